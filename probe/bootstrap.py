"""Poisson-bootstrap weights keyed on the sequence, so that intervals do not depend on how a corpus was split.

Sequence s enters replicate r with a weight ~ Poisson(1) drawn from a counter-based generator whose key is the identity
of s. Every batch, shard and rank therefore draws the same weights for the same sequence, replicates of any state merge
by addition, and heads that saw the same sequences are resampled together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

REPLICATES = 200
LEVEL = 0.95

# P(X ≤ k) for X ~ Poisson(1), k = 0 … 20: inverting this table keeps the draws the same in every version of numpy
_CUMULATIVE = np.cumsum(np.exp(-1.0) / np.concatenate(([1.0], np.cumprod(np.arange(1.0, 21.0)))))


@lru_cache(maxsize=65536)
def _draw(identity: int) -> NDArray[np.uint8]:
    raw = np.random.Philox(key=identity).random_raw(REPLICATES)
    uniform = (np.asarray(raw, dtype=np.uint64) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.searchsorted(_CUMULATIVE, uniform, side="right").astype(np.uint8)


def weights(identities: Sequence[int]) -> Tensor:
    """(REPLICATES, len(identities)) float64: how often each sequence enters each replicate. Not to be written to: every
    layer of a forward is handed the same.
    """
    return _weights(tuple(identities))


@lru_cache(maxsize=8)
def _weights(identities: tuple[int, ...]) -> Tensor:
    if not identities:
        return torch.zeros(REPLICATES, 0, dtype=torch.float64)
    return torch.from_numpy(np.stack([_draw(identity) for identity in identities], axis=1).astype(np.float64))


def interval(replicates: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Percentile interval at LEVEL over axis 0; replicates that are NaN (an empty resample) are left out."""
    tail = 100 * (1 - LEVEL) / 2
    finite = np.isfinite(replicates)
    few = finite.sum(0) < REPLICATES // 2
    filled = np.where(finite, replicates, np.nan)
    filled[:, few] = 0.0
    low, high = np.nanpercentile(filled, [tail, 100 - tail], axis=0)
    return np.where(few, np.nan, low), np.where(few, np.nan, high)
