"""What both implementations of the law return: numbers per query row and per key, O(T) of them.

Shapes: B batch, H query heads, Q query positions, S key positions, V value width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .strongest import Edges


@dataclass(frozen=True, eq=False)
class Totals:
    """What a pass added up on its way, float64: sums (B,H,C) as `statistics.sequence_sums` gives them for whole batch rows;
    of the value gradients over the batch, total (H,V) of −m_j, moment (H,V,V) of m_j m_jᵀ, and the keys in use (H,).
    """

    sums: Tensor
    total: Tensor
    moment: Tensor
    keys: Tensor


@dataclass(frozen=True, eq=False)
class Vectors:
    """One call, row by row and key by key; rows that do not count hold 0.

    Rows, (B,H,Q): R is the set of counted rows that see at least one key.
        counted: bool, membership in R. entropy: −Σ_j α ln α, nats. sink: 1 − Σ_j α.
        expected: E_i = Σ_j α b. advantage_square: Σ_j α A². missed: max over visible keys of A.
        alignment: Pearson correlation of α_i and A_i over V_i where `aligned` (three visible keys, both vary).
        score_square: Σ_j D². spread: ½ Σ_j |D|. over_uniform: mean over visible keys of b, minus E_i.
        upstream_norm: ‖u_i‖. residual: (Σ_j w b − u_i·o_i)². residual_scale: Σ_j α b².
    Sequences, (B,H): blind: counted rows that see no key, which are not in R.
        distance: Σ_ij α_ij |position_i − position_j|. first_key: Σ_i α_{i,f}.
    Keys, (B,H,S): usage: N_j = Σ_i α_ij. user_norm: Σ_i w_ij ‖u_i‖. value_gradient (B,H,S,V): m_j = Σ_i w_ij u_i.
        uniform (B,1 or H,S): usage if every row spread evenly over its visible keys.
    reach (B,H,Q): Σ_j α_ij |position_i − position_j|, None in the block pass where `distance` follows from usage, because
        every key lies before its query.
    edges: the strongest score gradients, where asked for: (towards attention, away from attention).
    """

    counted: Tensor
    entropy: Tensor
    sink: Tensor
    expected: Tensor
    advantage_square: Tensor
    missed: Tensor
    alignment: Tensor
    aligned: Tensor
    score_square: Tensor
    spread: Tensor
    over_uniform: Tensor
    upstream_norm: Tensor
    residual: Tensor
    residual_scale: Tensor
    blind: Tensor
    distance: Tensor
    first_key: Tensor
    usage: Tensor
    user_norm: Tensor
    value_gradient: Tensor
    uniform: Tensor
    reach: Tensor | None = None
    edges: tuple[Edges, Edges] | None = None
    totals: Totals | None = None


def correlation(
    live: Tensor,
    n: Tensor,
    mass: Tensor,
    expected: Tensor,
    less_sum: Tensor,
    less_square: Tensor,
    variation: Tensor,
    less_mean: Tensor,
) -> tuple[Tensor, Tensor]:
    """(aligned, alignment) of rows: Pearson correlation of α_i and A_i over V_i, 0 where one of them does not vary.

    Args, rows all: live, n_i, Σ_j α, E_i; over V_i, with b − E = −A: Σ (b − E), Σ (b − E)², Σ (α − mean)², Σ α (b − E).
    """
    less_variation = (less_square - less_sum.square() / n).clamp(min=0)
    covariance = mass * less_sum / n - less_mean  # Σ_j (α − ᾱ) A
    tiny = torch.finfo(less_sum.dtype).eps  # of a square; below, a correlation would be one of rounding errors
    aligned = live & (n >= 3) & (variation > tiny * (variation + mass.square() / n))
    aligned = aligned & (less_variation > tiny * (less_square + 2 * expected * less_sum + n * expected.square()))
    product = torch.where(aligned, (variation * less_variation).sqrt(), 1.0)
    return aligned, torch.where(aligned, covariance / product, 0.0)
