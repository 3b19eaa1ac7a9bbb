"""Attention that somebody wrote out by hand, joined with one line.

How it sees the call: the user's code says so, `y = expose(self, q, k, v, y, is_causal=True)`, right after the head
output has been computed; the line returns `y` unchanged and does nothing while nobody watches. What it cannot see:
anything it is not told; a mask or a scale that is left out shows at once in the check that weights times values give y.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..attachment import plans
from ..errors import BadRequest, UnsupportedKernel
from ..forward import stacks
from ..observation import Reading, observe
from ..visibility import Structure
from . import compiled


def expose(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Let watches see one attention call that is computed by hand; returns `output`, unchanged.

    Args:
        module: the module that computes it; its name in the watched model names the rows.
        query (B,H,Q,D), key (B,K,S,D), value (B,K,S,V): as they enter the products (rotated, before group repetition).
        output (B,H,Q,V): weights times values, before any gate, norm or projection.
        scale: factor on q·k (default 1/√D). softcap: c of c·tanh(s/c).
        mask: broadcastable to (B,H,Q,S): True is visible, or a float that is added. bias: float that hides nothing.
        is_causal: query i sees keys 0 … i only. sinks: (H,) score of a hidden column with value 0.
        weights: (B,H,Q,S) after dropout, where some were dropped.

    Raises:
        BadRequest: for tensors without four axes, or an output of another shape.
    """
    shapes = [tuple(tensor.shape) for tensor in (query, key, value, output)]
    if any(len(shape) != 4 for shape in shapes) or shapes[3] != (*shapes[0][:3], shapes[2][3]):
        raise BadRequest(
            "expose() takes query (batch, heads, queries, width), key and value (batch, kv heads, keys, width) and output "
            f"(batch, heads, queries, value width), not {', '.join(map(str, shapes))}."
        )
    tracing = torch.compiler.is_compiling()

    def read() -> Reading:
        return Reading(
            "expose",
            Structure(is_causal),
            query.shape[-1] ** -0.5 if scale is None else float(scale),
            softcap,
            mask=None if mask is None else mask[(None,) * (4 - mask.dim())],
            bias=None if bias is None else bias[(None,) * (4 - bias.dim())],
            sinks=sinks,
            weights=weights is not None,
            late=None if tracing else {"query": (query, _same), "key": (key, _same), "value": (value, _same)},
        )

    if tracing:
        name = id(module)
        if name not in compiled.watched or not torch.is_grad_enabled():
            return output
        return compiled.behind(name, output.transpose(1, 2), query, key, value, read(), weights).transpose(1, 2)
    stacks.read += 1
    observers = plans(module, query)
    if not observers:
        return output

    def run(_query: Tensor, _key: Tensor, used: Tensor) -> tuple[Tensor, Any]:
        if used is not value:
            raise UnsupportedKernel(
                "expose() shows a call whose values have been used; change the head output instead."
            )
        return output.transpose(1, 2), weights

    seen, _ = observe(observers, query, key, value, run, read)
    return seen.transpose(1, 2)


def _same(gradient: Tensor) -> Tensor:
    return gradient
