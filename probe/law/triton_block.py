"""From what the GPU kernels add up to the vectors of a call; chosen where Triton and a GPU are there.

Shapes: B batch, H query heads, Q query positions, S key positions.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from ...hooks.call import AttentionCall
from .vectors import Vectors, correlation


def usable(call: AttentionCall) -> bool:
    """True where Triton is installed, the call lies on a GPU and is of the kind that the kernels know."""
    if not call.query.is_cuda or importlib.util.find_spec("triton") is None:
        return False
    from . import triton_kernels

    return triton_kernels.fits(call)


def vectors(call: AttentionCall, *, tokens: bool = True) -> Vectors:
    """Both laws for every query row and key, as `blockwise.vectors` without edges."""
    from . import triton_kernels

    batch, heads, queries, _ = call.query.shape
    device = call.query.device
    counted = call.visibility.counted(batch, device)
    seen, uniform = call.visibility.counts(batch, counted)
    live = counted & (seen[:, 0] > 0)
    usable = live[:, None].expand(batch, heads, queries)
    rows, by_key = triton_kernels.sums(call, live, seen[0, 0])
    upstream = torch.where(usable[..., None], call.upstream.float(), 0.0)
    received = (upstream * torch.where(usable[..., None], call.output.float(), 0.0)).sum(-1)
    n = seen.clamp(min=1).float()
    expected, less_mean = rows["expected"], rows["less_mean"]
    aligned, alignment = correlation(
        usable,
        n,
        torch.ones_like(expected),
        expected,
        rows["less_sum"],
        rows["less_square"],
        rows["variation"],
        less_mean,
    )

    def shown(row: Tensor) -> Tensor:
        return torch.where(usable, row, 0.0)

    b_square = rows["advantage_square"] + expected * (2 * less_mean + expected)
    first = call.visibility.first_key(call.sequences.key_rows, batch, device)
    reach = shown(rows["reach"])
    return Vectors(
        counted=usable,
        entropy=shown(rows["entropy"]),
        sink=torch.zeros_like(expected),
        expected=shown(expected),
        advantage_square=shown(rows["advantage_square"]),
        missed=shown(rows["missed"]),
        alignment=alignment,
        aligned=aligned,
        score_square=shown(rows["score_square"]),
        spread=shown(0.5 * rows["spread"]) if tokens else torch.zeros_like(expected),
        over_uniform=shown(rows["less_sum"] / n),
        upstream_norm=upstream.norm(dim=-1),
        residual=shown((expected - received).square()),
        residual_scale=shown(b_square),
        blind=(counted & (seen[:, 0] == 0)).sum(-1)[:, None].expand(batch, heads),
        distance=reach.sum(-1),
        first_key=by_key["usage"].gather(-1, first[:, None, None].expand(-1, heads, 1))[..., 0],
        usage=by_key["usage"],
        user_norm=by_key["user_norm"],
        value_gradient=by_key["value_gradient"],
        uniform=uniform,
        reach=reach,
    )
