"""The strongest pairs of a call: which (query, key) pairs the loss wants more, or less, attention on.

Shapes: B batch, H query heads, k edges kept; inside a block b, h, r, s as in `blocks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from .knockout import knockout

RankBy = Literal["score_gradient", "knockout"]


@dataclass(frozen=True, eq=False)
class Edges:
    """Edges of one direction, strongest first along the last axis; unused places hold 0 in what ranks them.

    Attributes, all (B,H,k):
        query, key: positions. score_gradient: D_ij. attention: α_ij. advantage: A_ij. compatibility: b_ij.
        knockout: ΔL to first order when the edge is removed; NaN where it was a row's only key.
    """

    query: Tensor
    key: Tensor
    score_gradient: Tensor
    attention: Tensor
    advantage: Tensor
    compatibility: Tensor
    knockout: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Edges:
        return Edges(*(change(getattr(self, field.name)) for field in fields(self)))


def strength(edges: Edges, rank_by: RankBy) -> Tensor:
    """What ranks them, (…,k), not negative."""
    return getattr(edges, rank_by).abs().nan_to_num(0.0, posinf=0.0, neginf=0.0)


def join(parts: Sequence[Edges], axis: int) -> Edges:
    """Edges side by side along `axis`."""
    return Edges(*(torch.cat([getattr(part, field.name) for part in parts], axis) for field in fields(Edges)))


def strongest(parts: Sequence[Edges], k: int, rank_by: RankBy) -> Edges:
    """The k strongest edges of `parts`, per batch row and head."""
    joined = join(parts, -1)
    index = strength(joined, rank_by).topk(min(k, joined.query.shape[-1]), dim=-1).indices
    return joined.map(lambda tensor: tensor.gather(-1, index))


@dataclass(frozen=True, eq=False)
class Scored:
    """A block, entry by entry, for queries from `start` and keys from `low` on: all (b,h,r,s) but `sink` (b,h,r).

    `score_gradient` is 0 in rows that do not count and on hidden keys.
    """

    score_gradient: Tensor
    attention: Tensor
    weights: Tensor
    advantage: Tensor
    compatibility: Tensor
    sink: Tensor
    start: int
    low: int


def of_block(block: Scored, k: int, rank_by: RankBy) -> tuple[Edges, Edges]:
    """The k strongest edges of a block that attention will rise on (D < 0: routed), and fall on (anti-routed)."""
    gone = knockout(block.attention, block.weights, block.compatibility, block.sink)
    flat = block.score_gradient.flatten(2)
    width = block.score_gradient.shape[-1]
    ranked = flat.abs() if rank_by == "score_gradient" else gone.flatten(2).abs().nan_to_num(0.0, posinf=0.0)

    def side(sign: float) -> Edges:
        # the two directions are told apart by D, whose sign a knock-out shares turned round
        index = torch.where(sign * flat > 0, ranked, 0.0).topk(min(k, flat.shape[-1]), dim=-1).indices
        there = (sign * flat).gather(-1, index) > 0

        def picked(tensor: Tensor) -> Tensor:
            return torch.where(there, tensor.flatten(2).gather(-1, index), 0.0)

        return Edges(
            index // width + block.start,
            index % width + block.low,
            picked(block.score_gradient),
            picked(block.attention),
            picked(block.advantage),
            picked(block.compatibility),
            picked(gone),
        )

    return side(-1.0), side(1.0)
