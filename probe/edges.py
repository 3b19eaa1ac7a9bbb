"""The strongest pairs over everything that was added: kept per head and direction, by sequence, position and token.

Shapes: B batch, H query heads, k edges kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..hooks.sequences import Sequences
from .columns import EDGE_ROWS
from .law.strongest import Edges, RankBy


@dataclass(frozen=True, eq=False)
class EdgeRows:
    """Kept edges of one direction, strongest first along the last axis, named as in the edges table.

    Attributes, all (H,k): sequence: place in `TopEdges.sequences`. query_position, key_position, query_token_id,
        key_token_id (−1: no token): int64. score_gradient, attention, advantage, compatibility, knockout: float64; an
        unused place holds a score gradient of 0.
    """

    sequence: Tensor
    query_position: Tensor
    key_position: Tensor
    query_token_id: Tensor
    key_token_id: Tensor
    score_gradient: Tensor
    attention: Tensor
    advantage: Tensor
    compatibility: Tensor
    knockout: Tensor

    @classmethod
    def empty(cls, heads: int) -> EdgeRows:
        whole, real = (torch.zeros(heads, 0, dtype=dtype) for dtype in (torch.int64, torch.float64))
        return cls(*(real if field.name in EDGE_ROWS else whole for field in fields(cls)))

    def map(self, change: Callable[[Tensor], Tensor]) -> EdgeRows:
        return EdgeRows(*(change(getattr(self, field.name)) for field in fields(self)))

    def beside(self, other: EdgeRows) -> EdgeRows:
        """These and others of the same heads."""
        return EdgeRows(*(torch.cat([getattr(self, f.name), getattr(other, f.name)], 1) for f in fields(self)))

    def cut(self, capacity: int, rank_by: RankBy) -> EdgeRows:
        """The strongest `capacity` of every head; of equals those that came first."""
        strength = getattr(self, rank_by).abs().nan_to_num(0.0)
        order = strength.sort(dim=-1, descending=True, stable=True).indices[:, :capacity]
        return self.map(lambda column: column.gather(1, order))


def _ids(ids: Tensor | None, positions: Tensor) -> Tensor:
    """Token ids (B,T) at positions (B,H,k), or −1."""
    if ids is None:
        return torch.full_like(positions, -1)
    return ids.to(positions.device).gather(1, positions.flatten(1)).view_as(positions)


@dataclass(eq=False)
class TopEdges:
    """The strongest edges of one module and use over everything that was added, per direction and head.

    `sequences`: identities that the rows' `sequence` counts. `rank_by`: what is strong.
    """

    capacity: int
    routed: EdgeRows
    anti_routed: EdgeRows
    sequences: list[int]
    rank_by: RankBy = "score_gradient"

    @classmethod
    def empty(cls, heads: int, capacity: int, rank_by: RankBy = "score_gradient") -> TopEdges:
        return cls(capacity, EdgeRows.empty(heads), EdgeRows.empty(heads), [], rank_by)

    def add(self, edges: tuple[Edges, Edges], sequences: Sequences, positions: tuple[Tensor, Tensor]) -> None:
        """Add the edges of one call; `positions` (B,Q) and (B,S) are those that token rows show."""
        offset = len(self.sequences)
        self.sequences.extend(sequences.identities)
        new = [_rows(one, sequences, positions, offset) for one in edges]
        self.routed, self.anti_routed = (
            kept.beside(rows).cut(self.capacity, self.rank_by)
            for kept, rows in zip((self.routed, self.anti_routed), new)
        )
        self._forget()

    def _forget(self) -> None:
        """Keep the identities of those sequences only that still have an edge."""
        used = torch.cat([self.routed.sequence, self.anti_routed.sequence], 1).unique()
        place = torch.zeros(len(self.sequences), dtype=torch.long)
        place[used] = torch.arange(len(used))
        self.sequences = [self.sequences[index] for index in used.tolist()]
        self.routed, self.anti_routed = (
            replace(side, sequence=place[side.sequence]) for side in (self.routed, self.anti_routed)
        )

    def divide(self, weight: float) -> None:
        """Take a factor out of u."""
        for side in (self.routed, self.anti_routed):
            for name, field in EDGE_ROWS.items():
                if field.degree:
                    getattr(side, name).div_(weight**field.degree)

    def merge(self, other: TopEdges) -> None:
        offset = len(self.sequences)
        self.sequences = [*self.sequences, *other.sequences]
        self.routed, self.anti_routed = (
            ours.beside(replace(theirs, sequence=theirs.sequence + offset)).cut(self.capacity, self.rank_by)
            for ours, theirs in ((self.routed, other.routed), (self.anti_routed, other.anti_routed))
        )
        if self.sequences:
            self._forget()

    def copy(self) -> TopEdges:
        routed, anti_routed = self.routed.map(Tensor.clone), self.anti_routed.map(Tensor.clone)
        return TopEdges(self.capacity, routed, anti_routed, list(self.sequences), self.rank_by)


def _rows(edges: Edges, sequences: Sequences, positions: tuple[Tensor, Tensor], offset: int) -> EdgeRows:
    """The edges (B,H,k) of a call as rows (H,B·k); what is not finite is an unused place."""
    number = torch.arange(edges.query.shape[0])[:, None, None].expand(edges.query.shape) + offset
    own, other = (
        part.gather(1, place.flatten(1)).view_as(place) for part, place in zip(positions, (edges.query, edges.key))
    )
    found = EdgeRows(
        number,
        own,
        other,
        _ids(sequences.query_ids, edges.query),
        _ids(sequences.key_ids, edges.key),
        *(getattr(edges, field.name).double() for field in fields(EdgeRows) if field.name in EDGE_ROWS),
    ).map(lambda column: column.cpu().transpose(0, 1).flatten(1))
    return replace(found, score_gradient=torch.where(torch.isfinite(found.score_gradient), found.score_gradient, 0.0))
