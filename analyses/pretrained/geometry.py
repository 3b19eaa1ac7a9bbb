"""Paper III's geometry of a pretrained model, every figure beside its nulls.

Three things: are the columns of W_K orthogonal, does attention at the final query focus with depth, and do the values of
the final token lie in few dimensions, ordered by the model's own predictive entropy? The paper's pass rules are evaluated
as they stand, and beside them stands what a freshly initialised model of the same configuration scores under the same rule,
because a rule that a model without training passes says nothing.

Shapes: n prompts, H heads, d values of all key/value heads side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import nn

from ..inputs.precision import rounding_noise
from ..inputs.prompts import Prompts, residualised
from ..intervals.nulls import DRAWS, half_samples
from ..vectors.collecting import Collected, collect
from ..vectors.labelled import Rows
from ..vectors.readout import beside, line, order
from ..vectors.shapes import shape, shares
from ..weights.keys import cosines, fresh, head_columns, off_diagonal, orthogonality

Array = NDArray[np.float64]
Note = Callable[[int, int, str], None]

SHARE, COSINE, DROP = 0.30, 0.20, 0.30  # the thresholds of Paper III's rules


@dataclass(frozen=True, eq=False)
class Geometry:
    """`keys` (a row per key/value head), `attention` (a row per layer, and the focusing), `manifolds` (a row per prompt set
    and figure), `rules` (the pass rules), `copies` (figures of copies with rounding noise, empty without), `record`.
    """

    keys: pd.DataFrame
    attention: pd.DataFrame
    manifolds: pd.DataFrame
    rules: pd.DataFrame
    copies: pd.DataFrame
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def frames(self) -> dict[str, pd.DataFrame]:
        """The tables that hold something, by name."""
        named = {"keys": self.keys, "attention": self.attention, "manifolds": self.manifolds, "rules": self.rules}
        return named | ({"copies": self.copies} if len(self.copies) else {})


def geometry(
    model: nn.Module,
    sets: Mapping[str, Prompts],
    *,
    copies: int = 0,
    draws: int = DRAWS,
    seed: int = 0,
    progress: Note | None = None,
) -> Geometry:
    """All of it for one causal language model.

    Args:
        sets: prompts by name; the first set ("mixed") is the one that rules and attention profile are taken on.
        copies: how many copies with rounding noise to repeat the rules' figures on (for de-quantised weights).
        progress: told (done, all, what).

    Raises:
        UnsupportedFamily: where W_K cannot be told apart per head. Whatever the hooks refuse.
    """
    steps = len(sets) * 2 + 2 + copies
    done = 0

    def note(what: str) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, steps, what)

    initial = fresh(model, seed)
    keys = orthogonality(model, initial, draws=draws, seed=seed)
    note("keys")
    first = next(iter(sets))
    manifolds, attention = [], pd.DataFrame()
    for name, prompts in sets.items():
        seen = collect(model, prompts.batches(), attention=name == first)
        note(f"{name} prompts")
        started = collect(initial, prompts.batches(), attention=name == first)
        note(f"{name} prompts, fresh weights")
        if name == first:
            attention = focusing(seen, started, draws=draws, seed=seed)
            note("attention")
        manifolds.append(_manifold(seen, started, prompts, draws, seed).assign(prompts=name))
    table = pd.concat(manifolds, ignore_index=True)
    table = table[["prompts", *[column for column in table.columns if column != "prompts"]]]
    rules = pass_rules(keys, attention, table[table["prompts"] == first])
    repeated = []
    for copy in range(copies):
        with rounding_noise(model, seed + 1 + copy):
            repeated.append(_figures(model, sets[first]) | {"copy": copy + 1})
        note(f"copy {copy + 1}")
    last = list(seen.vectors)[-1]
    record = {"prompts": {name: len(part.ids) for name, part in sets.items()}, "value_layer": last, "draws": draws}
    record["tokens"] = {name: len(part.ids[0]) for name, part in sets.items()}
    record["left_out"] = {name: part.short for name, part in sets.items()}
    record["initial"] = "weights drawn anew by the library's initialisation, one draw"
    return Geometry(keys, attention, table, rules, pd.DataFrame(repeated), record)


def focusing(seen: Collected, started: Collected, *, draws: int = DRAWS, seed: int = 0) -> pd.DataFrame:
    """Attention entropy at the final query: per head first, then the mean over heads.

    One row per layer: `layer`, `entropy` (nats), `low`, `high` (95 %, half samples of prompts), `initial` (the same layer
    of the fresh model), `uniform` (ln of the visible keys); last a row "drop": 1 − last/first layer.
    """
    generator = np.random.default_rng(seed)
    layers = {name: part[:, 0].mean(1) for name, part in seen.attention_entropy.items()}
    fresh_layers = {name: float(part[:, 0].mean()) for name, part in started.attention_entropy.items()}
    rows = []
    for name, part in layers.items():
        low, high = half_samples(lambda chosen, part=part: float(part[chosen].mean()), len(part), generator, draws)  # type: ignore[misc]
        uniform = float(np.log(seen.visible[name]))
        rows.append([name, float(part.mean()), low, high, fresh_layers[name], uniform])
    top, bottom = next(iter(layers.values())), list(layers.values())[-1]

    def drop(chosen: NDArray[np.int64]) -> float:
        return float(1 - bottom[chosen].mean() / top[chosen].mean())

    low, high = half_samples(drop, len(top), generator, draws)
    around = list(fresh_layers.values())
    rows.append(["drop", drop(np.arange(len(top))), low, high, 1 - around[-1] / around[0], float("nan")])
    return pd.DataFrame(rows, columns=["layer", "entropy", "low", "high", "initial", "uniform"])


def _rows(seen: Collected, prompts: Prompts) -> tuple[Rows, str]:
    """Last layer, all heads side by side, one row per prompt."""
    vectors = list(seen.by("layer").values())[-1][:, 0]
    vectors, keep, note = residualised(vectors, prompts.last)
    entropy = seen.entropy[keep, 0]
    zeros = np.zeros(len(vectors), dtype=np.int64)
    return Rows(vectors, entropy, zeros, np.arange(len(vectors)), zeros), note


def _manifold(seen: Collected, started: Collected, prompts: Prompts, draws: int, seed: int) -> pd.DataFrame:
    """Shares of variance in correlation form, and the order of PC1 by the model's predictive entropy."""
    generator = np.random.default_rng(seed)
    rows, note = _rows(seen, prompts)
    found = shape(rows, generator, draws, correlation_form=True)
    lines = [line(name, part, note) for name, part in found.items()]
    from ..vectors.pca import pca

    first = pca(rows.vectors, correlation=True).project(rows.vectors, 1)[:, 0]
    lines.append(line("PC1 with entropy", order(first, rows, rows.position, generator, draws), note))
    table = pd.DataFrame(lines).assign(n=rows.sequences, d=rows.vectors.shape[1])
    return beside(table, "initial", _rows(started, prompts)[0], correlation_form=True)


