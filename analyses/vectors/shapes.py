"""What shape a cloud of vectors has: shares of variance, intrinsic dimension, and how near it is to a curve.

Each stands beside a null that keeps what is uninteresting: columns permuted against each other, or rows exchanged across
the axis.

Shapes: N rows, d numbers in a row.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ..intervals.nulls import DRAWS, Figure, figure, half_samples, permuted_columns
from .labelled import Rows
from .pca import StreamingPCA

Array = NDArray[np.float64]
Groups = NDArray[np.int64]

POINTS = 600  # rows that the neighbour distances are taken of
RIDGE = 1e-3  # of the mean eigenvalue


def shares(vectors: Array, correlation_form: bool = False) -> tuple[float, float, float]:
    """Share of variance on the first axis, on the first two, and the participation ratio."""
    found = StreamingPCA(vectors.shape[1], correlation_form).update(vectors).finish()
    return float(found.explained[0]), float(found.explained[:2].sum()), found.participation_ratio


SHARES = ("PC1 share", "PC1+2 share", "participation ratio")


def shape(
    rows: Rows, generator: np.random.Generator, draws: int = DRAWS, correlation_form: bool = False
) -> dict[str, Figure]:
    """Shares of variance and participation ratio, with half-sample intervals, beside parallel analysis (columns
    permuted).
    """
    value = shares(rows.vectors, correlation_form)
    null = np.array([shares(permuted_columns(rows.vectors, generator), correlation_form) for _ in range(draws)])
    found = {}
    state = generator.bit_generator.state
    known: dict[bytes, tuple[float, float, float]] = {}
    for place, name in enumerate(SHARES):
        generator.bit_generator.state = state  # the same halves for all three

        def again(chosen: Groups, place: int = place) -> float:
            name = chosen.tobytes()
            if name not in known:
                known[name] = shares(rows.of(chosen).vectors, correlation_form)
            return known[name][place]

        limits = (1.0, np.inf) if place == 2 else (0.0, 1.0)
        interval = half_samples(again, rows.sequences, generator, draws, limits)
        side = "small" if place == 2 else "large"
        found[name] = figure(value[place], interval, null[:, place], "columns permuted", side)
    return found


def two_nearest(vectors: Array) -> float:
    """Intrinsic dimension from the ratio μ of second to first neighbour distances (Facco et al. 2017): the maximum
    likelihood estimate under P(μ) = d μ^−(d+1), the largest tenth of ratios censored; duplicates left out, NaN for fewer
    than 20 points.
    """
    points = np.unique(vectors, axis=0)
    if len(points) < 20:
        return float("nan")
    tensor = torch.from_numpy(points)
    near = torch.cdist(tensor, tensor, compute_mode="donot_use_mm_for_euclid_dist").topk(3, largest=False).values
    first, second = near[:, 1].numpy(), near[:, 2].numpy()
    logs = np.sort(np.log(second[first > 0] / first[first > 0]))
    kept = int(0.9 * len(logs))
    whole = logs[:kept].sum() + (len(logs) - kept) * logs[kept - 1]
    return float(kept / whole) if whole > 0 else float("nan")


def dimension(rows: Rows, generator: np.random.Generator, draws: int = DRAWS) -> Figure:
    """`two_nearest` of at most 600 rows, with its interval and its null."""
    chosen = np.sort(generator.permutation(len(rows.vectors))[:POINTS])
    some = rows.at(chosen)
    value = two_nearest(some.vectors)
    null = np.array([two_nearest(permuted_columns(some.vectors, generator)) for _ in range(draws)])

    def again(half: Groups) -> float:
        keep = np.isin(some.sequence, half)
        return two_nearest(some.vectors[keep])

    interval = half_samples(again, rows.sequences, generator, draws, (0.0, np.inf))
    return figure(value, interval, null, "columns permuted", "small")


def curve(rows: Rows, generator: np.random.Generator, draws: int = DRAWS) -> Figure | None:
    """How far the vectors are from a cubic curve along the entropy axis: share of the variance orthogonal to the axis that
    no cubic of the coordinate explains, on other sequences than those it was fitted on (1: no curve, 0: a curve).

    The entropy axis is the direction of a ridge regression of entropy on the vectors. None where entropy is constant.
    """
    if rows.entropy.std() < 1e-9:
        return None
    halves = generator.permutation(rows.sequences) % 2
    fit = halves[rows.sequence] == 0
    if fit.all() or not fit.any():
        return None
    centred = rows.vectors - rows.vectors[fit].mean(0)
    gram = centred[fit].T @ centred[fit]
    if np.trace(gram) == 0:
        return None
    ridge = RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram))
    axis = np.linalg.solve(gram + ridge, centred[fit].T @ (rows.entropy[fit] - rows.entropy[fit].mean()))
    size = np.linalg.norm(axis)
    if size == 0:
        return None
    axis = axis / size
    along = centred @ axis
    across = centred - np.outer(along, axis)
    powers = (along / max(along[fit].std(), 1e-300))[:, None] ** np.arange(4)

    def errors(beside: Array) -> tuple[Array, Array]:
        weights = np.linalg.lstsq(powers[fit], beside[fit], rcond=None)[0]
        left = ((beside[~fit] - powers[~fit] @ weights) ** 2).sum(1)
        return left, ((beside[~fit] - beside[fit].mean(0)) ** 2).sum(1)

    left, whole = errors(across)
    value = float(left.sum() / max(whole.sum(), 1e-300))
    null = []
    for _ in range(draws):
        one, other = errors(across[generator.permutation(len(across))])
        null.append(one.sum() / max(other.sum(), 1e-300))
    held = rows.sequence[~fit]
    per = np.stack([np.bincount(held, part, rows.sequences) for part in (left, whole)])
    used = np.unique(held)

    def again(chosen: Groups) -> float:
        return float(per[0, used[chosen]].sum() / max(per[1, used[chosen]].sum(), 1e-300))

    interval = half_samples(again, len(used), generator, draws, (0.0, np.inf))
    return figure(value, interval, np.array(null), "rows exchanged across the axis", "small")
