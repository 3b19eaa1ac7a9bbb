"""What it costs to cut the axis of a curve, beside axes that the same vectors vary along as much.

Decodable is not used. The axis is the first one of the group means of one half of the episodes; on the other half it is
taken out of the values (or outputs) of one layer, and the loss is held against cuts along random axes drawn from the
covariance of the same vectors, orthogonal to it. An isotropic axis would be no rival: vectors hardly vary along it.

Shapes: n episodes, N rows, F numbers of a layer's heads side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import nn

from ..intervals.nulls import bound
from ..wind_tunnels.tasks.protocol import Episodes
from ..wind_tunnels.truth.against_truth import batches
from .decodable import half_of, sequence_loss
from .edits import Edit, Place, cut, intervene, random_axes

Array = NDArray[np.float64]

AXES = 60  # random ones


@dataclass(frozen=True)
class Cut:
    """Cost in nats per target on `episodes` held-out episodes, with its 95 % interval over them; `random`, `random_low`,
    `random_high`: mean and 95 % range of the random axes; `p`: upper bound for a random axis that costs as much.
    """

    site: str
    cost: float
    low: float
    high: float
    random: float
    random_low: float
    random_high: float
    p: float
    share: float
    random_share: float
    episodes: int


def cut_axis(
    model: nn.Module,
    episodes: Episodes,
    held: NDArray[np.int64],
    rows: Array,
    axis: Array,
    layer: int,
    *,
    place: Place = "value",
    axes: int = AXES,
    seed: int = 0,
) -> Cut:
    """Cut `axis` (F,) out of one layer on the episodes numbered `held`.

    Args:
        rows: (N,F) vectors of the layer, of other episodes: their mean is what is cut to, their covariance draws the random
            axes; `share` of their variance lies along the axis, `random_share` along the random ones.
    """
    import torch

    generator = np.random.default_rng(seed)
    part = half_of(episodes, torch.as_tensor(held))
    measure = sequence_loss(model, list(batches(part, 64)))
    centre = rows.mean(0)
    before = measure()

    def cost(direction: Array) -> Array:
        with intervene(model, Edit(layer, cut(direction, centre), place)):
            return np.asarray(measure() - before)

    own = cost(axis)
    within = random_axes(axis, axes, generator, rows)
    others = np.array([cost(other).mean() for other in within])
    spread = ((rows - centre) ** 2).sum()
    unit = axis / np.linalg.norm(axis)
    half = 1.96 * own.std(ddof=1) / np.sqrt(len(own))
    low, high = np.quantile(others, [0.025, 0.975])
    mean = float(own.mean())
    return Cut(
        f"L{layer}",
        mean,
        mean - float(half),
        mean + float(half),
        float(others.mean()),
        float(low),
        float(high),
        bound(mean, others, "large"),
        float((((rows - centre) @ unit) ** 2).sum() / spread),
        float(np.mean([(((rows - centre) @ other) ** 2).sum() / spread for other in within])),
        len(own),
    )


def table(found: list[Cut]) -> pd.DataFrame:
    """One row a layer."""
    return pd.DataFrame([vars(one) for one in found])
