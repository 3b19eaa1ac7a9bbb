"""One observed attention call, whichever adapter saw it.

An adapter says how to run the original kernel and how to read the call (`Reading`); everything else is the same for
all: ask who observes, tap the inputs where their gradients are wanted, run, tap the output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .attachment import Plan
from .call import AttentionCall, CallSite, Editor
from .errors import ProbeError
from .flash import Seam
from .forward import stacks
from .tap import Delivery, Replay, tap_inputs, tap_output
from .visibility import Structure, Visibility


@dataclass(frozen=True, eq=False)
class Reading:
    """What an adapter read from the arguments of a call; tensors are those of the call, not copies.

    `mask`, `bias` and `sinks` as in `AttentionCall`; `weights` tells whether the kernel's second result is w, `replay`
    computes w again. `hidden` as in `CallSite`. `added`: names of the last key columns that are no tokens. `late`, where
    the products were computed before the call was read: the tensors on which hooks receive the gradients of query, key
    and value, and how each gradient gets its four axes.
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
    replay: Replay | None = None
    hidden: bool = False
    added: tuple[str, ...] = ()
    late: Mapping[str, tuple[Tensor, Callable[[Tensor], Tensor]]] | None = None


Run = Callable[[Tensor], tuple[Tensor, Any]]
_NOT_PLAIN = "the call has a cap, sinks, a bias or dropout, or several receivers"


class Observation:
    """One call between its first product and its last; adapters that see the two apart use it directly.

    `query` and `key` are what the scores must be computed from: the ones given, or tapped ones.

    Args:
        query (B,H,Q,D), key (B,K,S,D): the kernel's inputs.
        read: the call's other arguments; what it raises is given to the receivers, never to the user.
    """

    def __init__(self, plans: Sequence[Plan], query: Tensor, key: Tensor, read: Callable[[], Reading]) -> None:
        self.query, self.key = query, key
        self._deliveries: list[tuple[Plan, Delivery]] = []
        self._edits: list[tuple[Editor, CallSite]] = []
        self._reading: Reading | None = None
        try:
            reading = self._reading = read()
        except ProbeError as error:
            for plan in plans:
                plan.attachment.receiver.refuse(error)
            return
        heads, group = query.shape[1], query.shape[1] // key.shape[1]
        for plan in plans:
            call = plan.call if plan.call is not None else site_of(plan, reading, query, key)
            attachment = plan.attachment
            if plan.needs.editor is not None:
                attachment.receiver.seen(call, heads, group, False)
                self._edits.append((plan.needs.editor, call))
                continue
            if plan.deferred:
                attachment.await_recomputation(plan, query, call, None)
                attachment.receiver.seen(call, heads, group, True)
                continue
            inputs = plan.needs.inputs
            delivery = Delivery(
                call,
                reading.structure,
                (),
                attachment.deliver,
                attachment.fail,
                attachment.passed,
                inputs,
                reading.replay,
            )
            if inputs and reading.late is None:
                self.query, self.key = tap_inputs(delivery, plan.anchor, query=self.query, key=self.key)
            self._deliveries.append((plan, delivery))

    def complete(self, value: Tensor, run: Run) -> tuple[Tensor, Any]:
        """Run the rest of the kernel on `value` (B,K,S,V); returns the output (B,Q,H,V) and the kernel's second result."""
        for plan, delivery in self._deliveries:
            if plan.needs.inputs and self._reading is not None and self._reading.late is None:
                (value,) = tap_inputs(delivery, plan.anchor, value=value)
        for editor, call in self._edits:
            value = editor.value(call, value)
        seam = self._seam()
        stacks.calls.append(seam)
        try:
            output, second = run(value)
        finally:
            stacks.calls.pop()
        if self._reading is not None:
            output = self._tapped(self._reading, value, output, second, seam)  # watches see what the kernel computed
            for editor, call in self._edits:
                now = self._now(self._reading, call, value, output, second)
                output = editor.output(now).transpose(1, 2)
        return output, second

    def _seam(self) -> Seam | None:
        """Where the kernel may find a backward of the receiver's; None where nobody offers one or the call is not plain."""
        reading = self._reading
        if reading is None or len(self._deliveries) != 1 or self._edits or not self._deliveries[0][0].needs.flash:
            return None
        plan, delivery = self._deliveries[0]
        plain = reading.softcap is None and reading.sinks is None and reading.bias is None and reading.late is None
        if not plain or reading.dropout or plan.needs.inputs:
            return None
        return Seam(delivery, plan.attachment.flash, reading.mask, self.query, self.key)

    def _now(self, reading: Reading, call: CallSite, value: Tensor, output: Tensor, second: Any) -> AttentionCall:
        """The call as an editor sees it."""
        visibility = Visibility(
            reading.structure,
            self.query.shape[2],
            self.key.shape[2],
            reading.mask,
            reading.bias,
            call.sequences.query_rows,
            len(call.sequences.added),
            call.site.kind != "cross",
        )
        context = output.transpose(1, 2)
        nothing = output.new_zeros(()).expand(context.shape)
        weights = second if reading.weights else None
        return AttentionCall(
            **vars(call),
            delivery=0,
            query=self.query,
            key=self.key,
            value=value,
            output=context,
            upstream=nothing,
            visibility=visibility,
            sinks=reading.sinks,
            weights=weights,
        )

    def _tapped(self, reading: Reading, value: Tensor, output: Tensor, second: Any, seam: Seam | None) -> Tensor:
        named = {"query": self.query, "key": self.key, "value": value, "mask": reading.mask, "bias": reading.bias}
        named |= {"sinks": reading.sinks, "weights": second if reading.weights else None}
        present = {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}
        heads, group = self.query.shape[1], self.query.shape[1] // self.key.shape[1]
        for plan, delivery in self._deliveries:
            if plan.needs.inputs and reading.late is not None:
                delivery.hook_inputs(reading.late)
            delivery.parts = ("output", *present)
            if plan.needs.flash and not (seam is not None and seam.taken):
                delivery.call = replace(delivery.call, beside=_NOT_PLAIN if seam is None else seam.reason)
            if plan.call is None:
                reachable = output.requires_grad or plan.anchor is not None
                plan.attachment.receiver.seen(delivery.call, heads, group, reachable)
                if not reachable:
                    continue
                if plan.hooked:
                    plan.attachment.await_recomputation(plan, self.query, delivery.call, delivery)
            if seam is None or not seam.taken:
                output = tap_output(delivery, output, tuple(present.values()), plan.anchor)
        return output


