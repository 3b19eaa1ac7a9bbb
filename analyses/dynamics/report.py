"""What several runs say together: the JSON object, the tables, the wording, the figure.

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

from ..paired import paired
from . import frame
from .course import FORKS
from .examined import CUTS, FROZEN, Examined
from .following import pooled
from .real_steps import KINDS

MOST = 0.8  # of the runs
FEWEST = 5
SAYS = {"own": "the run's own (AdamW, its momenta)", "sgd": "SGD", "adam": "Adam", "muon": "Muon"}


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
        return f"The frame does not come first: {told}, and the rule asks for {MOST:.0%} of the runs."

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


def figure(runs: Sequence[Examined]) -> Any:
    """Frame and precision, pressures, the price of freezing, following; a matplotlib figure."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(14, 8), layout="constrained")
    axes = drawing.subplots(2, 3)
    for run in runs:
        steps = run.checkpoints["step"].clip(lower=0.7)
        start = float(run.checkpoints["excess"].iloc[0])
        axes[0, 0].plot(steps, run.checkpoints["frame_whole"], color="C0", alpha=0.8, linewidth=1)
        axes[0, 0].plot(steps, run.checkpoints["excess"] / start, color="C1", alpha=0.8, linewidth=1)
        axes[0, 1].plot(steps, run.checkpoints["frame_whole"].where(lambda column: column > 0), color="C0", linewidth=1)
        axes[0, 1].plot(steps, run.checkpoints["excess"] / start, color="C1", linewidth=1)
    for axis in axes[0, :2]:
        axis.plot([], [], color="C0", label="frame: divergence from the last maps, over that at the start")
        axis.plot([], [], color="C1", label="precision: excess over Bayes, over that at the start")
        axis.set(xscale="log", xlabel="step")
    axes[0, 0].set(title="linear scale", ylim=(0, None))
    axes[0, 1].set(yscale="log", title="log scale, same numbers")
    if len(runs) > 1:
        layers = runs[0].course.recipe.shape.layers
        pairs = [frame.between_seeds(one.maps, other.maps, layers) for one, other in itertools.combinations(runs, 2)]
        scale = sum(pairs) / len(pairs) / (sum(run.start_divergence for run in runs) / len(runs))
        axes[0, 1].axhline(scale, color="C0", linestyle=":", linewidth=1, label="frame between two runs' last maps")
    axes[0, 1].legend(fontsize=7)
    told = pressures(runs)
    steps = told["step"].clip(lower=0.7)
    axes[0, 2].plot(steps, told["routing"], label="routing pressure")
    axes[0, 2].plot(steps, told["content"], label="content pressure, relative")
    axes[0, 2].plot(steps, told["ratio"], label="their ratio", linestyle="--")
    axes[0, 2].set(xscale="log", yscale="log", xlabel="step", title="pressures on the fixed sequences")
    axes[0, 2].legend(fontsize=7)
    _draw_causal(axes[1, 0], causal(runs))
    _draw_following(axes[1, 1], following(runs))
    sizes = step_sizes(runs)
    sizes = sizes[sizes["optimizer"] == "own"]
    base = [0.0] * len(sizes)
    for name in ("routing", "values", "output", "other"):
        axes[1, 2].bar([f"{one:g}" for one in sizes["percent"]], sizes[name], bottom=base, label=name)
        base = [one + other for one, other in zip(base, sizes[name], strict=True)]
    axes[1, 2].set(xlabel="% of the run", title="first-order shares of the step's loss change")
    axes[1, 2].legend(fontsize=7)
    seeds = f"{len(runs)} seeds" if len(runs) > 1 else "one seed, no interval"
    drawing.suptitle(
        f"{runs[0].course.tunnel} {runs[0].course.changes or ''}: {runs[0].course.recipe.steps:,} steps, {seeds}"
    )
    return drawing


def _draw_following(axis: Any, table: pd.DataFrame) -> None:
    """ρ of every optimizer between what it is held against: the score alone is missing wherever there is no room."""
    table = table[table["batch"] == "own"]
    for place, kind in enumerate(KINDS):
        part = table[table["optimizer"] == kind]
        axis.plot([f"{one:g}" for one in part["percent"]], part["rho"], marker="o", color=f"C{place}", label=SAYS[kind])
    part = table[table["optimizer"] == "own"]
    marks = [f"{one:g}" for one in part["percent"]]
    for name, style, says in (
        ("ceiling", "--", "ceiling: infinitesimal plain step"),
        ("ceiling_routing", ":", "the same on W_Q and W_K alone"),
        ("null", "-.", "null: other sequences' targets"),
    ):
        axis.plot(marks, part[name], color="black", linestyle=style, linewidth=1, label=says)
    axis.set(xlabel="% of the run")
    axis.set_title("correlation of Δα with the law's Δα*, own batch", fontsize=10)
    axis.legend(fontsize=6)


def _draw_causal(axis: Any, forks: Sequence[dict[str, Any]]) -> None:
    axis.set(title="price of freezing from there on, nats at the end", xlabel="% of the run")
    for place, fork in enumerate(forks):
        for name, offset, colour in (("routing", -0.1, "C0"), ("content", 0.1, "C1")):
            label = f"{name} frozen" if place == 0 else None
            axis.plot([place + offset] * len(fork[name]), fork[name], "o", color=colour, alpha=0.7, label=label)
    if forks:
        axis.set_xticks(range(len(forks)), [f"{fork['percent']:g}" for fork in forks])
        axis.set_yscale("symlog", linthresh=0.01)
        axis.set_ymargin(0.2)
        axis.legend(fontsize=7)
    else:
        axis.text(0.5, 0.5, "no continuations were run", ha="center", transform=axis.transAxes)


def write(runs: Sequence[Examined], folder: Path) -> None:
    """Figure (png, svg, pdf), tables (Parquet and CSV) and the JSON object into `folder`."""
    from ..export import write_frame, write_json

    drawing = figure(runs)
    for ending in ("png", "svg", "pdf"):
        drawing.savefig(folder / f"dynamics.{ending}", dpi=130)
    for name in ("checkpoints", "pressures", "following", "feedback", "steps", "causal"):
        tables = [getattr(run, name).assign(seed=run.seed) for run in runs]
        write_frame(pd.concat(tables, ignore_index=True), folder / name)
    write_json(summary(runs), folder / "run.json")
