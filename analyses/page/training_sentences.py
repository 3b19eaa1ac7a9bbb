"""The five sentences of a training run: what its steps say, and plainly what they cannot say.

A history keeps sums per step and no sequences, so nothing says how far a number would move on other text, and no head is
singled out by it. What is told of the course is one run's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from ..intervals.resampled import quiet

KEEP = "“advantage-probe analyze” on a saved model keeps them, and so does a watch with singly=True"


def observed(record: dict[str, Any], history: pd.DataFrame) -> str:
    """What was watched, over which steps, and in which unit."""
    steps = history["step"].nunique()
    weights = {
        "unknown": "the loss weight was not told, so numbers change with the batch size",
        "in part": "the loss weight was not told at every step, so numbers of some steps change with the batch size",
    }.get(str(record.get("loss_weight", "unknown")), "numbers are per summed loss")
    return (
        f"Measured: {history['label'].nunique()} attention heads of {record.get('model')} while it learned, at {steps} "
        f"observed step{'s' * (steps > 1)}{_span(history)}; {weights}."
    )


def _span(history: pd.DataFrame) -> str:
    first, last = int(history["step"].min()), int(history["step"].max())
    return f" from {first:,} to {last:,}" if last > first else f", step {first:,}"


def moved(history: pd.DataFrame, runs: int = 1) -> str:
    """How the median head's routing pressure went."""
    why = f"no layer or head is singled out, because the steps' sequences were not kept ({KEEP})"
    ends = _ends(history, lambda rows: rows["routing_pressure"])
    if ends is None:
        return f"Where: {why}; a course takes two steps at which a head is known."
    (first, before), (last, after), which = ends
    return (
        f"Where: in {which} routing pressure went from {before:.3g} at step {first:,} to {after:.3g} at step "
        f"{last:,}, in {'this one run' if runs == 1 else f'these {runs} runs together'}; {why}."
    )


def balance(history: pd.DataFrame) -> str:
    """On which of routing and content the loss pulled, at the first and the last step."""
    ends = _ends(history, lambda rows: rows["content_relative"] / rows["routing_pressure"])
    if ends is None:
        return (
            "Routing or content: not known; without sequences no interval can be given, and a course takes two steps at "
            "which a head is known."
        )
    (first, before), (last, after), which = ends
    return (
        f"Routing or content: in {which} a relative change of its values would have moved the loss {before:.2g} "
        f"times as much as a unit change of its scores at step {first:,}, and {after:.2g} times at step {last:,}; without "
        "sequences that has no interval, so which of the two pulls harder is not said."
    )


def _ends(history: pd.DataFrame, column: Any) -> tuple[tuple[int, float], tuple[int, float], str] | None:
    """(step, median over heads) of the first and the last step at which any head is known, of the heads that are known at
    both; and what to call the median head. None where no head is known at two steps.
    """
    with quiet():
        values = history.assign(value=pd.to_numeric(column(history), errors="coerce").astype(float))
        values = values.replace({"value": {np.inf: math.nan}}).dropna(subset=["value"])
        known = values.assign(label=values["label"].astype(str)).pivot_table("value", "step", "label")
    if len(known) < 2:
        return None
    ends = known.iloc[[0, -1]].dropna(axis=1)  # a resumed run may watch other layers
    if ends.empty:
        return None
    medians = ends.median(axis=1)
    some = ends.shape[1] < known.shape[1]
    which = f"the median head of the {ends.shape[1]} that are known at both ends" if some else "the median head"
    first, last = ((int(step), float(median)) for step, median in medians.items())
    return first, last, which


def unwritten() -> str:
    return (
        "What it writes: not known, the steps' tokens and pairs were not kept; a watch with detail=“edges” keeps them."
    )