def observe(
    plans: Sequence[Plan],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    run: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Any]],
    read: Callable[[], Reading],
) -> tuple[Tensor, Any]:
    """Run a kernel with the taps that `plans` ask for.

    Args:
        query (B,H,Q,D), key (B,K,S,D), value (B,K,S,V): the kernel's inputs.
        run: the original kernel on these three; returns the output (B,Q,H,V) and its second result.
        read: the call's other arguments.
    """
    observation = Observation(plans, query, key, read)
    return observation.complete(value, lambda last: run(observation.query, observation.key, last))


def site_of(plan: Plan, reading: Reading, query: Tensor, key: Tensor) -> CallSite:
    """The call as the forward pass knows it."""
    assert plan.forward is not None
    sequences = plan.forward.sequences(
        query.shape[0], query.shape[2], key.shape[2], plan.site.kind == "cross", reading.added
    )
    if plan.site.kind != "cross" and sequences.positions is not None and query.shape[2] == key.shape[2]:
        plan.attachment.packing.look(plan.site, reading.structure, reading.mask, sequences)
    if reading.hidden:
        plan.attachment.say_hidden(reading.implementation)
    return CallSite(
        plan.site,
        plan.use,
        plan.forward.number,
        reading.scale,
        reading.softcap,
        reading.dropout,
        reading.implementation,
        sequences,
        reading.hidden,
    )


def additive(mask: Tensor) -> bool:
    """True for a float mask, which is added to the scores; False for a boolean one (True is visible)."""
    return mask.dtype != torch.bool
