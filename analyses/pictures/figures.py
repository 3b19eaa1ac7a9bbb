"""One style for every picture, and how a picture is written: with its data and its caption beside it.

Nothing of the user's matplotlib is touched: figures are made without pyplot, under settings of their own. Text is 7 to
8 pt at the printed width of one column (3.3 in) or two (6.8 in), colours are told apart by colour-blind readers, fonts are
embedded, and heat maps are rasterised inside vector files so that these stay small.
"""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ...hooks.errors import BadRequest
from ...probe.student import quantile
from ..files.export import new_file, write_table, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.3, 6.8  # inches
SMALLEST = 6.0  # pt, after scaling to the printed width
DPI = 300
# Okabe and Ito's colours, the ones that stay apart on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DIVERGING, SEQUENTIAL = "RdBu_r", "viridis"
_SETTINGS: dict[str, Any] = {
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "savefig.dpi": DPI,
    "text.usetex": False,
}
FORMATS = ("png", "svg", "pdf")


@contextmanager
def style() -> Iterator[None]:
    """The settings of this library's figures, for the time of the block."""
    import matplotlib

    with matplotlib.rc_context(_SETTINGS | {"font.family": _families()}):  # type: ignore[arg-type]
        yield


@cache
def _families() -> list[str]:
    """DejaVu Sans, and for what it lacks the fonts that are installed: each one missing would be a storm of warnings."""
    from matplotlib.font_manager import get_font_names

    return ["DejaVu Sans", *[name for name in ("Noto Sans CJK SC", "Noto Color Emoji") if name in get_font_names()]]


def axes(width: float = COLUMN, height: float | None = None, ax: Axes | None = None) -> Axes:
    """`ax`, or the only axes of a new figure of this size in inches."""
    if ax is not None:
        return ax
    return new_figure(width, height).add_subplot()


def new_figure(width: float = COLUMN, height: float | None = None) -> Figure:
    """An empty figure that no window and no global list knows."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height if height is not None else 0.75 * width), layout="constrained")


def panels(lines: int, columns: int, height: float, width: float = PAGE) -> tuple[Figure, list[Any]]:
    """A figure of several axes, in reading order, under this library's settings."""
    with style():
        figure = new_figure(width, height)
        return figure, list(np.asarray(figure.subplots(lines, columns)).flat)


def title(ax: Axes, text: str) -> None:
    """A panel's title, in this library's size."""
    with style():
        ax.set_title(text, loc="left", fontsize=_SETTINGS["axes.titlesize"])


def token(text: object, most: int = 12) -> str:
    """A token as a label of a picture: spaces and line ends visible, nothing that could reorder or break the line or
    start a formula, cut at `most` letters.
    """
    shown: list[str] = []
    for letter in str(text):
        kind = unicodedata.category(letter)
        if letter == " ":
            shown.append("␣" if not shown else " ")
        elif letter == "\n":
            shown.append("↵")
        elif kind.startswith("C"):  # control, format (bidirectional marks), surrogate, unassigned
            shown.append("·" if kind in ("Cf", "Cc") else "�")
        else:
            shown.append(letter)
    label = "".join(shown) or "∅"
    label = label if len(label) <= most else label[: most - 1] + "…"
    return label.replace("$", "\\$")  # a dollar sign that starts no formula


def needs(table: pd.DataFrame, *columns: str) -> None:
    """Refuse a table without one of `columns`; raises `BadRequest`."""
    missing = [column for column in columns if column not in table]
    if missing:
        raise BadRequest(f"The table has no column {missing[0]!r}; it has {', '.join(map(str, table.columns[:8]))}, ….")


def over_runs(rows: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean (N,) and half-width (N,) of rows (R,N), one row per run or seed: pointwise 95 %, Student's t.

    The half-width is NaN where fewer than two runs have a value.
    """
    numbers = np.atleast_2d(np.asarray(rows, dtype=float))
    count = np.isfinite(numbers).sum(0)
    t = np.array([quantile(0.95, int(runs) - 1) if runs > 1 else np.nan for runs in count])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # columns in which nothing is finite
        mean, deviation = np.nanmean(numbers, 0), np.nanstd(numbers, 0, ddof=1)
    return mean, np.where(count > 1, t * deviation / np.sqrt(np.maximum(count, 1)), np.nan)


def limit(*tables: Any) -> float:
    """One symmetric limit for maps that are compared: the largest absolute finite value, 1 where all are 0."""
    finite = [np.abs(np.asarray(table, dtype=float)[np.isfinite(np.asarray(table, dtype=float))]) for table in tables]
    most = max((float(part.max()) for part in finite if part.size), default=0.0)
    return most or 1.0


@dataclass(frozen=True)
class Caption:
    """What a picture needs beside it: what it shows, n and its unit, how intervals were made, the null, the command."""

    what: str
    n: str
    unit: str = ""
    interval: str = "none drawn"
    null: str = "none"
    command: str = ""

    def text(self) -> str:
        from ... import __version__

        lines = [self.what, f"n: {self.n}", f"unit: {self.unit or 'none'}", f"interval: {self.interval}"]
        lines += [f"null: {self.null}", f"command: {self.command or 'not recorded'}", f"advantage-probe {__version__}"]
        return "\n".join(lines) + "\n"


def smallest_text(figure: Figure, printed: float | None = None) -> float:
    """The smallest text of a figure in pt, when it is printed `printed` inches wide (default: as drawn)."""
    from matplotlib.text import Text

    scale = 1.0 if printed is None else printed / float(figure.get_figwidth())
    sizes = [
        float(part.get_fontsize()) for part in figure.findobj(Text) if part.get_visible() and part.get_text().strip()
    ]
    return min(sizes, default=np.inf) * scale


def save(
    drawn: Axes | Figure,
    stem: str | Path,
    data: pd.DataFrame,
    caption: Caption,
    formats: Sequence[str] = FORMATS,
    printed: float | None = None,
) -> list[Path]:
    """Write a picture as `stem`.png, .svg and .pdf with `stem`.csv (its data) and `stem`.txt (its caption).

    Raises:
        BadRequest: for another format, or text that would be smaller than 6 pt in print. BadInput: when a file cannot be
            written.
    """
    figure: Any = drawn if hasattr(drawn, "savefig") else drawn.figure
    unknown = set(formats) - set(FORMATS)
    if unknown:
        raise BadRequest(f"Pictures are written as {', '.join(FORMATS)}, not {sorted(unknown)[0]}.")
    if smallest_text(figure, printed) < SMALLEST:
        raise BadRequest(
            f"The smallest text would be {smallest_text(figure, printed):.1f} pt in print, below {SMALLEST:g}; draw it "
            "wider, or with fewer labels."
        )
    stem = Path(stem)
    written = []
    with style():
        for kind in formats:
            target = stem.with_name(f"{stem.name}.{kind}")
            with new_file(target) as partial:
                undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": None}[kind]
                figure.savefig(partial, format=kind, dpi=DPI, metadata=undated)
            written.append(target)
    write_table(data, stem.with_name(f"{stem.name}.csv"))
    write_text(caption.text(), stem.with_name(f"{stem.name}.txt"))
    return [*written, stem.with_name(f"{stem.name}.csv"), stem.with_name(f"{stem.name}.txt")]
