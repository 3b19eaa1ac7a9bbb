"""Decodable is not used: what a probe reads along an axis, beside what taking that axis out does to the model.

The axis is estimated on one half of the sequences; what it tells of entropy, and what its interventions do, are measured
on the other half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..inputs.corpus import Batch
from ..intervals.nulls import DRAWS
from ..vectors.collecting import collect
from ..vectors.labelled import rows_of
from ..vectors.readout import grouped, order
from ..wind_tunnels.tasks.protocol import Episodes, Tunnel
from ..wind_tunnels.truth.against_truth import batches as episode_batches
from .edits import Measure, Place, axis_effects, entropy_axis

Array = NDArray[np.float64]


def sequence_loss(model: nn.Module, batches: Sequence[Batch]) -> Measure:
    """A measure: the mean cross-entropy per target of every sequence, nats."""

    @torch.no_grad()
    def measure() -> Array:
        found = []
        for batch in batches:
            logits = model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits.double()
            each = nn.functional.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none")
            found.append(each.sum(1) / (batch.targets != -100).sum(1))
        return np.asarray(torch.cat(found).numpy())

    return measure


def half_of(episodes: Episodes, chosen: Tensor) -> Episodes:
    """Some of the episodes."""
    return Episodes(episodes.tokens[chosen], episodes.targets[chosen], {}, episodes.outcomes)


def decodable_and_used(
    tunnel: Tunnel,
    model: nn.Module,
    layer: int,
    *,
    place: Place = "value",
    episodes: int = 128,
    draws: int = DRAWS,
    seed: int = 0,
    measure: Callable[[nn.Module, Sequence[Batch]], Measure] = sequence_loss,
) -> pd.DataFrame:
    """The entropy axis of one layer (heads side by side) of a tunnel model.

    Returns:
        A row "decoded": the rank correlation of the axis's coordinate with exact entropy inside positions, on the second
        half of the episodes, with interval and permutation null (`isotropic_*` hold the null here); then the rows of
        `interventions.axis_effects` on the same half, in the units of the measure (nats per target).
    """
    drawn = tunnel.sample(episodes, torch.Generator().manual_seed(seed))
    first = half_of(drawn, torch.arange(episodes // 2))
    second = half_of(drawn, torch.arange(episodes // 2, episodes))
    site = f"L{layer}"
    fitted, held = (
        rows_of(
            collect(model, episode_batches(part, 64), place, "all").by("layer")[site],
            tunnel.entropy(part.tokens).numpy(),
            part.tokens,
        )
        for part in (first, second)
    )
    axis = entropy_axis(fitted.vectors, fitted.entropy)
    generator = np.random.default_rng(seed)
    read = order((held.vectors - held.vectors.mean(0)) @ axis, held, grouped(held.position), generator, draws)
    rows: list[dict[str, Any]] = []
    if read is not None:
        told = {"what": "decoded: r with entropy inside positions", "effect": read.value, "low": read.low}
        told |= {"high": read.high, "n": held.sequences, "isotropic_mean": read.null, "isotropic_p": read.p}
        rows.append(told)
    parts = list(episode_batches(second, 64))
    effects = axis_effects(model, measure(model, parts), held.vectors, axis, layer, place=place, draws=draws, seed=seed)
    return pd.concat([pd.DataFrame(rows), effects], ignore_index=True).assign(layer=layer, place=place)
