"""sdpa's flash kernel on the CPU, with a backward of the receiver's behind it.

How it sees the call: while an attention call is observed, the kernel's own call of `scaled_dot_product_attention` finds a
`Seam`. Where torch would choose the flash kernel, and the kernel's arguments are those that the adapter read, the seam runs
that kernel itself and keeps what its backward needs; the receiver then gives ∂L/∂q, ∂L/∂k and ∂L/∂v, bit for bit those of
the kernel, along with what it adds up. Everything else runs as it would have, with a tap behind it, and the seam says why.

Shapes: B batch, H query heads, K key/value heads, Q query positions, S key positions, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .call import Flash, Gradients
from .mask_cache import remembered
from .tap import Delivery, savable
from .visibility import Structure

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH = 1  # SDPBackend.FLASH_ATTENTION
_LARGEST = 2**31 - 1  # what BLAS can count

# the call, assembled in the backward pass, and the kernel → the gradients of its inputs, or None where nobody listens
Fuse = Callable[[Any, Flash], Gradients | None]


class Seam:
    """The place where one observed call may find the flash kernel.

    Attributes:
        taken: the kernel ran here, and the receiver gives its gradients. reason: why not, where it did not.
    """

    def __init__(self, delivery: Delivery, fuse: Fuse, mask: Tensor | None, query: Tensor, key: Tensor) -> None:
        self.taken = self.spoiled = False
        self.reason = "the kernel is not that of scaled_dot_product_attention"
        self.delivery, self.fuse = delivery, fuse
        self._mask, self._query, self._key = mask, query, key
        self._met, self._copies = False, 1

    def attend(self, query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> Tensor | None:
        """The kernel's output (B,H,Q,D), or None where its call has to go on as it came.

        Args:
            given: the other arguments of `scaled_dot_product_attention` by name.
        """
        if self._met:  # what either call says would be a part of the whole
            self.spoiled, self.taken, self.reason = True, False, "attention is put together from several calls"
            return None
        self._met = True
        mask, causal = given.get("attn_mask"), bool(given.get("is_causal"))
        trouble = self._trouble(query, key, value, mask, causal, given)
        if trouble:
            self.reason = trouble
            return None
        self.taken, self.reason = True, ""
        added = None if mask is None else _added(mask, query.dtype)
        read = self._mask
        same = read is mask and added is mask
        scale = given.get("scale")  # where none is given, torch divides: 8 ** -0.5 and 1 / sqrt(8) are two numbers
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
        output: Tensor = _FlashAttention.apply(
            self, causal, scale, query, key, value, *savable_or_none((added, None if same else read))
        )
        return output

    def deliver(self, flash: Flash, read: Tensor | None, upstream: Tensor) -> Gradients | None:
        """Hand the call over, in the backward pass; `read`: the mask as the adapter read it."""
        delivery, copies = self.delivery, self._copies
        key, value = (part if copies == 1 else part[:, ::copies] for part in (flash.key, flash.value))
        masks = () if read is None else (read,)
        delivery.parts = ("output", "query", "key", "value", *("mask" for _ in masks))
        saved = (flash.output.transpose(1, 2), flash.query, key, value, *masks)
        return self.fuse(delivery.assemble(saved, upstream.transpose(1, 2)), flash)

    def _trouble(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, given: dict[str, Any]
    ) -> str:
        """Why the kernel keeps its backward; nothing where it need not."""
        tensors = (query, key, value)
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return "neither queries, keys nor values need a gradient"
        if torch.is_autocast_enabled("cpu"):
            return "autocast runs the kernel in half precision"
        if query.device.type != "cpu" or query.dtype not in (torch.float32, torch.float64):
            return f"the operator knows float32 and float64 on a CPU, not {query.dtype} on {query.device.type}"
        if _ruled(tensors):
            return "the call runs inside a transform, a mode or a tensor subclass"
        if float(given.get("dropout_p") or 0.0):
            return "attention weights are dropped"
        if mask is not None and mask.requires_grad:
            return "the mask needs a gradient"
        group = bool(given.get("enable_gqa"))
        scale = given.get("scale")
        if query.dim() != 4 or (query.dtype == torch.float32 and _coarse()):
            return "products are rounded more coarsely than float32"
        choice = torch._fused_sdp_choice(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=group)
        if int(choice) != _FLASH:
            return "torch computes it by plain products (SDPBackend.MATH)"
        if not all(_readable(tensor) for tensor in tensors):
            return "the strides of queries, keys or values are none that BLAS reads"
        if not self._agrees(query, key, mask, causal, scale):
            return "the kernel was given other arguments than the module"
        return ""

    def _agrees(self, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> bool:
        """True where the kernel's arguments say what the adapter read."""
        read = self._mask
        if self.delivery.structure != Structure(causal) or query.shape != self._query.shape:
            return False
        if (query.shape[-1] ** -0.5 if scale is None else float(scale)) != self.delivery.call.scale:
            return False
        if (mask is None) != (read is None):
            return False
        if mask is not None and read is not None:
            shape = (*query.shape[:3], key.shape[2])
            ours, theirs = read.expand(shape), mask.expand(shape)
            if (ours.data_ptr(), ours.stride(), ours.dtype) != (theirs.data_ptr(), theirs.stride(), theirs.dtype):
                return False
        self._copies, left = divmod(key.shape[1], self._key.shape[1])
        if left or key.shape[2:] != self._key.shape[2:]:
            return False
        if self._copies == 1:
            return True
        step = max(1, key.shape[2] // 4)  # whether heads repeat in groups shows at any position
        mine, theirs = key.detach()[:, :, ::step], self._key.detach()[:, :, ::step]
        return torch.equal(mine, theirs.repeat_interleave(self._copies, 1))


def _ruled(tensors: Sequence[Tensor]) -> bool:
    """True under functorch, forward-mode derivatives, someone's mode, or for subclasses."""
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return True
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return True
    return any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors)


