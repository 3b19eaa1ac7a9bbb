"""Attaches a receiver to a model: picks the adapters, makes their replacements, and hands the attachment the way back.

Most clients want no more than the calls: `with calls(model, on_call)` for those that look, `with edited(model, …)` for
those that put other values or outputs in their place. Who needs the whole protocol of `call.Receiver` uses `attach`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from .adapters import families, functional, huggingface, module_calls, transformer_lens
from .attachment import Attachment
from .call import AttentionCall, CallSite, Needs, Receiver
from .site import Site, unmixed


def attach(model: nn.Module, receiver: Receiver, *, reach_all: bool = False) -> Attachment:
    """Show `receiver` the attention calls of `model` until the attachment is closed.

    Args:
        model: any module; nothing of it is changed.
        receiver: who is asked in the forward pass and told in the backward pass.
        reach_all: give every call a gradient path, also where the model's own graph has none.
    """
    attachment = Attachment(model, receiver, transformer_lens.names(model), unmixed(model), reach_all=reach_all)
    try:
        for adapter in (module_calls, functional, families, transformer_lens):
            for owner, name, make in adapter.overrides(model):
                attachment.replace(owner, name, make)
        huggingface.acquire()
        attachment.undo(huggingface.release)
    except BaseException:
        attachment.close()
        raise
    return attachment


def anywhere(site: Site) -> bool:
    """Every attention module is wanted."""
    return True


def within_one_sequence(site: Site) -> bool:
    """Self-attention only: the modules whose queries and keys are the same tokens."""
    return site.kind != "cross"


@dataclass(eq=False)
class Listener:
    """A receiver made of functions.

    Attributes:
        on_call: handed every wanted call; in the backward pass, or in the forward pass where `edits`.
        wanted: which modules; inputs: as in `Needs`.
        on_value, on_output: what an editor puts in place of values and outputs.
        ran: every wanted call of the forward pass, with its number of heads. error: the first thing that could not be read.
    """

    on_call: Callable[[AttentionCall], None] | None = None
    wanted: Callable[[Site], bool] = anywhere
    inputs: bool = False
    edits: bool = False
    on_value: Callable[[CallSite, Tensor], Tensor] | None = None
    on_output: Callable[[AttentionCall], Tensor] | None = None
    ran: list[tuple[CallSite, int]] = field(default_factory=list)
    error: Exception | None = None

    def wants(self, site: Site) -> Needs | None:
        if not self.wanted(site):
            return None
        return Needs(editor=self) if self.edits else Needs(inputs=self.inputs)

    def seen(self, call: CallSite, heads: int, group: int, reachable: bool) -> None:
        self.ran.append((call, heads))

    def receive(self, call: AttentionCall) -> None:
        assert self.on_call is not None
        self.on_call(call)

    def refuse(self, error: Exception) -> None:
        self.error = self.error or error
        if self.edits:  # the user asked for this forward to be another: it must not go on as it was
            raise error

    def value(self, call: CallSite, value: Tensor) -> Tensor:
        return value if self.on_value is None else self.on_value(call, value)

    def output(self, call: AttentionCall) -> Tensor:
        if self.on_call is not None:
            self.on_call(call)
        return call.output if self.on_output is None else self.on_output(call)

    def check(self) -> None:
        """Raise what could not be read so far."""
        if self.error is not None:
            raise self.error


@contextmanager
def _listening(model: nn.Module, listener: Listener, reach_all: bool = False) -> Iterator[Listener]:
    attachment = attach(model, listener, reach_all=reach_all)
    try:
        yield listener
    finally:
        attachment.close()
    if not listener.edits:  # else it was raised where it happened
        listener.check()


def calls(
    model: nn.Module,
    on_call: Callable[[AttentionCall], None],
    *,
    wanted: Callable[[Site], bool] = anywhere,
    forward: bool = False,
    inputs: bool = False,
    reach_all: bool = False,
) -> AbstractContextManager[Listener]:
    """Hand every attention call of `model` to `on_call` inside the block; what could not be read is raised at its end.

    Args:
        model: any module; nothing of it is changed.
        on_call: gets each call in the backward pass, once a gradient has come back to it.
        wanted: which attention modules.
        forward: hand calls over in the forward pass instead, with or without gradients; their `upstream` is 0.
        inputs: also the gradients of query, key and value, as the kernel computes them.
        reach_all: give every call a gradient path, also where the model's own graph has none.
    """
    listener = Listener(on_call, wanted, inputs, forward)
    return _listening(model, listener, reach_all)


def edited(
    model: nn.Module,
    *,
    value: Callable[[CallSite, Tensor], Tensor] | None = None,
    output: Callable[[AttentionCall], Tensor] | None = None,
    wanted: Callable[[Site], bool] = within_one_sequence,
) -> AbstractContextManager[Listener]:
    """Put other values (B,K,S,V) or head outputs (B,H,Q,V) in the place of those of `model` inside the block.

    What cannot be read is raised at once, in the forward: an edit that does not happen must not pass for one.
    """
    listener = Listener(wanted=wanted, edits=True, on_value=value, on_output=output)
    return _listening(model, listener)
