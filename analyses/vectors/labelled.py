"""Vectors and what is known of each: where it stood, in which sequence, and how uncertain a perfect reader would be there.

Shapes: n sequences, P positions, N rows, d numbers in a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...hooks.errors import BadInput
from .pca import FEWEST

Array = NDArray[np.float64]
Groups = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Rows:
    """Vectors and what is known of them, one row per asked position.

    Attributes:
        vectors (N,d); entropy (N,): bits; position, sequence, distinct (N,): int, `distinct` the number of different
            tokens before the row's own. excluded: rows left out because of NaN or infinities.
    """

    vectors: Array
    entropy: Array
    position: Groups
    sequence: Groups
    distinct: Groups
    excluded: int = 0

    @property
    def sequences(self) -> int:
        return int(self.sequence.max()) + 1 if len(self.sequence) else 0

    def of(self, chosen: Groups) -> Rows:
        """The rows of the chosen sequences, numbered anew in their order."""
        number = np.full(self.sequences, -1)
        number[chosen] = np.arange(len(chosen))
        keep = number[self.sequence] >= 0
        renumbered = number[self.sequence][keep]
        return Rows(self.vectors[keep], self.entropy[keep], self.position[keep], renumbered, self.distinct[keep])

    def at(self, places: Groups) -> Rows:
        """Some of the rows, sequences numbered as they are."""
        parts = self.position[places], self.sequence[places], self.distinct[places]
        return Rows(self.vectors[places], self.entropy[places], *parts)


def rows_of(vectors: Array, entropy: Array, tokens: Tensor | None = None) -> Rows:
    """Rows of vectors (n,P,d) where entropy (n,P) is not NaN; `tokens` (n,P): the ids, for the number seen before.

    Raises:
        BadInput: when fewer than three rows are left.
    """
    count, positions = entropy.shape
    sequence, position = np.meshgrid(np.arange(count), np.arange(positions), indexing="ij")
    distinct = _distinct(tokens) if tokens is not None and tokens.dim() == 2 else np.zeros_like(position)
    asked = np.isfinite(entropy)
    finite = np.isfinite(vectors).all(-1)
    keep = asked & finite
    if keep.sum() < FEWEST:
        raise BadInput(f"A read-out needs at least {FEWEST} vectors; there are {int(keep.sum())}.")
    left_out = int((asked & ~finite).sum())
    return Rows(vectors[keep], entropy[keep], position[keep], sequence[keep], distinct[keep], left_out)


def _distinct(tokens: Tensor) -> Groups:
    """(n,P) how many different tokens come before each position."""
    ids = tokens.cpu().numpy()
    new = np.ones(ids.shape, dtype=np.int64)
    for place in range(1, ids.shape[1]):
        new[:, place] = (ids[:, :place] != ids[:, place : place + 1]).all(1)
    return np.asarray(new.cumsum(1) - new)
