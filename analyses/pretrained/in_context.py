"""In-context evidence: does a language model weigh labelled examples as Bayes' rule does?

The protocol: a latent label is one of two with probability ½; k examples carry labels that match the latent one with
probability 0.9; the prompt ends where the label of one more example is due. What is predicted there is a *label*, so the
right answer is the label predictive 0.9 p + 0.1 (1 − p) with p = σ((n₁ − n₂) ln 9) from the labels actually drawn. The
latent posterior p itself is what earlier work compared with; it is shown for comparison and marked, for a perfect
Bayesian scores 0.287 bits of entropy error against it.

Shapes: n prompts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import nn

from ..intervals.nulls import DRAWS, bound, exchanged, half_samples
from ..vectors.collecting import Collected, collect
from ..vectors.pca import pca
from ..vectors.readout import inside
from .evidence import (
    SHOTS,
    beta_bernoulli,
    binary_entropy,
    constant_against_latent,
    expected_entropy,
    perfect_against_latent,
    posterior,
    predictive,
)
from .trials import CONTROLS, PER, Trials, batches, label_pairs, trials

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@torch.no_grad()
def label_odds(model: nn.Module, drawn: Trials) -> tuple[Array, Array]:
    """Per prompt the model's log-odds of the first label over the second, and the mass on both together."""
    odds, mass = [], []
    device = next(model.parameters()).device
    keeps = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    for batch in batches(drawn):
        given = {"input_ids": batch.ids.to(device), "attention_mask": batch.mask.to(device), "use_cache": False}
        logs = (
            torch.log_softmax(model(**given, **keeps).logits[:, -1].double(), -1)[:, list(drawn.labels)].cpu().numpy()
        )
        odds.append(logs[:, 0] - logs[:, 1])
        mass.append(np.exp(logs).sum(1))
    return np.concatenate(odds), np.concatenate(mass)


def divergence(truth: Array, guess: Array) -> Array:
    """KL(truth ‖ guess) of two-valued distributions given by their first probability, bits; guesses within 1e-12 of 0 or 1
    are moved there.
    """
    guess = np.clip(guess, 1e-12, 1 - 1e-12)
    with np.errstate(divide="ignore", invalid="ignore"):
        one = np.where(truth > 0, truth * np.log2(truth / guess), 0.0)
        other = np.where(truth < 1, (1 - truth) * np.log2((1 - truth) / (1 - guess)), 0.0)
    return np.asarray(one + other)


def _best_constant(truth: Array, groups: Ints) -> Array:
    """The probability that is best in mean KL, one per group: the mean of the truth."""
    return np.asarray((np.bincount(groups, truth) / np.maximum(np.bincount(groups), 1))[groups])


def _best_entropy(truth: Array, groups: Ints) -> Array:
    """The entropy that is best in mean absolute error, one per group: the median."""
    found = np.empty_like(truth)
    for group in np.unique(groups):
        found[groups == group] = np.median(binary_entropy(truth[groups == group]))
    return found


def rivals(drawn: Trials) -> dict[str, tuple[Array, Array]]:
    """Per baseline its probabilities and its entropies (n,): constants, copying the last label, counting labels."""
    truth, none, groups = drawn.truth(), np.zeros_like(drawn.shots), drawn.shots
    copying = np.where(drawn.last < 0, 0.5, np.where(drawn.last == 0, predictive(1, 0), predictive(0, 1)))
    with np.errstate(invalid="ignore"):
        counting = np.where(drawn.shots == 0, 0.5, drawn.first / np.maximum(drawn.shots, 1))
    counting = np.clip(counting, 0.01, 0.99)
    counted = beta_bernoulli(drawn.first, drawn.second)
    return {
        "best constant": (_best_constant(truth, none), _best_entropy(truth, none)),
        "best constant per k": (_best_constant(truth, groups), _best_entropy(truth, groups)),
        "copy the last label": (copying, binary_entropy(copying)),
        "label frequency, within [.01, .99]": (counting, binary_entropy(counting)),
        "Beta–Bernoulli predictive": (counted, binary_entropy(counted)),
        "perfect Bayesian": (truth, binary_entropy(truth)),
    }