def _coarse() -> bool:
    """True where torch may round the products of float32 to less."""
    if torch.get_float32_matmul_precision() != "highest":
        return True
    return torch._C._get_fp32_precision_getter("mkldnn", "matmul") not in ("none", "ieee")


def _readable(tensor: Tensor) -> bool:
    """True for strides that torch hands to BLAS, and not to a loop of its own."""
    row, width = tensor.stride(2), tensor.shape[3]
    return width <= row <= _LARGEST and max(tensor.shape[2], width) <= _LARGEST


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What the kernel adds to the scores: a boolean mask as 0 and −∞, as torch turns it; with all four axes."""
    if mask.dtype == torch.bool:
        mask = remembered(
            ("added", dtype), (mask,), lambda: torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
        )
    while mask.dim() < 4:
        mask = mask[None]
    return mask


def savable_or_none(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """`savable` where some of them are None."""
    return tuple(None if tensor is None else savable((tensor,))[0] for tensor in tensors)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        seam: Seam,
        causal: bool,
        scale: float,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        added: Tensor | None,
        read: Tensor | None,
    ) -> Tensor:
        output, normalizer = _FORWARD(query, key, value, 0.0, causal, attn_mask=added, scale=scale)
        ctx.seam, ctx.causal, ctx.scale = seam, causal, scale
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, output, normalizer, added, read)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (upstream,) = gradients
        if upstream is None:
            return (None,) * 8
        query, key, value, output, normalizer, added, read = ctx.saved_tensors
        flash = Flash(query, key, value, output, normalizer, added, ctx.causal, ctx.scale)
        seam: Seam = ctx.seam
        # a graph of the gradients: the kernel's own backward, which says what torch says of second derivatives
        found = flash.gradients(upstream) if torch.is_grad_enabled() else None
        if not seam.spoiled:
            try:
                with torch.no_grad():
                    ours = seam.deliver(flash, added if read is None else read, upstream)
                found = ours if found is None else found
            except Exception as error:
                seam.delivery.fail(error)
            seam.delivery.settle()
        found = flash.gradients(upstream) if found is None else found
        wanted = (part if needed else None for part, needed in zip(found, ctx.needs_input_grad[3:6]))
        return None, None, None, *wanted, None, None
