"""What lies between the products of a block, written to be compiled: `inductor.py` makes a few loops of it.

For calls without sinks and dropped weights. `blockwise.py` is the definition.

Shapes: n heads of batch rows, r query rows, s keys, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...hooks.visibility import HIDDEN
from . import row_sums

# α (n,r,s), D or nothing, [u, ‖u‖, live] (n,r,V+2), rows (12,n,r), aligned (n,r)
Found = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]


def sweep(
    score: Tensor,
    compatibility: Tensor,
    shown: Tensor,
    upstream: Tensor,
    output: Tensor,
    live: Tensor,
    n: Tensor,
    gradient: bool,
) -> Found:
    """Everything between the products of a block.

    Args:
        score, compatibility (n,r,s): s_ij, hidden or not, and b_ij. shown: 1 where a key is visible and 0 elsewhere, (r,s)
            or (n,r,s), in their dtype. upstream, output (n,r,V), 0 in rows that do not count.
            live (n,r) bool. n (n,r): n_i, at least 1. gradient: also D.
    """
    score = score + (shown - 1) * -HIDDEN
    largest = score.amax(-1, keepdim=True)
    power = torch.exp(score - largest)
    total = power.sum(-1, keepdim=True)
    expected = (power * compatibility).sum(-1, keepdim=True) / total
    with_score = (power * (score - largest)).sum(-1, keepdim=True) / total
    attention = power / total
    less = (compatibility - expected) * shown
    varied = (attention - (1 / n)[..., None]) * shown
    score_gradient = attention * less
    norm = torch.linalg.vector_norm(upstream, dim=-1)
    one = torch.ones_like(norm)
    found, aligned = row_sums.table(
        live=live,
        n=n,
        mass=one,
        sink=torch.zeros_like(norm),
        entropy=(total.log() - with_score)[..., 0],
        expected=expected[..., 0],
        deviation=expected[..., 0] - (upstream * output).sum(-1),
        missed=0.0 - less.amin(-1),
        score_norm=score_gradient.square().sum(-1).sqrt(),
        spread=score_gradient.abs().sum(-1),
        less_sum=less.sum(-1),
        less_square=less.square().sum(-1),
        less_mean=score_gradient.sum(-1),
        advantage_square=(score_gradient * less).sum(-1),
        variation=varied.square().sum(-1),
        upstream_norm=norm,
    )
    users = torch.cat([upstream, norm[..., None], live[..., None].to(norm.dtype)], -1)
    found = torch.where(live, found, 0.0)
    return attention, score_gradient if gradient else None, users, found, aligned
