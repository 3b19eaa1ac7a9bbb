"""What the EM experiment says: the JSON object, the table, the paired intervals, two sentences, the files.

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

from ..files.export import TABLES, write_frame, write_json
from ..intervals.paired import Paired, paired
from .arms import ARMS
from .experiment import Experiment, curves, trajectories
from .pictures import write_pictures

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
    found = summary(experiment)
    says, rows = names(found), []
    for name, record in found["arms"].items():
        rows.append(
            {
                "arm": says[name],
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


def names(found: dict[str, Any]) -> dict[str, str]:
    """What every arm of a run's object is called."""
    return {
        name: f"Adam {arm['rate']:g} (best of three)" if "rate" in arm else SAYS[name]
        for name, arm in found["arms"].items()
    }


def write(experiment: Experiment, folder: Path, formats: Sequence[str] = TABLES, command: str = "") -> None:
    """Figures with data and captions, tables in `formats` and the JSON object into `folder`."""
    found = summary(experiment)
    tables = {"curves": curves(experiment), "trajectories": trajectories(experiment)}
    write_pictures(tables["curves"], tables["trajectories"], found, names(found), folder, command)
    for name, frame in (tables | {"arms": table(experiment), "paired": pd.DataFrame(found["paired"])}).items():
        write_frame(frame, folder / name, formats)
    write_json(found, folder / "run.json")
