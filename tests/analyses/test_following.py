"""Following, feedback, radius and shares: closed forms where the law holds exactly, and rivals that must score nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from advantage_probe.analyses.dynamics import attention_calls, feedback, following, roles, step_size
from advantage_probe.analyses.inputs import precision
from advantage_probe.hooks.errors import BadRequest

B, H, T, V, C = 6, 2, 14, 5, 4


def causal() -> Tensor:
    return torch.ones(T, T).tril().bool().expand(B, H, T, T)


class FreeHead:
    """A head whose scores and values are free numbers, read out by a fixed matrix; cross-entropy summed over rows."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = ((B, H, T, T), (B, H, T, V), (H * V, C))
        self.scores, self.values, self.output = (
            torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes
        )
        self.targets = torch.randint(C, (B, T), generator=generator)

    def attention(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(~causal(), -torch.inf).softmax(-1)

    def read(self, scores: Tensor, values: Tensor) -> Tensor:
        return self.attention(scores) @ values

    def loss(self, read: Tensor, targets: Tensor) -> Tensor:
        rows = read.transpose(1, 2).flatten(2) @ self.output
        return nn.functional.cross_entropy(rows.flatten(0, 1), targets.flatten(), reduction="sum")

    def score_gradient(self, targets: Tensor) -> Tensor:
        scores = self.scores.clone().requires_grad_()
        return torch.autograd.grad(self.loss(self.read(scores, self.values), targets), scores)[0]

    def advantage(self, targets: Tensor) -> Tensor:
        read = self.read(self.scores, self.values).requires_grad_()
        (upstream,) = torch.autograd.grad(self.loss(read, targets), read)
        return feedback.advantage(self.attention(self.scores), upstream, self.values)


# -- following ---------------------------------------------------------------------------------------------------------


def test_the_law_change_is_the_derivative_of_attention_along_the_score_gradient() -> None:
    head = FreeHead()
    attention = head.attention(head.scores)
    expected = following.law_change(attention, head.advantage(head.targets))
    _, exact = torch.autograd.functional.jvp(head.attention, head.scores, -head.score_gradient(head.targets))
    torch.testing.assert_close(expected, exact, rtol=1e-10, atol=1e-12)


def test_a_free_head_after_one_gradient_step_follows_by_one() -> None:
    head = FreeHead()
    before = head.attention(head.scores)
    slope = head.score_gradient(head.targets)
    expected = following.law_change(before, head.advantage(head.targets))
    small, real = (head.attention(head.scores - rate * slope) - before for rate in (1e-7, 1e-3))
    permuted = head.targets.roll(1, 0)
    null = following.law_change(before, head.advantage(permuted))
    rho, ceiling, nothing = (
        float(following.row_correlation(*pair, causal()).mean())
        for pair in ((expected, real), (expected, small), (null, real))
    )
    assert following.score(rho, ceiling, nothing) == pytest.approx(1.0, abs=5e-4)
    assert ceiling == pytest.approx(1.0, abs=1e-6)
    assert nothing < 0.8
    # the obvious figure, advantage against the realised change, is far from 1 where the law holds exactly
    assert float(following.row_correlation(head.advantage(head.targets), real, causal()).mean()) < 0.8


def test_a_step_against_the_law_scores_below_zero_and_one_at_random_about_the_null() -> None:
    head = FreeHead()
    before = head.attention(head.scores)
    expected = following.law_change(before, head.advantage(head.targets))
    null_law = following.law_change(before, head.advantage(head.targets.roll(1, 0)))
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(head.scores.shape, generator=generator, dtype=torch.float64)
    against = head.attention(head.scores + 1e-3 * head.score_gradient(head.targets)) - before
    random = head.attention(head.scores + 1e-3 * noise) - before
    for change, bounds in ((against, (-99, -0.5)), (random, (-0.3, 0.3))):
        rho, null = (float(following.row_correlation(law, change, causal()).mean()) for law in (expected, null_law))
        assert bounds[0] < following.score(rho, 1.0, null) < bounds[1]


def test_row_correlation_is_numpys_over_visible_keys_of_long_rows() -> None:
    import numpy as np

    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(B, H, T, T, generator=generator, dtype=torch.float64) for _ in range(2))
    found = following.row_correlation(one, other, causal())
    for head in range(H):
        rows = [
            np.corrcoef(one[b, head, i, : i + 1], other[b, head, i, : i + 1])[0, 1]
            for b in range(B)
            for i in range(7, T)
        ]
        assert float(found[head]) == pytest.approx(np.mean(rows), abs=1e-12)


def test_no_room_between_ceiling_and_null_is_no_score() -> None:
    assert torch.tensor(following.score(0.5, 0.52, 0.5)).isnan()


