"""Pictures of heads. Every function returns the Axes it drew on, takes `ax=`, and draws what it is given, no more.

The data are the tables of this library (columns by their names there) or plain arrays; units are on the axes.

Shapes: Q query tokens, S key tokens, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ...hooks.errors import BadRequest
from ...probe.columns import COLUMNS, with_unit
from ...probe.state import without_head
from ..files.numbers import thinned
from .figures import COLOURS, COLUMN, DIVERGING, PAGE, SEQUENTIAL, axes, limit, needs, style, token
from .plots_learning import arms, by_part, over_steps, paths, trajectories, two_timescales

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "along_sequence",
    "arms",
    "by_part",
    "calibration",
    "head_map",
    "layer_head",
    "manifold",
    "over_steps",
    "paths",
    "predicted_actual",
    "simplex",
    "trajectories",
    "two_timescales",
    "vocabulary",
]


def layer_head(
    heads: pd.DataFrame,
    column: str = "routing_pressure",
    *,
    signed: bool | None = None,
    most: float | None = None,
    unresolved: Sequence[str] = (),
    ax: Axes | None = None,
) -> Axes:
    """Layer × head map of a column of the heads table.

    Args:
        signed: whether the scale is symmetric around zero (default: as the column's sign means something).
        most: colour limit, so that maps can be compared; see `figures.limit`.
        unresolved: labels of heads to hatch, whose value is not told apart from the others.
    """
    needs(heads, column, "label", "head", "module")
    rows = list(dict.fromkeys(zip(heads["module"].astype(str), heads["use"], strict=True)))
    width = int(heads["head"].max()) + 1
    grid = np.full((len(rows), width), np.nan)
    places: dict[str, tuple[int, int]] = {}
    for row in heads.itertuples():
        place = rows.index((str(row.module), row.use)), int(row.head)
        grid[place] = getattr(row, column)
        places[str(row.label)] = place
    signed = (column in COLUMNS and COLUMNS[column].signed) if signed is None else signed
    with style():
        ax = axes(COLUMN, max(1.6, min(6.0, 0.16 * len(rows) + 0.9)), ax)
        top = most or limit(grid)
        shown = ax.imshow(
            grid,
            cmap=DIVERGING if signed else SEQUENTIAL,
            vmin=-top if signed else 0.0,
            vmax=top,
            aspect="auto",
            rasterized=True,
        )
        from matplotlib.patches import Rectangle

        for name in unresolved:
            if name in places:
                line, head = places[name]
                ax.add_patch(
                    Rectangle((head - 0.5, line - 0.5), 1, 1, fill=False, hatch="////", edgecolor="0.6", linewidth=0)
                )
        names = [str(heads["label"].astype(str).iloc[0])] if len(heads) == 1 else None
        labels = names or [_row_label(heads, module, use) for module, use in rows]
        kept = thinned(len(rows), 24)
        ax.set_yticks(kept, [labels[place] for place in kept])
        across = thinned(width, 16)
        ax.set_xticks(across, [str(head) for head in across])
        ax.set_xlabel("head")
        ax.set_ylabel("layer")
        ax.figure.colorbar(shown, ax=ax, label=with_unit(column), shrink=0.9)
    return ax


def _row_label(heads: pd.DataFrame, module: str, use: int) -> str:
    first = heads[(heads["module"].astype(str) == module) & (heads["use"] == use)].iloc[0]
    return without_head(str(first["label"]), int(first["head"]), use)


def head_map(
    values: ArrayLike,
    kind: str = "attention",
    *,
    query_tokens: Sequence[object] | None = None,
    key_tokens: Sequence[object] | None = None,
    most: float | None = None,
    labels: int = 16,
    ax: Axes | None = None,
) -> Axes:
    """Heat map of one head over tokens: what it attends to, or what the loss wants of that.

    Args:
        values (Q,S): α ("attention"), A ("advantage"), D ("score_gradient") or ΔL ("knockout"); NaN where a key is hidden.
        query_tokens, key_tokens: labels; thinned to at most `labels` a side.
        most: colour limit, so that maps can be compared.
    """
    kinds = {
        "attention": "attention α",
        "advantage": "advantage A (loss)",
        "score_gradient": "∂L/∂score D (loss)",
        "knockout": "knock-out ΔL (loss)",
    }
    if kind not in kinds:
        raise BadRequest(f"kind must be one of {', '.join(kinds)}, not {kind!r}.")
    grid = np.asarray(values, dtype=float)
    if grid.ndim != 2:
        raise BadRequest(f"A head's map has two axes (queries, keys), not {grid.ndim}.")
    signed = kind != "attention"
    with style():
        ax = axes(COLUMN, COLUMN * 0.95, ax)
        top = most or limit(grid)
        shown = ax.imshow(
            grid,
            cmap=DIVERGING if signed else SEQUENTIAL,
            vmin=-top if signed else 0.0,
            vmax=top,
            aspect="auto",
            interpolation="nearest",
            rasterized=True,
        )
        for tokens, count, ticks, rotation in (
            (query_tokens, grid.shape[0], ax.set_yticks, 0),
            (key_tokens, grid.shape[1], ax.set_xticks, 90),
        ):
            kept = thinned(count, labels)
            texts = [str(place) if tokens is None else token(tokens[place]) for place in kept]
            ticks(kept, texts, rotation=rotation)
        ax.set_xlabel("key")
        ax.set_ylabel("query")
        ax.figure.colorbar(shown, ax=ax, label=kinds[kind], shrink=0.9)
    return ax


def along_sequence(
    tokens: pd.DataFrame, label: str, column: str = "usage", *, sequence: int = 0, ax: Axes | None = None
) -> Axes:
    """A key's usage or coherence (or any token column) along one sequence, for one head."""
    needs(tokens, column, "label", "sequence", "position", "token")
    rows = tokens[(tokens["label"].astype(str) == label) & (tokens["sequence"] == sequence)]
    rows = rows[rows[column].notna()].sort_values("position")
    if rows.empty:
        raise BadRequest(f"The token table has no {column} of {label} in sequence {sequence}.")
    with style():
        ax = axes(PAGE, 1.8, ax)
        ax.plot(rows["position"].astype(int), rows[column], color=COLOURS[0], marker=".", markersize=3)
        kept = thinned(len(rows), 40)
        texts = rows["token"].astype(object).tolist()
        places = rows["position"].astype(int).tolist()
        ax.set_xticks([places[place] for place in kept], [token(texts[place]) for place in kept], rotation=90)
        ax.set_ylabel({"usage": "usage N (queries)", "coherence": "coherence (0 to 1)"}.get(column, column))
        ax.set_xlabel("key token")
        ax.set_title(label, loc="left")
    return ax


def manifold(
    coordinates: ArrayLike,
    entropy: ArrayLike | None = None,
    *,
    pair: tuple[int, int] = (0, 1),
    shares: Sequence[float] | None = None,
    unit: str = "bits",
    limits: tuple[float, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Values in two of their principal axes, coloured by posterior entropy.

    Args:
        coordinates (N,k): projections. entropy (N,): colour; None draws one colour.
        pair: which axes. shares: explained share of every axis, for the labels.
        limits: colours of the least and the largest entropy where panels are compared; the bar is then the caller's.
    """
    points = np.asarray(coordinates, dtype=float)
    if points.ndim != 2 or max(pair) >= points.shape[1]:
        raise BadRequest(f"Coordinates of shape {points.shape} have no axes {pair}.")
    with style():
        ax = axes(COLUMN, 2.6, ax)
        colour: dict[str, Any] = {"color": COLOURS[0]}
        if entropy is not None:
            low, high = limits or (None, None)
            colour = {"c": np.asarray(entropy, dtype=float), "cmap": SEQUENTIAL, "vmin": low, "vmax": high}
        shown = ax.scatter(
            points[:, pair[0]], points[:, pair[1]], s=4, alpha=0.7, linewidths=0, rasterized=True, **colour
        )
        for axis, number in zip((ax.xaxis, ax.yaxis), pair, strict=True):
            share = f", {100 * shares[number]:.0f} %" if shares is not None else ""
            axis.set_label_text(f"axis {number + 1}{share} (value units)")
        if entropy is not None and limits is None:
            ax.figure.colorbar(shown, ax=ax, label=f"posterior entropy ({unit})", shrink=0.9)
    return ax


def calibration(
    table: pd.DataFrame, *, columns: Sequence[str] | None = None, unit: str = "bits", ax: Axes | None = None
) -> Axes:
    """Error by position, one line per column; `NAME_low` and `NAME_high` are drawn as the interval of NAME."""
    names = list(columns or [name for name in table.columns if not str(name).endswith(("_low", "_high"))])
    needs(table, *names)
    from matplotlib.ticker import MaxNLocator

    with style():
        ax = axes(COLUMN, 2.3, ax)
        for place, name in enumerate(names):
            colour = COLOURS[place % len(COLOURS)]
            ax.plot(table.index, table[name], color=colour, label=str(name), marker=".", markersize=3)
            if f"{name}_low" in table and f"{name}_high" in table:
                ax.fill_between(
                    table.index, table[f"{name}_low"], table[f"{name}_high"], color=colour, alpha=0.2, linewidth=0
                )
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("position")
        ax.set_ylabel(f"error ({unit})")
        ax.legend()
    return ax


def simplex(
    beliefs: ArrayLike, colours: ArrayLike | None = None, *, names: Sequence[str] = (), ax: Axes | None = None
) -> Axes:
    """Beliefs over three states as points of a triangle.

    Args:
        beliefs (N,3): probabilities. colours (N,3): another belief of the same rows to colour by, as red, green and blue.
    """
    points = np.asarray(beliefs, dtype=float)
    if points.ndim != 2 or points.shape[1] != 3:
        raise BadRequest(f"A simplex shows beliefs over three states, not an array of shape {points.shape}.")
    corners = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, 3**0.5 / 2]])
    with style():
        ax = axes(COLUMN, 2.9, ax)
        flat = points @ corners
        shade = points if colours is None else np.asarray(colours, dtype=float)
        ax.scatter(flat[:, 0], flat[:, 1], s=3, c=shade.clip(0, 1), linewidths=0, rasterized=True)
        ax.plot(*np.vstack([corners, corners[:1]]).T, color="0.6", linewidth=0.6)
        for corner, name in zip(corners, names or ("state 1", "state 2", "state 3"), strict=True):
            ax.annotate(token(name), corner, ha="center", va="top" if corner[1] == 0 else "bottom", fontsize=7)
        ax.set_aspect("equal")
        ax.set_axis_off()
    return ax


def predicted_actual(predicted: ArrayLike, actual: ArrayLike, *, ax: Axes | None = None) -> Axes:
    """First-order change of the loss against the one that came, both logarithmic and in nats; the line is equality.

    The ratio tends to 1 for small steps whatever the law: what informs is where it leaves [0.9, 1.1].
    """
    x, y = (np.abs(np.asarray(values, dtype=float)) for values in (predicted, actual))
    fine = np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)
    if not fine.any():
        raise BadRequest("No pair of a predicted and an actual change is finite and not zero.")
    with style():
        ax = axes(COLUMN, 2.6, ax)
        ends = np.array([min(x[fine].min(), y[fine].min()), max(x[fine].max(), y[fine].max())])
        ax.fill_between(ends, 0.9 * ends, 1.1 * ends, color="0.85", linewidth=0)
        ax.plot(ends, ends, color="0.5", linewidth=0.8)
        ax.scatter(x[fine], y[fine], s=6, color=COLOURS[0], linewidths=0)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel("predicted change of the loss (nats)")
        ax.set_ylabel("actual change (nats)")
    return ax


def vocabulary(tokens: pd.DataFrame, head: str, *, ax: Axes | None = None) -> Axes:
    """What one head's values are pushed to say: bars of its mean direction, dotted the 95 % line of random directions.

    Args:
        tokens: as `probe.vocabulary.vocabulary` gives them.
    """
    needs(tokens, "head", "key", "token", "logit", "random_edge")
    part = tokens[(tokens["head"] == head) & (tokens["key"] == "")].sort_values("logit")
    if not len(part):
        raise BadRequest(f"There is no head {head!r}; heads: {', '.join(tokens['head'].unique()[:6])} …")
    with style():
        ax = axes(COLUMN, 0.16 * len(part) + 0.9, ax)
        colours = [COLOURS[1] if value > 0 else COLOURS[0] for value in part["logit"]]
        ax.barh(range(len(part)), part["logit"], color=colours)
        ax.set_yticks(range(len(part)), [token(text, 20) for text in part["token"]])
        for side in (-1, 1):
            ax.axvline(side * float(part["random_edge"].iloc[0]), color="0.4", linestyle=":", linewidth=0.8)
        ax.set_xlabel("change of the logit per unit step")
        ax.set_ylabel("token")
        ax.set_title(head, loc="left")
    return ax
