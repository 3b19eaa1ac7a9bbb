"""Calls of sdpa's CPU flash kernel, and calls of kinds that it does not know, made of plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from calls import call_of
from torch import Tensor

from advantage_probe.hooks.call import AttentionCall, CallSite, Flash
from advantage_probe.hooks.sequences import Sequences
from advantage_probe.hooks.site import Site
from advantage_probe.hooks.visibility import Structure, Visibility
from advantage_probe.probe.law.definition import law

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# batch, query heads, key heads, queries, keys, width
SHAPES = {
    "blocks of 32": (3, 4, 4, 70, 70, 16),
    "blocks of 64": (1, 2, 2, 300, 300, 64),
    "blocks of 256": (1, 2, 2, 801, 801, 32),
    "two key blocks": (1, 1, 1, 1025, 1025, 8),
    "wide heads": (1, 2, 2, 40, 40, 256),
    "grouped": (2, 6, 2, 50, 50, 24),
    "more keys": (2, 2, 2, 50, 97, 40),
    "fewer keys": (1, 2, 2, 200, 60, 20),
    "one query": (2, 3, 3, 1, 77, 64),
    "one token": (2, 2, 2, 1, 1, 8),
}
MASKS = ("causal", "two-sided", "boolean", "padding", "window", "documents", "biased")


def draw(shape, dtype: torch.dtype, generator: torch.Generator, layout: str = "tokens first") -> Tensor:
    batch, heads, length, width = shape
    if layout == "tokens first":  # as projections leave it
        return torch.randn(batch, length, heads, width, generator=generator, dtype=dtype).transpose(1, 2)
    if layout == "odd":  # rows further apart than they are wide
        return torch.randn(batch, heads, length, width + 3, generator=generator, dtype=dtype)[..., :width]
    return torch.randn(batch, heads, length, width, generator=generator, dtype=dtype)


def mask_of(
    name: str, batch: int, heads: int, queries: int, keys: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """(what the call reads as its mask, rows that count)."""
    row, column = torch.arange(queries)[:, None], torch.arange(keys)[None]
    order = column <= row + max(0, keys - queries)
    generator = torch.Generator().manual_seed(7)
    if name == "boolean":
        return torch.rand(batch, 1, queries, keys, generator=generator) < 0.7, None
    if name == "padding":
        real = torch.arange(keys) < torch.tensor([keys - (keys // 3) * (place % 2) for place in range(batch)])[:, None]
        shown = order & real[:, None, None]
        rows = real[:, :queries] if queries == keys else None
        return torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, torch.finfo(dtype).min), rows
    if name == "window":
        return (order & (column > row + max(0, keys - queries) - 9))[None, None], None
    if name == "documents":
        return (order & (row // 11 == column // 11))[None, None], None
    if name == "biased":
        bias = torch.randn(1, heads, queries, keys, generator=generator, dtype=dtype)
        return bias.masked_fill(~order, -torch.inf), None
    return None, None


def ran(
    shape: str | tuple[int, ...],
    mask: str = "causal",
    dtype: torch.dtype = torch.float64,
    layout: str = "tokens first",
    change: Callable[..., None] | None = None,
) -> tuple[AttentionCall, Flash]:
    """A call of the kernel, and what is known of it in the backward pass."""
    batch, heads, owners, queries, keys, width = SHAPES[shape] if isinstance(shape, str) else shape
    generator = torch.Generator().manual_seed(3)
    query = draw((batch, heads, queries, width), dtype, generator, layout)
    key, value = (draw((batch, owners, keys, width), dtype, generator, layout) for _ in range(2))
    upstream = draw((batch, heads, queries, width), dtype, generator)
    if change is not None:
        change(query, key, value, upstream)
    read, rows = mask_of(mask, batch, heads, queries, keys, dtype)
    added = read
    if read is not None and read.dtype == torch.bool:
        added = torch.zeros_like(read, dtype=dtype).masked_fill_(~read, -torch.inf)
    causal, scale = mask == "causal", 0.7 * width**-0.5
    output, normalizer = FORWARD(query, key, value, 0.0, causal, attn_mask=added, scale=scale)
    site = CallSite(
        Site("attention", 0, "", "decoder_self"),
        0,
        0,
        scale,
        None,
        0.0,
        "sdpa",
        Sequences(tuple(range(batch)), query_rows=rows),
    )
    visibility = Visibility(Structure(causal), queries, keys, read, rows=rows)
    call = AttentionCall(
        **vars(site),
        delivery=0,
        query=query,
        key=key,
        value=value,
        output=output,
        upstream=upstream,
        visibility=visibility,
    )
    return call, Flash(query, key, value, output, normalizer, added, causal, scale)


def same_bits(ours, theirs) -> bool:
    whole = {torch.float32: torch.int32, torch.float64: torch.int64}
    return all(
        torch.equal(one.view(whole[one.dtype]), other.view(whole[one.dtype])) for one, other in zip(ours, theirs)
    )


KINDS = {
    "cap": {"cap": 1.5},
    "sinks": {"sinks": True},
    "dropped weights": {"dropped": True},
    "a learned bias": {"bias": True},
    "a mask for every head": {"mask": "float"},
    "a boolean mask": {"mask": "bool"},
    "everything": {"cap": 2.0, "sinks": True, "dropped": True, "bias": True, "mask": "bool"},
}


def unusual(kind: str, dtype: torch.dtype = torch.float64) -> AttentionCall:
    """A call of a kind that sdpa's kernel does not know, with its true output."""
    wanted = KINDS[kind]
    call, generator = call_of("grouped", dtype), torch.Generator().manual_seed(11)
    batch, heads, queries, _ = call.query.shape
    shape = (batch, heads, queries, call.key.shape[2])
    mask = bias = None
    if wanted.get("mask") == "bool":
        mask = torch.rand(batch, 1, *shape[2:], generator=generator) < 0.6
    if wanted.get("mask") == "float":
        mask = torch.randn(shape, generator=generator, dtype=dtype)
        mask = mask.masked_fill(torch.rand(shape, generator=generator) < 0.3, -1e9)
    if wanted.get("bias"):
        bias = torch.randn(1, *shape[1:], generator=generator, dtype=dtype)
    sinks = torch.randn(heads, generator=generator, dtype=dtype) if wanted.get("sinks") else None
    structure = call.visibility.structure
    call = replace(
        call,
        softcap=wanted.get("cap"),
        visibility=Visibility(structure, *shape[2:], mask, bias),
        sinks=sinks,
    )
    weights = law(call, torch.float64).attention
    if wanted.get("dropped"):
        weights = weights * (torch.rand(shape, generator=generator) > 0.2) / 0.8
        call = replace(call, weights=weights.to(dtype))
    value = call.value.double().repeat_interleave(call.group, 1)
    return replace(call, output=(weights @ value).to(dtype))
