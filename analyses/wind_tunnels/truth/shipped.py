"""Trained models that come with the package, and the figures each is held to, recomputed from its weights.

A model's folder holds `model.safetensors` and `card.json`; the card names the tunnel, the recipe and the command.
`evaluate` draws fresh sequences, prints every rival in the rows above the model, and lists the checks a shipped model
has to pass.

Shapes: n sequences, L positions, O outcomes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor, nn

from ..errors import UnknownTunnel, UnusableCheckpoint
from ..tasks.protocol import Tunnel
from ..tasks.registry import tunnel
from ..training.checkpoints import load_card, load_weights
from ..training.models import Shape, build
from ..training.recorded import recorded_controls
from ..training.runner import Progress
from .beliefs import BeliefProbe, probe_beliefs
from .calibration import Errors, by_position, errors, held_out, model_rows, table

MODELS = Path(__file__).parent.parent / "models"


@dataclass(frozen=True)
class Check:
    """One figure of a model: what was measured, and what it has to stay at or below (or above, where `least`)."""

    what: str
    measured: float
    bound: float
    least: bool = False

    @property
    def passed(self) -> bool:
        return self.measured >= self.bound if self.least else self.measured <= self.bound


@dataclass(frozen=True)
class Evaluation:
    """`tables` by title, rivals first; `positions` of the model; `checks`, empty for a model held to nothing; `controls`,
    the recorded figures of networks without attention, where there are any.
    """

    name: str
    tables: dict[str, pd.DataFrame]
    positions: pd.DataFrame
    checks: list[Check] = field(default_factory=list)
    probe: BeliefProbe | None = None
    controls: pd.DataFrame | None = None


def shipped_names() -> tuple[str, ...]:
    """Names of the models in the package."""
    return tuple(sorted(path.parent.name for path in MODELS.glob("*/card.json")))


def folder_of(name_or_folder: str) -> Path:
    """The folder of a shipped name or of one's own run; raises `UnknownTunnel` with the names there are."""
    for folder in (MODELS / name_or_folder, Path(name_or_folder)):
        if (folder / "card.json").is_file():
            return folder
    raise UnknownTunnel(
        f"{name_or_folder!r} is neither a shipped model ({', '.join(shipped_names())}) nor a folder with a card.json"
    )


def load(name_or_folder: str) -> tuple[Tunnel, nn.Module, dict[str, Any]]:
    """Tunnel, model in eval mode (float32) and card."""
    folder = folder_of(name_or_folder)
    card = load_card(folder)
    try:
        name, shape, seed = card["tunnel"], Shape(**card["recipe"]["shape"]), int(card["recipe"]["seed"])
    except (KeyError, TypeError) as error:
        raise UnusableCheckpoint(
            f"{folder / 'card.json'} lacks tunnel, recipe.shape or recipe.seed: {error}"
        ) from error
    task = tunnel(name)
    model = build(shape, task, seed)
    load_weights(folder, model)
    return task, model.eval(), card


def evaluate(
    name_or_folder: str, sequences: int = 2_000, seed: int = 0, progress: Progress | None = None
) -> Evaluation:
    """Recompute the figures of a trained model on `sequences` fresh sequences; `progress` is told (parts, in all, note)."""
    told = progress or (lambda done, whole, note: None)
    task, model, card = load(name_or_folder)
    name = card["tunnel"]
    episodes = held_out(task, sequences, seed)
    told(1, 5, "exact posteriors")
    truth = task.predictive(episodes.tokens)
    told(2, 5, "the model")
    rows = model_rows(model, episodes.tokens, task.outcomes)
    told(3, 5, "its rivals")
    tables = {"all supervised positions": table(task, {"model": rows}, episodes)}
    found = errors(rows[0], truth, rows[1])
    own = _OWN_CHECKS.get(name) if folder_of(name_or_folder).parent == MODELS else None  # one's own run owes nothing
    checks: list[Check] = []
    probe = None
    if own is not None:
        context = _Context(task, model, card, episodes.tokens, truth, rows, found, tables, sequences, seed)
        told(4, 5, "its checks")
        checks, probe = own(context)
    told(5, 5, "")
    return Evaluation(name, tables, by_position(found), checks, probe, recorded_controls(folder_of(name_or_folder)))


