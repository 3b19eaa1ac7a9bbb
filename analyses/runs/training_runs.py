"""Training runs as the page draws them: a history folder, a watch, the tables of `dynamics`, a run in a tunnel.

Each gives what it has. A history has sums per step and no text, so its page has the heads at the last step, their courses
and sentences that say what cannot be said; a watch that kept sequences, tokens and pairs has those too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from ...hooks.errors import BadInput, BadRequest
from ...probe.history import read_history
from ...probe.tables import HISTORY as HISTORY_COLUMNS
from ...probe.tables import joined
from ...probe.watch import Watch
from ..files.names import CARD, HISTORY
from .analyze import recorded
from .run import Run

NOTHING = pd.DataFrame()
_NEEDED = {
    "pressures.parquet": {"step", "layer", "head", "routing_pressure", "content_relative"},
    "checkpoints.parquet": {"step"},
}
_CURVES = {"loss": "loss (nats)", "entropy_error": "entropy error (bits)", "kl": "KL from the exact posterior (bits)"}
_CHECKPOINTS = {
    "excess": "excess over Bayes (nats)",
    "loss": "loss (nats)",
    "frame_whole": "divergence from the last attention maps, over the first",
}


def of_watch(watch: Watch) -> Run:
    """A watch, open or closed: its heads over all observed steps together, and whatever else it kept.

    Raises:
        NoAttentionSeen: when nothing was captured. BadRequest: when no step was closed. Whatever the watch could not read.
    """
    history = watch.history()
    if history.empty:
        raise BadRequest(
            "No step was closed, so there is nothing to draw; call watch.step() after each optimizer step."
        )
    history = history[history["backward"] == 0]  # the heads table is of the first gradient, too
    several = history["step"].nunique() > 1
    detailed = watch.options.detail == "edges"
    record = {**recorded(watch), **_steps(history)}
    return Run(
        watch.heads(intervals=True),
        watch.tokens() if watch.options.detail != "heads" else NOTHING,
        watch.edges(watch.options.edges) if detailed else NOTHING,
        watch.updates(),
        watch.sequences() if watch.options.singly else NOTHING,
        record | ({"columns_of": "all observed steps together"} if several else {}),
        more={"history": history},
    )


def of_folder(folder: Path) -> Run | None:
    """The training run that lies in a folder; None where none does.

    Raises:
        BadInput: for tables that are damaged, or a run of which nothing was kept that a page shows.
    """
    if any(folder.glob("part-*.parquet")):
        return of_history(folder)
    inside = folder / HISTORY
    if (folder / CARD).is_file():
        return of_tunnel(folder)
    if inside.is_dir() and any(inside.glob("part-*.parquet")):
        return of_history(inside)
    if (folder / "pressures.parquet").is_file() and (folder / "checkpoints.parquet").is_file():
        return of_dynamics(folder)
    if (folder / "course.json").is_file() or any(folder.glob("*/course.json")):
        raise BadInput(
            f"{str(folder)!r} holds saved steps and no tables; run `advantage-probe dynamics --checkpoints {folder} --out "
            "DIR` and give DIR."
        )
    return None


def of_history(folder: Path) -> Run:
    """The folder that `watch(history=)` wrote: heads at its last step that was not skipped, and all courses."""
    parts, model = read_history(folder)
    history = joined(parts)
    missing = [name for name in HISTORY_COLUMNS if name not in history]
    if missing:
        raise BadInput(
            f"The history {str(folder)!r} lacks the column {missing[0]!r}, as of an older version; watch again."
        )
    first = history[history["backward"] == 0]
    taken = first[~first["status"].astype(str).str.contains("skipped")]
    if taken.empty:
        raise BadInput(f"The history {str(folder)!r} has no step that was taken; let the run go on.")
    last = int(taken["step"].max())
    heads = taken[taken["step"] == last].reset_index(drop=True)
    record = {"model": model, "loss_weight": _weight(first["loss_weight"]), **_steps(first)}
    return Run(
        heads, NOTHING, NOTHING, NOTHING, NOTHING, record | {"columns_of": f"step {last:,}"}, more={"history": first}
    )


def of_tunnel(folder: Path) -> Run:
    """A folder that `advantage-probe tunnel train` wrote: its curve, and its heads where they were watched."""
    card = _json(folder / CARD)
    try:
        curve = pd.DataFrame(card["curve"])[["step", *_CURVES]].rename(columns=_CURVES)
        named = {"model": card["tunnel"], "command": card["command"], "versions": card["versions"]}
    except (KeyError, TypeError) as error:
        raise BadInput(f"{str(folder / CARD)!r} lacks {error}; train the tunnel again.") from error
    inside = folder / HISTORY
    if not (inside.is_dir() and any(inside.glob("part-*.parquet"))):
        raise BadInput(
            f"{str(folder)!r} holds a trained model whose heads were not watched; train it with `--watch N`."
        )
    run = of_history(inside)
    record = {**run.record, **named, "parameters": card.get("parameters"), "steps_trained": int(curve["step"].max())}
    return _bare(run.heads, record, {**run.more, "curve": curve})


def of_dynamics(folder: Path) -> Run:
    """A folder that `advantage-probe dynamics --out` wrote: pressures of every run, and the runs' own curves."""
    found = _json(folder / "run.json")
    pressures, checkpoints = (_table(folder / f"{name}.parquet") for name in ("pressures", "checkpoints"))
    several = "seed" in pressures and pressures["seed"].nunique() > 1
    seeds = pressures["seed"].astype(str) if "seed" in pressures else pd.Series("", index=pressures.index)
    before = ("seed " + seeds + " ") if several else pd.Series("", index=pressures.index)
    layers, heads = (pressures[name].astype("Int64").astype(str) for name in ("layer", "head"))
    history = pressures.assign(
        label=before + "L" + layers + "H" + heads, module=before + "layer " + layers, use=0, backward=0
    )
    steps = sorted(history["step"].unique())
    names = {name: text for name, text in _CHECKPOINTS.items() if name in checkpoints}
    curve = checkpoints.rename(columns=names)[["step", *names.values()]]
    if "seed" in checkpoints:
        curve = curve.assign(run="seed " + checkpoints["seed"].astype(str))
    record: dict[str, Any] = {
        "model": found.get("task") or "saved models",
        "loss_weight": 1.0,
        **_steps(history),
        **{name: found[name] for name in ("seeds", "changes", "targets") if name in found},
        "wording": found.get("wording"),
    }
    rows = history[history["step"] == steps[-1]].reset_index(drop=True)
    return _bare(rows, record | {"columns_of": f"step {int(steps[-1]):,}"}, {"history": history, "curve": curve})


def _bare(heads: pd.DataFrame, record: dict[str, Any], more: dict[str, pd.DataFrame]) -> Run:
    """A run that kept neither tokens nor pairs nor sequences."""
    return Run(heads, NOTHING, NOTHING, NOTHING, NOTHING, record, more=more)


def _steps(history: pd.DataFrame) -> dict[str, Any]:
    steps = history["step"]
    return {"steps": f"{int(steps.min()):,} to {int(steps.max()):,}", "observed_steps": int(steps.nunique())}


def _weight(weights: pd.Series) -> float | str:
    """The loss weight of a history: a number, "varied", "in part" (not told at every step) or "unknown"."""
    known = weights.dropna()
    if len(known) < len(weights):
        return "in part" if len(known) else "unknown"
    return float(known.iloc[0]) if known.nunique() == 1 else "varied"


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{str(path)!r} cannot be read ({error}); make it again.") from error


def _table(path: Path) -> pd.DataFrame:
    try:
        table = pd.read_parquet(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise BadInput(f"{str(path)!r} is damaged ({error}); make it again.") from error
    missing = sorted(_NEEDED[path.name] - set(table))
    if missing:
        raise BadInput(f"{str(path)!r} lacks the column {missing[0]!r}; make it again.")
    return table
