"""Interventions change what they say, nothing else, and leave no trace; steps are those that autograd predicts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import zoo
from torch import Tensor, nn

from advantage_probe.analyses.inputs import precision
from advantage_probe.analyses.inputs.corpus import Batch
from advantage_probe.analyses.interventions import predicted
from advantage_probe.analyses.interventions.decodable import sequence_loss
from advantage_probe.analyses.interventions.edits import (
    Edit,
    ablate,
    axis_effects,
    cut,
    displaced,
    intervene,
    keep_only,
    random_axes,
    shift,
    strongest_head,
    swap,
)
from advantage_probe.analyses.vectors.collecting import collect
from advantage_probe.hooks import attachment, override
from advantage_probe.hooks.errors import BadRequest, UnsupportedKernel
from advantage_probe.probe.watch import watch


def batch(rows: int = 4, length: int = 9, seed: int = 0) -> Batch:
    ids = torch.randint(3, zoo.VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    return Batch(ids, torch.ones_like(ids), targets)


@torch.no_grad()
def logits(model: nn.Module, given: Batch) -> Tensor:
    found: Tensor = model(input_ids=given.ids, attention_mask=given.mask, use_cache=False).logits
    return found


@contextmanager
def by_forward_hook(model: nn.Module, name: str, heads: int, change: object) -> Iterator[None]:
    """The same change made by hand, at the input of the output projection (B,T,H·V)."""

    def hook(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (change(given[0]),)  # type: ignore[operator]

    handle = model.get_submodule(name).register_forward_pre_hook(hook)
    yield
    handle.remove()


def nothing_left() -> bool:
    return not override._active and not attachment._attachments and not attachment._by_module


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
def test_an_output_edit_is_a_change_before_the_output_projection(family: str) -> None:
    model, given = zoo.FAMILIES[family].build().requires_grad_(False), batch()
    name = {"gpt2": "transformer.h.1.attn.c_proj"}.get(family, "model.layers.1.self_attn.o_proj")
    plain = logits(model, given)
    width = 8

    def by_hand(rows: Tensor) -> Tensor:
        rows = rows.clone()
        rows[..., 2 * width : 3 * width] = 0
        return rows

    with by_forward_hook(model, name, 4, by_hand):
        expected = logits(model, given)
    with intervene(model, Edit(1, ablate(), "output", (2,))):
        found = logits(model, given)
    assert torch.equal(found, expected)
    assert not torch.equal(found, plain)
    assert torch.equal(logits(model, given), plain)
    assert nothing_left()


def test_a_value_edit_is_a_change_of_the_value_projection() -> None:
    model, given = zoo.llama().requires_grad_(False), batch()
    axis = np.random.default_rng(0).normal(size=16)
    unit = torch.tensor(axis / np.linalg.norm(axis), dtype=torch.float32)
    handle = model.model.layers[0].self_attn.v_proj.register_forward_hook(
        lambda module, args, rows: rows - (rows @ unit)[..., None] * unit
    )
    expected = logits(model, given)
    handle.remove()
    with intervene(model, Edit(0, cut(axis), "value")):
        assert torch.allclose(logits(model, given), expected, atol=1e-5)
    with (
        intervene(model, Edit(0, cut(axis), "value", (0,))),
        pytest.raises(BadRequest, match="16 numbers does not fit"),
    ):
        logits(model, given)
    assert nothing_left()


def test_values_of_attention_written_by_hand_are_edited_too() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    config = BloomConfig(vocab_size=zoo.VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    model = zoo.finish(BloomForCausalLM(config)).requires_grad_(False)
    given = batch()
    bias = model.transformer.h[1].self_attention.query_key_value.bias.unflatten(0, (4, 3, 8))
    with intervene(model, Edit(1, shift(np.eye(8)[3], 0.7), "value", (1,))):
        found = logits(model, given)
    with torch.no_grad():
        bias[1, 2, 3] += 0.7  # rows of weights sum to one, so a shift of the values is a shift of their bias
    assert torch.allclose(found, logits(model, given), atol=1e-5)


class Plain(nn.Module):
    """One causal attention layer that calls the plain function."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out_proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, rows: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.into(rows).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return found


