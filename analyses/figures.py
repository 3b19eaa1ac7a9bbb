"""One style for every picture, and how a picture is written: with its data and its caption beside it.

Nothing of the user's matplotlib is touched: figures are made without pyplot, under settings of their own. Text is 7 to
8 pt at the printed width of one column (3.3 in) or two (6.8 in), colours are told apart by colour-blind readers, fonts are
embedded, and heat maps are rasterised inside vector files so that these stay small.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ..hooks.refusals import BadRequest
from .export import whole_file, write_table, write_text

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
    "font.family": ["DejaVu Sans", "Noto Sans CJK SC", "Noto Color Emoji", "sans-serif"],
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
    import logging

    import matplotlib

    fonts = logging.getLogger("matplotlib.font_manager")
    level = fonts.level
    fonts.setLevel(logging.ERROR)  # one warning per font that is not installed would be a storm
    try:
        with matplotlib.rc_context(_SETTINGS):  # type: ignore[arg-type]
            yield
    finally:
        fonts.setLevel(level)


def axes(width: float = COLUMN, height: float | None = None, ax: Axes | None = None) -> Axes:
    """`ax`, or the only axes of a new figure of this size in inches."""
    if ax is not None:
        return ax
    return new_figure(width, height).add_subplot()


def new_figure(width: float = COLUMN, height: float | None = None) -> Figure:
    """An empty figure that no window and no global list knows."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height if height is not None else 0.75 * width), layout="constrained")


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


def thinned(count: int, most: int) -> list[int]:
    """Places of at most `most` evenly spaced labels among `count`."""
    if count <= most:
        return list(range(count))
    return [int(place) for place in np.linspace(0, count - 1, most).round()]


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
        from .. import __version__

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
            with whole_file(target) as partial:
                undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": None}[kind]
                figure.savefig(partial, format=kind, dpi=DPI, metadata=undated)
            written.append(target)
    write_table(data, stem.with_name(f"{stem.name}.csv"))
    write_text(caption.text(), stem.with_name(f"{stem.name}.txt"))
    return [*written, stem.with_name(f"{stem.name}.csv"), stem.with_name(f"{stem.name}.txt")]
