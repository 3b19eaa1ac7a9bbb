"""Attention dropout inside `scaled_dot_product_attention`: which weights were dropped is computed again.

The state of the random generator is noted before the kernel runs. In the backward pass the kernel's own path of plain
products runs once more on a generator in that state, and gives w, the weights after dropout. Fused kernels draw in an
order of their own and are refused.

Shapes: B batch, H query heads, Q query positions, S key positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_MATH = 0  # SDPBackend.MATH


def unreadable(query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, causal: bool) -> bool:
    """True where a fused kernel would run, or the device's random state cannot be noted."""
    if query.device.type not in ("cpu", "cuda"):
        return True
    with torch.no_grad():
        like = query if query.shape[1] == key.shape[1] else key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        keys = key if like is query else like
        return int(torch._fused_sdp_choice(query, keys, keys, mask, dropout, causal)) != _MATH


def replay(
    device: torch.device, dropout: float, causal: bool, scale: float
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """Note the random state now; the result computes w (B,H,Q,S) from query, key, value and mask."""
    state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)

    def weights(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        group = query.shape[1] // key.shape[1]
        if group > 1:
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        math = torch.ops.aten._scaled_dot_product_attention_math
        if device.type != "cpu":  # the kernel's own generator; what the user draws is not disturbed
            with torch.random.fork_rng([device]):
                torch.cuda.set_rng_state(state, device)
                found: Tensor = math(query, key, value, mask, dropout, causal, scale=scale)[1]
            return found
        shape = (*query.shape[:3], key.shape[2])
        generator = torch.Generator()
        generator.set_state(state)
        kept = torch.empty(shape, dtype=query.dtype).bernoulli_(1 - dropout, generator=generator)
        plain = math(query, key, value, mask, 0.0, causal, scale=scale)[1]
        return plain.mul_(kept).div_(1 - dropout)

    return weights
