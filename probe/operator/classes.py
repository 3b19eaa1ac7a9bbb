"""Whether the operator gives the kernel's bits: asked once per class of calls, in this process, of the kernel itself.

A class is everything that decides how torch and BLAS go about a call, and not its length. The first call of a class is
computed both ways; the kernel's gradients are handed over, and the bit patterns are compared. A class that differs is
demoted, in one sentence: from then on the kernel keeps its own backward, and the statistics come from two products.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from ...hooks.call import AttentionCall, Flash, Gradients
from ..law.vectors import Vectors
from .one_pass import NONE, EdgeRequest, vectors, with_gradients

ONE_PASS, TWO_PRODUCTS = "one pass", "two products"


@dataclass(frozen=True)
class Kind:
    """A class of calls.

    `layouts`: of q, k and v, whether rows are dense, which of batch, head and row varies fastest, and whether they start on
    a cache line. `mask`: its strides are 0 along these axes; None without one. `regime`: rows of the kernel's query block.
    `short`: whether the last block of queries, of keys, is shorter than the others.
    """

    dtype: torch.dtype
    width: int
    grouped: bool
    layouts: tuple[tuple[bool, int, bool], ...]
    mask: tuple[bool, ...] | None
    causal: bool
    threads: int
    capability: str
    regime: int
    short: tuple[bool, bool]


def kind(flash: Flash) -> Kind:
    """The class of a call."""
    query, key = flash.query, flash.key
    queries, keys = query.shape[2], key.shape[2]
    regime = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return Kind(
        query.dtype,
        query.shape[3],
        query.shape[1] != key.shape[1],
        tuple(_layout(tensor) for tensor in (query, key, flash.value)),
        None if flash.mask is None else tuple(stride == 0 for stride in flash.mask.stride()),
        flash.causal,
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        regime,
        (queries % regime != 0, keys % 512 != 0),
    )


def _layout(tensor: Tensor) -> tuple[bool, int, bool]:
    strides = tensor.stride()
    return strides[2] == tensor.shape[3], strides.index(min(strides[:3])), tensor.data_ptr() % 64 == 0


_bit_equal: dict[Kind, bool] = {}


def attend(call: AttentionCall, flash: Flash, edges: EdgeRequest = NONE) -> tuple[Vectors, Gradients, str]:
    """The vectors of a call, the gradients of the kernel's inputs, and which way they were computed.

    Raises:
        UnsupportedKernel: where the operator cannot be had.
    """
    upstream, of = call.upstream, kind(flash)
    trusted = _bit_equal.get(of)
    if trusted:
        return *with_gradients(call, flash, edges), ONE_PASS
    theirs = flash.gradients(upstream)
    if trusted is None:
        found, ours = with_gradients(call, flash, edges)
        _bit_equal[of] = trusted = all(_same_bits(one, other) for one, other in zip(ours, theirs))
        if trusted:
            return found, theirs, ONE_PASS
        warnings.warn(
            f"advantage_probe: {call.site.module or 'the model'} and calls like it ({_words(of)}) keep the kernel's "
            "own backward, because the one pass for gradients and statistics did not give its bits on this machine; the "
            "numbers are the same, a little slower.",
            stacklevel=2,
        )
    alone = call.key.shape[1] == call.query.shape[1] and flash.key.shape[1] == call.query.shape[1]
    m = theirs[2] if alone and _nothing_uncounted(call) else None
    return vectors(call, edges, flash.normalizer, m), theirs, TWO_PRODUCTS


def _nothing_uncounted(call: AttentionCall) -> bool:
    """True where no row that does not count has a gradient, so that ∂L/∂v is m."""
    return call.visibility.mask is None and call.visibility.rows is None and not call.visibility.added


def _same_bits(one: Tensor, other: Tensor) -> bool:
    as_whole = torch.int64 if one.dtype == torch.float64 else torch.int32
    return torch.equal(one.view(as_whole), other.view(as_whole))


def _words(of: Kind) -> str:
    order = "causal" if of.causal else "two-sided"
    masked = "no mask" if of.mask is None else "a mask"
    kind_ = f"{str(of.dtype).removeprefix('torch.')}, width {of.width}, {order}, {masked}"
    return f"{kind_}, {of.threads} threads, {of.capability}"
