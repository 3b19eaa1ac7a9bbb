"""Attention calls made of plain tensors, one of every structure, and the comparison of what two passes say of them."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from advantage_probe.hooks.call import AttentionCall, CallSite
from advantage_probe.hooks.sequences import Sequences
from advantage_probe.hooks.site import Site
from advantage_probe.hooks.visibility import Structure, Visibility
from advantage_probe.probe.law.definition import law
from advantage_probe.probe.operator import ways

operator = pytest.mark.skipif(not ways.usable(), reason="the C++ operator needs a C++ compiler and an x86-64 Linux")
CASES = {
    "causal": (Structure(causal=True), 70, 70, 1),
    "grouped": (Structure(causal=True), 33, 33, 2),
    "window": (Structure(causal=True, window=9), 70, 70, 2),
    "two-sided": (Structure(), 40, 40, 1),
    "behind a cache": (Structure(causal=True, offset=37), 30, 67, 1),
    "cross": (Structure(), 20, 50, 2),
}


def call_of(
    case: str,
    dtype: torch.dtype = torch.float32,
    padded: bool = False,
    width: int = 24,
    mask: torch.Tensor | None = None,
) -> AttentionCall:
    """A call with its true output, from plain tensors; values are narrower than keys."""
    structure, queries, keys, group = CASES[case]
    generator = torch.Generator().manual_seed(len(case))
    batch, heads = 2, 4

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    sequences = Sequences(tuple(range(batch)))
    kind = "cross" if case == "cross" else "decoder_self"
    site = CallSite(Site("attention", 0, "", kind), 0, 1, 0.6, None, 0.0, "sdpa", sequences)
    rows = None
    if padded:
        rows = torch.ones(batch, queries, dtype=torch.bool)
        rows[0, -5:] = False
    call = AttentionCall(
        **vars(site),
        delivery=0,
        query=draw(batch, queries, heads, width).transpose(1, 2),  # as models have them: not contiguous
        key=draw(batch, heads // group, keys, width),
        value=draw(batch, heads // group, keys, 18),
        output=draw(batch, heads, queries, 18),
        upstream=draw(batch, heads, queries, 18),
        visibility=Visibility(structure, queries, keys, mask, rows=rows, paired=case != "cross"),
    )
    weights = law(call, torch.float64).weights
    value = call.value.double().repeat_interleave(group, 1)
    return replace(call, output=torch.einsum("bhqs,bhsv->bhqv", weights, value).to(dtype))


def compared(found, expected, limit: float) -> None:
    assert torch.equal(found.counted, expected.counted)
    assert torch.equal(found.aligned, expected.aligned)
    assert torch.equal(found.blind.expand_as(expected.blind), expected.blind)
    left = {"counted", "aligned", "blind", "edges", "totals", "residual"}
    for name in (entry.name for entry in fields(found) if entry.name not in left):
        true, got = getattr(expected, name), getattr(found, name)
        if true is None or got is None:  # the block pass takes distances from usage where it can
            assert name == "reach"
            continue
        scale = max(float(true.abs().max()), 1e-30)
        assert float((got.expand(true.shape) - true).abs().max()) <= limit * scale, name
    # rounding squared: small beside what it is measured against, in both
    assert float((found.residual.sum() / found.residual_scale.sum()).sqrt()) <= limit