def test_the_null_of_value_directions_is_the_mean_over_all_permutations() -> None:
    import itertools

    generator = torch.Generator().manual_seed(0)
    change, gradient = (torch.randn(1, 1, 5, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    cosine, null = following.value_cosine(change, gradient)
    similarity = nn.functional.cosine_similarity
    own = similarity(change[0, 0], -gradient[0, 0]).mean()
    every = [similarity(change[0, 0], -gradient[0, 0, list(p)]).mean() for p in itertools.permutations(range(5))]
    assert float(cosine) == pytest.approx(float(own))
    assert float(null) == pytest.approx(float(torch.stack(every).mean()))


# -- a real model ------------------------------------------------------------------------------------------------------


def prepared(kind: str) -> tuple[nn.Module, attention_calls.Loss, attention_calls.Loss]:
    """A tiny float64 model, its loss on a batch, and the same with targets of other sequences."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=11, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        model: nn.Module = GPT2LMHeadModel(config)
    else:
        shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=11, num_key_value_heads=2, **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() == 2 else 1.0)
    ids = torch.randint(0, 11, (5, 13), generator=torch.Generator().manual_seed(1))

    def loss(targets: Tensor) -> attention_calls.Loss:
        def compute(given: nn.Module) -> Tensor:
            rows = given(input_ids=ids, use_cache=False).logits[:, :-1]
            return nn.functional.cross_entropy(rows.flatten(0, 1), targets.flatten(), reduction="sum")

        return compute

    return precision.double(model), loss(ids[:, 1:]), loss(ids[:, 1:].roll(1, 0))


def gradient_step(model: nn.Module, loss: attention_calls.Loss, rate: float, chosen: str = "") -> dict[str, Tensor]:
    model.zero_grad()
    loss(model).backward()
    return {name: -rate * slope for name, slope in attention_calls.gradients(model).items() if chosen in name}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_tiny_plain_gradient_step_of_a_model_reaches_its_ceiling(kind: str) -> None:
    model, loss, other = prepared(kind)
    batches = {"own": following.Batch(loss, (other,))}
    table = following.follow(model, gradient_step(model, loss, 1e-5), loss, batches)
    assert len(table) == {"gpt2": 4, "llama": 8}[kind]
    assert table["rho"].to_numpy() == pytest.approx(table["ceiling"].to_numpy(), abs=0.01)
    assert table["following"].dropna().to_numpy() == pytest.approx(1.0, abs=0.05)
    assert table["following"].notna().any()
    assert (table["ceiling"] < 0.9).all()  # shared W_Q and W_K permit less than free scores
    step = gradient_step(model, loss, 1e-5)
    alone = {name: torch.zeros_like(change) for name, change in step.items()}
    for part in roles.parts(model):
        if part.role in roles.ROUTING:
            part.of(alone[part.parameter]).copy_(part.of(step[part.parameter]))
    routed = following.follow(model, alone, loss, batches)
    assert routed["rho"].to_numpy() == pytest.approx(routed["ceiling_routing"].to_numpy(), abs=0.01)
    assert following.pooled(routed)["following_routing"] == pytest.approx(1.0, abs=0.05)
    assert (routed["ceiling_routing"] > routed["ceiling"]).mean() > 0.5
    uphill = following.follow(model, gradient_step(model, loss, -1e-5), loss, batches)
    assert uphill["rho"].to_numpy() == pytest.approx(-table["ceiling"].to_numpy(), abs=0.01)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_gradient_step_on_the_value_projection_alone_moves_values_along_the_shared_direction(kind: str) -> None:
    model, loss, other = prepared(kind)
    chosen = {"gpt2": "h.0.attn.c_attn", "llama": "layers.0.self_attn.v_proj"}[kind]
    step = gradient_step(model, loss, 1e-3, chosen)
    table = following.follow(model, step, loss, {"own": following.Batch(loss, (other,))})
    first = table[table["layer"] == 0]
    assert first["value_shared"].to_numpy() == pytest.approx(1.0, abs=1e-9)
    assert (first["value_cosine"] < 0.999).all()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_shares_of_a_step_are_the_laws_own_first_order_terms(kind: str) -> None:
    model, loss, _ = prepared(kind)
    queries = {"gpt2": "c_attn", "llama": "q_proj"}[kind]
    torch.manual_seed(5)
    for layer in ("0", "1"):
        step = {
            name: 1e-4 * torch.randn_like(parameter)
            for name, parameter in model.named_parameters()
            if queries in name and f".{layer}." in name
        }
        now, then = (attention_calls.heads(one, loss) for one in (model, attention_calls.moved(model, step)))
        module = next(name for name in now if f".{layer}." in name)
        floor = 1e-300
        scores = (then[module].attention + floor).log() - (
            now[module].attention + floor
        ).log()  # Δs up to a row's constant
        routed = float((now[module].score_gradient * scores).sum())
        valued = float((now[module].value_gradient * (then[module].value - now[module].value)).sum())
        found = step_size.step_size(model, step, loss)
        assert found.routing == pytest.approx(routed, rel=1e-2)
        assert found.values == pytest.approx(valued, rel=1e-3, abs=1e-12)
        assert found.other == pytest.approx(0.0, abs=1e-12)
        assert sum(found.shares().values()) == pytest.approx(1.0, abs=5e-2)


class Bowl(nn.Module):
    """A loss that is quadratic along the step, behind one attention module by name."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Module()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self.attention, name, nn.Linear(1, 1, bias=False).double())
        nn.init.ones_(self.attention.v_proj.weight)

    def forward(self) -> Tensor:
        return self.attention.v_proj.weight.square().sum() / 2


def test_the_radius_of_a_quadratic_is_where_its_second_order_is_a_tenth() -> None:
    # L = w²/2 at w = 1, Δ = −η: first order −rη, exact −rη + r²η²/2, off by rη/2 of it; a tenth at r = .2/η
    for rate in (0.2 / 3.0, 0.2 / 0.3):
        found = step_size.step_size(
            Bowl(), {"attention.v_proj.weight": torch.full((1, 1), -rate).double()}, lambda model: model()
        )
        assert found.radius <= 0.2 / rate < 2 * found.radius
        assert not found.unbounded
        assert found.change == pytest.approx(-rate + rate**2 / 2)
        assert found.values == pytest.approx(found.predicted) == pytest.approx(-rate)
        assert found.norm == pytest.approx(rate)


# -- feedback ----------------------------------------------------------------------------------------------------------


def test_weighted_changes_of_advantage_vanish_and_the_slope_does_not() -> None:
    head = FreeHead()
    attention = head.attention(head.scores)
    read = head.read(head.scores, head.values).requires_grad_()
    (upstream,) = torch.autograd.grad(head.loss(read, head.targets), read)
    gradient = attention.mT @ upstream
    change = feedback.advantage(attention, upstream, -0.1 * gradient)
    assert (attention * change).sum(-1).abs().max() < 1e-12
    slope = feedback.row_slope(change, attention, causal())
    assert (slope > 0).all()  # keys whose users agree become more attractive with u as it was


def test_the_slope_is_numpys_least_squares() -> None:
    import numpy as np

    head = FreeHead()
    attention = head.attention(head.scores)
    change = torch.randn(B, H, T, T, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = feedback.row_slope(change, attention, causal())
    rows = [
        np.polyfit(attention[b, 0, i, : i + 1], change[b, 0, i, : i + 1], 1)[0] for b in range(B) for i in range(7, T)
    ]
    assert float(found[0]) == pytest.approx(np.mean(rows), rel=1e-9)


def test_permuted_steps_are_the_same_steps_elsewhere() -> None:
    change = torch.randn(3, 2, 4, 5, generator=torch.Generator().manual_seed(0))
    other = feedback.permuted(change, torch.Generator().manual_seed(1))
    for head in range(2):
        one, two = (tensor[:, head].reshape(-1, 5) for tensor in (change, other))
        assert sorted(one.tolist()) == sorted(two.tolist())
        assert not torch.equal(one, two)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_actual_slope_is_that_of_a_model_whose_value_projection_moved(kind: str) -> None:
    model, loss, _ = prepared(kind)
    chosen = {"gpt2": "h.1.attn.c_attn", "llama": "layers.1.self_attn.v_proj"}[kind]
    step = gradient_step(model, loss, 0.05, chosen)
    if kind == "gpt2":  # the value third of the fused projection alone
        for change in step.values():
            change[..., : 2 * change.shape[-1] // 3] = 0
    table = feedback.feedback(model, step, loss, draws=2)
    now, then = (attention_calls.heads(one, loss) for one in (model, attention_calls.moved(model, step)))
    for module, head in now.items():
        if "1" not in module:
            continue
        torch.testing.assert_close(then[module].attention, head.attention, rtol=1e-9, atol=1e-12)
        slope = feedback.row_slope(then[module].advantage - head.advantage, head.attention, head.visible)
        own = table[table["module"] == module]
        assert own["actual"].to_numpy() == pytest.approx(slope.numpy(), rel=1e-6)
        assert not torch.allclose(torch.tensor(own["mechanical"].to_numpy()), slope, rtol=1e-3)


# -- roles -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_frozen_roles_stay_bit_for_bit_and_nothing_else_does(kind: str) -> None:
    model, loss, _ = prepared(kind)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    frozen = roles.Frozen(model, roles.ROUTING)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
        frozen.restore()
    parameters = dict(model.named_parameters())
    for part in roles.parts(model):
        same = torch.equal(part.of(parameters[part.parameter]), part.of(before[part.parameter]))
        assert same == (part.role in roles.ROUTING)
    others = set(parameters) - {part.parameter for part in roles.parts(model)}
    assert not any(torch.equal(parameters[name], before[name]) for name in others)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_roles_tell_what_attention_and_values_depend_on(kind: str) -> None:
    model, loss, _ = prepared(kind)
    now = attention_calls.heads(model, loss)
    for role, changes in (("query", "attention"), ("key", "attention"), ("value", "value")):
        step = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
        for part in roles.parts(model):
            if part.role == role:
                part.of(step[part.parameter]).normal_(0, 0.1)
        first = next(iter(now))
        then = attention_calls.heads(attention_calls.moved(model, step), loss)[first]
        moved = {
            name
            for name in ("attention", "value")
            if not torch.allclose(getattr(then, name), getattr(now[first], name), atol=1e-9)
        }
        assert moved == {changes}


def test_a_model_without_known_projections_is_refused() -> None:
    with pytest.raises(BadRequest, match="cannot be told apart"):
        roles.parts(nn.Sequential(nn.Linear(2, 2)))
