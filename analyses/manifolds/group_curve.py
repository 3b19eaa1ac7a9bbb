"""Group means in their plane: how much of their variance one axis has, and what labels without meaning would give.

An axis fitted to group means is a supervised one: ten means in a hundred dimensions have a large first axis whatever they
are means of, and where the label goes with position, position alone draws a curve. So the labels are permuted inside
positions *before* the axis is fitted, and an untrained network stands beside.

Shapes: N rows, d numbers in a row, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..intervals.nulls import DRAWS, exchanged
from .groups import Groups, Marks

Array = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class GroupCurve:
    """Group means and their plane.

    Attributes:
        means (G,d); centre (d,): their mean; axes (2,d): principal axes of the means, every group counting once, the
            first one pointing to larger values of the group; shares (2,): of the means' variance on one axis and two.
        between: share of the groups in the variance of the rows.
    """

    means: Array
    centre: Array
    axes: Array
    shares: Array
    between: float

    def project(self, rows: Array) -> Array:
        """(N,2) coordinates of rows (N,d)."""
        return np.asarray((rows - self.centre) @ self.axes.T)


@dataclass(frozen=True)
class Shares:
    """PC1, PC1+2 and the groups' share of the variance, each with the mean and the 97.5 % point of its null; `p` bounds."""

    value: Array
    null: Array
    edge: Array
    p: Array


def curve(rows: Array, number: Whole, groups: int) -> GroupCurve:
    """The curve through the means of rows (N,d); rows whose number is below 0 belong to no group."""
    inside = number >= 0
    rows, number = rows[inside], number[inside]
    means = _means(rows, number, groups)
    centre = means.mean(0)
    _, sizes, axes = np.linalg.svd(means - centre, full_matrices=False)
    axes = _padded(axes)
    along = (means - centre) @ axes[0]
    if along @ (np.arange(groups) - (groups - 1) / 2) < 0:
        axes[0] *= -1
    return GroupCurve(means, centre, axes, _cumulated(sizes), _between(rows, number, means))


def shares(rows: Array, marks: Marks, groups: Groups, generator: np.random.Generator, draws: int = DRAWS) -> Shares:
    """The shares of the group means beside labels permuted inside positions; where labels are a function of the position
    the null is the value itself, and p is 1.
    """
    inside = groups.number >= 0
    inner, number, position = rows[inside], groups.number[inside], marks.position[inside]
    count = len(groups.values)

    def measured(labels: Whole) -> Array:
        means = _means(inner, labels, count)
        sizes = np.linalg.svd(means - means.mean(0), compute_uv=False)
        return np.array([*_cumulated(sizes), _between(inner, labels, means)])

    value = measured(number)
    moved = (exchanged(number.astype(np.float64), position, generator).astype(np.int64) for _ in range(draws))
    null = np.stack([measured(labels) for labels in moved])
    p = (1 + (null >= value - 1e-12).sum(0)) / (1 + draws)
    return Shares(value, null.mean(0), np.quantile(null, 0.975, axis=0), p)


def _means(rows: Array, number: Whole, groups: int) -> Array:
    """(G,d) means of the rows; NaN-free, because permutations keep the size of every group."""
    picked = np.zeros((groups, len(rows)))
    picked[number, np.arange(len(rows))] = 1.0
    return np.asarray((picked @ rows) / picked.sum(1, keepdims=True))


def _cumulated(sizes: Array) -> Array:
    squares = sizes**2
    whole = float(squares.sum())
    return np.array([squares[0], squares[:2].sum()]) / whole if whole > 0 else np.zeros(2)


def _between(rows: Array, number: Whole, means: Array) -> float:
    """Share of the variance of the rows that lies between the groups."""
    centre = rows.mean(0)
    whole = float(((rows - centre) ** 2).sum())
    between = float((((means - centre) ** 2).sum(1) * np.bincount(number, minlength=len(means))).sum())
    return between / whole if whole > 0 else 0.0


def _padded(axes: Array) -> Array:
    """Two axes, the second of zeros where there is only one."""
    return np.concatenate([axes[:2], np.zeros((max(0, 2 - len(axes)), axes.shape[1]))])
