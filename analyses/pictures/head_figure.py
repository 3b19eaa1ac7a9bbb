"""One head for a paper: its attention, its advantage and the score gradient over one window, side by side.

Shapes: P, P′ cells of a side, Q query tokens, S key tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pandas as pd

from .figures import Caption, panels, save, title
from .plots import head_map

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class HeadMap(Protocol):
    """What is drawn: α, A and D (P,P′) over the tokens (Q,S) that the cells cover."""

    @property
    def attention(self) -> np.ndarray: ...

    @property
    def advantage(self) -> np.ndarray: ...

    @property
    def score_gradient(self) -> np.ndarray: ...

    @property
    def length(self) -> tuple[int, int]: ...


KINDS = ("attention", "advantage", "score_gradient")


def starts(tokens: int, cells: int) -> list[int]:
    """The first token of every cell when `tokens` are split into `cells` parts, the larger ones first."""
    return [int(part[0]) for part in np.array_split(np.arange(tokens), cells)]


def head_figure(one: HeadMap, label: str, tokens: Sequence[object]) -> Figure:
    """Three panels, 6.8 inches wide; keys that a query cannot see are blank. Labels are the first token of each cell.

    Args:
        tokens: of the window, as the tables spell them.
    """
    figure, places = panels(1, 3, 2.5)
    hidden = (one.attention == 0) & (one.score_gradient == 0)
    sides = [
        [tokens[place] for place in starts(length, cells)] for length, cells in zip(one.length, one.attention.shape)
    ]
    for axis, kind in zip(places, KINDS):
        values = np.where(hidden, np.nan, getattr(one, kind))
        head_map(values, kind, query_tokens=sides[0], key_tokens=sides[1], labels=12, ax=axis)
        if axis is not places[0]:
            axis.set_ylabel("")
            axis.tick_params(labelleft=False)  # the rows are those of the first panel
    title(places[0], label)
    return figure


def head_data(one: HeadMap) -> pd.DataFrame:
    """What the panels show: query, key (first token of the cell, from 0), and the three values, where a key is seen."""
    rows, columns = np.nonzero((one.attention != 0) | (one.score_gradient != 0))
    places = [np.array(starts(length, cells)) for length, cells in zip(one.length, one.attention.shape)]
    table = {"query": places[0][rows], "key": places[1][columns]}
    return pd.DataFrame(table | {kind: getattr(one, kind)[rows, columns].astype("float64") for kind in KINDS})


def write_head(one: HeadMap, label: str, tokens: Sequence[object], model: str, stem: Path, command: str) -> list[Path]:
    """`stem` as PNG, SVG and PDF with its data and its caption; raises as `figures.save`."""
    cells = one.attention.shape
    pooled = "" if cells == one.length else f", pooled to {cells[0]} × {cells[1]} cells (summed over keys)"
    caption = Caption(
        f"Head {label} of {model}: attention α, advantage A and score gradient D = −α·A over one window.",
        f"one window of {one.length[0]} queries and {one.length[1]} keys{pooled}",
        "α: none; A and D: loss, summed over targets",
        "none: one window",
        "none",
        command,
    )
    return save(head_figure(one, label, tokens), stem, head_data(one), caption)
