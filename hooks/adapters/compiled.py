"""Attention inside `torch.compile`: taps that stay in the compiled graph, `fullgraph=True` included.

How it sees the call: while a model is being traced, adapters put `tap` behind the kernel, a custom operator that returns
its input unchanged and numbers the call when the graph runs; its gradient is a second operator that delivers. Opening or
closing a watch changes `watched`, on which the trace is guarded, so the graph is compiled anew once each. What it cannot
see: attention written out by hand, dropout of fused kernels and gradients of q, k and v; those are refused by name.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attachment import Attachment, attached
from ..attachment import traced as watched
from ..call import CallSite
from ..errors import ProbeError, UnsupportedKernel
from ..observation import Reading, site_of
from ..tap import Delivery, recomputing
from ..visibility import Structure, Visibility

# ids of the modules whose `__call__` is being traced, outermost first
tracing: list[int] = []

_DROPOUT = (
    "A compiled kernel drops attention weights and does not say which; set the attention dropout to 0, or run watched "
    "steps under torch.compiler.set_stance('force_eager')."
)
_KEPT = 4096  # calls that may await their gradient
_ANCHOR = torch.zeros((), requires_grad=True)
_open: OrderedDict[int, _Entry]
_numbers = itertools.count(1)


class _Entry:
    """What one call of a compiled graph remembers until its gradient comes."""

    def __init__(self, module: int, query: Tensor, deliveries: list[Delivery]) -> None:
        self.module, self.shape, self.deliveries = module, query.shape, deliveries
        self.fingerprint = query.detach()[:, 0].sum(dim=1)


_open = OrderedDict()


def read(reader: Callable[[], Reading]) -> tuple[Reading | None, str]:
    """What an adapter reads from a call, or why it cannot; called while tracing."""
    try:
        reading = reader()
    except ProbeError as error:
        return None, str(error)
    if reading.replay is not None or reading.hidden:
        return None, _DROPOUT
    return reading, ""


def behind(
    module: int,
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    reading: Reading,
    drawn: Tensor | None = None,
) -> Tensor:
    """`output` (B,Q,H,V) with a tap behind it; called while tracing."""
    anchor = _ANCHOR if watched[module] else None
    structure = reading.structure
    tapped, _ = torch.ops.advantage_probe.tap(
        output,
        query,
        key,
        value,
        reading.mask,
        reading.bias,
        reading.sinks,
        drawn,
        anchor,
        module,
        reading.implementation,
        reading.scale,
        reading.softcap,
        reading.dropout,
        structure.causal,
        structure.offset,
        structure.window,
        output.requires_grad or anchor is not None,
    )
    return tapped


def current() -> int | None:
    """Id of the watched module whose code is being traced, where gradients are wanted."""
    module = tracing[-1] if tracing else 0
    return module if module in watched and torch.is_grad_enabled() else None


def refuse(module: int, tensor: Tensor, message: str) -> Tensor:
    """`tensor`, unchanged; when the graph runs, the watches of `module` are told why it cannot be read."""
    return torch.ops.advantage_probe.refused(tensor, module, message)


@torch.library.custom_op("advantage_probe::refused", mutates_args=())
def _refused(tensor: Tensor, module: int, message: str) -> Tensor:
    for attachment in _attachments(module):
        attachment.receiver.refuse(UnsupportedKernel(message))
    return tensor.clone()


@_refused.register_fake
def _(tensor: Tensor, module: int, message: str) -> Tensor:
    return torch.empty_like(tensor)


_refused.register_autograd(lambda ctx, gradient: (gradient, None, None))


@torch.library.custom_op("advantage_probe::tap", mutates_args=())
def _tap(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    weights: Tensor | None,
    anchor: Tensor | None,
    module: int,
    implementation: str,
    scale: float,
    softcap: float | None,
    dropout: float,
    causal: bool,
    offset: int,
    window: int | None,
    reachable: bool,
) -> tuple[Tensor, Tensor]:
    reading = Reading(implementation, Structure(causal, offset, window), scale, softcap, dropout, mask, bias, sinks)
    named = {"query": query, "key": key, "value": value, "mask": mask, "bias": bias, "sinks": sinks, "weights": weights}
    parts = ("output", *(name for name, tensor in named.items() if tensor is not None))
    number = next(_numbers)
    deliveries = _again(module, query) if recomputing() else _first(module, query, key, reading, parts, reachable)
    if deliveries:
        _open[number] = _Entry(module, query, deliveries)
        while len(_open) > _KEPT:
            _open.popitem(last=False)
    return output.clone(), torch.tensor(number)


@_tap.register_fake
def _(output: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(output), torch.empty((), dtype=torch.int64)


def _attachments(module: int) -> Sequence[Attachment]:
    return [attachment for attachment in attached(module) if attachment.open]


def _first(
    module: int, query: Tensor, key: Tensor, reading: Reading, parts: tuple[str, ...], reachable: bool
) -> list[Delivery]:
    """The deliveries of a call that runs for the first time."""
    found = []
    for attachment in _attachments(module):
        plan = attachment.compiled_plan(module, lambda: _kind(query, key, reading))
        if plan is None:
            continue
        if plan.needs.editor is not None:
            attachment.receiver.refuse(
                UnsupportedKernel("A compiled graph cannot be intervened on; use the plain model.")
            )
            continue
        if plan.needs.inputs:
            attachment.receiver.refuse(
                UnsupportedKernel(
                    "Gradients of queries and keys are inside the compiled graph; verify the plain model."
                )
            )
            continue
        call: CallSite = site_of(plan, reading, query, key)
        attachment.receiver.seen(call, query.shape[1], query.shape[1] // key.shape[1], reachable)
        if reachable:
            deliver, fail = attachment.deliver, attachment.fail
            found.append(Delivery(call, reading.structure, parts, deliver, fail, attachment.passed, False))
    return found


def _kind(query: Tensor, key: Tensor, reading: Reading) -> Any:
    """For calls whose module says nothing of its kind: what mask and lengths say."""
    if reading.implementation != "scaled_dot_product_attention" or query.shape[2] == 1:
        return None
    queries, keys = query.shape[2], key.shape[2]
    if reading.structure.causal or Visibility(Structure(), queries, keys, reading.mask).ordered():
        return "decoder_self"
    return "encoder_self" if queries == keys else "cross"


def _again(module: int, query: Tensor) -> list[Delivery]:
    """The deliveries of the same call, which a checkpoint computes again."""
    for entry in reversed(_open.values()):
        same = entry.module == module and entry.shape == query.shape
        if same and torch.equal(entry.fingerprint, query.detach()[:, 0].sum(dim=1)):
            return entry.deliveries
    return []


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.anchored = inputs[8] is not None
    ctx.present = [place for place in range(8) if inputs[place] is not None]
    ctx.save_for_backward(output[1], *(inputs[place] for place in ctx.present))


def _backward(ctx: Any, upstream: Tensor, _: Any) -> tuple[Any, ...]:
    number, *saved = ctx.saved_tensors
    passed, nothing = torch.ops.advantage_probe.deliver(upstream, number, saved)
    # the anchor's gradient of 0 keeps the delivery in graphs where nothing else needs one
    return passed, *(None,) * 7, nothing if ctx.anchored else None, *(None,) * 9


_tap.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("advantage_probe::deliver", mutates_args=())
def _deliver(upstream: Tensor, number: Tensor, saved: list[Tensor]) -> tuple[Tensor, Tensor]:
    entry = _open.get(int(number))
    for delivery in entry.deliveries if entry is not None else ():
        try:
            with torch.no_grad():
                delivery.deliver(delivery.assemble(tuple(saved), upstream))
        except Exception as error:
            delivery.fail(error)
    _ANCHOR.grad = None
    return upstream.clone(), torch.zeros(())


@_deliver.register_fake
def _(upstream: Tensor, number: Tensor, saved: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.empty_like(upstream), torch.empty(())


def follow(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A module's `__call__` while it is traced: what it calls inside knows its id."""
    tracing.append(id(module))
    try:
        return original(module, *args, **kwargs)
    finally:
        tracing.pop()
