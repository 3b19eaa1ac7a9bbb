"""Delivers u = ∂L/∂(head output), and where wanted ∂L/∂q, ∂L/∂k, ∂L/∂v, exactly once per backward.

A tap is an identity in the graph behind the kernel's output. It saves query, key, value and output the autograd way, so
that activation checkpointing and offloading treat them as they treat everything else, and it gives the receiver its
call from inside the backward pass. A closure that kept the tensors from the forward on would undo checkpointing; a hook
on the tensor would hold them as well. Values and gradients pass through untouched, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .call import AttentionCall, CallSite
from .visibility import Structure, Visibility

Deliver = Callable[[AttentionCall], None]
Fail = Callable[[Exception], None]


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
    ) -> None:
        self.call, self.structure, self.parts = call, structure, parts
        self.deliver, self.fail, self.passed, self.inputs = deliver, fail, passed, inputs
        self.count = 0
        self.pending = True
        self.partial: AttentionCall | None = None

    def assemble(self, saved: tuple[Tensor, ...], upstream: Tensor) -> AttentionCall:
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
        )
        call = AttentionCall(
            self.call,
            self.count,
            query,
            key,
            named["value"],
            output,
            upstream.detach().transpose(1, 2),
            visibility,
            named.get("sinks"),
            named.get("weights"),
        )
        self.count += 1
        return call


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
                    delivery.partial = call
                else:
                    delivery.deliver(call)
        except Exception as error:
            delivery.fail(error)
        delivery.pending = _graph_kept()
        delivery.passed()
        return None, None, upstream, *unused


class _InputTap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, delivery: Delivery, anchor: Tensor | None, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.delivery = delivery
        return query.detach(), key.detach(), value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value = gradients
        delivery: Delivery = ctx.delivery
        partial, delivery.partial = delivery.partial, None
        if partial is not None:
            try:
                with torch.no_grad():
                    delivery.deliver(
                        replace(
                            partial,
                            query_gradient=query.detach(),
                            key_gradient=key.detach(),
                            value_gradient=value.detach(),
                        )
                    )
            except Exception as error:
                delivery.fail(error)
        return None, None, query, key, value


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
    return _OutputTap.apply(delivery, anchor, output, *others)


def tap_inputs(
    delivery: Delivery, query: Tensor, key: Tensor, value: Tensor, anchor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, unchanged, whose gradients complete the delivery."""
    return _InputTap.apply(delivery, anchor, query, key, value)
