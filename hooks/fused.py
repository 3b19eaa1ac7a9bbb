"""One backward pass for the gradients and the statistics, where the user asked for it.

The backward of attention computes α, b and E anyway. Here the kernel runs forward as always, without its own backward,
and the receiver's pass over the blocks returns ∂L/∂q, ∂L/∂k, ∂L/∂v along with what it adds up. That changes the last
bits of the model's gradients, so it happens on request only, and only for calls whose every query row counts; all others
keep the kernel's backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .tap import Delivery, savable
from .visibility import Visibility

Kernel = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Any]]
# the call, assembled in the backward pass → its input gradients, or None when they have to come from the kernel
Fuse = Callable[[Any], tuple[Tensor, Tensor, Tensor] | None]


def fusable(visibility: Visibility, batch: int, *tensors: Tensor | None) -> bool:
    """True where every query row counts and sees a key, and nothing but query, key and value wants a gradient."""
    if any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return False
    device = next((tensor.device for tensor in tensors if tensor is not None), torch.device("cpu"))
    counted = visibility.counted(batch, device)
    seen, _ = visibility.counts(batch, counted)
    return bool(counted.all()) and bool((seen > 0).all())


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        delivery: Delivery,
        fuse: Fuse,
        run: Kernel,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *others: Tensor,
    ) -> Tensor:
        output, _ = run(query, key, value)
        ctx.delivery, ctx.fuse, ctx.run = delivery, fuse, run
        kind = query.device.type
        ctx.autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output, query, key, value, *others)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (upstream,) = gradients
        delivery: Delivery = ctx.delivery
        unused = (None,) * (len(delivery.parts) - 4)
        if upstream is None:
            return None, None, None, None, None, None, *unused
        saved = ctx.saved_tensors
        inputs = saved[1:4]
        found = None
        try:
            with torch.no_grad():
                found = ctx.fuse(delivery.assemble(saved, upstream))
        except Exception as error:
            delivery.fail(error)
        if found is None:
            with ctx.autocast:  # as in the forward: the kernel may have got its inputs in several precisions
                found = _by_the_kernel(ctx.run, inputs, upstream)
        delivery.pending = False
        delivery.passed()
        return None, None, None, *(part.to(given.dtype) for part, given in zip(found, inputs)), *unused


def _by_the_kernel(run: Kernel, inputs: tuple[Tensor, ...], upstream: Tensor) -> tuple[Tensor, ...]:
    """The gradients of the kernel itself, run once more."""
    with torch.enable_grad():
        leaves = tuple(tensor.detach().requires_grad_() for tensor in inputs)
        output, _ = run(*leaves)
    return torch.autograd.grad(output, leaves, upstream.to(output.dtype))


def fused(
    delivery: Delivery, fuse: Fuse, run: Kernel, query: Tensor, key: Tensor, value: Tensor, *others: Tensor
) -> Tensor:
    """The kernel's output (B,Q,H,V); in its backward `fuse` gives the gradients. `others` as in `delivery.parts[4:]`."""
    return _Fused.apply(delivery, fuse, run, query, key, value, *savable(others))
