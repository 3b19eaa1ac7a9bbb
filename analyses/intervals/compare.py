"""Which heads changed between two runs: paired by sequence, and simultaneous over all heads.

A column of the heads table is a function of sums over sequences. Under the hypothesis that nothing changed, the two runs'
sums of a sequence can be exchanged (runs of the same texts), or sequences can change sides (runs of different ones), and
the column's difference is computed anew. The largest of all heads' differences, each in units of its own spread, gives one
limit for all heads together, whatever their dependence.

Shapes: N sequences, H heads, C sums, R draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ...hooks.errors import BadInput
from ...probe.columns import SUMS, columns, columns_of

DRAWS = 999
LEVEL = 0.95
BLOCK = 2**24  # sums of draws that are held at once
FEWEST = 6  # pairs: below, even all signs alike are no rarer than 1 in 32
_KEYS = ["module", "use", "head", "label"]
Array = NDArray[np.float64]


class Recorded(Protocol):
    """What is compared: a run with its record and its sums per sequence."""

    @property
    def record(self) -> dict[str, Any]: ...

    @property
    def sequences(self) -> pd.DataFrame: ...

    @property
    def folder(self) -> Path | None: ...


@dataclass(frozen=True, eq=False)
class Comparison:
    """`table`: one row per head and column: both values, the difference with its simultaneous interval, the adjusted p and
    `changed`. `sequences`: how many were paired, or lie on the smaller side.
    """

    table: pd.DataFrame
    paired: bool
    sequences: int

    def sentence(self) -> str:
        """What may be said, and when nothing may."""
        if self.sequences < FEWEST:
            return (
                f"Not distinguishable with {self.sequences} sequences; at least {FEWEST} are needed, and about 20 to see a "
                "change of one spread between sequences."
            )
        found = self.table[self.table["changed"]]
        if found.empty:
            return f"No head changed beyond what {self.sequences} sequences allow to tell (all heads at once, 95 %)."
        shown = found.sort_values("p").drop_duplicates("label")
        names = ", ".join(shown["label"].astype(str).head(8)) + ("…" if len(shown) > 8 else "")
        return f"{len(shown)} heads changed (all heads and columns at once, 95 %, {self.sequences} sequences): {names}."


def comparable(first: Recorded, second: Recorded) -> None:
    """Refuse runs whose numbers do not mean the same.

    Raises:
        BadInput: naming what differs or is unknown: loss, loss weight, texts, tokenizer, or the heads themselves.
    """
    named = {
        "loss_kind": "the loss",
        "loss_targets": "the targets",
        "loss_weight": "the loss weight",
        "texts_digest": "the texts",
        "tokenizer_digest": "the tokenizer",
    }
    for key, what in named.items():
        one, other = first.record.get(key), second.record.get(key)
        for run, value in ((first, one), (second, other)):
            if value is None or value == "unknown":
                raise BadInput(f"{str(run.folder)!r} does not say {what} ({key}); analyse it again with this version.")
        if key != "loss_weight" and one != other:
            raise BadInput(
                f"The runs differ in {what} ({one!r} and {other!r}), so their heads cannot be compared; analyse both alike."
            )
    ours, theirs = (
        set(map(tuple, run.sequences[_KEYS].astype(str).drop_duplicates().values)) for run in (first, second)
    )
    if ours != theirs:
        odd = next(iter(sorted(ours ^ theirs)))
        raise BadInput(f"Only one of the runs has the head {odd[3]} ({odd[0]}); compare runs of the same architecture.")


def compare(first: Recorded, second: Recorded, *, draws: int = DRAWS, seed: int = 0) -> Comparison:
    """Two runs of the same texts, sequence by sequence.

    Raises:
        BadInput: as `comparable`.
    """
    comparable(first, second)
    heads, sides = _sums(first.sequences, second.sequences)
    return _compared(heads, *sides, paired=True, draws=draws, seed=seed)


def halves(run: Recorded, *, draws: int = DRAWS, seed: int = 0) -> Comparison:
    """The null: one half of a run's sequences against the other; a head named here is a false one.

    Raises:
        BadInput: for a run of fewer than four sequences.
    """
    names = np.array(sorted(run.sequences["sequence"].astype(str).unique()))
    if len(names) < 4:
        raise BadInput(f"{str(run.folder)!r} has {len(names)} sequences; two halves need at least four.")
    chosen = np.random.default_rng(seed).permutation(names)[: len(names) // 2]
    there = run.sequences["sequence"].astype(str).isin(chosen)
    heads, sides = _sums(run.sequences[there], run.sequences[~there], paired=False)
    return _compared(heads, *sides, paired=False, draws=draws, seed=seed + 1)


def _sums(first: pd.DataFrame, second: pd.DataFrame, *, paired: bool = True) -> tuple[pd.DataFrame, list[Array]]:
    """The heads in order, and the sums (N,H,C) of both sides over the same sequences if `paired`."""
    heads = first[_KEYS].astype({"module": str, "label": str}).drop_duplicates().reset_index(drop=True)
    sides = []
    common = sorted(set(first["sequence"].astype(str)) & set(second["sequence"].astype(str)))
    if paired and not common:
        raise BadInput("The runs share no sequence; analyse the same texts with the same window.")
    for table in (first, second):
        table = table.assign(sequence=table["sequence"].astype(str), module=table["module"].astype(str))
        names = common if paired else sorted(table["sequence"].unique())
        index = pd.MultiIndex.from_product([names, range(len(heads))])
        place = {tuple(row): number for number, row in enumerate(heads[["module", "use", "head"]].values.tolist())}
        number = [place[row] for row in table[["module", "use", "head"]].itertuples(index=False, name=None)]
        values = table.set_index([table["sequence"], pd.Index(number)])[list(SUMS)]
        filled = values.reindex(index).fillna(0.0).to_numpy(dtype=np.float64)
        sides.append(filled.reshape(len(names), len(heads), len(SUMS)))
    return heads, sides


def _values(sums: Array) -> Array:
    """Comparable columns of sums (…,H,C): (…,H,columns)."""
    table = columns(sums, columns_of("compared"))
    return np.stack([table[name] for name in columns_of("compared")], -1)


def _compared(heads: pd.DataFrame, first: Array, second: Array, *, paired: bool, draws: int, seed: int) -> Comparison:
    generator = np.random.default_rng(seed)
    observed = _values(second.sum(0)) - _values(first.sum(0))
    together = np.concatenate([first, second])
    chosen = np.zeros((draws, len(together)))  # which sequences make up the first side
    for draw in chosen:
        if paired:
            swap = generator.random(len(first)) < 0.5
            draw[: len(first)], draw[len(first) :] = ~swap, swap
        else:
            draw[generator.permutation(len(together))[: len(first)]] = 1
    parts = []
    for some in np.array_split(chosen, max(1, draws * together[0].size // BLOCK)):  # (R,H,C) of many heads is gigabytes
        ones = np.tensordot(some, together, 1)
        parts.append(_values(together.sum(0) - ones) - _values(ones))
    null = np.concatenate(parts)
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.sqrt(np.nanmean(null**2, axis=0))
        unit = np.where(spread > 0, spread, np.inf)
        largest = np.nanmax(np.abs(null) / unit, axis=(1, 2))
    limit = np.quantile(largest, LEVEL)
    size = np.abs(observed) / unit
    p = (1 + (largest[:, None, None] >= size).sum(0)) / (draws + 1)
    sequences = len(first) if paired else min(len(first), len(second))
    changed = (p <= 1 - LEVEL) & np.isfinite(observed) & (sequences >= FEWEST)
    before, after = _values(first.sum(0)), _values(second.sum(0))
    tables = []
    for place, name in enumerate(columns_of("compared")):
        rows: dict[str, Any] = {
            "column": name,
            "first": before[:, place],
            "second": after[:, place],
            "difference": observed[:, place],
            "difference_low": observed[:, place] - limit * spread[:, place],
            "difference_high": observed[:, place] + limit * spread[:, place],
            "p": np.where(np.isfinite(observed[:, place]), p[:, place], np.nan),
            "changed": changed[:, place],
        }
        tables.append(heads.assign(**rows))
    return Comparison(pd.concat(tables, ignore_index=True), paired, sequences)
