"""Pictures of projections, and a report in one file: tables and pictures, nothing from elsewhere."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

_STYLE = """body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-size:12px;margin:.5rem 0 1.5rem}td,th{padding:.15rem .5rem;border-bottom:1px solid #ddd;
text-align:right;white-space:nowrap}th{border-bottom:1px solid #888}td:first-child,th:first-child{text-align:left}
.wide{overflow-x:auto}img{max-width:100%}p{max-width:50rem}"""


def scatter(panels: Mapping[str, tuple[Array, Array]], unit: str = "bits") -> Figure:
    """One panel per name: the first two coordinates (N,2) coloured by entropy (N,), at most 3,000 points each."""
    from matplotlib.figure import Figure

    columns = min(4, max(1, len(panels)))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(3.2 * columns + 0.6, 2.9 * lines), layout="constrained")
    drawn = None
    axes: list[Any] = []
    for place, (name, (points, colour)) in enumerate(panels.items()):
        panel = figure.add_subplot(lines, columns, place + 1)
        some = np.random.default_rng(0).permutation(len(points))[:3_000]
        flat = points if points.shape[1] > 1 else np.column_stack([points, np.zeros(len(points))])
        drawn = panel.scatter(flat[some, 0], flat[some, 1], c=colour[some], s=3, linewidths=0, cmap="viridis")
        panel.set_title(name, fontsize=9)
        panel.tick_params(labelsize=6)
        axes.append(panel)
    figure.supxlabel("PC1", fontsize=9)
    figure.supylabel("PC2", fontsize=9)
    if drawn is not None:
        figure.colorbar(drawn, ax=axes, label=f"entropy, {unit}")
    return figure


def png(figure: Figure) -> bytes:
    """The picture as a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def page(title: str, words: list[str], frames: Mapping[str, pd.DataFrame], pictures: Mapping[str, bytes]) -> str:
    """A self-contained HTML page: sentences, pictures, tables."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>"
    ]
    parts.append(f"<h1>{html.escape(title)}</h1>")
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


def number(value: float) -> str:
    """Three significant places; powers of ten where it is very small or large."""
    if value != value:
        return "–"
    size = abs(value)
    return "0" if value == 0 else f"{value:.2e}" if size < 1e-3 or size >= 1e5 else f"{value:.4g}"
