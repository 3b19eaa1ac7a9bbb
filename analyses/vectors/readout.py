"""The Bayesian read-out: are vectors ordered by posterior entropy, and do they lie on a curve?

With distinct keys entropy *is* position, so a correlation over all positions says nothing. Order by entropy is claimed
only inside groups (a position, or a position and a number of distinct tokens seen), from correlations in each group
averaged by count, against a null that exchanges entropies between sequences inside the group. Where entropy is a function
of the group there is nothing to correlate, and the table says that instead.

Shapes: n sequences, P positions, N rows, d numbers in a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..intervals.nulls import DRAWS, FEW, Figure, exchanged, figure, half_samples
from .labelled import Rows
from .pca import Manifold, StreamingPCA
from .shapes import POINTS, RIDGE, SHARES, curve, dimension, shape, shares, two_nearest

Array = NDArray[np.float64]
Groups = NDArray[np.int64]

SMALLEST = 8  # rows in a group, below which no correlation is taken
FUNCTION = "entropy is a function of the group"


def grouped(*parts: Groups) -> Groups:
    """One number per combination of the parts."""
    _, number = np.unique(np.stack(parts, 1), axis=0, return_inverse=True)
    return np.asarray(number).reshape(-1)


def inside(numbers: Array, groups: Groups, ranked: bool = True) -> Array:
    """Numbers (N,), as ranks, less their mean in each group, over their spread there; NaN where a group is too small or
    does not vary (spread below 1e-9).
    """
    if ranked:  # what differs by rounding only is the same
        table = pd.DataFrame({"group": groups, "number": np.round(numbers, 9)})
        numbers = table.groupby("group")["number"].rank().to_numpy()
    count = np.bincount(groups)
    mean = np.bincount(groups, numbers) / np.maximum(count, 1)
    centred = numbers - mean[groups]
    spread = np.sqrt(np.bincount(groups, centred**2) / np.maximum(count, 1))
    good = (count >= SMALLEST) & (spread > 1e-9)
    return np.where(good[groups], centred / np.where(spread > 1e-9, spread, 1.0)[groups], np.nan)


def correlation(coordinate: Array, entropy: Array, groups: Groups) -> float:
    """Rank correlation in each group, averaged by count; NaN where no group varies in both."""
    product = inside(coordinate, groups) * inside(entropy, groups)
    return float(np.nanmean(product)) if np.isfinite(product).any() else float("nan")


def order(
    coordinate: Array, rows: Rows, groups: Groups, generator: np.random.Generator, draws: int = DRAWS
) -> Figure | None:
    """Rank correlation of a coordinate (N,) with entropy inside groups; None where entropy is a function of the group."""
    one, other = inside(coordinate, groups), inside(rows.entropy, groups)
    both = np.isfinite(one * other)
    if not both.any():
        return None
    one, other, inner = one[both], other[both], groups[both]
    observed = float((one * other).mean())
    null = np.array([(one * exchanged(other, inner, generator)).mean() for _ in range(draws)])

    def again(chosen: Groups) -> float:
        number = np.full(rows.sequences, False)
        number[chosen] = True
        keep = number[rows.sequence]
        return correlation(coordinate[keep], rows.entropy[keep], groups[keep])

    interval = half_samples(again, rows.sequences, generator, draws, (-1.0, 1.0))
    return figure(observed, interval, null, "entropies exchanged inside groups", "both")


def explained(rows: Rows, groups: Groups, generator: np.random.Generator, draws: int = DRAWS) -> Figure | None:
    """Share of entropy's variance inside groups that a linear map of the vectors explains on other sequences.

    Fitted on one half of the sequences and read on the other, both ways; None where entropy does not vary inside groups.
    """
    target = inside(rows.entropy, groups, ranked=False)
    keep = np.isfinite(target)
    if not keep.any():
        return None
    inner, sequence = groups[keep], rows.sequence[keep]
    spread = rows.entropy[keep]
    mean = np.bincount(inner, spread) / np.maximum(np.bincount(inner), 1)
    goal = spread - mean[inner]
    centre = np.stack([np.bincount(inner, column) for column in rows.vectors[keep].T], 1)
    inputs = rows.vectors[keep] - (centre / np.maximum(np.bincount(inner), 1)[:, None])[inner]
    goals = np.stack([goal] + [exchanged(goal, inner, generator) for _ in range(draws)], 1)
    halves = generator.permutation(rows.sequences) % 2
    guess = np.empty_like(goals)
    for half in (0, 1):
        fit = halves[sequence] != half
        if not fit.any() or fit.all():
            return None
        gram = inputs[fit].T @ inputs[fit]
        ridge = RIDGE * max(np.trace(gram), 1e-300) / len(gram) * np.eye(len(gram))
        guess[~fit] = inputs[~fit] @ np.linalg.solve(gram + ridge, inputs[fit].T @ goals[fit])
    error, whole = (goals - guess) ** 2, goals**2
    score = 1 - error.sum(0) / whole.sum(0)
    per = np.stack([np.bincount(sequence, part[:, 0], rows.sequences) for part in (error, whole)])

    def again(chosen: Groups) -> float:
        return float(1 - per[0, chosen].sum() / max(per[1, chosen].sum(), 1e-300))

    interval = half_samples(again, rows.sequences, generator, draws, (-np.inf, 1.0))
    return figure(float(score[0]), interval, score[1:], "entropies exchanged inside groups")


def read_out(rows: Rows, *, seed: int = 0, draws: int = DRAWS, correlation_form: bool = False) -> pd.DataFrame:
    """Every figure of one site: one row per figure.

    Columns: `figure`, `value`, `low`, `high` (95 %, half samples of sequences), `null` (its name), `null_mean`,
    `null_edge` (97.5 % point; 2.5 % where small is remarkable), `p` (upper bound), `n` sequences, `rows`, `d`, `note`.
    """
    generator = np.random.default_rng(seed)
    manifold = StreamingPCA(rows.vectors.shape[1], correlation_form).update(rows.vectors).finish()
    lines: list[dict[str, Any]] = []
    if len(manifold.constant) == manifold.width:
        lines = [line(name, None, "the vectors do not vary") for name in (*SHARES, "TwoNN dimension")]
        return _told(lines, rows)
    first = manifold.project(rows.vectors, 1)[:, 0]

    def add(name: str, found: Figure | None, note: str = "") -> None:
        lines.append(line(name, found, note))

    for name, found in shape(rows, generator, draws, correlation_form).items():
        add(name, found)
    width = dimension(rows, generator, draws)
    some = np.isfinite([width.value, width.low]).all()
    add("TwoNN dimension", width if some else None, "" if some else "fewer than 20 different vectors in a half sample")
    found_curve = curve(rows, generator, draws)
    add("cubic residual", found_curve, "" if found_curve is not None else "entropy does not vary")
    several = len(np.unique(rows.position)) > 1
    together = np.zeros_like(rows.position)
    kinds = {"": together}
    if several:
        kinds = {" inside positions": rows.position}
        if len(np.unique(rows.distinct)) > 1:
            kinds[" inside positions and distinct tokens"] = grouped(rows.position, rows.distinct)
    for name, groups in kinds.items():
        groups = grouped(groups)
        ordered = order(first, rows, groups, generator, draws)
        add(f"PC1 with entropy{name}", ordered, "" if ordered is not None else FUNCTION)
        told = explained(rows, groups, generator, draws)
        add(f"entropy R²{name}", told, "" if told is not None else FUNCTION)
    if several:  # beside them, and no claim: neither has a null of its own
        raw, clock = (
            correlation(first, rows.entropy, together),
            correlation(first, rows.position.astype(np.float64), together),
        )
        lines[-1]["note"] = f"over all positions: PC1 with entropy {raw:.3f}, PC1 with position {clock:.3f}"
    return _told(lines, rows)


def _told(lines: list[dict[str, Any]], rows: Rows) -> pd.DataFrame:
    """The lines as a table, with what is known of the rows."""
    table = pd.DataFrame(lines)
    table["n"], table["rows"], table["d"] = rows.sequences, len(rows.vectors), rows.vectors.shape[1]
    if rows.excluded:
        table["note"] = [f"{note}; {rows.excluded} non-finite rows left out".strip("; ") for note in table["note"]]
    if rows.sequences < FEW:
        table["note"] = [f"{note}; too few sequences for an interval".strip("; ") for note in table["note"]]
    return table


def line(name: str, found: Figure | None, note: str) -> dict[str, Any]:
    if found is None:
        nothing = dict.fromkeys(("value", "low", "high", "null_mean", "null_edge", "p"), float("nan"))
        return {"figure": name, **nothing, "null": "", "note": note}
    return {
        "figure": name,
        "value": found.value,
        "low": found.low,
        "high": found.high,
        "null": found.named,
        "null_mean": found.null,
        "null_edge": found.null_high,
        "p": found.p,
        "note": note,
    }


def beside(table: pd.DataFrame, name: str, reference: Rows, correlation_form: bool = False) -> pd.DataFrame:
    """The table with a column `name`: the same figures in the same rows of another model (untrained, or trained on
    exchanged targets), without draws of their own.
    """
    generator = np.random.default_rng(0)
    nothing = len(StreamingPCA(reference.vectors.shape[1]).update(reference.vectors).finish().constant)
    if nothing == reference.vectors.shape[1]:
        return table.assign(**{name: float("nan")})
    values: dict[str, float] = dict(zip(SHARES, shares(reference.vectors, correlation_form)))
    chosen = np.sort(generator.permutation(len(reference.vectors))[:POINTS])
    values["TwoNN dimension"] = two_nearest(reference.vectors[chosen])
    for figure_name in table["figure"]:
        if figure_name in values:
            continue
        groups = np.zeros_like(reference.position)
        if figure_name.endswith("inside positions"):
            groups = reference.position
        elif figure_name.endswith("distinct tokens"):
            groups = grouped(reference.position, reference.distinct)
        groups = grouped(groups)
        if figure_name.startswith("PC1 with"):
            manifold = StreamingPCA(reference.vectors.shape[1], correlation_form).update(reference.vectors).finish()
            coordinate = manifold.project(reference.vectors, 1)[:, 0]
            values[figure_name] = correlation(coordinate, reference.entropy, groups)
        elif figure_name.startswith("entropy R²"):
            found = explained(reference, groups, generator, 1)
            values[figure_name] = float("nan") if found is None else found.value
        elif figure_name == "cubic residual":
            found = curve(reference, generator, 1)
            values[figure_name] = float("nan") if found is None else found.value
    return table.assign(**{name: [values.get(figure_name, float("nan")) for figure_name in table["figure"]]})


def unfurling(checkpoints: Iterable[tuple[int, Rows]], draws: int = DRAWS) -> pd.DataFrame:
    """How the curve unfurls: the read-out at every checkpoint (step, rows of the same sequences), with a column `step` and
    `axis_turn`, the cosine of the first axis with that of the checkpoint before (signs follow the axis, NaN at first and
    where the axis is ambiguous).
    """
    return pd.concat(list(_unfurled(checkpoints, draws)), ignore_index=True)


def _unfurled(checkpoints: Iterable[tuple[int, Rows]], draws: int) -> Iterator[pd.DataFrame]:
    before: Manifold | None = None
    for step, rows in checkpoints:
        manifold = StreamingPCA(rows.vectors.shape[1]).update(rows.vectors).finish()
        turn = float("nan")
        if before is not None:
            manifold = manifold.towards(before)
            if not (manifold.ambiguous[0] or before.ambiguous[0]):
                turn = float(manifold.axes[0] @ before.axes[0])
        before = manifold
        yield read_out(rows, draws=draws).assign(step=step, axis_turn=turn)
