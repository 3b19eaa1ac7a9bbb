"""Is the coordinate a count or an entropy? One rule, the same for every model, layer and seed.

A curve f(d) is fitted on the new keys of one half of the episodes. A repeated key of count d has entropy 0: if the vectors
carry entropy it lies at the low-entropy end of the curve, if they carry the count it lies at f(d). On the other half of the
episodes the two squared distances are compared. `place` is their difference over the squared distance of the two points:
+1 where repeated keys lie at f(d), −1 where they lie at the low-entropy end. The verdict is read off the difference.

Two things would say "count" of a network that counts nothing. The end of the curve rests on few keys, and its noise puts it
far from everything: so the curve is fitted twice, on two quarters of the episodes, and squares are products of the two
fits, whose noise averages out. And vectors that know their position alone lie near f(d), because counts grow with
position: so the rule is applied to the vectors and again inside positions (a part of the position and a part of the count,
by least squares), and a verdict needs both. Intervals draw episodes anew, for the fits and for what is held against them.

Shapes: n episodes, N rows, d numbers in a row, G counts, K columns of a design.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..intervals.nulls import DRAWS
from .groups import FEWEST, Marks

Array = NDArray[np.float64]
Whole = NDArray[np.int64]
Word = Literal["count", "entropy", "cannot tell"]

SHARE = 0.8  # of the seeds that must agree: four of five
SEEDS = 5
NAN = float("nan")


@dataclass(frozen=True)
class Compared:
    """The difference of the squared distances (value units², its 95 % interval `low`, `high`), and `place`."""

    difference: float
    low: float
    high: float
    place: float


@dataclass(frozen=True)
class Placed:
    """Where repeated keys lie, plainly and inside positions, over so many held-out episodes; `why` where nothing can be
    said.
    """

    plain: Compared
    inside: Compared
    episodes: int
    why: str = ""

    @property
    def word(self) -> Word:
        """What this one model says."""
        if self.plain.low > 0 and self.inside.low > 0:
            return "count"
        return "entropy" if self.plain.high < 0 and self.inside.high < 0 else "cannot tell"


def nothing(why: str) -> Placed:
    """No answer, and the reason."""
    none = Compared(NAN, NAN, NAN, NAN)
    return Placed(none, none, 0, why)


def placed(rows: Array, marks: Marks, *, seed: int = 0, draws: int = DRAWS) -> Placed:
    """The rule for the vectors (N,d) of all keys but the first."""
    if not len(marks.repeated) or not marks.repeated.any():
        return nothing("no key comes again, so that entropy is a function of the position")
    generator = np.random.default_rng(seed)
    part = np.full(marks.sequences, 2)  # 0, 1: a quarter each for the two fits; 2: the half they are held against
    order = generator.permutation(marks.sequences)
    part[order[: marks.sequences // 2]] = np.arange(marks.sequences // 2) % 2
    of = part[marks.sequence]
    new = ~marks.repeated
    counts = np.arange(marks.count.max() + 1)
    fitted = np.array(
        [[_episodes(marks, new & (of == which) & (marks.count == d)) for d in counts] for which in (0, 1)]
    )
    known = np.flatnonzero((fitted.sum(0) >= FEWEST) & (fitted > 1).all(0))
    if len(known) < 3:
        return nothing(f"fewer than three counts have new keys of {FEWEST} fitted episodes")
    entropy = np.array([marks.entropy[new & (marks.count == d)].mean() for d in known])
    end = int(known[entropy.argmin()])
    places = np.intersect1d(marks.position[new & (of == 0)], marks.position[new & (of == 1)])
    usable = np.isin(marks.count, known) & np.isin(marks.position, places)
    fit = usable & new
    held = usable & ~new & (marks.count != end) & (of == 2)
    episodes = _episodes(marks, held)
    if episodes < FEWEST:
        return nothing(f"fewer than {FEWEST} held-out episodes have a repeated key")
    counted = np.zeros((len(marks), len(known)))
    counted[np.arange(len(marks)), np.searchsorted(known, marks.count).clip(max=len(known) - 1)] = 1.0
    counted = np.delete(
        counted, int(np.searchsorted(known, end)), 1
    )  # the end of the curve is where it is measured from
    found = []
    for by in (np.zeros_like(marks.position), marks.position):
        base = (by[:, None] == np.unique(by[usable])).astype(np.float64)
        found.append(_compared(rows, marks.sequence, base, counted, fit, held, part, generator, draws))
    return Placed(found[0], found[1], episodes)


def _episodes(marks: Marks, rows: NDArray[np.bool_]) -> int:
    return len(np.unique(marks.sequence[rows]))


def _compared(
    rows: Array,
    sequence: Whole,
    base: Array,
    counted: Array,
    fit: NDArray[np.bool_],
    held: NDArray[np.bool_],
    part: Whole,
    generator: np.random.Generator,
    draws: int,
) -> Compared:
    """Rows ≈ base·a + counted·g, fitted twice; held-out x: mean of 2 (x − a)·g − g·g, products across the fits."""
    design = np.concatenate([base, counted], 1)
    gram = _per_episode(design, design, sequence, fit, len(part))
    moment = _per_episode(design, rows, sequence, fit, len(part))
    square = _per_episode(counted, design, sequence, held, len(part))
    product = _per_episode(counted, rows, sequence, held, len(part))
    amount = np.bincount(sequence[held], minlength=len(part)).astype(np.float64)
    bases = base.shape[1]

    def measured(weights: Array) -> tuple[float, float]:
        weight = weights / max(float(weights @ amount), 1e-300)
        fits = []
        for which in (0, 1):
            mine = np.where(part == which, weights, 0.0)
            fits.append(np.linalg.pinv(np.tensordot(mine, gram, 1), rcond=1e-10) @ np.tensordot(mine, moment, 1))
        held_square, held_product = np.tensordot(weight, square, 1), np.tensordot(weight, product, 1)
        over = under = 0.0
        for one, other in (fits, fits[::-1]):
            curve = other[bases:]
            away = held_product - held_square[:, :bases] @ one[:bases]
            size = float((curve * (held_square[:, bases:] @ one[bases:])).sum())
            over += (2 * float((away * curve).sum()) - size) / 2
            under += size / 2
        return over, under

    ones = np.ones(len(part))
    difference, size = measured(ones)
    members = [np.flatnonzero(part == which) for which in (0, 1, 2)]
    drawn = []
    for _ in range(draws):
        weights = np.zeros(len(part))
        for numbers in members:
            weights += np.bincount(generator.choice(numbers, len(numbers)), minlength=len(part))
        drawn.append(measured(weights)[0])
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Compared(difference, float(low), float(high), difference / size if size > 0 else NAN)


def _per_episode(left: Array, right: Array, sequence: Whole, rows: NDArray[np.bool_], episodes: int) -> Array:
    """(n, K, ·) left'·right of the chosen rows of every episode."""
    found = np.zeros((episodes, left.shape[1], right.shape[1]))
    chosen = np.flatnonzero(rows)
    chosen = chosen[np.argsort(sequence[chosen], kind="stable")]
    for block in np.split(chosen, np.flatnonzero(np.diff(sequence[chosen])) + 1):
        if len(block):
            found[sequence[block[0]]] = left[block].T @ right[block]
    return found


