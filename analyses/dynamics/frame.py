"""Frame and precision: when attention maps settle, and when the answers do.

A "dissociation index" moves from 1.09 to .023 with the scale on which precision is read, and a distance to the final
checkpoint reaches 90 % by construction. So: F(t), the mean Jensen–Shannon divergence of attention rows from those at the
end, over that at the start, on fixed sequences; P(t), the excess cross-entropy over Bayes; the 90 % time of each on a
linear and a log scale (four numbers, never one); and the same with the run cut at ½ and ¼.

Shapes: n sequences, H heads of all layers, T positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

DONE = 0.9


def divergence(one: Tensor, other: Tensor) -> Tensor:
    """Mean Jensen–Shannon divergence of attention rows, nats, (n,H,T,T) × 2 → (H,); rows that see one key count with 0."""
    middle = (one + other) / 2
    entropies = [torch.special.entr(rows).sum(-1) for rows in (middle, one, other)]
    return (entropies[0] - (entropies[1] + entropies[2]) / 2).mean((0, 2)).clamp(min=0)


def between_seeds(one: Tensor, other: Tensor, layers: int) -> float:
    """Mean divergence of two runs' maps when the heads of each layer are matched as well as can be, nats.

    Heads of two runs have no common order, so the best of all pairings inside each layer counts.
    """
    total = 0.0
    for first, second in zip(one.chunk(layers, 1), other.chunk(layers, 1), strict=True):
        heads = first.shape[1]
        costs = torch.stack([divergence(first, second.roll(-shift, 1)) for shift in range(heads)])
        total += min(
            sum(float(costs[(match - head) % heads, head]) for head, match in enumerate(order))
            for order in itertools.permutations(range(heads))
        )
    return total / one.shape[1]


def t90(steps: Sequence[int], values: Sequence[float], log: bool = False) -> float:
    """First step at which a falling quantity has gone 90 % of the way from its first value to its last.

    On a log scale the end is the last value above zero (a distance to the end is zero there by construction). NaN where
    nothing falls.
    """
    numbers = np.asarray(values, float)
    if log:
        above = numbers > 0
        numbers = np.log(np.where(above, numbers, numbers[above].min() if above.any() else math.nan))
    start, end = numbers[0], numbers[-1]
    if not end < start:
        return math.nan
    reached = np.flatnonzero(numbers <= start - DONE * (start - end) + 1e-12 * abs(start))
    return float(steps[int(reached[0])])


def times(steps: Sequence[int], frame: Sequence[float], precision: Sequence[float]) -> dict[str, float]:
    """The four numbers, in steps."""
    return {
        "frame_linear": t90(steps, frame),
        "frame_log": t90(steps, frame, log=True),
        "precision_linear": t90(steps, precision),
        "precision_log": t90(steps, precision, log=True),
    }


def log_spaced(steps: int, count: int = 44) -> list[int]:
    """0, 1, … `steps`, even on a log scale as far as whole numbers are, `count` or a few more; ½ and ¼ are among them."""
    found = set(range(steps + 1))
    for points in range(count, 20 * count):
        found = {round(steps ** (place / (points - 1))) for place in range(points)}
        if len(found) >= count - 1 or steps + 1 <= count:
            break
    if steps + 1 <= count:
        found = set(range(steps + 1))
    return sorted(found | {0, steps, steps // 2, steps // 4})
