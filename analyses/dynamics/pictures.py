"""Training runs drawn: frame and precision on both scales, pressures, the price of freezing, law-following, shares.

Everything is drawn from one long table, which is written beside the picture: panel, line, seed, x, value.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..pictures.figures import COLOURS, Caption, panels, save, style, title
from ..pictures.plots import by_part, over_steps, two_timescales

PRICE, FOLLOWING, SHARES, PRESSURES = "price of freezing", "following", "shares", "pressures"
UNITS = {
    PRESSURES: "pressure (loss); ratio",
    PRICE: "price of freezing (nats at the end)",
    FOLLOWING: "correlation of Δα with Δα*",
    SHARES: "share of the step's loss change",
}
HELD_AGAINST = {
    "ceiling": ("ceiling: plain step", "--"),
    "ceiling_routing": ("the same, W_Q, W_K only", ":"),
    "null": ("null: other targets", "-."),
}


def lines(table: pd.DataFrame, panel: str, line: str, seed: int, x: str, value: str) -> pd.DataFrame:
    """Rows of the long table from two columns of a table of one run."""
    return pd.DataFrame(
        {"panel": panel, "line": line, "seed": seed, "x": table[x], "value": table[value].astype(float)}
    )


def _grid(data: pd.DataFrame, line: str) -> pd.DataFrame:
    return data[data["line"] == line].pivot(index="seed", columns="x", values="value")


def figure(data: pd.DataFrame, between: float | None = None) -> Any:
    """A matplotlib figure of six panels, of as many as the table has something for.

    Args:
        between: the divergence between two runs' last maps, as a share of the start's.
    """
    drawing, places = panels(3, 2, 7.6)
    frame, excess = _grid(data, "frame"), _grid(data, "excess")
    for axis, logarithmic in zip(places[:2], (False, True)):
        two_timescales(frame.columns, frame, excess, logarithmic=logarithmic, ax=axis)
        title(axis, f"frame and precision, {'logarithmic' if logarithmic else 'linear'}")
        if between is not None:
            axis.axhline(between, color=COLOURS[0], linestyle=":", linewidth=0.8)
    over_steps(data[data["panel"] == PRESSURES], UNITS[PRESSURES], legend=False, ax=places[2])
    title(places[2], PRESSURES)
    _legend_below(places[2])
    for axis, panel in zip(places[3:], (PRICE, FOLLOWING, SHARES)):
        part = data[data["panel"] == panel]
        held = part["line"].isin(HELD_AGAINST)
        title(axis, {FOLLOWING: "law-following, the step's own batch"}.get(panel, panel))
        if part.empty:
            with style():
                axis.text(0.5, 0.5, "no continuations were run", ha="center", transform=axis.transAxes, fontsize=7)
                axis.set_axis_off()
            continue
        by_part(part[~held], UNITS[panel], legend=False, ax=axis)
        for name, (says, dashes) in HELD_AGAINST.items():
            mean = _grid(part, name).mean()
            if len(mean):
                axis.plot(np.arange(len(mean)), mean, color="0.3", linestyle=dashes, linewidth=0.8, label=says)
        _legend_below(axis)
    return drawing


def _legend_below(axis: Any) -> None:
    """Under the panel, where it hides nothing."""
    handles, names = axis.get_legend_handles_labels()
    columns = 2 if len(names) > 4 or sum(map(len, names)) > 50 else 4
    with style():
        where: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": columns}
        axis.legend(handles, names, columnspacing=1.0, handlelength=1.6, **where)


def write_picture(data: pd.DataFrame, folder: Path, what: str, command: str, between: float | None) -> None:
    """`dynamics` as PNG, SVG and PDF with its data and its caption."""
    seeds = data["seed"].nunique()
    several = seeds > 1
    caption = Caption(
        f"{what} Frame: divergence of attention maps from the last ones, as a share of that at the start (dotted: "
        "between two runs' last maps); precision: excess cross-entropy over Bayes. The two scales show the same numbers. "
        "Pressures: root mean square over heads. Price: excess at the end above the unfrozen run. Shares are of first "
        "order and need not add up to 1.",
        f"{seeds} runs, a seed changes data and first weights together" if several else "one run",
        "as on the axes; nats",
        "95 % over runs, Student's t (bands and bars); dots are runs" if several else "none: one run",
        "law-following: beside the targets of other sequences, and below the ceiling of an infinitesimal plain step",
        command,
    )
    save(figure(data, between), folder / "dynamics", data, caption)


def saved_figure(checkpoints: pd.DataFrame, pressures: pd.DataFrame) -> Any:
    """Models of somebody else's run: frame and loss above the last model's, and the ratio of pressures per head."""
    from ..pictures.plots import trajectories

    drawing, places = panels(1, 2, 2.6)
    above = checkpoints["loss"] - float(checkpoints["loss"].iloc[-1])
    two_timescales(
        checkpoints["step"],
        checkpoints["frame_whole"],
        above,
        logarithmic=False,
        above="loss above the last model's (nats)",
        ax=places[0],
    )
    ratio = pressures.assign(label=[f"L{layer}H{head}" for layer, head in zip(pressures["layer"], pressures["head"])])
    trajectories(ratio, "ratio", ax=places[1])
    places[1].set_ylabel("routing over relative content pressure")
    return drawing


def write_saved(tables: Mapping[str, pd.DataFrame], targets: int, folder: Path, command: str) -> None:
    """`dynamics` of saved models, as `write_picture`; the data are the curve (the heads' are the table of pressures)."""
    caption = Caption(
        "Divergence of attention maps from the last model's, as a share of the first, and the loss above the last model's, "
        "which is 0 there by construction; beside it the ratio of pressures of the seven heads in which it ends highest.",
        f"{len(tables['checkpoints'])} saved models of one run, {targets:,} targets",
        "as on the axes",
        "none: one run",
        "none; nothing is said about which comes first",
        command,
    )
    save(saved_figure(**tables), folder / "dynamics", tables["checkpoints"], caption)
