"""The picture of the value manifold: group means and keys in their plane, layer by layer, the untrained network below.

Every panel has the plane of its own network and layer, fitted to the means of the keys that were grouped; the keys of the
other kind are projected into it. One scale of colours for all panels; axes are equal inside a panel.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ..pictures.figures import COLOURS, SEQUENTIAL, Caption, panels, save, style, title
from .group_report import TRAINED, UNTRAINED, GroupReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 4  # layers of one picture
UNITS = {"count": "symbols already used", "entropy": "entropy (bits)", "position": "position"}


def manifold_figure(report: GroupReport, sites: Sequence[str] | None = None) -> Figure:
    """Trained networks above, untrained ones below, a column a layer; at most four layers, evenly over all of them."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    known = list(dict.fromkeys(report.curves["site"]))
    shown = list(sites or _even(known, MOST))
    group = str(report.record["group"])
    limits = float(report.curves["group"].min()), float(report.curves["group"].max())
    height = 0.4 + 2 * min(2.6, 6.2 / max(2, len(shown)))
    figure, places = panels(2, len(shown), height)
    for row, network in enumerate((TRAINED, UNTRAINED)):
        for column, site in enumerate(shown):
            axis = places[row * len(shown) + column]
            _panel(axis, report, network, site, limits)
            title(axis, f"{_named(site)}, {network}")
    with style():
        vectors = "values" if report.record.get("vectors") == "value" else f"{report.record.get('vectors', 'value')}s"
        figure.supxlabel(f"first axis of the group means of {vectors} (their own units)", fontsize=7.5)
        figure.supylabel("second axis", fontsize=7.5)
        handles, labels = places[0].get_legend_handles_labels()
        if len(handles) > 1:
            figure.legend(handles, labels, loc="outside upper right", ncols=len(handles), handlelength=1.8)
        colours = ScalarMappable(Normalize(*limits), SEQUENTIAL)
        figure.colorbar(colours, ax=places, label=UNITS[group], shrink=0.5, aspect=30)
    return figure


def strip_figure(strip: pd.DataFrame, order: pd.DataFrame, group: str) -> Figure:
    """Over training: the group means of one layer at each kept step, and below the held-out rank correlation by step."""
    steps = list(dict.fromkeys(strip["step"]))
    shown = _even(steps, 6)
    figure, places = panels(2, len(shown), 3.0)
    limits = float(strip["group"].min()), float(strip["group"].max())
    for axis, step in zip(places, shown):
        for kind, part in strip[strip["step"] == step].groupby("keys", sort=False):
            _line(axis, part, str(kind), limits)
        axis.set_aspect("equal", adjustable="datalim")
        _bare(axis)
        title(axis, f"step {step:,}")
    grid = places[0].get_gridspec()
    for axis in places[len(shown) :]:
        axis.remove()
    with style():
        below = figure.add_subplot(grid[1, :])
        for network, part in order.groupby("network", sort=False):
            colour = COLOURS[0] if network == TRAINED else COLOURS[6]
            below.plot(part["step"], part["r"], marker="o", markersize=3, color=colour, label=str(network))
            below.fill_between(part["step"], part["low"], part["high"], color=colour, alpha=0.2, linewidth=0)
        below.axhline(0, color="#888888", linewidth=0.6)
        below.set_xscale("symlog", linthresh=100)
        below.set_xlim(left=-5)
        below.set(xlabel="training step", ylabel="held-out rank\ncorrelation")
        handles, labels = places[0].get_legend_handles_labels()
        if len(handles) > 1:
            figure.legend(handles, labels, loc="outside upper right", ncols=len(handles), handlelength=1.8)
    return figure


