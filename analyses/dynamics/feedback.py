"""Does a value step make attended keys more attractive? Mechanically, and after the step has shrunk u.

Σ_j α_ij A_ij = 0, so an α-weighted change of advantage always vanishes and says nothing. What is read is the within-row
slope of ΔA_ij on α_ij after the values of one layer moved by the real Δv: *mechanical* with u as it was, *actual* with u
recomputed, both against value steps of equal norm whose tokens were permuted. Attention of that layer stays as it was.

Shapes: B batch, H query heads, K key/value heads, T positions, V value width.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import torch
from torch import Generator, Tensor, nn

from .attention_calls import Head, Loss, heads, moved
from .following import FEWEST, centred
from .roles import added_values


def advantage(attention: Tensor, upstream: Tensor, value: Tensor) -> Tensor:
    """A_ij = u_i·(o_i − v_j), (B,H,T,T), from α (B,H,T,T), u (B,H,T,V) and v (B,H or K,T,V)."""
    group = upstream.shape[1] // value.shape[1]
    compatibility = upstream @ value.repeat_interleave(group, 1).mT
    return (attention * compatibility).sum(-1, keepdim=True) - compatibility


def row_slope(change: Tensor, attention: Tensor, visible: Tensor, fewest: int = FEWEST) -> Tensor:
    """Mean over rows of the least-squares slope of `change` on α over visible keys, (B,H,T,T) → (H,), loss per weight."""
    visible = visible.expand_as(attention)
    count = visible.sum(-1, keepdim=True)
    x, y = centred(attention, visible), centred(change, visible)
    spread = x.square().sum(-1)
    usable = (count[..., 0] >= fewest) & (spread > 1e-12)
    slope = torch.where(usable, (x * y).sum(-1) / torch.where(usable, spread, 1.0), 0.0)
    return slope.sum((0, 2)) / usable.sum((0, 2))


def mechanical(head: Head, change: Tensor) -> Tensor:
    """(H,) slope of ΔA on α for values that moved by `change` (B,K,T,V), u and α as they were."""
    return row_slope(advantage(head.attention, head.upstream, change), head.attention, head.visible)


def permuted(change: Tensor, generator: Generator) -> Tensor:
    """The same steps (B,K,T,V) on other tokens of the batch, so that their norm is the same."""
    count = change.shape[0] * change.shape[2]
    order = torch.randperm(count, generator=generator)
    flat = change.transpose(1, 2).flatten(0, 1)[order]
    return flat.unflatten(0, (change.shape[0], change.shape[2])).transpose(1, 2)


def feedback(
    before: nn.Module, step: Mapping[str, Tensor], loss: Loss, *, draws: int = 4, seed: int = 0
) -> pd.DataFrame:
    """One row per head: slopes of ΔA on α after the real value step of its layer, and after permuted ones.

    Args:
        before: the float64 model before the step; `step`: what the optimizer did, by parameter name.
        loss: summed over the targets of a fixed batch.

    Columns: module, layer, head; `mechanical`, `actual`, and `mechanical_permuted`, `actual_permuted` (mean of `draws`).
    """
    generator = Generator().manual_seed(seed)
    now, then = heads(before, loss), heads(moved(before, dict(step)), loss)
    rows = []
    for module, head in now.items():
        change = then[module].value - head.value
        steps = [change, *(permuted(change, generator) for _ in range(draws))]
        slopes = torch.stack([mechanical(head, one) for one in steps])
        real = []
        for one in steps:
            with added_values(before, module, one):
                again = heads(before, loss)[module]
            real.append(row_slope(again.advantage - head.advantage, head.attention, head.visible))
        actual = torch.stack(real)
        for place in range(head.attention.shape[1]):
            rows.append(
                {
                    "module": module,
                    "layer": head.layer,
                    "head": place,
                    "mechanical": float(slopes[0, place]),
                    "mechanical_permuted": float(slopes[1:, place].mean()),
                    "actual": float(actual[0, place]),
                    "actual_permuted": float(actual[1:, place].mean()),
                }
            )
    return pd.DataFrame(rows)
