"""What the query rows of a block have: from sums over the keys to the numbers of `vectors.Vectors`.

Shapes: every tensor is one number per row, (b,h,r) or broadcastable to it; r rows of h heads of b batch rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .vectors import correlation

# the order in which `table` stacks them
ROWS = (
    "entropy",
    "sink",
    "expected",
    "advantage_square",
    "missed",
    "alignment",
    "score_square",
    "spread",
    "over_uniform",
    "upstream_norm",
    "residual",
    "residual_scale",
)


def table(
    *,
    live: Tensor,
    n: Tensor,
    mass: Tensor,
    sink: Tensor,
    entropy: Tensor,
    expected: Tensor,
    deviation: Tensor,
    missed: Tensor,
    score_norm: Tensor,
    spread: Tensor,
    less_sum: Tensor,
    less_square: Tensor,
    less_mean: Tensor,
    advantage_square: Tensor,
    variation: Tensor,
    upstream_norm: Tensor,
) -> tuple[Tensor, Tensor]:
    """(`ROWS`,b,h,r) stacked, and where the alignment is known; rows that are not live may hold anything.

    Args, with b − E = −A and V_i the visible keys: live; n_i; Σ α; 1 − Σ α; entropy; E_i; deviation: Σ w b − u·o; missed;
        ‖D‖; Σ |D|; over V_i Σ (b − E), Σ (b − E)², Σ α (b − E), Σ α (b − E)², Σ (α − mean)²; ‖u‖.
    """
    aligned, alignment = correlation(live, n, mass, expected, less_sum, less_square, variation, less_mean)
    b_square = advantage_square + expected * (2 * less_mean + mass * expected)  # Σ_j α b²
    columns = (
        entropy,
        sink,
        expected,
        advantage_square,
        missed,
        alignment,
        score_norm.square(),
        0.5 * spread,
        less_sum / n,
        upstream_norm,
        deviation.square(),
        b_square,
    )
    return torch.stack(torch.broadcast_tensors(*columns)), aligned
