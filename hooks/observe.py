"""One observed attention call, whichever adapter saw it.

An adapter says how to run the original kernel and how to read the call (`Reading`); everything else is the same for
all: ask who observes, tap the inputs where their gradients are wanted, run, tap the output.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .call import CallSite
from .refusals import ProbeError
from .tap import Delivery, tap_inputs, tap_output
from .visibility import Structure

if TYPE_CHECKING:
    from .attach import Plan


@dataclass(frozen=True, eq=False)
class Reading:
    """What an adapter read from the arguments of a call; tensors are those of the call, not copies.

    `mask`, `bias` and `sinks` as in `AttentionCall`; `weights` tells whether the kernel's second result is w.
    """

    implementation: str
    structure: Structure
    scale: float
    softcap: float | None = None
    dropout: float = 0.0
    mask: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    weights: bool = False


class _Running(threading.local):
    """The modules whose observed kernel is running on this thread: what it calls inside is part of the same call."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []


running_calls = _Running()

Run = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Any]]


def observe(
    plans: Sequence[Plan], query: Tensor, key: Tensor, value: Tensor, run: Run, read: Callable[[], Reading]
) -> tuple[Tensor, Any]:
    """Run the kernel with the taps that `plans` ask for.

    Args:
        query (B,H,Q,D), key (B,K,S,D), value (B,K,S,V): the kernel's inputs.
        run: the original kernel on these three; returns the output (B,Q,H,V) and its second result.
        read: the call's other arguments; what it raises is given to the receivers, never to the user.
    """
    try:
        reading = read()
    except ProbeError as error:
        for plan in plans:
            plan.attachment.receiver.refuse(error)
        return run(query, key, value)
    heads, group = query.shape[1], query.shape[1] // key.shape[1]
    deliveries = []
    for plan in plans:
        call = plan.call if plan.call is not None else _site(plan, reading, query, key)
        if plan.deferred:
            plan.attachment.await_recomputation(plan, query, call, None)
            plan.attachment.receiver.seen(call, heads, group, True)
            continue
        attachment = plan.attachment
        delivery = Delivery(
            call, reading.structure, (), attachment.deliver, attachment.fail, attachment.passed, plan.needs.inputs
        )
        if plan.needs.inputs:
            query, key, value = tap_inputs(delivery, query, key, value, plan.anchor)
        deliveries.append((plan, delivery))
    running_calls.modules.append(plans[0].module)
    try:
        output, second = run(query, key, value)
    finally:
        running_calls.modules.pop()
    named = {"query": query, "key": key, "value": value, "mask": reading.mask, "bias": reading.bias}
    named |= {"sinks": reading.sinks, "weights": second if reading.weights else None}
    present = {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}
    for plan, delivery in deliveries:
        delivery.parts = ("output", *present)
        if plan.call is None:
            reachable = output.requires_grad or plan.anchor is not None
            plan.attachment.receiver.seen(delivery.call, heads, group, reachable)
            if not reachable:
                continue
            if plan.hooked:
                plan.attachment.await_recomputation(plan, query, delivery.call, delivery)
        output = tap_output(delivery, output, tuple(present.values()), plan.anchor)
    return output, second


def _site(plan: Plan, reading: Reading, query: Tensor, key: Tensor) -> CallSite:
    assert plan.forward is not None
    sequences = plan.forward.sequences(query.shape[0], query.shape[2], key.shape[2], plan.site.kind == "cross")
    return CallSite(
        plan.site,
        plan.use,
        plan.forward.number,
        reading.scale,
        reading.softcap,
        reading.dropout,
        reading.implementation,
        sequences,
    )


def additive(mask: Tensor) -> bool:
    """True for a float mask, which is added to the scores; False for a boolean one (True is visible)."""
    return mask.dtype != torch.bool
