"""Which rows of a call count and how many keys they see, asked once for all the layers that share the answer.

Shapes: B batch, H query heads, Q query positions, S key positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...hooks.mask_cache import remembered
from ...hooks.visibility import Structure, Visibility


@dataclass(frozen=True, eq=False)
class Counting:
    """`usable` (B,1 or H,Q): counted rows that see a key; `whole`: all of them are. `seen` (B,1 or H,Q) int64: n_i.
    `blind` (B,1 or H): counted rows that see nothing. `uniform` (B,1 or H,S): usage if every row spread evenly, its entropy
    (B,1 or H), and where it is not 0: `used`.
    """

    usable: Tensor
    whole: bool
    seen: Tensor
    blind: Tensor
    uniform: Tensor
    entropy: Tensor
    used: Tensor


def counting(visibility: Visibility, batch: int) -> Counting:
    """The rows of a call on the CPU; not to be written to."""
    if visibility.mask is None and visibility.rows is None:
        return _by_structure(visibility.structure, visibility.queries, visibility.keys, batch)
    key = (
        "counting",
        visibility.structure,
        visibility.queries,
        visibility.keys,
        visibility.added,
        visibility.paired,
        batch,
    )
    return remembered(key, (visibility.mask, visibility.rows), lambda: _counting(visibility, batch))


@lru_cache(maxsize=8)
def _by_structure(structure: Structure, queries: int, keys: int, batch: int) -> Counting:
    return _counting(Visibility(structure, queries, keys), batch)


def _counting(visibility: Visibility, batch: int) -> Counting:
    device = torch.device("cpu")
    counted = visibility.counted(batch, device)
    seen, uniform = visibility.counts(batch, counted)
    usable = counted[:, None] & (seen > 0)
    blind = (counted[:, None] & (seen == 0)).sum(-1)
    share = uniform / uniform.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    entropy = -torch.xlogy(share, share).sum(-1)
    return Counting(usable, bool(usable.all()), seen.long(), blind, uniform, entropy, uniform > 0)
