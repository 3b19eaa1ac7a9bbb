"""Query rows and key rows, token by token, kept only where they were asked for (`detail="tokens"` or `"edges"`).

Shapes: B batch, H query heads, Q query positions, S key positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from ..hooks.call import AttentionCall
from ..hooks.sequences import documents
from .columns import KEY_ROWS, QUERY_ROWS
from .law.vectors import Vectors


@dataclass(frozen=True, eq=False)
class Side:
    """Rows of one side of one call: (n,) sequence row, position and token id (−1: no token); columns (n,H)."""

    row: NDArray[np.int64]
    position: NDArray[np.int64]
    token_id: NDArray[np.int64]
    columns: dict[str, NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class TokenRows:
    """The token rows of one call."""

    identities: tuple[int, ...]
    queries: Side
    keys: Side


@dataclass(eq=False)
class Tokens:
    """The token rows of every call of one module and use, in order; `divide` applies to all of them."""

    calls: list[TokenRows] = field(default_factory=list)

    def divide(self, weight: float) -> None:
        for call in self.calls:
            for side, columns in ((call.queries, QUERY_ROWS), (call.keys, KEY_ROWS)):
                for column in columns.values():
                    if column.degree:
                        side.columns[column.name] /= weight**column.degree

    def merge(self, other: Tokens) -> None:
        self.calls.extend(other.calls)

    def copy(self) -> Tokens:
        return Tokens([_copy(call) for call in self.calls])


def _copy(call: TokenRows) -> TokenRows:
    def side(rows: Side) -> Side:
        return Side(rows.row, rows.position, rows.token_id, {name: part.copy() for name, part in rows.columns.items()})

    return TokenRows(call.identities, side(call.queries), side(call.keys))


def token_rows(call: AttentionCall, rows: Vectors) -> TokenRows:
    """The token rows of one call: queries that count, and keys that some counted query can see."""
    sequences = call.sequences
    m = rows.value_gradient
    norm = m.norm(dim=-1)
    value = call.value.to(m.dtype).repeat_interleave(call.group, 1)
    value_norm = value.norm(dim=-1)
    turned = (norm > 0) & (value_norm > 0)
    cosine = torch.where(turned, -(m * value).sum(-1) / torch.where(turned, norm * value_norm, 1.0), torch.nan)
    coherence = norm / rows.user_norm  # 0/0: nobody looked, NaN
    query = {
        "entropy": rows.entropy,
        "expected_compatibility": rows.expected,
        "advantage_missed": rows.missed,
        "advantage_spread": rows.spread,
        "upstream_norm": rows.upstream_norm,
    }
    key = {"usage": rows.usage, "coherence": coherence, "update_norm": norm, "update_cosine": cosine}
    own, other = positions(call)
    used = (rows.uniform > 0).any(1)
    return TokenRows(
        sequences.identities,
        _side(rows.counted.any(1), own, sequences.query_ids, query),
        _side(used, other, sequences.key_ids, key),
    )


def positions(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(B,Q) and (B,S): positions from the first token of each sequence, wherever its padding lies.

    Packed documents start again with each document. Queries behind a cached prefix count on from it.
    """
    sequences, batch = call.sequences, call.query.shape[0]
    own, other = call.visibility.positions(call.query.device)
    given = sequences.positions
    if given is not None and len(other) == given.shape[1] and documents(given, sequences.query_rows) is not None:
        packed = given.to(own.device).expand(batch, -1)
        return packed, packed

    def shifted(line: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        whole = line.expand(batch, -1)
        if real is None:
            return whole
        return whole - real.to(torch.uint8).argmax(dim=1).to(whole.device)[:, None]

    return shifted(own, sequences.query_rows), shifted(other, sequences.key_rows)


def _side(
    kept: torch.Tensor,
    positions: torch.Tensor,
    ids: torch.Tensor | None,
    columns: dict[str, torch.Tensor],
) -> Side:
    row, place = kept.nonzero(as_tuple=True)
    position = positions[row, place]
    token = ids.to(row.device)[row, place] if ids is not None else torch.full_like(row, -1)
    picked = {name: part.transpose(1, 2)[row, place].double().cpu().numpy() for name, part in columns.items()}
    return Side(row.cpu().numpy(), position.cpu().numpy(), token.cpu().numpy(), picked)