def write_manifold(report: GroupReport, stem: Path, command: str, sites: Sequence[str] | None = None) -> Path:
    """The picture as PNG, SVG and PDF with its data (means and keys) and its caption; the path of the PNG."""
    group, keys = report.record["group"], report.record["keys"]
    what = (
        f"Means of the {report.record.get('vectors', 'value')} vectors of {'' if keys == 'all' else keys + ' '}keys "
        f"grouped by {group}, in the plane of their first two principal axes, above trained and below untrained; faint: "
        "single keys."
    )
    if keys == "new" and "repeated" in set(report.curves["keys"]):
        what += " Dashed: repeated keys, whose entropy is 0, grouped by their count and projected into the same plane."
    null = report.shares
    trained = null[null["network"] == TRAINED]
    shares = "; ".join(f"{row['site']} {row['pc1']:.3f} ({row['pc1_null']:.3f})" for row in trained.to_dict("records"))
    data = pd.concat([report.curves.assign(what="mean"), report.points.assign(what="key")], ignore_index=True)
    caption = Caption(
        f"{what} {' '.join(report.words)}",
        f"{report.record.get('episodes', report.record.get('prompts'))} episodes or prompts; per mean in the data",
        "the vectors' own; " + UNITS[str(group)],
        "none drawn: single keys are",
        f"untrained network; PC1 of the means and, in brackets, with labels permuted inside positions: {shares}",
        command,
    )
    return save(manifold_figure(report, sites), stem, data, caption)[0]


def write_strip(strip: pd.DataFrame, order: pd.DataFrame, group: str, stem: Path, command: str) -> Path:
    """As `write_manifold`, over training."""
    caption = Caption(
        f"Group means of one layer over training, each in its own plane (grouped by {group}; dashed: repeated keys), and "
        "the rank correlation of the first axis with entropy inside positions on episodes that it was not fitted on.",
        "one seed; episodes as in the data",
        UNITS[group],
        "band: 95 % from half samples of the held-out episodes",
        "step 0 is the untrained network",
        command,
    )
    data = pd.concat([strip.assign(what="mean"), order.assign(what="order")], ignore_index=True)
    return save(strip_figure(strip, order, group), stem, data, caption)[0]


def _panel(axis: Axes, report: GroupReport, network: str, site: str, limits: tuple[float, float]) -> None:
    def here(table: pd.DataFrame) -> pd.DataFrame:
        return table[(table["network"] == network) & (table["site"] == site)]

    means, points = here(report.curves), here(report.points)
    own = str(report.record["keys"])
    dots = points[points["keys"] == own]
    axis.scatter(
        dots["axis_1"],
        dots["axis_2"],
        c=dots["group"],
        cmap=SEQUENTIAL,
        vmin=limits[0],
        vmax=limits[1],
        s=1.5,
        alpha=0.25,
        linewidths=0,
        rasterized=True,
    )
    for kind, part in means.groupby("keys", sort=False):
        _line(axis, part, str(kind), limits)
    box = dots[["axis_1", "axis_2"]].quantile([0.01, 0.99]).to_numpy()
    if len(dots):  # a few keys far off would make the curve small
        centre, half = box.mean(0), 0.6 * max(float(np.ptp(box, axis=0).max()), 1e-12)
        axis.set_xlim(centre[0] - half, centre[0] + half)
        axis.set_ylim(centre[1] - half, centre[1] + half)
    axis.set_aspect("equal", adjustable="box")


def _line(axis: Any, part: pd.DataFrame, kind: str, limits: tuple[float, float]) -> None:
    again = kind == "repeated"
    colour = COLOURS[1] if again else "#333333"
    label = {"new": "new keys", "repeated": "repeated keys", "all": "all keys"}[kind]
    axis.plot(
        part["axis_1"], part["axis_2"], color=colour, linestyle="--" if again else "-", linewidth=1.0, label=label
    )
    axis.scatter(
        part["axis_1"],
        part["axis_2"],
        c=part["group"],
        cmap=SEQUENTIAL,
        vmin=limits[0],
        vmax=limits[1],
        s=12 if not again else 9,
        marker="s" if again else "o",
        edgecolors=colour,
        linewidths=0.6,
        zorder=3,
    )


def _bare(axis: Any) -> None:
    axis.set(xticks=[], yticks=[])


def _named(site: str) -> str:
    number = site.removeprefix("L")
    return f"layer {number}" if number.isdigit() else site


def _even(known: Sequence[Any], most: int) -> list[Any]:
    if len(known) <= most:
        return list(known)
    return [known[int(place)] for place in np.linspace(0, len(known) - 1, most).round()]
