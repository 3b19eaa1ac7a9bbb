"""Poisson-bootstrap weights keyed on the sequence, so that intervals do not depend on how a corpus was split.

Sequence s enters replicate r with a weight ~ Poisson(1) drawn from a counter-based generator whose key is the identity
of s. Every batch, shard and rank therefore draws the same weights for the same sequence, replicates of any state merge
by addition, and heads that saw the same sequences are resampled together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .operator.draws import drawn
from .student import quantile

REPLICATES = 200
LEVEL = 0.95
FEWEST, FEW = 12, 30  # sequences: below the first there is no interval, below the second it is said that they are few
MANY = 200  # from here on Student's limit is the plain one to a hundredth, and sequences are counted no further
Scale = Literal["plain", "log"]

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
    found = drawn(identities, REPLICATES, _CUMULATIVE)
    if found is not None:
        return torch.from_numpy(found)
    return torch.from_numpy(np.stack([_draw(identity) for identity in identities], axis=1).astype(np.float64))


def percentiles(replicates: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Percentile interval at LEVEL over axis 0; replicates that are NaN (an empty resample) are left out."""
    tail = 100 * (1 - LEVEL) / 2
    finite = np.isfinite(replicates)
    few = finite.sum(0) < REPLICATES // 2
    filled = np.where(finite, replicates, np.nan)
    filled[:, few] = 0.0
    low, high = np.nanpercentile(filled, [tail, 100 - tail], axis=0)
    return np.where(few, np.nan, low), np.where(few, np.nan, high)


def interval(
    values: NDArray[np.float64], replicates: NDArray[np.float64], sequences: int, *, scale: Scale = "plain"
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Student's interval at LEVEL around `values` (H,), with the spread of `replicates` (R,H) and one degree of freedom
    less than there are sequences; NaN below `FEWEST` sequences.

    A dozen sequences do not show how far their own spread may be off, which percentiles of the replicates take as known:
    those covered .76 to .92 where this covers .88 to .96. On the scale "log" both ends have the sign of the value.
    """
    finite = np.isfinite(replicates)
    if scale == "log":
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn, middle = np.log(np.abs(replicates)), np.log(np.abs(values))
        finite &= np.isfinite(drawn)
    else:
        drawn, middle = replicates, values
    if sequences < FEWEST:
        return np.full_like(values, np.nan), np.full_like(values, np.nan)
    known = finite.sum(0) >= REPLICATES // 2
    count = np.maximum(finite.sum(0), 2)
    kept = np.where(finite, drawn, 0.0)
    mean = kept.sum(0) / count
    spread = np.sqrt(np.where(finite, (drawn - mean) ** 2, 0.0).sum(0) / (count - 1)) if finite.any() else mean
    half = quantile(LEVEL, sequences - 1) * np.sqrt(sequences / (sequences - 1)) * spread
    low, high = middle - half, middle + half
    if scale == "log":
        ends = np.sign(values) * np.exp(low), np.sign(values) * np.exp(high)
        low, high = np.minimum(*ends), np.maximum(*ends)
    return np.where(known, low, np.nan), np.where(known, high, np.nan)


def told(sequences: int) -> str:
    """What is said of an interval over so many sequences: "ok", "few: …" below FEW, "none: …" below FEWEST."""
    if sequences < FEWEST:
        return f"none: {sequences} sequence{'s' * (sequences != 1)}, {FEWEST} are needed"
    return f"few: {sequences} sequences" if sequences < FEW else "ok"
