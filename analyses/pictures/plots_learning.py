"""Pictures of heads while they learn; `plots` has them under the same names.

Where there are several runs or seeds, a line is their mean and a band its pointwise 95 % interval (Student's t).

Shapes: N points, R runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ...hooks.errors import BadRequest
from ...probe.columns import with_unit
from .figures import COLOURS, COLUMN, axes, needs, over_runs, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHES = ("-", "--", ":", "-.")


def band(ax: Axes, x: ArrayLike, rows: ArrayLike, place: int = 0, **line: Any) -> None:
    """Mean and interval of rows (R,N) at x (N,) in the `place`-th colour; a log scale leaves out what is not positive."""
    mean, half = over_runs(rows)
    low, high = mean - half, mean + half
    if ax.get_yscale() == "log":
        mean = np.where(mean > 0, mean, np.nan)
        low = np.where(low > 0, low, mean / 10)  # the band reaches below what a log scale can show
    colour = line.pop("color", COLOURS[place % len(COLOURS)])
    ax.plot(x, mean, color=colour, **{"linestyle": DASHES[place // len(COLOURS) % len(DASHES)], **line})
    if np.isfinite(half).any():
        ax.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)


def trajectories(
    history: pd.DataFrame,
    column: str = "routing_pressure",
    labels: Sequence[str] | None = None,
    *,
    logarithmic: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """A column over training, one line per head; `labels` picks heads (default: the seven largest at the end)."""
    needs(history, "step", "label", column)
    table = history.assign(label=history["label"].astype(str))
    if labels is None:
        last = table[table["step"] == table["step"].max()].set_index("label")[column].abs()
        labels = last.sort_values(ascending=False).index[: len(COLOURS)].tolist()
    missing = set(labels) - set(table["label"])
    if missing:
        raise BadRequest(f"The history has no head {sorted(missing)[0]!r}.")
    from matplotlib.ticker import MaxNLocator

    with style():
        ax = axes(COLUMN, 2.3, ax)
        for place, name in enumerate(labels):
            rows = table[table["label"] == name].sort_values("step")
            ax.plot(rows["step"].astype(int), rows[column], color=COLOURS[place % len(COLOURS)], label=name)
        if logarithmic and (table[table["label"].isin(labels)][column] > 0).all():
            ax.set_yscale("log")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("optimizer step")
        ax.set_ylabel(with_unit(column))
        ax.legend(ncols=2)
    return ax


def two_timescales(
    steps: ArrayLike,
    frame: ArrayLike,
    precision: ArrayLike,
    *,
    logarithmic: bool = True,
    above: str = "excess loss over Bayes (nats)",
    ax: Axes | None = None,
) -> Axes:
    """Frame (divergence of attention from its end, as a share) and precision (nats), each (N,) or (R,N), by step (N,).

    The two have axes of their own; neither shape says which one leads, and what they seem to say changes with
    `logarithmic`, so draw both. `above`: what precision is.
    """
    x = np.asarray(steps, dtype=float)
    with style():
        ax = axes(COLUMN, 2.3, ax)
        other = ax.twinx()
        other.spines["right"].set_visible(True)
        for axis, values, place, name in (
            (ax, frame, 0, "divergence of attention\n(share of the start)"),
            (other, precision, 1, above),
        ):
            axis.set_yscale("log" if logarithmic else "linear")
            band(axis, x, values, place, linestyle=DASHES[place])
            axis.set_ylabel(name, color=COLOURS[place])
            axis.tick_params(axis="y", which="both", colors=COLOURS[place])
            if not logarithmic:
                axis.set_ylim(bottom=0)
        _steps(ax, x)
    return ax


def _steps(ax: Axes, x: np.ndarray) -> None:
    """A log axis of optimizer steps on which step 0 has its place."""
    if x.min() > 0:
        ax.set_xscale("log")
    else:
        ax.set_xscale("symlog", linthresh=1.0, linscale=0.3)
    ax.set_xlim(x.min(), x.max())
    ax.set_xlabel("optimizer step")


def over_steps(
    lines: pd.DataFrame, unit: str, *, logarithmic: bool = True, legend: bool = True, ax: Axes | None = None
) -> Axes:
    """Several quantities of one unit by step: `lines` has line, seed, x (the step) and value."""
    needs(lines, "line", "seed", "x", "value")
    with style():
        ax = axes(COLUMN, 2.3, ax)
        ax.set_yscale("log" if logarithmic else "linear")
        for place, (name, rows) in enumerate(lines.groupby("line", sort=False)):
            grid = rows.pivot(index="seed", columns="x", values="value")
            band(ax, grid.columns, grid, place, linestyle=DASHES[place % len(DASHES)], label=str(name))
        _steps(ax, np.asarray(lines["x"], dtype=float))
        ax.set_ylabel(unit)
        if legend:
            ax.legend()
    return ax


def arms(
    curves: pd.DataFrame,
    x: str = "passes",
    y: str = "heldout_loss",
    *,
    oracle: float | None = None,
    logarithmic: bool = False,
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """Mean loss of every arm with its interval over seeds; `curves` has arm, seed, `x` and `y` columns.

    Args:
        oracle: a loss to draw across, such as that of the exact filter.
        logarithmic: the scale of `x`, on which 0 has no place.
    """
    needs(curves, "arm", "seed", x, y)
    with style():
        ax = axes(COLUMN, 2.5, ax)
        for place, (name, rows) in enumerate(curves.groupby("arm", sort=False, observed=True)):
            grid = rows[rows[x] > 0 if logarithmic else rows[x].notna()].pivot(index="seed", columns=x, values=y)
            band(ax, grid.columns, grid, place, label=str(name))
        if oracle is not None:
            ax.axhline(oracle, color="0.4", linewidth=0.8, linestyle=":")
            ax.annotate("exact filter", (0.02, oracle), xycoords=("axes fraction", "data"), va="bottom", fontsize=7)
        if logarithmic:
            ax.set_xscale("log")
        ax.set_xlabel(x.replace("_", " "))
        ax.set_ylabel(f"{y.replace('_', ' ')} (nats)")
        if legend:
            ax.legend(ncols=2)
    return ax


def by_part(
    table: pd.DataFrame, unit: str, *, across: str = "% of the run", legend: bool = True, ax: Axes | None = None
) -> Axes:
    """A number per run at parts of it, side by side for every line: small dots are runs, a ring and its bar the mean.

    `table` has line, seed, x and value.
    """
    needs(table, "line", "seed", "x", "value")
    parts = sorted(table["x"].unique())
    names = list(dict.fromkeys(table["line"]))
    with style():
        ax = axes(COLUMN, 2.3, ax)
        ax.axhline(0, color="0.8", linewidth=0.6)
        for place, name in enumerate(names):
            rows = table[table["line"] == name]
            grid = rows.pivot(index="seed", columns="x", values="value").reindex(columns=parts)
            at = np.arange(len(parts)) + 0.7 * ((place + 0.5) / len(names) - 0.5)
            mean, half = over_runs(grid)
            colour = COLOURS[place % len(COLOURS)]
            if len(grid) > 1:
                for _, own in grid.iterrows():
                    ax.plot(at - 0.05, own, ".", color=colour, markersize=3, alpha=0.7, markeredgewidth=0)
            style_of: dict[str, Any] = {
                "markersize": 3.2,
                "markerfacecolor": "white",
                "markeredgewidth": 0.9,
                "elinewidth": 0.9,
            }
            marker = "osD^vPX"[place % 7]
            ax.errorbar(at, mean, np.nan_to_num(half), fmt=marker, color=colour, label=str(name), **style_of)
        ax.set_xticks(range(len(parts)), [f"{part:g}" for part in parts])
        ax.set_xlabel(across)
        ax.set_ylabel(unit)
        if legend:
            ax.legend()
    return ax


def paths(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Points that move over training, in two principal axes: `table` has symbol, step, first, second (value units)."""
    needs(table, "symbol", "step", "first", "second")
    with style():
        ax = axes(COLUMN, 2.6, ax)
        for place, (symbol, rows) in enumerate(table.sort_values("step").groupby("symbol")):
            colour = COLOURS[place % len(COLOURS)]
            ax.plot(rows["first"], rows["second"], color=colour, linewidth=0.8, linestyle=DASHES[place // len(COLOURS)])
            ax.plot(rows["first"].iloc[-1], rows["second"].iloc[-1], "o", color=colour, markersize=2.5)
            ax.annotate(
                str(symbol),
                (rows["first"].iloc[-1], rows["second"].iloc[-1]),
                xytext=(3, 1),
                textcoords="offset points",
                color=colour,
                fontsize=7,
            )
        ax.margins(0.12)
        ax.set_xlabel("axis 1 (value units)")
        ax.set_ylabel("axis 2 (value units)")
    return ax
