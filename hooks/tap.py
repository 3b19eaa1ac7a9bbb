"""Delivers u = ∂L/∂(head output), and where wanted ∂L/∂q, ∂L/∂k, ∂L/∂v, exactly once per backward.

A tap is an identity in the graph behind the kernel's output. It saves query, key, value and output the autograd way, so
that activation checkpointing and offloading treat them as they treat everything else, and it gives the receiver its
call from inside the backward pass. A closure that kept the tensors from the forward on would undo checkpointing; a hook
on the tensor would hold them as well. Values and gradients pass through untouched, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .call import AttentionCall, CallSite
from .errors import UnsupportedKernel
from .visibility import Structure, Visibility

Deliver = Callable[[AttentionCall], None]
Fail = Callable[[Exception], None]
# query, key, value, mask, bias → w (B,H,Q,S), the weights after dropout
Replay = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


class Delivery:
    """What a tap remembers of its call between forward and backward: no activations, only how to put them together.

    `checkpointed` deliveries are expected to be recomputed; `pending` turns False when the gradient has passed and the
    graph was not kept.
    """

    def __init__(
        self,
        call: CallSite,
        structure: Structure,
        parts: tuple[str, ...],
        deliver: Deliver,
        fail: Fail,
        passed: Callable[[], None],
        inputs: bool,
        replay: Replay | None = None,
    ) -> None:
        self.call, self.structure, self.parts = call, structure, parts
        self.deliver, self.fail, self.passed, self.inputs, self.replay = deliver, fail, passed, inputs, replay
        self.count = 0
        self.pending = True
        self.partial: AttentionCall | None = None
        self.arrived: dict[str, Tensor] = {}
        self.unhooked: dict[str, torch.Size] = {}

    def assemble(self, saved: tuple[Tensor, ...], upstream: Tensor) -> AttentionCall:
        """The call with its tensors, from what the tap saved."""
        named = dict(zip(self.parts, saved))
        output = named["output"].transpose(1, 2)
        query, key = named["query"], named["key"]
        visibility = Visibility(
            self.structure,
            query.shape[2],
            key.shape[2],
            named.get("mask"),
            named.get("bias"),
            self.call.sequences.query_rows,
            len(self.call.sequences.added),
            self.call.site.kind != "cross",
        )
        weights = named.get("weights")
        if self.replay is not None:
            weights = self.replay(query, key, named["value"], named.get("mask"), named.get("bias"))
        call = AttentionCall(
            **vars(self.call),
            delivery=self.count,
            query=query,
            key=key,
            value=named["value"],
            output=output,
            upstream=upstream.detach().transpose(1, 2),
            visibility=visibility,
            sinks=named.get("sinks"),
            weights=weights,
        )
        self.count += 1
        return call

    def settle(self) -> None:
        """Note that the gradient has passed."""
        self.pending = _graph_kept()
        self.passed()

    def hook_inputs(self, inputs: Mapping[str, tuple[Tensor, Callable[[Tensor], Tensor]]]) -> None:
        """Have the gradients of inputs that were used already complete the call; those that need none are unknown."""
        for name, (tensor, arrange) in inputs.items():
            if tensor.requires_grad:
                tensor.register_hook(partial(self._hooked, name, arrange))
            else:
                self.unhooked[name] = arrange(tensor.detach()).shape

    def _hooked(self, name: str, arrange: Callable[[Tensor], Tensor], gradient: Tensor) -> None:
        try:
            self.arrive({name: arrange(gradient)})
        except Exception as error:
            self.fail(error)

    def arrive(self, gradients: dict[str, Tensor]) -> None:
        """Note gradients of inputs, which come after u; the last of the three completes the call."""
        self.arrived |= gradients
        for name, shape in self.unhooked.items():
            self.arrived[name] = next(iter(gradients.values())).new_full(shape, torch.nan)
        if self.partial is None or len(self.arrived) < 3:
            return
        partial, self.partial, arrived, self.arrived = self.partial, None, self.arrived, {}
        query, key, value = (arrived[name].detach() for name in ("query", "key", "value"))
        self.deliver(replace(partial, query_gradient=query, key_gradient=key, value_gradient=value))


class _OutputTap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, delivery: Delivery, anchor: Tensor | None, output: Tensor, *others: Tensor) -> Tensor:
        ctx.delivery = delivery
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output.detach(), *(other.detach() for other in others))
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (upstream,) = gradients
        delivery: Delivery = ctx.delivery
        unused = (None,) * (len(delivery.parts) - 1)
        if upstream is None:
            return None, None, None, *unused
        try:
            with torch.no_grad():
                call = delivery.assemble(ctx.saved_tensors, upstream)
                if delivery.inputs:
                    delivery.partial, delivery.arrived = call, {}
                else:
                    delivery.deliver(call)
        except Exception as error:
            delivery.fail(_named(error, delivery.call))
        delivery.settle()
        return None, None, upstream, *unused


class _InputTap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, delivery: Delivery, names: tuple[str, ...], anchor: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.delivery, ctx.names = delivery, names
        return tuple(tensor.detach() for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        delivery: Delivery = ctx.delivery
        try:
            with torch.no_grad():
                delivery.arrive(dict(zip(ctx.names, gradients)))
        except Exception as error:
            delivery.fail(error)
        return None, None, None, *gradients


def _named(error: Exception, call: CallSite) -> Exception:
    """The refusal for a tensor that was overwritten after the kernel returned it; other errors as they are."""
    if isinstance(error, RuntimeError) and "inplace operation" in str(error):
        return UnsupportedKernel(
            f"{call.site.module or 'The model'} changes queries, keys, values or head output in place after attention, so "
            "that what the kernel used is gone; write the change out of place (y = y * 2, not y *= 2)."
        )
    return error


def _graph_kept() -> bool:
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def recomputing() -> bool:
    """True while autograd runs: a forward that happens now is a checkpoint being recomputed."""
    return torch._C._current_graph_task_id() != -1


def saving_is_hooked() -> bool:
    """True where saved tensors go through someone's hooks, as they do inside a non-reentrant checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def tap_output(delivery: Delivery, output: Tensor, others: tuple[Tensor, ...], anchor: Tensor | None) -> Tensor:
    """`output` (B,Q,H,V), unchanged, with the delivery in its backward; `others` as in `delivery.parts[1:]`."""
    return _OutputTap.apply(delivery, anchor, output, *savable(others))


def savable(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same; a mask that was made in inference mode, which autograd does not save, as a copy."""
    return tuple(tensor.clone() if tensor.is_inference() else tensor for tensor in tensors)


def tap_inputs(delivery: Delivery, anchor: Tensor | None, **inputs: Tensor) -> tuple[Tensor, ...]:
    """Some of query, key and value, unchanged, whose gradients complete the delivery."""
    tapped: tuple[Tensor, ...] = _InputTap.apply(delivery, tuple(inputs), anchor, *inputs.values())
    return tapped