def scored(drawn: Trials, odds: Array, *, draws: int = DRAWS, seed: int = 0) -> pd.DataFrame:
    """The model in the last row, every rival above it.

    Columns, bits: `kl` of the right answer to the guess, `entropy_error` mean |H(guess) − H(right answer)|, `latent_error`
    the same against the latent posterior (marked: not what is predicted), each with `_low`, `_high` (95 %, half samples of
    prompts); `kl_null` and `kl_p`: mean KL when answers are exchanged between prompts of the same k, and the bound on p.
    """
    generator = np.random.default_rng(seed)
    truth = drawn.truth()
    hidden = posterior(drawn.first, drawn.second)
    guesses = rivals(drawn)
    model = 1 / (1 + np.exp(-odds))
    guesses["model"] = (model, binary_entropy(model))
    rows = []
    for name, (guess, entropy) in guesses.items():
        parts = {
            "kl": divergence(truth, guess),
            "entropy_error": np.abs(entropy - binary_entropy(truth)),
            "latent_error": np.abs(entropy - binary_entropy(hidden)),
        }
        row: dict[str, Any] = {"source": name}
        for column, part in parts.items():
            row[column] = float(part.mean())
            low, high = half_samples(lambda chosen, part=part: float(part[chosen].mean()), len(part), generator, draws)  # type: ignore[misc]
            row[f"{column}_low"], row[f"{column}_high"] = low, high
        null = [divergence(truth, exchanged(guess, drawn.shots, generator)).mean() for _ in range(draws)]
        row["kl_null"] = float(np.mean(null))
        row["kl_p"] = bound(row["kl"], np.array(null), "small")
        rows.append(row)
    return pd.DataFrame(rows)


def by_shots(drawn: Trials, odds: Array) -> pd.DataFrame:
    """Per k: mean entropies of model, label predictive (with its expectation) and latent posterior, and the model's KL."""
    guess, truth = 1 / (1 + np.exp(-odds)), drawn.truth()
    hidden = posterior(drawn.first, drawn.second)
    rows = []
    for count in np.unique(drawn.shots):
        here = drawn.shots == count
        rows.append(
            {
                "k": int(count),
                "prompts": int(here.sum()),
                "model": float(binary_entropy(guess[here]).mean()),
                "label_predictive": float(binary_entropy(truth[here]).mean()),
                "expected": expected_entropy(int(count)) if drawn.informative else 1.0,
                "latent_posterior_not_predicted": float(binary_entropy(hidden[here]).mean()),
                "kl": float(divergence(truth[here], guess[here]).mean()),
            }
        )
    return pd.DataFrame(rows)


def slope(drawn: Trials, odds: Array, *, draws: int = DRAWS, seed: int = 0) -> pd.DataFrame:
    """The model's log-odds as a line in the label predictive's log-odds: `slope` (1: as much as Bayes; 0: none) and
    `intercept` (a liking for one label), with intervals, and the slope when answers are exchanged inside k.
    """
    generator = np.random.default_rng(seed)
    right = predictive(drawn.first, drawn.second)
    inputs = np.log(right) - np.log1p(-right)

    def fit(chosen: Ints, given: Array) -> tuple[float, float]:
        one, other = inputs[chosen], given[chosen]
        spread = ((one - one.mean()) ** 2).sum()
        steep = float(((one - one.mean()) * (other - other.mean())).sum() / spread) if spread > 0 else float("nan")
        return steep, float(other.mean() - steep * one.mean())

    every = np.arange(len(odds))
    value = fit(every, odds)
    null = np.array([fit(every, exchanged(odds, drawn.shots, generator)) for _ in range(draws)])
    rows = []
    for place, name in enumerate(("slope", "intercept")):
        low, high = half_samples(lambda chosen, place=place: fit(chosen, odds)[place], len(odds), generator, draws)  # type: ignore[misc]
        p = bound(value[0], null[:, 0], "both") if name == "slope" else float("nan")
        mean = float(null[:, 0].mean()) if name == "slope" else float("nan")
        rows.append({"figure": name, "value": value[place], "low": low, "high": high, "null_mean": mean, "p": p})
    return pd.DataFrame(rows)


def reliability(drawn: Trials, odds: Array, bins: int = 5) -> pd.DataFrame:
    """Prompts in `bins` equally filled bins of the model's probability: means of `model` and of the `right` answer."""
    guess, right = 1 / (1 + np.exp(-odds)), drawn.truth()
    order = np.argsort(guess, kind="stable")
    rows = [
        {"model": float(guess[part].mean()), "right": float(right[part].mean()), "prompts": len(part)}
        for part in np.array_split(order, bins)
        if len(part)
    ]
    return pd.DataFrame(rows)


