"""Numbers over the steps of a training run, thinned to what a picture can show."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from ...probe.columns import columns_of
from ..files.numbers import thinned

NUMBERS = 80_000  # of all heads' courses: about 600 kB
STEPS = (40, 400)  # steps that are kept at least, where there are so many heads, and at most


def short(value: Any, digits: int = 6) -> float | None:
    """So many significant digits: more than the page shows, few enough to keep it small."""
    return None if pd.isna(value) else float(f"{value:.{digits}g}")


def history_lines(table: pd.DataFrame | None) -> dict[str, Any]:
    """Steps and the columns of the heads over them; of many heads those of the largest last routing pressure.

    `of`: how many steps and heads there were.
    """
    if table is None or table.empty:
        return {}
    table = table.assign(label=table["label"].astype(str))
    if "backward" in table:
        table = table[table["backward"] == 0]
    names = [name for name in columns_of("page") if name in table and table[name].notna().any()]
    wide = table.drop_duplicates(["step", "label"]).pivot(index="step", columns="label", values=names).sort_index()
    labels = list(dict.fromkeys(table["label"]))
    shown = thinned(len(wide), max(STEPS[0], min(STEPS[1], NUMBERS // max(1, len(labels) * len(names)))))
    most = max(1, NUMBERS // max(1, len(shown) * len(names)))
    if len(labels) > most:
        last = wide["routing_pressure"].ffill().iloc[-1].astype(float)
        labels = last.sort_values(ascending=False, na_position="last").index[:most].tolist()
    steps = wide.iloc[shown]
    heads = {label: {name: [short(value, 4) for value in steps[name, label]] for name in names} for label in labels}
    return {
        "steps": [int(step) for step in steps.index],
        "heads": heads,
        "of": [len(wide), table["label"].nunique()],
    }


def curve_lines(table: pd.DataFrame | None) -> list[dict[str, Any]]:
    """Numbers of the run as a whole over its steps, one entry per column and unit, such as "loss (nats)"; several lines
    where `table` has a column `run`.
    """
    if table is None or table.empty:
        return []
    found = []
    runs = list(table.groupby(table["run"].astype(str), sort=False)) if "run" in table else [("", table)]
    for name in (str(column) for column in table if column not in ("step", "run")):
        lines = []
        for run, rows in runs:
            rows = rows.dropna(subset=[name]).sort_values("step")
            rows = rows.iloc[thinned(len(rows), STEPS[1])]
            values = [short(value, 4) if math.isfinite(value) else None for value in rows[name]]
            lines.append({"run": run, "steps": [int(step) for step in rows["step"]], "values": values})
        found.append({"name": name, "lines": [line for line in lines if line["steps"]]})
    return [entry for entry in found if entry["lines"]]
