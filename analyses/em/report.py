"""What the EM experiment says: the JSON object, the table, the paired intervals, two sentences, the figure.

A sentence is one of three templates, and the paired intervals choose it. Held-out loss decides, and what is asked of every
control is what it leaves of the arm's gain: (control − arm) beside (SGD − arm). The gain does not survive when some control
leaves less than a quarter of it; that claim may pick among k controls, so its intervals are at 1 − .05 / k. It survives
when every control leaves something, each at 95 %. Everything else cannot be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ..paired import Paired, paired
from .arms import ARMS
from .experiment import Experiment, curves, trajectories

SAYS = {arm.name: arm.says for arm in ARMS}
COMPARISONS = (
    ("output_x10", "values_x10"),
    ("all_x10", "values_x10"),
    ("matched_length", "values_x10"),
    ("routing_frozen", "values_x10"),
    ("closed_form", "values_x10"),
    ("closed_form_length", "closed_form"),
)
QUESTIONS = (
    ("values_x10", ("output_x10", "all_x10", "matched_length")),
    ("closed_form", ("closed_form_length",)),
)
LEFT = 0.25  # of the gain: what a control may leave and still account for it
_TAIL = (
    "after {steps} iterations {control} leaves {left:+.4f} nats [{low:+.4f}, {high:+.4f}] of the {gain:.4f} by which its "
    "held-out loss is below that of SGD (passes to each seed's own SGD training loss: {own}, and {its} of the control)."
)
SURVIVES = "The speed-up of {arm} survives its controls: of all of them the nearest does not account for it; " + _TAIL
CANNOT_TELL = "Whether anything of the speed-up of {arm} survives cannot be told from {seeds}: " + _TAIL
DOES_NOT_SURVIVE = "The speed-up of {arm} does not survive its controls: " + _TAIL


def summary(experiment: Experiment) -> dict[str, Any]:
    """One object for `--json`: nats throughout, one number per seed in every list."""
    own = experiment.own_sgd_loss()
    mean = [sum(own) / len(own)] * len(own)
    arms = {}
    for name, trained in experiment.arms.items():
        record: dict[str, Any] = {
            "loss": trained.train["loss"].tolist(),
            "heldout_loss": trained.held_out["loss"].tolist(),
        }
        for figure in ("entropy", "accuracy", "kl", "excess"):
            record[figure] = trained.train[figure].tolist()
            record[f"heldout_{figure}"] = trained.held_out[figure].tolist()
        record["steps_to_own_sgd_loss"] = experiment.steps_to(name, own)
        record["steps_to_mean_sgd_loss"] = experiment.steps_to(name, mean)
        passes = trained.arm.passes
        record["passes_per_step"] = passes
        record["passes"] = passes * experiment.steps
        record["passes_to_own_sgd_loss"] = [
            None if step is None else passes * step for step in record["steps_to_own_sgd_loss"]
        ]
        record["heldout_loss_minimum"] = trained.held_out_losses.amin(1).tolist()
        record["length"] = trained.lengths[:, -1].tolist()
        if trained.arm.rule == "adam":
            record["rate"] = trained.arm.rates[0]
            record["heldout_minimum_by_rate"] = {f"{rate:g}": loss for rate, loss in experiment.candidates.items()}
        arms[name] = record
    return {
        "oracle_entropy": experiment.oracle,
        "filter_loss": experiment.filter_loss,
        "heldout_filter_loss": experiment.held_out_filter_loss,
        "seeds": list(experiment.seeds),
        "steps": experiment.steps,
        "damping": experiment.damping,
        "unit": "nats",
        "arms": arms,
        "paired": [
            {"arm": arm, "against": other, "measure": measure, "mean": it.mean, "low": it.low, "high": it.high}
            for arm, other, measure, it in comparisons(arms)
        ],
        "sentences": sentences(arms, experiment.steps),
    }


def comparisons(arms: dict[str, Any]) -> list[tuple[str, str, str, Paired]]:
    """Arm, arm it is compared with, measure, and the 95 % paired interval of the difference (arm − other)."""
    return [
        (arm, other, measure, paired(arms[arm][measure], arms[other][measure]))
        for arm, other in COMPARISONS
        for measure in ("heldout_loss", "loss")
    ]


def sentences(arms: dict[str, Any], steps: int) -> list[str]:
    """One sentence on the released arm and one on the closed form."""
    return [verdict(arms, arm, controls, steps) for arm, controls in QUESTIONS]


def verdict(arms: dict[str, Any], arm: str, controls: Sequence[str], steps: int) -> str:
    """The template that the held-out intervals choose, filled; `arms` as in `summary`."""
    own, plain = arms[arm]["heldout_loss"], arms["sgd"]["heldout_loss"]
    gain = paired(plain, own).mean
    corrected = 1 - 0.05 / len(controls)
    left = {control: paired(arms[control]["heldout_loss"], own) for control in controls}
    beyond = {
        control: paired(
            [
                other - mine - LEFT * (base - mine)
                for other, mine, base in zip(arms[control]["heldout_loss"], own, plain)
            ],
            [0.0] * len(own),
            corrected,
        )
        for control in controls
    }
    nearest = min(controls, key=lambda control: left[control].low)
    explains = min(controls, key=lambda control: beyond[control].high)
    template, control = CANNOT_TELL, nearest
    if gain > 0 and beyond[explains].high < 0:
        template, control = DOES_NOT_SURVIVE, explains
    elif gain > 0 and all(one.low > 0 for one in left.values()):
        template = SURVIVES
    shown = left[control]
    return template.format(
        arm=SAYS[arm],
        control=SAYS[control],
        steps=f"{steps:,}",
        left=shown.mean,
        low=shown.low,
        high=shown.high,
        gain=gain,
        seeds="one seed" if len(own) == 1 else f"{len(own)} seeds",
        own=spanned(arms[arm]["passes_to_own_sgd_loss"]),
        its=spanned(arms[control]["passes_to_own_sgd_loss"]),
    )


def spanned(steps: Sequence[int | None]) -> str:
    """ "16–44", or "never" where no seed arrives, with how many where some do."""
    arrived = [step for step in steps if step is not None]
    if not arrived:
        return "never"
    low, high = min(arrived), max(arrived)
    text = f"{low:,}" if low == high else f"{low:,}–{high:,}"
    return text if len(arrived) == len(steps) else f"{text} ({len(arrived)} of {len(steps)} seeds)"


def table(experiment: Experiment) -> pd.DataFrame:
    """One row per arm, held-out first; "mean ± sample sd" over seeds, nats."""
    arms = summary(experiment)["arms"]
    rows = []
    for name, record in arms.items():
        says = f"Adam {record['rate']:g} (best of three)" if "rate" in record else SAYS[name]
        rows.append(
            {
                "arm": says,
                "held-out loss": _spread(record["heldout_loss"]),
                "above filter": _spread(record["heldout_excess"]),
                "KL": _spread(record["heldout_kl"]),
                "accuracy": _spread(record["heldout_accuracy"], 3),
                "entropy": _spread(record["heldout_entropy"], 3),
                "train loss": _spread(record["loss"]),
                "train above filter": _spread(record["excess"]),
                "steps to own SGD loss": spanned(record["steps_to_own_sgd_loss"]),
                "to mean": spanned(record["steps_to_mean_sgd_loss"]),
                "passes to own": spanned(record["passes_to_own_sgd_loss"]),
            }
        )
    return pd.DataFrame(rows)


def text(experiment: Experiment) -> str:
    """Table, floors, paired intervals and the two sentences, for a terminal."""
    found = summary(experiment)
    held_out, trained = (sum(found[name]) / len(found[name]) for name in ("heldout_filter_loss", "filter_loss"))
    several = len(experiment.seeds) > 1
    lines = [
        f"sticky chain, {experiment.steps:,} iterations, seeds {', '.join(map(str, experiment.seeds))}; nats",
        f"exact filter's own loss: held-out {held_out:.4f}, train {trained:.4f} (a training loss below it fits noise)",
        f"oracle that knows the hidden symbol: {experiment.oracle:.4f}",
        "",
        table(experiment).to_string(index=False),
        "",
    ]
    if several:
        lines.append(
            f"paired differences, 95 % (Student's t, {len(experiment.seeds) - 1} degrees of freedom); a seed changes"
        )
        lines.append("data and first weights together")
        for it in found["paired"]:
            name = f"{SAYS[it['arm']]} − {SAYS[it['against']]}"
            lines.append(f"  {it['measure']:<13}{it['mean']:+.4f} ± {it['high'] - it['mean']:.4f}  {name}")
        lines.append("")
    return "\n".join([*lines, *found["sentences"]])


def _spread(numbers: Sequence[float], places: int = 4) -> str:
    series = pd.Series(numbers)
    return f"{series.mean():.{places}f}" + (f" ± {series.std():.3f}" if len(series) > 1 else "")


def figure(experiment: Experiment) -> Any:
    """Held-out loss by passes, training loss by cumulative step length, and value trajectories; a matplotlib figure."""
    from matplotlib.figure import Figure

    points, paths = curves(experiment), trajectories(experiment)
    drawing = Figure(figsize=(15, 9), layout="constrained")
    axes = drawing.subplots(2, 3)
    colours = {name: f"C{place}" for place, name in enumerate(experiment.arms)}
    means = (
        points.groupby(["arm", "step"], sort=False)[["passes", "length", "heldout_loss", "loss"]].mean().reset_index()
    )
    panels = (
        (axes[0, 0], "passes", "heldout_loss", "passes (forward and backward)", "held-out loss, nats"),
        (axes[0, 1], "passes", "loss", "passes (forward and backward)", "training loss, nats"),
        (axes[0, 2], "length", "loss", "cumulative step length of all matrices", "training loss, nats"),
    )
    filters = {"heldout_loss": experiment.held_out_filter_loss, "loss": experiment.filter_loss}
    for axis, across, up, label, title in panels:
        for name in experiment.arms:
            chosen = means[(means["arm"] == name) & (means[across] > 0)]
            axis.plot(chosen[across], chosen[up], color=colours[name], label=_label(experiment, name), linewidth=1.4)
        floor = sum(filters[up]) / len(filters[up])
        axis.axhline(floor, color="black", linewidth=0.8, linestyle="--", label="exact filter's own loss")
        axis.axhline(
            experiment.oracle, color="grey", linewidth=0.8, linestyle=":", label="oracle that knows the symbol"
        )
        axis.set(xscale="log", xlabel=label, ylabel=title, ylim=(min(1.7, experiment.oracle - 0.1), 2.12))
    axes[0, 0].legend(fontsize=7)
    seed = experiment.seeds[0]
    for axis, name in zip(axes[1], ("sgd", "values_x10", "closed_form"), strict=True):
        own = paths[(paths["arm"] == name) & (paths["seed"] == seed)]
        for symbol, path in own.groupby("symbol"):
            axis.plot(path["first"], path["second"], color=f"C{symbol}", linewidth=1)
            axis.annotate(str(symbol), (path["first"].iloc[-1], path["second"].iloc[-1]), color=f"C{symbol}")
        shown = float(own["shown"].iloc[0])
        axis.set_title(
            f"{_label(experiment, name)}, seed {seed}: values of the symbols ({shown:.0%} of variance)", fontsize=9
        )
        axis.set(xlabel="first principal axis", ylabel="second principal axis")
    drawing.suptitle(f"Sticky chain, {len(experiment.seeds)} seeds (means), {experiment.steps:,} iterations")
    return drawing


def _label(experiment: Experiment, name: str) -> str:
    return experiment.arms[name].arm.says


def write(experiment: Experiment, folder: Path) -> None:
    """Figure (png, svg, pdf), tables (Parquet and CSV) and the JSON object into `folder`."""
    from ..export import write_frame, write_json

    drawing = figure(experiment)
    for ending in ("png", "svg", "pdf"):
        drawing.savefig(folder / f"em.{ending}", dpi=130)
    write_frame(table(experiment), folder / "arms")
    write_frame(curves(experiment), folder / "curves")
    write_frame(trajectories(experiment), folder / "trajectories")
    found = summary(experiment)
    write_frame(pd.DataFrame(found["paired"]), folder / "paired")
    write_json(found, folder / "run.json")
