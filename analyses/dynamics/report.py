"""What several runs say together: the JSON object, the tables, the wording, the files.

The seed is the unit: every number is one per run, and differences are paired over runs. "Frame first" is written only if
freezing routing costs less than freezing content, in at least four of five runs and never of fewer than five, at every step
that was tried. Where it holds at some steps only, both sides are told, with how far the maps then were from the last ones:
routing that has not begun to move costs little to freeze, and that is no frame.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ..files.export import TABLES, write_frame, write_json
from ..intervals.paired import paired
from . import frame, pictures
from .course import FORKS
from .examined import CUTS, FROZEN, Examined
from .following import pooled
from .real_steps import KINDS

MOST = 0.8  # of the runs
FEWEST = 5
SAYS = {"own": "the run's own", "sgd": "SGD", "adam": "Adam", "muon": "Muon"}


def percent(run: Examined, step: int) -> float:
    """The part of the run at which `step` lies, in percent, as close as the fork steps know."""
    return next((100 * part for part, fork in zip(FORKS, run.course.forks) if fork == step), math.nan)


def causal(runs: Sequence[Examined]) -> list[dict[str, Any]]:
    """Per fork: what freezing routing and freezing content cost each run at its end (nats), and the paired difference."""
    found = []
    for place, part in enumerate(FORKS):
        costs: dict[str, list[float]] = {name: [] for name in FROZEN}
        for run in runs:
            own = run.causal[run.causal["step"] == run.course.forks[place]]
            for name in FROZEN:
                costs[name] += own[own["frozen"] == name]["cost"].tolist()[:1]
        if not costs["routing"]:
            continue
        difference = paired(costs["routing"], costs["content"])
        cheaper = sum(one < other for one, other in zip(costs["routing"], costs["content"], strict=True))
        found.append(
            {
                "percent": 100 * part,
                "routing": costs["routing"],
                "content": costs["content"],
                "routing_minus_content": difference.mean,
                "low": difference.low,
                "high": difference.high,
                "routing_cheaper": cheaper,
                "runs": len(costs["routing"]),
                "frame_left": [
                    float(run.checkpoints.set_index("step")["frame_whole"].get(run.course.forks[place], math.nan))
                    for run in runs
                    if "step" in run.checkpoints
                ],
                "frame_first": len(costs["routing"]) >= FEWEST and cheaper >= MOST * len(costs["routing"]),
            }
        )
    return found


def wording(forks: Sequence[dict[str, Any]]) -> str:
    """The one sentence on order; `forks` as `causal` gives them."""
    if not forks:
        return "Which of the two comes first is not said: no continuations were run."
    runs = int(forks[0]["runs"])
    counts = ", ".join(f"{fork['routing_cheaper']} of {runs} at {fork['percent']:g} %" for fork in forks)
    told = f"freezing routing cost less than freezing content in {counts} of the run"
    if runs < FEWEST:
        return f"Which of the two comes first cannot be told from {runs} run{'s' * (runs > 1)}: {told}."
    first = [fork for fork in forks if fork["frame_first"]]
    if len(first) == len(forks):
        return f"Frame first: {told}."
    if not first:
        return f"“Frame first” is not written of these runs: {told}, and the rule asks for {MOST:.0%} of the runs."

    def where(chosen: Sequence[dict[str, Any]]) -> str:
        parts = []
        for fork in chosen:
            left = f", maps {sum(fork['frame_left']) / runs:.2f} of the way from the last" if fork["frame_left"] else ""
            parts.append(f"{fork['percent']:g} % ({fork['routing_cheaper']} of {runs}{left})")
        return ", ".join(parts)

    others = [fork for fork in forks if not fork["frame_first"]]
    return (
        f"“Frame first” is not written of these runs: freezing routing cost less than freezing content at {where(first)}, "
        f"but not at {where(others)}."
    )


def summary(runs: Sequence[Examined]) -> dict[str, Any]:
    """One object for `--json`; lists hold one number per run, steps are optimizer steps, losses nats."""
    layers = runs[0].course.recipe.shape.layers
    pairs = [frame.between_seeds(one.maps, other.maps, layers) for one, other in itertools.combinations(runs, 2)]
    forks = causal(runs)
    final = [float(run.checkpoints["excess"].iloc[-1]) for run in runs]
    return {
        "task": runs[0].course.tunnel,
        "changes": runs[0].course.changes,
        "steps": runs[0].course.recipe.steps,
        "seeds": [run.seed for run in runs],
        "checkpoints": len(runs[0].checkpoints),
        "excess_start": [float(run.checkpoints["excess"].iloc[0]) for run in runs],
        "excess_end": final,
        "times": {cut: {name: [run.times[cut][name] for run in runs] for name in runs[0].times[cut]} for cut in CUTS},
        "start_divergence": [run.start_divergence for run in runs],
        "divergence_between_seeds": pairs,
        "causal": forks,
        "wording": wording(forks),
        "following": following(runs).to_dict("records"),
        "feedback": feedbacks(runs).to_dict("records"),
        "step_size": step_sizes(runs).to_dict("records"),
        "pressures": pressures(runs).to_dict("records"),
    }


def following(runs: Sequence[Examined]) -> pd.DataFrame:
    """Per optimizer, fork and batch: means over heads, then over runs; `following` is the score of the means."""
    rows = []
    for (percentage, kind, batch), table in _together(runs, "following").groupby(["percent", "optimizer", "batch"]):
        rows.append({"percent": percentage, "optimizer": kind, "batch": batch, **pooled(table)})
    order = {kind: place for place, kind in enumerate(KINDS)}
    return pd.DataFrame(rows).sort_values(
        ["batch", "percent", "optimizer"],
        key=lambda column: column.map(order) if column.name == "optimizer" else column,
        ignore_index=True,
    )


def feedbacks(runs: Sequence[Examined]) -> pd.DataFrame:
    """Per fork: slopes of ΔA on α, means over heads and runs, and in how many heads each is above its permuted ones."""
    rows = []
    for percentage, table in _together(runs, "feedback").groupby("percent"):
        row: dict[str, Any] = {"percent": percentage}
        for name in ("mechanical", "actual"):
            row[name] = float(table[name].mean())
            row[f"{name}_permuted"] = float(table[f"{name}_permuted"].mean())
            row[f"{name}_above"] = float((table[name] > table[f"{name}_permuted"]).mean())
        rows.append(row)
    return pd.DataFrame(rows)


def step_sizes(runs: Sequence[Examined]) -> pd.DataFrame:
    """Per fork and optimizer: median radius in real steps, mean length, mean shares of the real loss change."""
    rows = []
    for (percentage, kind), table in _together(runs, "steps").groupby(["percent", "optimizer"]):
        row = {"percent": percentage, "optimizer": kind, "radius": float(table["radius"].median())}
        row["norm"] = float(table["norm"].mean())
        total = table["change"].sum()  # shares of single steps have a noisy denominator: pool them
        for name in ("routing", "values", "output", "other"):
            row[name] = float((table[f"share_{name}"] * table["change"]).sum() / total)
        rows.append(row)
    return pd.DataFrame(rows)


def pressures(runs: Sequence[Examined]) -> pd.DataFrame:
    """Per saved step: root mean square over heads and runs of both pressures, and the ratio of the two."""
    table = pd.concat([run.pressures for run in runs])
    squares = table.assign(
        routing=table["routing_pressure"] ** 2,
        content=table["content_relative"] ** 2,
    )
    found = squares.groupby("step")[["routing", "content"]].mean() ** 0.5
    found["ratio"] = found["routing"] / found["content"]
    return found.reset_index()


def _together(runs: Sequence[Examined], name: str) -> pd.DataFrame:
    tables = []
    for run in runs:
        table = getattr(run, name).copy()
        table["percent"] = [percent(run, step) for step in table["step"]]
        table["seed"] = run.seed
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def text(runs: Sequence[Examined]) -> str:
    """Everything for a terminal."""
    found = summary(runs)
    several = len(runs) > 1
    lines = [
        f"{found['task']} {found['changes'] or ''}, {found['steps']:,} steps, seeds {', '.join(map(str, found['seeds']))}",
        f"excess over Bayes, nats: start {_range(found['excess_start'])}, end {_range(found['excess_end'])}",
        f"divergence of the first maps from the last, nats: {_range(found['start_divergence'])}"
        + (f"; between two runs' last maps: {_range(found['divergence_between_seeds'])}" if several else ""),
        "",
        "90 % times in steps, by scale and cut of the run",
        "(frame: divergence from the last maps; precision: excess over Bayes)",
    ]
    table = {cut: {name: _range(values, 0) for name, values in found["times"][cut].items()} for cut in found["times"]}
    lines += [pd.DataFrame(table).T.to_string(), ""]
    if found["causal"]:
        lines.append("cost at the end of freezing from a step on, nats above the unfrozen run (one number per run)")
        for fork in found["causal"]:
            half = fork["high"] - fork["routing_minus_content"]
            interval = f"   difference {fork['routing_minus_content']:+.4f} ± {half:.4f}" if several else ""
            lines.append(
                f"  {fork['percent']:>3g} %  routing {_list(fork['routing'])}   content {_list(fork['content'])}{interval}"
            )
    lines += [found["wording"], ""]
    lines += ["law-following (1: as far as shared W_Q and W_K permit; 0: as with other sequences' targets)"]
    shown = following(runs)
    lines += [shown.to_string(index=False, float_format=lambda number: f"{number:.3f}"), ""]
    lines += ["feedback: within-row slope of ΔA on α after the real value step", _plain(feedbacks(runs)), ""]
    lines += ["linear radius in real steps, and shares of the step's loss change", _plain(step_sizes(runs))]
    return "\n".join(lines)


def _plain(table: pd.DataFrame) -> str:
    return table.to_string(index=False, float_format=lambda number: f"{number:.4g}")


def _range(numbers: Sequence[float], places: int = 3) -> str:
    finite = [number for number in numbers if math.isfinite(number)]
    if not finite:
        return "–"
    low, high = (f"{number:,.{places}f}" for number in (min(finite), max(finite)))
    return low if low == high else f"{low}–{high}"


def _list(numbers: Sequence[float]) -> str:
    return " ".join(f"{number:+.3f}" for number in numbers)


def drawn(runs: Sequence[Examined]) -> pd.DataFrame:
    """What the picture shows, long: panel, line, seed, x (a step, or a part of the run in percent), value."""
    parts = []
    for run in runs:
        for name, column in (("frame", "frame_whole"), ("excess", "excess")):
            parts.append(pictures.lines(run.checkpoints, "timescales", name, run.seed, "step", column))
        own = pressures([run])
        for name, says in (("routing", "routing"), ("content", "content, relative"), ("ratio", "their ratio")):
            parts.append(pictures.lines(own, pictures.PRESSURES, says, run.seed, "step", name))
        if len(run.causal):
            costs = run.causal.assign(percent=[percent(run, step) for step in run.causal["step"]])
            for name in FROZEN:
                part = costs[costs["frozen"] == name]
                parts.append(pictures.lines(part, pictures.PRICE, f"{name} frozen", run.seed, "percent", "cost"))
        followed = following([run])
        followed = followed[followed["batch"] == "own"]
        for kind in KINDS:
            part = followed[followed["optimizer"] == kind]
            parts.append(pictures.lines(part, pictures.FOLLOWING, SAYS[kind], run.seed, "percent", "rho"))
        for name in pictures.HELD_AGAINST:
            part = followed[followed["optimizer"] == "own"]
            parts.append(pictures.lines(part, pictures.FOLLOWING, name, run.seed, "percent", name))
        sizes = step_sizes([run])
        sizes = sizes[sizes["optimizer"] == "own"]
        for name in ("routing", "values", "output", "other"):
            parts.append(pictures.lines(sizes, pictures.SHARES, name, run.seed, "percent", name))
    return pd.concat([part for part in parts if len(part)], ignore_index=True)


def write(runs: Sequence[Examined], folder: Path, formats: Sequence[str] = TABLES, command: str = "") -> None:
    """Figure with data and caption, tables in `formats` and the JSON object into `folder`."""
    found = summary(runs)
    pairs = found["divergence_between_seeds"]
    between = None
    if pairs:
        between = sum(pairs) / len(pairs) / (sum(found["start_divergence"]) / len(runs))
    changes = ", ".join(f"{name} {value}" for name, value in found["changes"].items())
    what = f"Training on {found['task']}{f' ({changes})' if changes else ''}, {found['steps']:,} steps."
    pictures.write_picture(drawn(runs), folder, what, command, between)
    for name in ("checkpoints", "pressures", "following", "feedback", "steps", "causal"):
        tables = [getattr(run, name).assign(seed=run.seed) for run in runs]
        write_frame(pd.concat(tables, ignore_index=True), folder / name, formats)
    write_json(found, folder / "run.json")
