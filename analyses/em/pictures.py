"""The EM experiment drawn: losses of every arm, and where the values of the symbols went.

Drawn from the tables that lie in a run's folder, so that a picture can be made again without the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from ..pictures.figures import Caption, panels, save, style, title
from ..pictures.plots import arms, paths

SHOWN = ("sgd", "values_x10", "closed_form")
PANELS = (
    ("passes", "heldout_loss", "passes (forward and backward)", "held-out loss (nats)"),
    ("passes", "loss", "passes (forward and backward)", "training loss (nats)"),
    ("length", "loss", "cumulative step length, mean of seeds", "training loss (nats)"),
)


def losses(curves: pd.DataFrame, found: dict[str, Any], names: dict[str, str]) -> Any:
    """Held-out and training loss by passes, training loss by cumulative step length; a matplotlib figure.

    Args:
        curves: as `experiment.curves`. found: the run's object. names: what every arm is called.
    """
    mean = curves.groupby(["arm", "step"])["length"].transform("mean")
    table = curves.assign(arm=curves["arm"].map(names), length=mean)
    filters = {"heldout_loss": found["heldout_filter_loss"], "loss": found["filter_loss"]}
    figure, places = panels(2, 2, 5.2)
    for axis, (across, up, label, says) in zip(places, PANELS):
        floor = sum(filters[up]) / len(filters[up])
        arms(table, across, up, oracle=floor, logarithmic=True, legend=False, ax=axis)
        axis.set(xlabel=label, ylabel=says)
        axis.set_ylim(min(1.7, floor - 0.1), 2.12)
    with style():
        places[3].set_axis_off()
        places[3].legend(*places[0].get_legend_handles_labels(), loc="center left")
    return figure


def values(trajectories: pd.DataFrame, seed: int, names: dict[str, str]) -> Any:
    """Values of the symbols during training, one panel per arm of `SHOWN`; a matplotlib figure."""
    figure, places = panels(1, len(SHOWN), 2.4)
    for axis, name in zip(places, SHOWN):
        own = trajectories[(trajectories["arm"] == name) & (trajectories["seed"] == seed)]
        paths(own, ax=axis)
        title(axis, f"{names[name]}\n{float(own['shown'].iloc[0]):.0%} of the variance")
    return figure


def write_pictures(
    curves: pd.DataFrame,
    trajectories: pd.DataFrame,
    found: dict[str, Any],
    names: dict[str, str],
    folder: Path,
    by: str,
) -> None:
    """`em` and `em-values` as PNG, SVG and PDF, each with its data and its caption."""
    seeds, steps = found["seeds"], found["steps"]
    count = f"{len(seeds)} seeds" if len(seeds) > 1 else "one seed"
    interval = "pointwise 95 % over seeds, Student's t" if len(seeds) > 1 else "none: one seed"
    caption = Caption(
        f"Loss of every arm on the sticky chain over {steps:,} iterations, by passes and by the length of all steps. "
        "A seed changes sequence and first weights together; curves that leave the frame are cut.",
        f"{count} of 2,000 symbols, each arm on the same draws",
        "nats per symbol",
        interval,
        "dotted: the exact filter's own loss, mean of seeds; the controls are arms of their own",
        by,
    )
    save(losses(curves, found, names), folder / "em", curves, caption)
    shown = trajectories[trajectories["arm"].isin(SHOWN) & (trajectories["seed"] == seeds[0])]
    caption = Caption(
        "Values of the eight noiseless symbols (μ W_V) during training, in the first two principal axes of each arm; "
        f"a dot is the end. Seed {seeds[0]}.",
        "8 symbols, one seed",
        "value units; axes of two panels are not the same directions",
        "none: one seed",
        "none",
        by,
    )
    save(values(shown, seeds[0], names), folder / "em-values", shown, caption)
