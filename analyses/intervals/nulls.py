"""What a figure is held against: permutations, half samples, and the bound on p that so many draws allow.

The sampling unit is the sequence. Permutations exchange sequences inside groups (the same position); half samples are
drawn without replacement, because a share of variance from n ≲ d vectors grows when vectors are repeated.

Shapes: n sequences, P positions, N = n·P rows, d numbers in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Generator = np.random.Generator

DRAWS = 200
FEW = 50  # sequences, below which an interval says little


@dataclass(frozen=True)
class Figure:
    """A number with its 95 % interval and its null.

    Attributes:
        value; low, high: the interval (NaN where none can be had).
        null: mean of the null draws, `null_high` their 97.5 % point (2.5 % where small is remarkable).
        p: upper bound, (1 + draws at least as extreme) / (1 + draws): never below 1/(draws + 1).
        named: what the null is.
    """

    value: float
    low: float
    high: float
    null: float
    null_high: float
    p: float
    named: str

    def __str__(self) -> str:
        return (
            f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]; {self.named}: {self.null:.3f}, {self.null_high:.3f} "
            f"(p ≤ {self.p:.3f})"
        )


def bound(observed: float, draws: Array, side: str = "large") -> float:
    """Upper bound on p that null `draws` allow; `side`: "large", "small" or "both" (in absolute value)."""
    draws = draws[np.isfinite(draws)]
    if not np.isfinite(observed) or not len(draws):
        return float("nan")
    if side == "both":
        extreme = np.abs(draws) >= abs(observed)
    else:
        extreme = draws >= observed if side == "large" else draws <= observed
    return float((1 + extreme.sum()) / (1 + len(draws)))


def figure(observed: float, interval: tuple[float, float], draws: Array, named: str, side: str = "large") -> Figure:
    """A number, its interval and its null draws put together."""
    draws = np.asarray(draws, dtype=np.float64)
    known = draws[np.isfinite(draws)]
    mean = float(known.mean()) if len(known) else float("nan")
    edge = float(np.quantile(known, 0.025 if side == "small" else 0.975)) if len(known) else float("nan")
    return Figure(observed, *interval, mean, edge, bound(observed, draws, side), named)


def half_samples(
    statistic: Callable[[NDArray[np.int64]], float],
    count: int,
    generator: Generator,
    draws: int = DRAWS,
    limits: tuple[float, float] = (-np.inf, np.inf),
) -> tuple[float, float]:
    """95 % interval of a statistic of `count` sequences, from half samples without replacement.

    `statistic` takes the numbers of the sequences to use. Half samples spread around the whole sample's value as that
    does around the truth; their mean is moved to the whole sample's value, which takes out what the smaller size adds. The
    interval ends at `limits`, beyond which the statistic cannot be.
    """
    whole = statistic(np.arange(count))
    halves = np.array([statistic(np.sort(generator.permutation(count)[: count // 2])) for _ in range(draws)])
    halves = halves[np.isfinite(halves)]
    if not len(halves) or not np.isfinite(whole):
        return float("nan"), float("nan")
    low, high = np.clip(np.quantile(halves, [0.025, 0.975]) - halves.mean() + whole, *limits)
    return float(low), float(high)


def exchanged(numbers: Array, groups: NDArray[np.int64], generator: Generator) -> Array:
    """`numbers` (N,) permuted inside every group (N,)."""
    order = np.lexsort((generator.random(len(numbers)), groups))
    place = np.argsort(groups, kind="stable")
    moved = np.empty_like(numbers)
    moved[place] = numbers[order]
    return moved


def permuted_columns(rows: Array, generator: Generator) -> Array:
    """Every column of rows (N,d) in an order of its own: the variances stay, all relations between columns go."""
    return np.take_along_axis(rows, generator.random(rows.shape).argsort(0), 0)