class Layers(nn.Module):
    """An attention layer under the name that makes it layer 0."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer])

    def forward(self, rows: Tensor, **options: bool) -> Tensor:
        inputs = (rows,) if isinstance(self.layers[0], Plain) else (rows, rows, rows)
        found = self.layers[0](*inputs, **options)
        return found if isinstance(found, Tensor) else found[0]


@pytest.mark.parametrize("options", [None, {"need_weights": True}, {"need_weights": False}])
def test_plain_pytorch_is_edited_like_everything_else(options: dict[str, bool] | None) -> None:
    torch.manual_seed(0)
    model = Layers(Plain() if options is None else nn.MultiheadAttention(8, 2, batch_first=True))
    rows, options = torch.randn(2, 5, 8), options or {}
    out = model.layers[0].out_proj
    with intervene(model, Edit(0, ablate(), "value")):
        assert torch.allclose(model(rows, **options), out.bias.expand(2, 5, 8), atol=1e-6)
    with intervene(model, Edit(0, ablate(), "output", (1,))):
        found = model(rows, **options)
    with torch.no_grad():
        out.weight[:, 4:] = 0
    assert torch.allclose(found, model(rows, **options), atol=1e-6)
    assert nothing_left()


def test_paths_that_no_edit_reaches_are_never_taken_for_an_effect_of_zero() -> None:
    fused = Layers(nn.MultiheadAttention(8, 2, batch_first=True)).eval()
    with (
        pytest.raises(BadRequest, match="a path that no edit reaches"),
        torch.no_grad(),
        intervene(fused, Edit(0, ablate())),
    ):
        fused(torch.randn(2, 5, 8), need_weights=False)
    model, given = zoo.llama(), batch()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(UnsupportedKernel, match="compiled graph"), intervene(compiled, Edit(0, ablate())):
        compiled(input_ids=given.ids)
    with pytest.raises(BadRequest, match="Nothing was changed"), intervene(compiled, Edit(0, ablate())):
        logits(compiled, given)
    assert nothing_left()


def test_cut_keep_and_shift_do_what_their_formulas_say() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    axis, centre = np.array([1.0, 2.0, 0.0, -1.0, 0.5]), np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    unit, middle = torch.tensor(axis / np.linalg.norm(axis)), torch.tensor(centre)
    assert torch.allclose((cut(axis)(rows) @ unit), torch.zeros(2, 3, dtype=torch.float64), atol=1e-12)
    assert torch.allclose((cut(axis, centre)(rows) - middle) @ unit, torch.zeros(2, 3, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(cut(axis, centre)(rows) + keep_only(axis, centre)(rows), rows + middle)
    assert torch.allclose((shift(axis, 0.3)(rows) - rows).norm(dim=-1), torch.full((2, 3), 0.3, dtype=torch.float64))
    half = cut(axis, strength=0.5)(rows)
    assert torch.allclose(half @ unit, 0.5 * (rows @ unit))
    assert torch.equal(swap()(rows), rows.flip(0))
    moved = displaced(ablate(), np.ones(5), slice(1, 3))(rows) - rows
    assert torch.allclose(moved.norm(dim=-1), rows[..., 1:3].norm(dim=-1))
    assert torch.allclose(moved / moved.norm(dim=-1, keepdim=True), torch.full_like(rows, 5**-0.5))


def test_everything_is_restored_after_an_exception_and_watches_see_the_edited_run() -> None:
    model, given = zoo.llama(), batch()
    plain = logits(model, given)
    with pytest.raises(RuntimeError, match="mine"), intervene(model, Edit(0, ablate())):
        logits(model, given)
        raise RuntimeError("mine")
    assert nothing_left()
    with pytest.raises(ZeroDivisionError), intervene(model, Edit(0, lambda rows: rows / 0 if 1 // 0 else rows)):
        logits(model, given)
    assert nothing_left()
    assert torch.equal(logits(model, given), plain)
    with watch(model) as seen:
        model(input_ids=given.ids, labels=given.ids).loss.backward()
        seen.step()
    with watch(model) as edited, intervene(model, Edit(0, shift(np.ones(32), 0.5))):
        model(input_ids=given.ids, labels=given.ids).loss.backward()
        edited.step()
    one, other = seen.heads()["routing_pressure"], edited.heads()["routing_pressure"]
    assert (edited.heads()["status"] == "ok").all()
    assert not np.allclose(one, other)


def test_what_cannot_be_edited_is_refused_by_name() -> None:
    model, given = zoo.llama(), batch()
    with pytest.raises(BadRequest, match="layer 7: attention was seen in layers"), intervene(model, Edit(7, ablate())):
        logits(model, given)
    with pytest.raises(BadRequest, match="no attention call was seen"), intervene(model, Edit(0, ablate())):
        pass
    with intervene(model, Edit(0, ablate(), "output", (4,))), pytest.raises(BadRequest, match=r"4 heads.*no 4"):
        logits(model, given)
    with intervene(model, Edit(0, ablate(), "value", (2,))), pytest.raises(BadRequest, match="2 key/value heads"):
        logits(model, given)
    with intervene(model, Edit(0, lambda rows: rows[..., :3])), pytest.raises(BadRequest, match="keep the shape"):
        logits(model, given)
    with pytest.raises(BadRequest, match="not zero"):
        cut(np.zeros(3))
    with intervene(model, Edit(0, swap([0]))), pytest.raises(BadRequest, match="order of 1"):
        logits(model, given)
    model.train()
    model.gradient_checkpointing_enable()
    with intervene(model, Edit(0, ablate())), pytest.raises(UnsupportedKernel, match="checkpoint"):
        model(input_ids=given.ids, labels=given.ids)
    assert nothing_left()


def test_random_axes_are_orthogonal_unit_and_follow_the_covariance() -> None:
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(4000, 5)) * np.array([5.0, 1.0, 1.0, 0.1, 0.0])
    axis = np.array([0.0, 1.0, 0.0, 0.0, 0.0])
    for kind in (None, rows):
        found = random_axes(axis, 500, generator, kind)
        assert np.allclose(np.linalg.norm(found, axis=1), 1)
        assert np.abs(found @ axis).max() < 1e-12
    assert np.abs(found[:, 4]).max() < 1e-6
    assert (found[:, 0] ** 2).mean() > 0.8


def test_a_planted_axis_stands_out_from_random_ones() -> None:
    model = zoo.llama().requires_grad_(False)
    given = batch(rows=16)
    measure = sequence_loss(model, [given])
    rows = collect(model, [given], "value", "all").by("layer")["L1"].reshape(-1, 16)
    axis = np.linalg.eigh(np.cov(rows.T))[1][:, -1]
    found = axis_effects(model, measure, rows, axis, 1, draws=20).set_index("what")
    assert list(found.index) == ["cut", "keep only", "shift +1 sd", "shift -1 sd", "swap all"]
    with intervene(model, Edit(1, cut(axis, rows.mean(0)), "value")):
        expected = float((measure()).mean())
    assert found.at["cut", "effect"] == pytest.approx(expected - float(measure().mean()), abs=1e-6)
    assert found.loc["cut", "isotropic_p"] >= 1 / 21
    assert found["low"].le(found["effect"]).all()


def test_the_strongest_head_is_picked_on_one_half_and_estimated_on_the_other() -> None:
    model = zoo.llama().requires_grad_(False)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, 16:24] *= 30  # head 2
    given = batch(rows=12)
    seen = collect(model, [given], "output", "all").vectors
    outputs = {int(layer[1:]): part.reshape(-1, *part.shape[2:]) for layer, part in seen.items()}
    found = strongest_head(model, sequence_loss(model, [given]), outputs, draws=5)
    assert found["what"].tolist() == ["ablate L1H2", "swap L1H2", "swap all of L1"]
    assert found["n"].tolist() == [6, 6, 6]
    assert found["picked_on"].eq(6).all()


# -- predicted and measured ---------------------------------------------------------------------------------------------


def test_small_steps_change_the_loss_as_the_law_predicts_and_wrong_ones_do_not() -> None:
    for family in ("llama", "gpt2"):
        model, given = zoo.FAMILIES[family].build(), batch()
        for step in ("values", "scores"):
            table = predicted.predicted_and_measured(model, given, step, (1e-8, 1e-6))  # type: ignore[arg-type]
            assert len(table) == 2 * (4 if step == "scores" or family == "gpt2" else 2) * (3 if family == "gpt2" else 2)
            assert (table["ratio"] - 1).abs().max() < 1e-3
    model = zoo.llama()
    exact = precision.double(model).requires_grad_(False)
    gradients, loss = predicted._gradients(exact, given)
    key = next(iter(gradients.value))
    tiled = gradients.value_gradient[key][:, [1, 0]]  # the groups' gradients exchanged
    square = float(tiled[:, 0].square().sum())
    receiver = predicted._Stepper("values", key, 0, 1e-6 * loss / square, tiled)
    attached = attachment_of(exact, receiver)
    with torch.no_grad():
        measured = predicted.mean_loss(exact, given).item() - loss
    attached.close()
    assert abs(measured / (-1e-6 * loss) - 1) > 0.1


def attachment_of(model: nn.Module, receiver: object) -> object:
    from advantage_probe.hooks.attach import attach

    return attach(model, receiver)  # type: ignore[arg-type]


def test_a_head_without_gradient_is_listed_and_not_divided() -> None:
    model, given = zoo.llama(), batch()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, :16] = 0  # heads 0 and 1: the first key/value head
    table = predicted.predicted_and_measured(model, given, "values", (1e-6,)).set_index("head")
    assert np.isnan(table.at["L1KV0", "ratio"])
    assert table.at["L1KV1", "ratio"] == pytest.approx(1, abs=1e-3)
    with pytest.raises(BadRequest, match="values"):
        predicted.predicted_and_measured(model, given, "queries")  # type: ignore[arg-type]


def test_the_linear_radius_is_where_the_ratio_leaves_the_band() -> None:
    eta = np.logspace(-3, 2, 40)
    assert predicted.linear_radius(eta, 1 - 0.02 * eta) == pytest.approx(5.0, rel=0.02)
    assert predicted.linear_radius(eta[::-1], (1 + 0.02 * eta)[::-1]) == pytest.approx(5.0, rel=0.02)
    assert predicted.linear_radius(eta, np.ones(40)) == np.inf
    assert np.isnan(predicted.linear_radius(eta, np.full(40, 1.3)))


def test_a_step_of_plain_descent_on_the_values_alone_has_its_own_size() -> None:
    """A model whose values are a free parameter: SGD moves them by exactly −η m."""
    model, given = zoo.llama(num_hidden_layers=1), batch(rows=1)
    found = predicted.training_step(model, given, lambda weights: torch.optim.SGD(weights, lr=0.0))
    assert all(size == 0 for part in found.values() for size in part.values())
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    moved = predicted.training_step(model, given, lambda weights: torch.optim.SGD(weights, lr=1e-3))
    twice = predicted.training_step(model, given, lambda weights: torch.optim.SGD(weights, lr=2e-3))
    for step in ("values", "scores"):
        for head, size in moved[step].items():
            assert twice[step][head] == pytest.approx(2 * size, rel=0.02)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
