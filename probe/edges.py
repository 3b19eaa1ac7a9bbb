"""The strongest score gradients: which (query, key) pairs the loss wants more, or less, attention on.

Shapes: B batch, H query heads, k edges kept; inside a block b, h, r, s as in `blockwise.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..hooks.sequences import Sequences


@dataclass(frozen=True, eq=False)
class Edges:
    """Edges of one direction, strongest first along the last axis; unused places hold a score gradient of 0.

    Attributes, all (B,H,k):
        query, key: positions. score_gradient: D_ij. attention: α_ij. advantage: A_ij.
        compatibility: b_ij.
    """

    query: Tensor
    key: Tensor
    score_gradient: Tensor
    attention: Tensor
    advantage: Tensor
    compatibility: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Edges:
        return Edges(*(change(getattr(self, field.name)) for field in fields(self)))


def join(parts: Sequence[Edges], axis: int) -> Edges:
    """Edges side by side along `axis`."""
    return Edges(*(torch.cat([getattr(part, field.name) for part in parts], axis) for field in fields(Edges)))


def strongest(parts: Sequence[Edges], k: int) -> Edges:
    """The k edges of `parts` with the largest |D|, per batch row and head."""
    joined = join(parts, -1)
    index = joined.score_gradient.abs().topk(min(k, joined.query.shape[-1]), dim=-1).indices
    return joined.map(lambda tensor: tensor.gather(-1, index))


def of_block(
    score_gradient: Tensor, attention: Tensor, advantage: Tensor, expected: Tensor, start: int, low: int, k: int
) -> tuple[Edges, Edges]:
    """The k most negative D of a block (attention will rise: routed) and the k most positive (anti-routed).

    Args:
        score_gradient, attention, advantage: (b,h,r,s), for queries from `start` and keys from `low` on.
        expected (b,h,r): E_i.
    """
    flat = score_gradient.flatten(2)
    width = score_gradient.shape[-1]

    def side(sign: float) -> Edges:
        strength, index = (sign * flat).clamp(min=0).topk(min(k, flat.shape[-1]), dim=-1)
        return Edges(
            index // width + start,
            index % width + low,
            sign * strength,
            attention.flatten(2).gather(-1, index),
            kept := advantage.flatten(2).gather(-1, index),
            expected.gather(-1, index // width) - kept,
        )

    return side(-1.0), side(1.0)


def _ids(ids: Tensor | None, positions: Tensor) -> Tensor:
    """Token ids (B,T) at positions (B,H,k), or −1."""
    if ids is None:
        return torch.full_like(positions, -1)
    return ids.to(positions.device).gather(1, positions.flatten(1)).view_as(positions)


@dataclass(eq=False)
class TopEdges:
    """The strongest edges of one module and use over everything that was added, per direction and head.

    Each kept edge is a row of `routed` or `anti_routed` (H,k,9): place in `sequences`, query, key, score gradient,
    attention, advantage, compatibility, and the token ids of query and key (−1: no token).
    """

    capacity: int
    routed: Tensor
    anti_routed: Tensor
    sequences: list[int]

    @classmethod
    def empty(cls, heads: int, capacity: int) -> TopEdges:
        nothing = torch.zeros(heads, 0, 9, dtype=torch.float64)
        return cls(capacity, nothing, nothing.clone(), [])

    def add(self, edges: tuple[Edges, Edges], sequences: Sequences, positions: tuple[Tensor, Tensor]) -> None:
        """Add the edges of one call; `positions` (B,Q) and (B,S) are those that token rows show."""
        offset = len(self.sequences)
        self.sequences.extend(sequences.identities)
        sides = []
        for kept, new in zip((self.routed, self.anti_routed), edges):
            number = torch.arange(new.query.shape[0])[:, None, None].expand(new.query.shape) + offset
            ids = (_ids(sequences.query_ids, new.query), _ids(sequences.key_ids, new.key))
            shown = [
                part.gather(1, place.flatten(1)).view_as(place) for part, place in zip(positions, (new.query, new.key))
            ]
            columns = (number, *shown, new.score_gradient, new.attention, new.advantage, new.compatibility, *ids)
            rows = torch.stack([column.double().cpu() for column in columns], -1).transpose(0, 1).flatten(1, 2)
            rows = torch.where(torch.isfinite(rows[..., 3:4]), rows, 0.0)
            sides.append(self._cut(torch.cat([kept, rows], 1)))
        self.routed, self.anti_routed = sides
        self._forget()

    def _cut(self, rows: Tensor) -> Tensor:
        order = rows[..., 3].abs().sort(dim=-1, descending=True, stable=True).indices[:, : self.capacity]
        return rows.gather(1, order[..., None].expand(-1, -1, rows.shape[-1]))

    def _forget(self) -> None:
        """Keep the identities of those sequences only that still have an edge."""
        kept = torch.cat([self.routed[..., 0], self.anti_routed[..., 0]], 1).long()
        used = kept.unique()
        place = torch.zeros(len(self.sequences), dtype=torch.long)
        place[used] = torch.arange(len(used))
        self.sequences = [self.sequences[index] for index in used.tolist()]
        for side in (self.routed, self.anti_routed):
            side[..., 0] = place[side[..., 0].long()].double()

    def divide(self, weight: float) -> None:
        """Take a factor out of u: score gradients, advantages and compatibilities are linear in it."""
        for side in (self.routed, self.anti_routed):
            side[..., 3] /= weight
            side[..., 5:7] /= weight

    def merge(self, other: TopEdges) -> None:
        offset = len(self.sequences)
        self.sequences = [*self.sequences, *other.sequences]
        for name in ("routed", "anti_routed"):
            theirs = getattr(other, name).clone()
            theirs[..., 0] += offset
            setattr(self, name, self._cut(torch.cat([getattr(self, name), theirs], 1)))
        if self.sequences:
            self._forget()

    def copy(self) -> TopEdges:
        return TopEdges(self.capacity, self.routed.clone(), self.anti_routed.clone(), list(self.sequences))
