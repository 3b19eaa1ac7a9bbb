"""Pictures of projections, and a report in one file: tables and pictures, nothing from elsewhere."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..files.numbers import number
from ..pictures.figures import SEQUENTIAL, Caption, panels, save, style, title
from ..pictures.plots import manifold

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
Points = Mapping[str, tuple[Array, Array]]

_STYLE = """body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-size:12px;margin:.5rem 0 1.5rem}td,th{padding:.15rem .5rem;border-bottom:1px solid #ddd;
text-align:right;white-space:nowrap}th{border-bottom:1px solid #888}td:first-child,th:first-child{text-align:left}
.wide{overflow-x:auto}img{max-width:100%}p{max-width:50rem}"""


MOST = 24  # panels of one picture


def long(points: Points) -> pd.DataFrame:
    """What `scatter` draws: site, axis_1, axis_2, entropy; at most 3,000 points a site, picked by seed 0."""
    tables = []
    for name, (place, colour) in points.items():
        some = np.random.default_rng(0).permutation(len(place))[:3_000]
        flat = place if place.shape[1] > 1 else np.column_stack([place, np.zeros(len(place))])
        table = {"site": name, "axis_1": flat[some, 0], "axis_2": flat[some, 1], "entropy": colour[some]}
        tables.append(pd.DataFrame(table))
    return pd.concat(tables, ignore_index=True)


def scatter(points: Points, unit: str = "bits") -> Figure:
    """One panel per site: the first two coordinates (N,2) coloured by entropy (N,), one scale of colours for all;
    at most 24 panels."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    table = long(dict(list(points.items())[:MOST]))
    sites = table["site"].nunique()
    columns = min(3 if sites <= 6 else 4, sites)
    lines = -(-sites // columns)
    figure, places = panels(lines, columns, 0.3 + (2.0 if columns < 4 else 1.5) * lines)
    limits = float(table["entropy"].min()), float(table["entropy"].max())
    for axis, (name, rows) in zip(places, table.groupby("site", sort=False)):
        manifold(rows[["axis_1", "axis_2"]], rows["entropy"], limits=limits, ax=axis)
        axis.set(xlabel="", ylabel="")
        title(axis, str(name))
    for axis in places[sites:]:
        axis.set_axis_off()
    with style():
        figure.supxlabel("axis 1 (value units)", fontsize=7.5)
        figure.supylabel("axis 2 (value units)", fontsize=7.5)
        colours = ScalarMappable(Normalize(*limits), SEQUENTIAL)
        figure.colorbar(colours, ax=places, label=f"entropy ({unit})", shrink=0.9 if lines == 1 else 0.5)
    return figure


def write_scatter(points: Points, stem: Path, entropy: str, command: str, unit: str = "bits") -> Path:
    """`stem` as PNG, SVG and PDF with its data and its caption; the path of the PNG."""
    count = ", ".join(sorted({f"{len(place):,}" for place, _ in points.values()}))
    caption = Caption(
        f"Vectors of every site in their first two principal axes, coloured by entropy ({entropy}); one scale of colours."
        + (f" The first {MOST} of {len(points)} sites; the data hold all." if len(points) > MOST else ""),
        f"{count} vectors a site, at most 3,000 drawn",
        f"value units; {unit}",
        "none: every point is drawn; the table beside it has intervals",
        "in the table",
        command,
    )
    return save(scatter(points, unit), stem, long(points), caption)[0]


def page(heading: str, words: list[str], frames: Mapping[str, pd.DataFrame], pictures: Mapping[str, bytes]) -> str:
    """A self-contained HTML page: sentences, pictures, tables."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(heading)}</title><style>{_STYLE}</style>"
    ]
    parts.append(f"<h1>{html.escape(heading)}</h1>")
    parts += [f"<p>{html.escape(sentence)}</p>" for sentence in words]
    for name, data in pictures.items():
        source = base64.b64encode(data).decode()
        parts.append(
            f'<h2>{html.escape(name)}</h2><img alt="{html.escape(name)}" src="data:image/png;base64,{source}">'
        )
    for name, frame in frames.items():
        shown = frame.to_html(index=False, float_format=number, na_rep="–", border=0, escape=True)
        parts.append(f"<h2>{html.escape(name)}</h2><div class=wide>{shown}</div>")
    return "\n".join([*parts, "</html>"])
