"""Attention dropout inside `scaled_dot_product_attention`: which weights were dropped is computed again.

The state of the random generator is noted before the kernel runs. In the backward pass the kernel's own path of plain
products runs once more on a generator in that state, and gives w, the weights after dropout. Fused kernels draw in an
order of their own and are refused.

Shapes: B batch, H query heads, Q query positions, S key positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .tap import Replay

_MATH = 0  # SDPBackend.MATH


def unreadable(query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, causal: bool) -> bool:
    """True where weights are dropped by a fused or compiled kernel, or the device's random state cannot be noted."""
    if not dropout:
        return False
    if torch.compiler.is_compiling() or query.device.type not in ("cpu", "cuda"):
        return True
    with torch.no_grad():
        like = query if query.shape[1] == key.shape[1] else key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        keys = key if like is query else like
        return int(torch._fused_sdp_choice(query, keys, keys, mask, dropout, causal)) != _MATH


def replay(device: torch.device, dropout: float, causal: bool, scale: float) -> Replay:
    """Note the random state now; the result computes w (B,H,Q,S) from query, key, value, mask and bias."""
    state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)

    def weights(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        group = query.shape[1] // key.shape[1]
        if group > 1:
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        shape = (*query.shape[:3], key.shape[2])
        alone = causal and mask is None and bias is None
        added = None if alone else _added(shape, query, mask, bias, causal)
        math = torch.ops.aten._scaled_dot_product_attention_math
        if device.type != "cpu":  # the kernel's own generator; what the user draws is not disturbed
            with torch.random.fork_rng([device]):
                torch.cuda.set_rng_state(state, device)
                found: Tensor = math(query, key, value, added, dropout, alone, scale=scale)[1]
            return found
        generator = torch.Generator()
        generator.set_state(state)
        kept = torch.empty(shape, dtype=query.dtype).bernoulli_(1 - dropout, generator=generator)
        plain: Tensor = math(query, key, value, added, 0.0, alone, scale=scale)[1]
        return plain.mul_(kept).div_(1 - dropout)

    return weights


def _added(
    shape: tuple[int, ...], query: Tensor, mask: Tensor | None, bias: Tensor | None, causal: bool
) -> Tensor | None:
    """Mask, bias and causal order as one tensor that is added to the scores; None where there is nothing."""
    if mask is not None and mask.dtype != torch.bool and bias is None and not causal:
        return mask  # a boolean one would be added as 0 and 1
    if mask is None and bias is None and not causal:
        return None
    added = query.new_zeros(shape)
    if mask is not None:
        added = added.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else added + mask
    if bias is not None:
        added = added + bias
    if causal:
        added = added.masked_fill(torch.ones(shape[2:], dtype=torch.bool, device=query.device).triu(1), -torch.inf)
    return added