def pass_rules(keys: pd.DataFrame, attention: pd.DataFrame, mixed: pd.DataFrame) -> pd.DataFrame:
    """Paper III's three rules: `rule`, `measured`, `low`, `high`, `passed`, `null` (what is held against it), `null_value`,
    `null_passes`.

    A rule that its null passes is no evidence of anything, and `says` tells so.
    """
    figures = mixed.set_index("figure")
    share = figures.loc["PC1+2 share"]
    one = figures.loc["PC1 share"]
    layers = keys.groupby("layer")[["orthogonality", "initial", "low", "high"]].mean()
    drop = attention.set_index("layer").loc["drop"]
    below = {name: float((layers[name] < COSINE).mean()) for name in layers}
    lines = [
        ("PC1 > 30 %", one["value"], one["low"], one["high"], SHARE, "columns permuted", one["null_mean"]),
        ("PC1+PC2 > 30 %", share["value"], share["low"], share["high"], SHARE, "columns permuted", share["null_mean"]),
        ("PC1+PC2 > 30 %", share["value"], share["low"], share["high"], SHARE, "fresh weights", share["initial"]),
        (
            "layers with mean |cos| < 0.20, ≥ half",
            below["orthogonality"],
            below["high"],
            below["low"],
            0.5 - 1e-12,
            "fresh weights",
            below["initial"],
        ),
        (
            "attention entropy falls > 30 %",
            drop["entropy"],
            drop["low"],
            drop["high"],
            DROP,
            "fresh weights",
            drop["initial"],
        ),
    ]
    table = pd.DataFrame(lines, columns=["rule", "measured", "low", "high", "least", "null", "null_value"])
    table["passed"] = table["measured"] > table["least"]
    table["null_passes"] = table["null_value"] > table["least"]
    table["says"] = [_says(*row) for row in zip(table["passed"], table["null_passes"], table["low"] <= table["least"])]
    return table.drop(columns="least")


def _says(passed: bool, null: bool, below: bool) -> str:
    if not passed:
        return "not passed"
    if null:
        return "nothing: its null passes too"
    return "passed, but its interval reaches below" if below else "passed, its null does not"


def verdict(rules: pd.DataFrame) -> str:
    """ "3 of 3 rules passed: signature" and the like, with how many of them their nulls pass as well."""
    groups = [
        ["PC1 > 30 %", "PC1+PC2 > 30 %"],
        ["layers with mean |cos| < 0.20, ≥ half"],
        ["attention entropy falls > 30 %"],
    ]
    passed = [bool(rules.loc[rules["rule"].isin(names), "passed"].any()) for names in groups]
    empty = [
        bool(rules.loc[rules["rule"].isin(names) & rules["passed"], "null_passes"].any()) and good
        for names, good in zip(groups, passed)
    ]
    name = {3: "signature", 2: "partial"}.get(sum(passed), "none")
    return f"{sum(passed)} of 3 rules passed ({name}); of these {sum(empty)} are passed by a null as well"


def _figures(model: nn.Module, prompts: Prompts) -> dict[str, float]:
    """The rules' figures alone."""
    seen = collect(model, prompts.batches(), attention=True)
    rows, _ = _rows(seen, prompts)
    one, two, ratio = shares(rows.vectors, True)
    columns = {name: off_diagonal(cosines(part)) for name, (_, part, _) in head_columns(model).items()}
    entropies = [float(part[:, 0].mean()) for part in seen.attention_entropy.values()]
    return {
        "PC1 share": one,
        "PC1+2 share": two,
        "participation ratio": ratio,
        "mean |cos|": float(np.mean(list(columns.values()))),
        "drop": 1 - entropies[-1] / entropies[0],
    }