@dataclass(frozen=True)
class _Context:
    task: Any
    model: nn.Module
    card: dict[str, Any]
    tokens: Tensor
    truth: Tensor
    rows: tuple[Tensor, Tensor]
    found: Errors
    tables: dict[str, pd.DataFrame]
    sequences: int
    seed: int

    def subset(self, title: str, keep: Tensor) -> pd.DataFrame:
        """Add the table of the positions in `keep` (n, L)."""
        episodes = held_out(self.task, self.sequences, self.seed)
        self.tables[title] = table(self.task, {"model": self.rows}, episodes, keep)
        return self.tables[title]

    def model_figure(self, title: str, column: str) -> float:
        return float(self.tables[title].at["model", column])


Checked = tuple[list[Check], BeliefProbe | None]


def _bijection_repeats(context: _Context) -> Checked:
    seen = context.task.entropy(context.tokens) == 0
    repeated = context.subset("repeated keys alone", seen)
    overall = context.model_figure("all supervised positions", "entropy_error")
    return [
        Check("entropy error, all keys, bits", overall, 0.03),
        Check("entropy error, repeated keys alone, bits", float(repeated.at["model", "entropy_error"]), 0.03),
    ], None


def _bijection_distinct(context: _Context) -> Checked:
    overall = context.model_figure("all supervised positions", "entropy_error")
    return [Check("entropy error, all keys, bits", overall, 0.03)], None


def _hmm(context: _Context) -> Checked:
    task, checks = context.task, []
    main = context.tables["all supervised positions"]
    rival = min(float(main.at["last 3 observations", "kl"]), 0.0148)
    what = "KL, bits, against a third of the last-3-observations filter's, or of 0.0148 where that is less"
    checks.append(Check(what, float(main.at["model", "kl"]), rival / 3))
    for factor in (1.5, 2.5):
        length = task.header + round(factor * task.observations)
        episodes = held_out(task, context.sequences, context.seed, length)
        rows = model_rows(context.model, episodes.tokens, task.outcomes)
        context.tables[f"{factor:g} times the trained length"] = table(task, {"model": rows}, episodes)
    return checks, None


def _belief_probe(context: _Context) -> BeliefProbe:
    probe = probe_beliefs(context.task, context.model, untrained_like(context.card), context.sequences, context.seed)
    context.tables["affine probes of the exact belief, positions after 6 tokens, split by prefix"] = probe.scores
    return probe


def _mess3(context: _Context) -> Checked:
    probe = _belief_probe(context)
    last = f"layer {context.card['recipe']['shape']['layers']}"
    missed = {who: 1 - float(probe.scores.at[f"{who}, {last}", "r2"]) for who in ("trained", "untrained")}
    return [
        Check("KL of the next symbol, bits", context.model_figure("all supervised positions", "kl"), 0.001),
        Check(
            "1 − R² of the last layer, against a third of the untrained network's",
            missed["trained"],
            missed["untrained"] / 3,
        ),
    ], probe


def _rrxor(context: _Context) -> Checked:
    probe = _belief_probe(context)
    return [
        Check("KL of the next symbol, bits", context.model_figure("all supervised positions", "kl"), 0.01),
        Check("R² of all layers together", float(probe.scores.at["trained, all layers", "r2"]), 0.75, least=True),
    ], probe


def _selection(context: _Context) -> Checked:
    belief = context.task.posterior(context.tokens).values[..., 0]
    pairs = context.task.contest.class_asked(context.tokens.shape[1]).expand_as(belief)
    between = (belief > 1e-9) & (belief < 1 - 1e-9) & ((belief - 0.5).abs() > 1e-9)
    context.subset("class, posterior none of 0, ½, 1", pairs & between)
    context.subset("class", pairs)
    error = context.model_figure("class", "total_variation")
    return [Check("class posterior error", error, 0.007)], None


_OWN_CHECKS: dict[str, Callable[[_Context], Checked]] = {
    "bijection-repeats": _bijection_repeats,
    "bijection-distinct": _bijection_distinct,
    "hmm": _hmm,
    "mess3": _mess3,
    "rrxor": _rrxor,
    "selection": _selection,
}


def untrained_like(card: dict[str, Any]) -> nn.Module:
    """A fresh network of the shape a card records, from another seed."""
    return build(Shape(**card["recipe"]["shape"]), tunnel(card["tunnel"]), int(card["recipe"]["seed"]) + 1)