def over_seeds(found: Sequence[Placed]) -> tuple[Word, str]:
    """The verdict over seeds and the sentence that says why."""
    words = [one.word for one in found]
    if all(one.why for one in found):
        return "cannot tell", f"cannot tell, by construction: {found[0].why}."
    need = int(np.ceil(SHARE * max(len(found), SEEDS)))
    sure: tuple[Word, ...] = ("count", "entropy")
    for word in sure:
        if words.count(word) >= need:
            sure_of = f"{word}: {words.count(word)} of {len(found)} seeds, each with an interval that excludes 0"
            return word, f"{sure_of}; {_places(found)}."
    told = ", ".join(f"{words.count(word)} {word}" for word in (*sure, "cannot tell") if word in words)
    few = f"; the rule asks {need} of {SEEDS} seeds" if len(found) < SEEDS else ""
    return "cannot tell", f"no verdict over seeds: {len(found)} of them, {told}{few}; {_places(found)}."


def _places(found: Sequence[Placed]) -> str:
    """Where repeated keys lie, over seeds, in words."""
    known = [one.plain.place for one in found if np.isfinite(one.plain.place)]
    if not known:
        return "no curve to be placed on"
    if max(known) - min(known) < 0.005:
        return f"place {known[0]:+.2f}"
    return f"place {min(known):+.2f} to {max(known):+.2f}"


def table(found: Sequence[tuple[str, str, Placed]]) -> pd.DataFrame:
    """One row per (model, site): the difference, its interval and the place, plainly and inside positions."""
    rows = []
    for model, site, one in found:
        row: dict[str, object] = {"model": model, "site": site}
        for name, part in (("", one.plain), ("inside_", one.inside)):
            row |= {f"{name}place": part.place, f"{name}difference": part.difference}
            row |= {f"{name}low": part.low, f"{name}high": part.high}
        rows.append(row | {"episodes": one.episodes, "seed_says": one.word, "note": one.why})
    return pd.DataFrame(rows)
