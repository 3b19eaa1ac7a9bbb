"""The law against autograd of an attention that keeps its scores, in float64; and the wrong laws, which must fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo
from calls import operator
from truth import NAME, recorded, reference_registered, relative

from advantage_probe.hooks.call import AttentionCall, CallSite
from advantage_probe.hooks.sequences import Sequences
from advantage_probe.hooks.site import Site
from advantage_probe.hooks.visibility import Structure, Visibility
from advantage_probe.probe.law import blocks as blockwise
from advantage_probe.probe.law.definition import law, vectors
from advantage_probe.probe.operator import one_pass

FAMILIES = ("gpt2", "llama", "mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "t5", "bart", "bert", "albert")
ROWS = ("entropy", "sink", "expected", "advantage_square", "missed", "alignment", "score_square", "spread")
ROWS += ("over_uniform", "upstream_norm", "residual_scale", "distance", "first_key", "usage", "user_norm")
ROWS += ("value_gradient", "uniform")


def in_float64(family: str):
    """A tiny model of the family in float64 on the reference attention."""
    model = zoo.FAMILIES[family].build(attn_implementation=NAME).double()
    if family == "gpt_oss":
        model.set_experts_implementation("eager")
    return model


def run(family: str, model, batch=None):
    """One backward; returns pairs (captured call, what the reference kept), in the order of the calls."""
    with reference_registered() as kept:
        model = in_float64(family) if model is None else model
        with recorded(model) as recorder:
            model(**(batch or zoo.batch(family))).loss.backward()
        assert not recorder.errors
        names = {module: name for name, module in model.named_modules()}
        by_key = {(call.site.module, call.use): call for call in recorder.calls}
        uses: dict[str, int] = {}
        pairs = []
        for entry in kept:
            name = names[entry.module]
            pairs.append((by_key[name, uses.get(name, 0)], entry))
            uses[name] = uses.get(name, 0) + 1
        assert len(pairs) == len(recorder.calls) > 0
        return pairs


@pytest.mark.parametrize("family", FAMILIES)
def test_both_laws_are_what_autograd_computes(family: str) -> None:
    for call, true in run(family, None):
        terms = law(call)
        assert relative(terms.attention, true.attention) < 1e-12
        assert relative(terms.score_gradient, true.score.grad) < 1e-12
        group = call.group
        by_head = terms.value_gradient.unflatten(1, (-1, group)).sum(2)
        assert relative(by_head, true.value.grad) < 1e-12
        assert relative(call.upstream, true.output.grad) == 0.0


@pytest.mark.parametrize("way", ["passes", pytest.param("operator", marks=operator)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_equals_the_law_in_every_number(family: str, way: str) -> None:
    for call, _ in run(family, None):
        expected = vectors(call)
        for entries in (1, 40, 1 << 19) if way != "operator" else (0,):
            if way == "operator":
                found = one_pass.vectors(call)
            else:
                found = blockwise.vectors(call, entries=entries)
            assert torch.equal(found.counted, expected.counted)
            assert torch.equal(found.aligned, expected.aligned)
            assert torch.equal(found.blind, expected.blind)
            for name in ROWS:
                true = getattr(expected, name)
                got = getattr(found, name).expand(true.shape)
                scale = max(float(true.abs().max()), 1e-30)
                assert float((got - true).abs().max()) <= 1e-12 * scale, name


def call_of(group: int = 1, *, sinks: bool = False, seed: int = 0) -> AttentionCall:
    """A causal call with its true output, from plain tensors."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, length, width = 2, 4, 7, 5

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    sequences = Sequences(tuple(range(batch)))
    site = CallSite(Site("attention", 0, "", "decoder_self"), 0, 1, 0.7, None, 0.0, "sdpa", sequences)
    call = AttentionCall(
        **vars(site),
        delivery=0,
        query=draw(batch, heads, length, width),
        key=draw(batch, heads // group, length, width),
        value=draw(batch, heads // group, length, width),
        output=draw(batch, heads, length, width),
        upstream=draw(batch, heads, length, width),
        visibility=Visibility(Structure(causal=True), length, length),
        sinks=draw(heads) if sinks else None,
    )
    terms = law(call)
    value = call.value.repeat_interleave(group, 1)
    return replace(call, output=torch.einsum("bhqs,bhsv->bhqv", terms.weights, value))


def residual(call: AttentionCall) -> float:
    rows = blockwise.vectors(call)
    return float((rows.residual.sum() / rows.residual_scale.sum()).sqrt())


def test_the_right_reading_has_no_residual() -> None:
    assert residual(call_of()) < 1e-14
    assert residual(call_of(group=2)) < 1e-14
    assert residual(call_of(sinks=True)) < 1e-14


def test_tiled_groups_are_seen() -> None:
    call = call_of(group=2)
    tiled = call.value.repeat(1, 2, 1, 1)  # head h reads h % K instead of h // G
    wrong = replace(call, key=call.key.repeat(1, 2, 1, 1), value=tiled)
    assert residual(wrong) > 0.3
    assert relative(law(wrong).score_gradient, law(call).score_gradient) > 0.1


def test_renormalised_sinks_are_seen() -> None:
    call = call_of(sinks=True)
    wrong = replace(call, sinks=None)
    assert residual(wrong) > 0.05
    assert relative(law(wrong).score_gradient, law(call).score_gradient) > 0.05


def test_an_output_behind_a_gate_is_seen() -> None:
    call = call_of()
    gate = torch.sigmoid(
        torch.randn(call.output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    )
    assert residual(replace(call, output=call.output * gate)) > 0.1


def test_a_scale_off_by_one_percent_is_seen() -> None:
    call = call_of()
    wrong = replace(call, scale=call.scale * 1.01)
    assert residual(wrong) > 1e-4
    assert relative(law(wrong).score_gradient, law(call).score_gradient) > 1e-4


def test_a_missing_mask_is_seen() -> None:
    call = call_of()
    assert residual(replace(call, visibility=replace(call.visibility, structure=Structure()))) > 0.1


def test_rows_of_the_score_gradient_sum_to_the_mass_on_the_sink() -> None:
    call = call_of(sinks=True)
    terms = law(call)
    assert float((terms.score_gradient.sum(-1) - terms.expected * terms.sink).abs().max()) < 1e-14
    assert float(law(call_of()).score_gradient.sum(-1).abs().max()) < 1e-14


def test_the_hand_sized_example_by_hand() -> None:
    # score rows through q·k with one-hot keys
    score = torch.tensor([[0, 0, 0], [0, 2, 0], [3, 0, 0]], dtype=torch.float64)
    query = torch.where(score > 0, score.clamp(min=1).log(), 0.0)[None, None]
    value = torch.tensor([[1, 0], [0, 1], [-1, 1]], dtype=torch.float64)[None, None]
    upstream = torch.tensor([[1, 0], [0, -1], [0.5, 0.5]], dtype=torch.float64)[None, None]
    site = CallSite(Site("hand", 0, "", "encoder_self"), 0, 1, 1.0, None, 0.0, "hand", Sequences((0,)))
    output = torch.tensor([[0, 2 / 3], [0, 0.75], [0.4, 0.4]], dtype=torch.float64)[None, None]
    key = torch.eye(3, dtype=torch.float64)[None, None]
    call = AttentionCall(
        **vars(site),
        delivery=0,
        query=query,
        key=key,
        value=value,
        output=output,
        upstream=upstream,
        visibility=Visibility(Structure(), 3, 3),
    )
    terms = law(call)
    advantage = torch.tensor([[-1, 0, 1], [-0.75, 0.25, 0.25], [-0.1, -0.1, 0.4]], dtype=torch.float64)
    gradient = torch.tensor([[1 / 3, 0, -1 / 3], [0.1875, -0.125, -0.0625], [0.06, 0.02, -0.08]], dtype=torch.float64)
    pulled = torch.tensor([[0.633333, 0.05], [0.433333, -0.4], [0.433333, -0.15]], dtype=torch.float64)
    assert torch.allclose(terms.advantage[0, 0], advantage, atol=1e-12)
    assert torch.allclose(terms.score_gradient[0, 0], gradient, atol=1e-12)
    assert torch.allclose(terms.value_gradient[0, 0], pulled, atol=1e-6)
    rows = blockwise.vectors(call)
    assert float(rows.score_square.sum()) == pytest.approx(0.287310, abs=1e-6)
    assert rows.usage[0, 0].tolist() == pytest.approx([1.183333, 1.033333, 0.783333], abs=1e-6)
    coherence = rows.value_gradient.norm(dim=-1) / rows.user_norm
    assert coherence[0, 0].tolist() == pytest.approx([0.630514, 0.605, 0.632711], abs=1e-6)


def test_the_law_is_differentiable() -> None:
    call = call_of()
    query = call.query.clone().requires_grad_()
    law(replace(call, query=query)).score_gradient.square().sum().backward()
    assert query.grad is not None
    assert query.grad.abs().sum() > 0
