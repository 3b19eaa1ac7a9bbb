"""A tunnel model's heads against the exact posterior of its task.

Three questions per head, each inside positions, so that the clock alone answers none of them: does attention spread out,
does the loss still want it elsewhere, and does the value say how uncertain a perfect Bayesian would be here?

Shapes: n episodes, L positions, H heads, V value width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import nn

from ....hooks.attach import calls
from ....hooks.call import AttentionCall
from ....probe.state import Key, label
from ...inputs.corpus import Batch
from ...runs.analyze import Progress, collect
from ...runs.run import Run
from ..tasks.protocol import Episodes, Tunnel
from .shipped import load

DRAWS = 200
FEWEST = 8  # episodes at a position, below which a correlation is not taken

Array = NDArray[np.float64]


class Names:
    """A tunnel's token names, in the shape of a tokenizer."""

    pad_token_id = 0

    def __init__(self, vocabulary: tuple[str, ...]) -> None:
        self.vocabulary = vocabulary

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.vocabulary[number] for number in ids)


@dataclass(frozen=True, eq=False)
class Compared:
    """The run, and one row per head that holds it against the exact posterior."""

    run: Run
    truth: pd.DataFrame


def batches(episodes: Episodes, size: int) -> Iterator[Batch]:
    """Episodes as batches of ids, with targets as token ids, −100 where nothing is asked."""
    outcomes = torch.tensor(episodes.outcomes)
    targets = torch.where(episodes.targets >= 0, outcomes[episodes.targets.clamp(min=0)], -100)
    for ids, wanted in zip(episodes.tokens.split(size), targets.split(size)):
        yield Batch(ids, torch.ones_like(ids), wanted)


def analyze_tunnel(
    name: str, *, episodes: int = 256, seed: int = 0, edges: int = 64, check: int = 0, progress: Progress | None = None
) -> Compared:
    """Analyse a shipped tunnel model on fresh episodes, and hold its heads against the exact posterior.

    Raises:
        TunnelError: for a name or folder that holds no tunnel model.
    """
    tunnel, model, _ = load(name)
    model = model.eval().requires_grad_(False)
    drawn = tunnel.sample(episodes, torch.Generator().manual_seed(seed))
    told = {"task": name, "texts": [f"{episodes} fresh episodes, seed {seed}"], "window_tokens": drawn.tokens.shape[1]}
    told |= {"texts_digest": _digest(drawn.tokens.tolist()), "tokenizer_digest": _digest(tunnel.vocabulary)}
    run = collect(
        model,
        ((batch, None) for batch in batches(drawn, 32)),
        episodes,
        tokenizer=Names(tunnel.vocabulary),
        name=name,
        edges=edges,
        check=check,
        entropy=tunnel.entropy(drawn.tokens).numpy(),
        progress=progress,
        record=told,
    )
    return Compared(run, against(tunnel, model, drawn, run, seed))


def against(tunnel: Tunnel, model: nn.Module, drawn: Episodes, run: Run, seed: int) -> pd.DataFrame:
    """One row per head.

    Columns: `entropy_r` correlation of the head's attention entropy with the exact predictive entropy H, inside
    positions; `missed_r` the same for advantage_missed; `value_r2` held-out share of H's variance inside positions that a
    linear map of the head's value explains; each with `_p`, an upper bound on the chance of as much when H is exchanged
    between episodes at the same position (200 draws).
    """
    truth = tunnel.entropy(drawn.tokens).numpy()  # (n, L), NaN where nothing is asked
    generator = np.random.default_rng(seed)
    values = _values(model, drawn)
    rows = run.tokens[run.tokens["side"] == "query"]
    table = []
    for head, part in rows.groupby("label", observed=True, sort=False):
        row: dict[str, Any] = {"head": str(head)}
        for name, column in (("entropy_r", "entropy"), ("missed_r", "advantage_missed")):
            seen = np.full(truth.shape, np.nan)
            seen[part["sequence"].to_numpy(int), part["position"].to_numpy(int)] = part[column].to_numpy(float)
            row[name], row[f"{name[:-2]}_p"] = _tested(seen, truth, generator)
        row["value_r2"], row["value_p"] = _explained(values[str(head)], truth, generator)
        table.append(row)
    return pd.DataFrame(table)


def _inside(numbers: Array) -> Array:
    """Numbers (n, L) less their mean at each position, over their spread there; NaN at positions that do not vary."""
    with np.errstate(invalid="ignore", divide="ignore"):
        centred = numbers - np.nanmean(numbers, 0, keepdims=True)
        spread = np.sqrt(np.nanmean(centred**2, 0, keepdims=True))
        enough = (np.isfinite(numbers).sum(0, keepdims=True) >= FEWEST) & (spread > 1e-9)
        return np.where(enough, centred / spread, np.nan)


def _exchanged(numbers: Array, generator: np.random.Generator) -> Array:
    return np.take_along_axis(numbers, generator.random(numbers.shape).argsort(0), 0)


def _tested(seen: Array, truth: Array, generator: np.random.Generator) -> tuple[float, float]:
    """Mean correlation inside positions, and the permutation bound on p."""
    asked = np.isfinite(truth).all(0)
    one, other = _inside(seen[:, asked]), _inside(truth[:, asked])
    if not np.isfinite(one * other).any():
        return float("nan"), float("nan")
    observed = float(np.nanmean(one * other))
    null = [abs(np.nanmean(one * _exchanged(other, generator))) for _ in range(DRAWS)]
    return observed, (1 + sum(draw >= abs(observed) for draw in null)) / (DRAWS + 1)


def _explained(values: Array, truth: Array, generator: np.random.Generator) -> tuple[float, float]:
    """Held-out R² inside positions of H on values (n, L, V): fitted on one half of the episodes, read on the other."""
    asked = np.isfinite(truth).all(0)
    target = _inside(truth[:, asked])
    use = np.isfinite(target).all(0)
    if not use.any():
        return float("nan"), float("nan")
    target, inputs = target[:, use], values[:, asked][:, use]
    inputs = inputs - inputs.mean(0, keepdims=True)
    half = len(target) // 2
    fit, held = inputs[:half].reshape(-1, inputs.shape[-1]), inputs[half:].reshape(-1, inputs.shape[-1])
    ridge = 1e-3 * np.trace(fit.T @ fit) / fit.shape[1] * np.eye(fit.shape[1])
    solve = np.linalg.solve(fit.T @ fit + ridge, fit.T)

    def score(wanted: Array) -> float:
        guess = held @ (solve @ wanted[:half].reshape(-1))
        rest = wanted[half:].reshape(-1)
        return float(1 - ((rest - guess) ** 2).sum() / (rest**2).sum())

    observed = score(target)
    null = [score(_exchanged(target, generator)) for _ in range(DRAWS)]
    return observed, (1 + sum(draw >= observed for draw in null)) / (DRAWS + 1)


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _values(model: nn.Module, drawn: Episodes) -> dict[str, Array]:
    """The values of every head, (n, L, V)."""
    found: dict[str, list[Array]] = {}

    def keep(call: AttentionCall) -> None:
        key = Key(call.site, call.use)
        for head in range(call.query.shape[1]):
            values = call.value[:, head // call.group].double().cpu().numpy()
            found.setdefault(label(key, head), []).append(values)

    with calls(model, keep, forward=True), torch.no_grad():
        for batch in batches(drawn, 64):
            model(input_ids=batch.ids, use_cache=False)
    return {name: np.concatenate(parts) for name, parts in found.items()}
