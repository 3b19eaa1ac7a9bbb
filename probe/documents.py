"""Sampling units: the sequence, which is the document where several are packed in one row.

Packed documents that attention keeps apart are sequences of their own: usage, first key and intervals are those of the
same documents unpacked. Where attention crosses from one into another they are one sequence, since the values of one are
used by the queries of the other.

Shapes: B batch, U units, H query heads, K key/value heads, Q query positions, S key positions, L longest unit.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..hooks.call import AttentionCall
from ..hooks.mask_cache import remembered
from ..hooks.sequences import crosses, digest, documents
from .law.vectors import Vectors

_PER_SEQUENCE = ("blind", "distance", "first_key")
_PER_KEY = ("usage", "user_norm", "value_gradient", "uniform")


@dataclass(frozen=True, eq=False)
class Units:
    """Where each unit lies: `row` (U,), the places of its tokens (U,L) and which of those exist; and its identity."""

    row: Tensor
    places: Tensor
    real: Tensor
    identities: tuple[int, ...]

    def split(self, rows: Tensor, axis: int) -> Tensor:
        """A (B,…) tensor with tokens on `axis` as (U,…), 0 where a unit has ended."""
        moved = rows.movedim(axis, 1)
        row, places, real = (part.to(rows.device) for part in (self.row, self.places, self.real))
        found = moved[row[:, None], places]
        shape = (*real.shape, *[1] * (found.dim() - 2))
        return torch.where(real.view(shape), found, torch.zeros((), dtype=found.dtype, device=found.device)).movedim(
            1, axis
        )


def units(call: AttentionCall) -> Units | None:
    """The documents of a packed call that attention keeps apart; None where every batch row is one sequence."""
    positions, rows = call.sequences.positions, call.sequences.query_rows
    visibility, batch = call.visibility, call.query.shape[0]
    if positions is None or not visibility.paired or visibility.queries != visibility.keys:
        return None
    number = remembered("documents", (positions, rows), lambda: documents(positions, rows))
    if number is None:
        return None
    number = number.expand(batch, -1)
    apart = remembered(
        ("apart", visibility.structure),
        (number, visibility.mask),
        lambda: not crosses(number, visibility.structure, visibility.mask),
    )
    if not apart:
        return None
    # forwards whose backwards come together may share position ids and hold other tokens
    told = call.sequences
    return remembered(("units", told.identities), (number, told.query_ids, rows), lambda: _units(call, number))


def _units(call: AttentionCall, number: Tensor) -> Units:
    number = number.cpu()
    ids, real = call.sequences.query_ids, call.sequences.query_rows
    places: list[Tensor] = []
    owners, identities = [], []
    for row in range(len(number)):
        for document in number[row].unique():
            place = (number[row] == document).nonzero()[:, 0]
            tokens = place if real is None else place[real[row].cpu()[place]]
            if not len(tokens):
                continue
            places.append(place)
            owners.append(row)
            if ids is None:
                identities.append(digest(str(call.sequences.identities[row]).encode(), str(int(document)).encode()))
            else:  # as of the same document in a row of its own
                identities.append(digest(ids[row].cpu().to(torch.int64)[tokens].contiguous().numpy().tobytes()))
    longest = max(len(place) for place in places)
    table = torch.stack([torch.nn.functional.pad(place, (0, longest - len(place))) for place in places])
    lengths = torch.tensor([len(place) for place in places])
    return Units(torch.tensor(owners), table, torch.arange(longest) < lengths[:, None], tuple(identities))


def split(call: AttentionCall, rows: Vectors, found: Units) -> tuple[Tensor, Vectors]:
    """The values (U,K,L,V) and the vectors of every unit."""
    parts: dict[str, Any] = {}
    for entry in fields(Vectors):
        value = getattr(rows, entry.name)
        if isinstance(value, Tensor) and entry.name not in _PER_SEQUENCE:
            parts[entry.name] = found.split(value.expand(call.query.shape[0], *value.shape[1:]), 2)
    first = torch.cat([torch.ones(1, dtype=torch.bool), found.row[1:] != found.row[:-1]])
    device = rows.blind.device
    blind = torch.where(first[:, None].to(device), rows.blind[found.row.to(device)], 0)
    start = _first(found, call).to(device)
    first_key = parts["usage"].gather(-1, start[:, None, None].expand(-1, rows.usage.shape[1], 1))[..., 0]
    return found.split(call.value, 2), replace(
        rows, **parts, blind=blind, first_key=first_key, distance=_distance(rows, parts, found), edges=None
    )


def _first(found: Units, call: AttentionCall) -> Tensor:
    """(U,) place within each unit of its first token that is not padding."""
    real = call.sequences.query_rows
    there = found.real
    if real is not None:
        there = there & real.cpu()[found.row[:, None], found.places]
    return there.to(torch.uint8).argmax(1)


def _distance(rows: Vectors, parts: dict[str, Any], found: Units) -> Tensor:
    if rows.reach is not None:
        return parts["reach"].sum(-1)
    line = torch.arange(found.places.shape[1], device=rows.usage.device, dtype=rows.usage.dtype)
    mass = torch.where(parts["counted"], 1 - parts["sink"], 0.0)
    return (mass * line).sum(-1) - (parts["usage"] * line).sum(-1)
