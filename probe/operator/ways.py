"""Which way the statistics of a call are computed, where its kernel keeps its backward."""

from __future__ import annotations

import torch

from ...hooks.call import AttentionCall
from ..law import blocks
from ..law.vectors import Vectors
from . import build, one_pass
from .one_pass import NONE, EdgeRequest

THREE_PRODUCTS, BLOCKS, TRITON = "three products", "blocks in Python", "Triton or blocks on the GPU"


def vectors(call: AttentionCall, edges: EdgeRequest = NONE, tokens: bool = True) -> tuple[Vectors, str]:
    """The vectors of any call, and the way they came.

    Raises:
        UnsupportedKernel: for dtypes without a gradient.
    """
    blocks.compute_dtype(call)
    if call.query.device.type == "cpu" and usable():
        return one_pass.vectors(call, edges), THREE_PRODUCTS
    found = blocks.vectors(
        call, edges=edges.capacity, rank_by="knockout" if edges.by_knockout else "score_gradient", tokens=tokens
    )
    return found, BLOCKS if call.query.device.type == "cpu" else TRITON


def usable() -> bool:
    """Whether this process computes on the CPU by the C++ operator; builds it where that was not done."""
    return not torch.compiler.is_compiling() and build.available()
