"""Does the curve order episodes that it was not fitted on, at one and the same position?

The axis is the first one of the group means of one half of the episodes; on the other half its coordinate is correlated
with exact entropy inside positions, in ranks. Two nulls, because they answer two questions. Is there an order at all: the
held-out entropies are exchanged between episodes at the same position. Did the axis need the labels: they are permuted
inside positions and the axis is fitted anew, and where positions alone already point along the curve this one orders as
well as the labels do, which takes nothing from the order and all from the supervision.

Shapes: N rows, d numbers in a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..intervals.nulls import DRAWS, bound, exchanged, half_samples
from ..vectors.readout import SMALLEST
from .group_curve import curve
from .groups import Groups, Marks

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

FIGURES = ("r", "low", "high", "null_edge", "p", "axis_null", "axis_edge", "axis_p")


def halves(marks: Marks, seed: int = 0) -> Mask:
    """(N,) which rows belong to the episodes that curves are fitted on: one half of them, at random."""
    order = np.random.default_rng(seed).permutation(marks.sequences)
    fitted = np.zeros(marks.sequences, dtype=bool)
    fitted[order[: marks.sequences // 2]] = True
    return np.asarray(fitted[marks.sequence])


def inside_positions(numbers: Array, position: NDArray[np.int64]) -> Array:
    """Ranks of the numbers in each position, centred and of unit spread there; NaN where a position has fewer than eight
    rows or does not vary. What differs by rounding only is the same, and shares its mean rank.
    """
    numbers = np.round(numbers, 9)
    sort = np.lexsort((numbers, position))
    values, groups = numbers[sort], position[sort]
    change = np.concatenate([[True], (values[1:] != values[:-1]) | (groups[1:] != groups[:-1])])
    starts = np.flatnonzero(change)
    lengths = np.diff(np.concatenate([starts, [len(values)]]))
    ranks = np.empty(len(values))
    ranks[sort] = np.repeat(starts + (lengths - 1) / 2, lengths)  # from 0 over all positions: the mean takes that out
    count = np.maximum(np.bincount(position), 1)
    centred = ranks - (np.bincount(position, ranks) / count)[position]
    spread = np.sqrt(np.bincount(position, centred**2) / count)
    good = (np.bincount(position) >= SMALLEST) & (spread > 1e-9)
    return np.where(good[position], centred / np.where(spread > 1e-9, spread, 1.0)[position], np.nan)


def order(
    rows: Array, marks: Marks, groups: Groups, fitted: Mask, generator: np.random.Generator, draws: int = DRAWS
) -> dict[str, float]:
    """Rank correlation inside positions, on the half that was not fitted, of the coordinate with entropy.

    Returns:
        `r` (positive where the axis, turned so that it rises with entropy on the fitted half, rises with it here), `low`,
        `high` (95 %, half samples of the held-out episodes), `p` (entropies exchanged) and `null_edge` (97.5 % point of its
        |r|), `axis_null` and `axis_edge` (mean and 97.5 % point of |r| of axes fitted to permuted labels), `axis_p`; NaN
        where entropy is a function of the position.
    """
    inside = groups.number >= 0
    fit, held = inside & fitted, inside & ~fitted
    truth = inside_positions(marks.entropy[held], marks.position[held])
    asked = np.isfinite(truth)
    nothing = dict.fromkeys(FIGURES, float("nan"))
    if not asked.any():
        return nothing
    count = len(groups.values)
    values, entropy = rows[held], marks.entropy[fit]

    def coordinate(labels: NDArray[np.int64]) -> Array:
        if len(np.unique(labels)) < count:
            return np.zeros(len(values))
        found = curve(rows[fit], labels, count)
        along = (rows[fit] - found.centre) @ found.axes[0]
        sign = np.sign((along - along.mean()) @ (entropy - entropy.mean()))
        return np.asarray((values - found.centre) @ found.axes[0] * (sign or 1.0))

    own = inside_positions(coordinate(groups.number[fit]), marks.position[held])
    product = own * truth
    if not np.isfinite(product).any():
        return nothing
    value = float(np.nanmean(product))
    position = marks.position[fit]
    null = []
    for _ in range(draws):
        moved = exchanged(groups.number[fit].astype(np.float64), position, generator).astype(np.int64)
        null.append(np.nanmean(inside_positions(coordinate(moved), marks.position[held]) * truth))
    numbers = np.unique(marks.sequence[held])
    which = np.searchsorted(numbers, marks.sequence[held])
    good = np.isfinite(product)
    sums = np.bincount(which[good], product[good], len(numbers)), np.bincount(which[good], minlength=len(numbers))

    def again(chosen: NDArray[np.int64]) -> float:
        return float(sums[0][chosen].sum() / max(sums[1][chosen].sum(), 1))

    low, high = half_samples(again, len(numbers), generator, draws, (-1.0, 1.0))
    both = np.isfinite(product)
    ranks, places, truths = own[both], marks.position[held][both], truth[both]
    chance = np.abs([float((ranks * exchanged(truths, places, generator)).mean()) for _ in range(draws)])
    size = np.abs(np.array(null))
    figures = {"r": value, "low": low, "high": high, "null_edge": float(np.quantile(chance, 0.975))}
    figures |= {"p": bound(abs(value), chance, "large"), "axis_null": float(size.mean())}
    return figures | {"axis_edge": float(np.quantile(size, 0.975)), "axis_p": bound(abs(value), size, "large")}


def orders(
    sites: Mapping[str, Array], marks: Marks, groups: Groups, *, seed: int = 0, draws: int = DRAWS
) -> pd.DataFrame:
    """`order` at every site (rows N,d), the same halves for all: one row per site."""
    fitted = halves(marks, seed)
    generator = np.random.default_rng(seed)
    lines = [{"site": name} | order(rows, marks, groups, fitted, generator, draws) for name, rows in sites.items()]
    return pd.DataFrame(lines)
