"""The sequences of a run drawn again, and cut in two: heads are picked on one half and estimated on the other.

The head that is largest on some sequences looks larger there than it is. So the half that picks is not the half that
estimates; which sequence lies in which half follows from its identity, and is the same in every run of a text.

Shapes: N sequences, H heads, C sums, R replicates.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ...probe import bootstrap
from ...probe.columns import SUMS, columns, columns_of
from ...probe.state import without_head
from ...probe.student import quantile

FEWEST = 12  # sequences: with fewer, a bootstrap over them is too narrow to single anything out
LEVEL = 0.95
MANY = 200  # sequences: from here on Student's limit is the plain one
BLOCK = 500  # heads that are drawn at once
RESAMPLED = columns_of("resampled")
_KEYS = ["module", "use", "head", "label"]
Array = NDArray[np.float64]


@contextmanager
def quiet() -> Iterator[None]:
    """Heads without a number are left out, and numpy need not say so."""
    with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@dataclass(frozen=True, eq=False)
class Sample:
    """Columns of some sequences: of all of them (H,), and of every replicate (R,H)."""

    sequences: int
    whole: dict[str, Array]
    replicates: dict[str, Array]

    def widened(self, limit: float, sequences: int | None = None) -> float:
        """A limit in bootstrap spreads as Student's for so many sequences (those of the sample), whose spread is drawn as
        well: with 12 sequences the plain one named a head of equal heads in 10 to 20 % of trials.
        """
        count = self.sequences if sequences is None else sequences
        if count < 2 or not limit > 0:
            return limit
        return quantile(min(math.erf(limit / math.sqrt(2)), 1 - 1e-13), count - 1) * math.sqrt(count / (count - 1))

    def above_median(self, column: str) -> tuple[Array, float]:
        """How far every head lies above the median head, in spreads of that (H,), and the limit for all heads at once."""
        values, drawn = self.whole[column], self.replicates[column]
        with quiet():
            above, moved = values - np.nanmedian(values), drawn - np.nanmedian(drawn, axis=1, keepdims=True)
            spread = np.nanstd(moved, axis=0)
            unit = np.where(spread > 0, spread, np.inf)
            return above / unit, float(np.nanquantile(np.nanmax((moved - above) / unit, axis=1), LEVEL))

    def not_told_from_zero(self, column: str) -> tuple[int, int]:
        """Heads whose simultaneous interval holds 0, and of how many heads the column is known."""
        values, drawn = self.whole[column], self.replicates[column]
        with quiet():
            spread = np.nanstd(drawn, axis=0)
            unit = np.where(spread > 0, spread, np.inf)
            limit = self.widened(float(np.nanquantile(np.nanmax(np.abs(drawn - values) / unit, axis=1), LEVEL)))
        return int((np.abs(values) <= limit * spread).sum()), int(np.isfinite(values).sum())

    def times_median(self, column: str, head: int) -> tuple[float, float, float]:
        """(ratio, low, high): a head's column over the median head's, with Student's interval of its logarithm (95 %);
        infinite where the median head has none.
        """
        values, drawn = self.whole[column], self.replicates[column]
        with quiet():
            ratio = float(values[head] / np.nanmedian(values))
            logs = np.log(drawn[:, head] / np.nanmedian(drawn, axis=1))
            spread = float(np.nanstd(np.where(np.isfinite(logs), logs, np.nan)))
        count = self.sequences
        half = quantile(LEVEL, count - 1) * math.sqrt(count / (count - 1)) * spread if count > 1 else math.inf
        return ratio, ratio * math.exp(-half), ratio * math.exp(half)


@dataclass(frozen=True, eq=False)
class Resampled:
    """Heads in order with the layer of each; all sequences, the half that picks, and the half that estimates."""

    labels: list[str]
    layers: list[str]
    whole: Sample
    picking: Sample
    estimating: Sample

    @property
    def sequences(self) -> int:
        return self.whole.sequences

    @property
    def halved(self) -> bool:
        """Whether there are enough sequences for two halves."""
        return self.sequences >= FEWEST

    def singled_out(self, column: str) -> tuple[list[str], int]:
        """Heads whose column lies above the median head's on the half that picks, at once for all, strongest first; and
        about how many sequences would single out the strongest where it is not, 0 where it does not lie above.
        """
        half = self.picking
        size, plain = half.above_median(column)
        order = np.argsort(-np.nan_to_num(size, nan=-np.inf))
        limit = half.widened(plain)
        largest = np.argsort(-np.nan_to_num(half.whole[column], nan=-np.inf))
        found = [self.labels[head] for head in largest if size[head] > limit]
        if found and self.halved:
            return found, self.sequences
        strongest = float(size[order[0]]) if len(order) else math.nan
        if not strongest > 0:
            return [], 0
        needed = half.sequences * (plain / strongest) ** 2
        if needed < MANY:  # with few, the limit itself depends on how many there are
            needed = half.sequences * (half.widened(plain, max(math.ceil(needed), FEWEST // 2)) / strongest) ** 2
        return [], max(2 * math.ceil(needed), FEWEST, self.sequences + 1)

    def estimated(self, column: str, label: str) -> tuple[float, float, float]:
        """(ratio, low, high) of a head over the median head on the half that estimates; see `Sample.times_median`."""
        return self.estimating.times_median(column, self.labels.index(label))


def per_sequence(table: pd.DataFrame) -> tuple[Array, pd.DataFrame, list[str]]:
    """The sums (N,H,C) of a sequences table, the keys of its heads, and the names of its sequences."""
    heads = table[_KEYS].drop_duplicates().reset_index(drop=True)
    place = {
        row: number for number, row in enumerate(heads[["module", "use", "head"]].itertuples(index=False, name=None))
    }
    names = sorted(table["sequence"].unique())
    sums = np.zeros((len(names), len(heads), len(SUMS)))
    line = table["sequence"].map({name: number for number, name in enumerate(names)}).to_numpy()
    column = np.array([place[row] for row in table[["module", "use", "head"]].itertuples(index=False, name=None)])
    sums[line, column] = table[list(SUMS)].to_numpy(dtype=np.float64)
    return sums, heads, names


def resampled(sequences: pd.DataFrame) -> Resampled | None:
    """Replicates over the sequences of a run; None when it kept none."""
    if sequences.empty:
        return None
    table = sequences.assign(module=sequences["module"].astype(str), sequence=sequences["sequence"].astype(str))
    sums, heads, names = per_sequence(table)
    weights = bootstrap.weights([int(name, 16) for name in names]).numpy()
    # names are digests of the tokens, so that every other one of them in order is a draw that the text does not decide
    picks = np.arange(len(names)) % 2 == 0
    halves = [_sample(sums, weights, chosen) for chosen in (np.ones_like(picks), picks, ~picks)]
    # stacks and cross attention count their layers each for itself
    places = [without_head(str(row.label), int(row.head), int(row.use)) for row in heads.itertuples()]
    layers = [place.removeprefix("L") if place[1:].isdecimal() else place for place in places]
    return Resampled(heads["label"].astype(str).tolist(), layers, *halves)


def _sample(sums: Array, weights: Array, chosen: NDArray[np.bool_]) -> Sample:
    parts: list[list[dict[str, Array]]] = [[], []]
    for some in np.array_split(sums[chosen], max(1, sums.shape[1] // BLOCK), axis=1):  # of many heads it is gigabytes
        parts[0].append(columns(some.sum(0), RESAMPLED))
        parts[1].append(columns(np.tensordot(weights[:, chosen], some, 1), RESAMPLED))
    whole, drawn = ({name: np.concatenate([one[name] for one in part], -1) for name in RESAMPLED} for part in parts)
    return Sample(int(chosen.sum()), whole, drawn)
