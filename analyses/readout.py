"""The Bayesian read-out: are vectors ordered by posterior entropy, and do they lie on a curve?

With distinct keys entropy *is* position, so a correlation over all positions says nothing. Order by entropy is claimed
only inside groups (a position, or a position and a number of distinct tokens seen), from correlations in each group
averaged by count, against a null that exchanges entropies between sequences inside the group. Where entropy is a function
of the group there is nothing to correlate, and the table says that instead.

Shapes: n sequences, P positions, N rows, d numbers in a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..hooks.refusals import BadInput
from .manifold import FEWEST, Manifold, StreamingPCA
from .nulls import DRAWS, FEW, Figure, exchanged, figure, half_samples, permuted_columns

Array = NDArray[np.float64]
Groups = NDArray[np.int64]

SMALLEST = 8  # rows in a group, below which no correlation is taken
POINTS = 600  # rows that the neighbour distances are taken of
_RIDGE = 1e-3
FUNCTION = "entropy is a function of the group"


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


# -- order by entropy ---------------------------------------------------------------------------------------------------


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

    interval = half_samples(again, rows.sequences, generator, draws)
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
        ridge = _RIDGE * max(np.trace(gram), 1e-300) / len(gram) * np.eye(len(gram))
        guess[~fit] = inputs[~fit] @ np.linalg.solve(gram + ridge, inputs[fit].T @ goals[fit])
    error, whole = (goals - guess) ** 2, goals**2
    score = 1 - error.sum(0) / whole.sum(0)
    per = np.stack([np.bincount(sequence, part[:, 0], rows.sequences) for part in (error, whole)])

    def again(chosen: Groups) -> float:
        return float(1 - per[0, chosen].sum() / max(per[1, chosen].sum(), 1e-300))

    interval = half_samples(again, rows.sequences, generator, draws)
    return figure(float(score[0]), interval, score[1:], "entropies exchanged inside groups")


# -- shape --------------------------------------------------------------------------------------------------------------


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

        interval = half_samples(again, rows.sequences, generator, draws)
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

    interval = half_samples(again, rows.sequences, generator, draws)
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
    ridge = _RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram))
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

    interval = half_samples(again, len(used), generator, draws)
    return figure(value, interval, np.array(null), "rows exchanged across the axis", "small")


# -- the table ----------------------------------------------------------------------------------------------------------


def read_out(rows: Rows, *, seed: int = 0, draws: int = DRAWS, correlation_form: bool = False) -> pd.DataFrame:
    """Every figure of one site: one row per figure.

    Columns: `figure`, `value`, `low`, `high` (95 %, half samples of sequences), `null` (its name), `null_mean`,
    `null_edge` (97.5 % point; 2.5 % where small is remarkable), `p` (upper bound), `n` sequences, `rows`, `d`, `note`.
    """
    generator = np.random.default_rng(seed)
    manifold = StreamingPCA(rows.vectors.shape[1], correlation_form).update(rows.vectors).finish()
    first = manifold.project(rows.vectors, 1)[:, 0]
    lines: list[dict[str, Any]] = []

    def add(name: str, found: Figure | None, note: str = "") -> None:
        lines.append(line(name, found, note))

    for name, found in shape(rows, generator, draws, correlation_form).items():
        add(name, found)
    width = dimension(rows, generator, draws)
    some = np.isfinite(width.value)
    add("TwoNN dimension", width if some else None, "" if some else "fewer than 20 different vectors")
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
