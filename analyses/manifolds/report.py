"""The read-out of a model's vectors, site by site, beside its nulls: what `advantage-probe manifold` writes.

Shipped tunnel models are read at every asked position against the exact predictive entropy; pretrained ones at the last
token of the shipped prompts against their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..inputs.prompts import Prompts, residualised
from ..intervals.nulls import DRAWS
from ..vectors.collecting import By, Where, collect
from ..vectors.labelled import Rows, rows_of
from ..vectors.pca import Manifold, StreamingPCA
from ..vectors.readout import beside, read_out, unfurling
from ..weights.keys import fresh
from ..wind_tunnels.tasks.protocol import Tunnel
from ..wind_tunnels.training.models import build, logits
from ..wind_tunnels.training.recipes import Recipe
from ..wind_tunnels.training.runner import train
from ..wind_tunnels.truth.against_truth import batches as episode_batches
from ..wind_tunnels.truth.shipped import load as load_tunnel
from ..wind_tunnels.truth.shipped import untrained_like
from .exchanged import exchanged_model

Array = NDArray[np.float64]
Note = Callable[[int, int, str], None]

EPISODES = 256


@dataclass(frozen=True, eq=False)
class ManifoldReport:
    """`table` (rows per site and figure), `bases` and `points` (first two coordinates, entropies) per site, `record`."""

    table: pd.DataFrame
    bases: dict[str, Manifold]
    points: dict[str, tuple[Array, Array]]
    record: dict[str, Any] = field(default_factory=dict)


def _report(
    rows: Mapping[str, Rows],
    references: Mapping[str, Mapping[str, Rows]],
    *,
    name: str,
    where: Where,
    correlation: bool,
    draws: int,
    record: dict[str, Any],
    progress: Note | None,
) -> ManifoldReport:
    tables, bases, points = [], {}, {}
    for place, (site, part) in enumerate(rows.items()):
        basis = StreamingPCA(part.vectors.shape[1], correlation).update(part.vectors).finish(f"{name}: {site}, {where}")
        bases[site] = basis
        points[site] = (basis.project(part.vectors, min(2, len(basis.axes))), part.entropy)
        table = read_out(part, draws=draws, correlation_form=correlation)
        for reference, theirs in references.items():
            table = beside(table, reference, theirs[site], correlation)
        tables.append(table.assign(site=site))
        if progress is not None:
            progress(place + 1, len(rows), site)
    whole = pd.concat(tables, ignore_index=True)
    whole = whole[["site", *[column for column in whole.columns if column not in ("site", "note")], "note"]]
    told = {"model": name, "vectors": where, "correlation": correlation, "draws": draws, "references": list(references)}
    return ManifoldReport(whole, bases, points, told | record)


def tunnel_report(
    name: str,
    where: Where = "value",
    by: By = "head",
    *,
    episodes: int = EPISODES,
    exchanged: bool = True,
    correlation: bool = False,
    draws: int = DRAWS,
    seed: int = 0,
    progress: Note | None = None,
) -> ManifoldReport:
    """A shipped tunnel model (or the folder of a run) on fresh episodes; entropy is exact.

    Args:
        exchanged: also a model trained on targets exchanged between episodes (minutes, on first use).

    Raises:
        TunnelError: for a name that holds no tunnel model.
    """
    tunnel, model, card = load_tunnel(name)
    drawn = tunnel.sample(episodes, torch.Generator().manual_seed(seed))
    entropy = tunnel.entropy(drawn.tokens).numpy()
    models: dict[str, nn.Module] = {"": model, "untrained": untrained_like(card).eval()}
    if exchanged:
        models["exchanged targets"] = exchanged_model(tunnel, card)
    rows: dict[str, dict[str, Rows]] = {}
    for who, network in models.items():
        seen = collect(network, episode_batches(drawn, 32), where, "all")
        rows[who] = {site: rows_of(part, entropy, drawn.tokens) for site, part in seen.by(by).items()}
    own = rows.pop("")
    record = {"episodes": episodes, "seed": seed, "entropy": "exact predictive entropy of the task, bits"}
    return _report(
        own, rows, name=name, where=where, correlation=correlation, draws=draws, record=record, progress=progress
    )


def unfurling_report(
    tunnel: Tunnel,
    recipe: Recipe,
    steps: Iterable[int],
    layer: int,
    where: Where = "value",
    *,
    episodes: int = EPISODES,
    draws: int = DRAWS,
    seed: int = 0,
) -> pd.DataFrame:
    """Train in a tunnel and read one layer's vectors (heads side by side) before each of `steps`, on the same episodes: how
    the curve unfurls. Columns as `readout.unfurling`.
    """
    drawn = tunnel.sample(episodes, torch.Generator().manual_seed(seed))
    entropy = tunnel.entropy(drawn.tokens).numpy()
    wanted, done = set(steps), 0
    found: list[tuple[int, Rows]] = []

    def forward(network: nn.Module, tokens: Tensor) -> Tensor:
        nonlocal done
        if network.training:  # a training step, not the held-out error
            if done in wanted:
                seen = collect(network, episode_batches(drawn, 32), where, "all").by("layer")[f"L{layer}"]
                found.append((done, rows_of(seen, entropy, drawn.tokens)))
            done += 1
        return logits(network, tokens)

    train(tunnel, recipe, model=build(recipe.shape, tunnel, recipe.seed), forward=forward)
    return unfurling(found, draws)


def pretrained_report(
    model: nn.Module,
    prompts: Prompts,
    where: Where = "value",
    by: By = "layer",
    *,
    name: str,
    correlation: bool = True,
    layers: tuple[int, ...] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
    progress: Note | None = None,
) -> ManifoldReport:
    """A causal language model at the last token of every prompt; entropy is the model's own."""
    rows: dict[str, dict[str, Rows]] = {}
    note = ""
    for who, network in (("", model), ("fresh weights", fresh(model, seed))):
        seen = collect(network, prompts.batches(), where)
        rows[who] = {}
        for site, part in seen.by(by).items():
            if layers is not None and by != "model" and seen.layer_of(site) not in layers:
                continue
            vectors, keep, note = residualised(part[:, 0], prompts.last)
            zeros = np.zeros(len(vectors), dtype=np.int64)
            rows[who][site] = Rows(vectors, seen.entropy[keep, 0], zeros, np.arange(len(vectors)), zeros)
    own = rows.pop("")
    record = {
        "prompts": len(prompts.ids),
        "tokens": len(prompts.ids[0]),
        "left_out": prompts.short,
        "last_token": note,
        "entropy": "the model's own next-token entropy, bits",
    }
    return _report(
        own, rows, name=name, where=where, correlation=correlation, draws=draws, record=record, progress=progress
    )