def coordinates(drawn: Trials, seen: Collected, *, draws: int = DRAWS, seed: int = 0) -> pd.DataFrame:
    """Rank correlation, within k, of the first two axes of every layer's final-token values with the evidence n₁ − n₂ and
    with the label predictive's entropy. Null: exchanged inside k. Intervals: half samples of prompts.
    """
    generator = np.random.default_rng(seed)
    evidence = (drawn.first - drawn.second).astype(np.float64)
    entropy = binary_entropy(predictive(drawn.first, drawn.second))
    groups = np.unique(drawn.shots, return_inverse=True)[1]
    rows = []
    for layer, vectors in seen.by("layer").items():
        projected = pca(vectors[:, 0], correlation=True).project(vectors[:, 0], 2)
        for axis in (0, 1):
            for name, target in (("evidence", evidence), ("entropy", entropy)):
                one, other = inside(projected[:, axis], groups), inside(target, groups)
                both = np.isfinite(one * other)
                if not both.any():
                    continue
                value = float((one * other)[both].mean())
                null = np.array(
                    [(one[both] * exchanged(other[both], groups[both], generator)).mean() for _ in range(draws)]
                )

                def again(chosen: Ints, axis: int = axis, target: Array = target, place: Array = projected) -> float:
                    product = inside(place[chosen, axis], groups[chosen]) * inside(target[chosen], groups[chosen])
                    return float(np.nanmean(product)) if np.isfinite(product).any() else float("nan")

                low, high = half_samples(again, len(groups), generator, draws, (-1.0, 1.0))
                rows.append(
                    {
                        "layer": layer,
                        "axis": axis + 1,
                        "with": name,
                        "r": value,
                        "low": low,
                        "high": high,
                        "null_edge": float(np.quantile(np.abs(null), 0.95)),
                        "p": bound(value, null, "both"),
                    }
                )
    return pd.DataFrame(rows)


@dataclass(frozen=True, eq=False)
class InContext:
    """Frames by control (`scores`, `shots`, `slopes`, `reliability`), `coordinates` of the main prompts, `record`."""

    scores: pd.DataFrame
    shots: pd.DataFrame
    slopes: pd.DataFrame
    reliability: pd.DataFrame
    coordinates: pd.DataFrame
    record: dict[str, Any]

    @property
    def frames(self) -> dict[str, pd.DataFrame]:
        names = ("scores", "shots", "slopes", "reliability", "coordinates")
        return {name: getattr(self, name) for name in names}


def in_context(
    model: nn.Module,
    tokenizer: Any,
    *,
    labels: Sequence[str] | None = None,
    per: int = PER,
    draws: int = DRAWS,
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> InContext:
    """The protocol and its controls for one causal language model.

    Args:
        labels: two words that are single tokens of the tokenizer (with a space before them); default: the first pair of a
            list that is. per: prompts for each k.

    Raises:
        BadInput: for labels that are not single tokens. Whatever the hooks refuse.
    """
    main, other = label_pairs(tokenizer, labels)
    tables: dict[str, list[pd.DataFrame]] = {"scores": [], "shots": [], "slopes": [], "reliability": []}
    masses, placed = {}, pd.DataFrame()
    for step, control in enumerate(CONTROLS):
        drawn = trials(tokenizer, other if control == "remapped" else main, control, per, seed)
        odds, mass = label_odds(model, drawn)
        masses[control] = float(mass.mean())
        found = {
            "scores": scored(drawn, odds, draws=draws, seed=seed),
            "shots": by_shots(drawn, odds),
            "slopes": slope(drawn, odds, draws=draws, seed=seed),
            "reliability": reliability(drawn, odds),
        }
        for name, table in found.items():
            tables[name].append(table.assign(control=control))
        if control == "main":
            placed = coordinates(drawn, collect(model, batches(drawn)), draws=draws, seed=seed)
        if progress is not None:
            progress(step + 1, len(CONTROLS), control)
    record = {
        "labels": {"main": main, "remapped": other},
        "prompts": per * len(SHOTS),
        "label_mass": masses,
        "perfect_against_latent": perfect_against_latent(),
        "constant_against_latent": constant_against_latent(False),
        "constant_per_k_against_latent": constant_against_latent(True),
        "draws": draws,
        "seed": seed,
    }
    joined = {name: pd.concat(parts, ignore_index=True) for name, parts in tables.items()}
    return InContext(**joined, coordinates=placed, record=record)
