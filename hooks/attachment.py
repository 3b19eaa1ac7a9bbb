"""One receiver attached to one model: decides which calls are observed, owns what was replaced, and puts it back.

Whether a call is observed is decided once, in its original forward. A checkpoint that is recomputed in the backward
pass repeats that decision, because non-reentrant checkpointing compares what was saved and would raise in the user's
backward otherwise. The recomputed call is recognised by its query (the recomputation is bit-equal), so that any number
of forwards may be under way, in any order, with watches opening and closing in between. A watch that closes while
checkpointed calls await their backward stops listening at once, and gives its overrides back when the last of them has
passed or has been freed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from . import override
from .call import AttentionCall, CallSite, Flash, FlashReceiver, Needs, Receiver
from .errors import Notices, UnsupportedKernel
from .forward import Forward, Running
from .mask_cache import forget
from .recomputation import Decision, Recomputations
from .sequences import Frame, Packing, looks_padded, takes_inputs
from .site import Kind, Site, describe
from .tap import Delivery, recomputing, saving_is_hooked

SHARDED = (
    "Query shards of one sequence (context parallelism) see only a part of its attention and cannot be added up; "
    "watch a run that keeps whole sequences on a device."
)
CHECKPOINTED = (
    "A checkpoint computes its forward again in the backward pass, where an edit would be missing; switch gradient "
    "checkpointing off for runs that are intervened on."
)
_CHECKED = 8  # forwards whose ids are looked at for forgotten padding
_lock = threading.RLock()
_by_module: dict[int, tuple[Attachment, ...]] = {}
traced: dict[
    int, bool
] = {}  # id of a watched module → whether its calls need a gradient path; compiled graphs guard on it
_attachments: list[Attachment] = []


@dataclass(frozen=True, eq=False)
class Plan:
    """The decision to observe one call.

    `call` is set when this is a recomputation; `deferred` when the forward runs without gradients inside a reentrant
    checkpoint, so that the recomputation will be the call that counts.
    """

    attachment: Attachment
    module: nn.Module
    site: Site
    needs: Needs
    forward: Forward | None
    use: int
    anchor: Tensor | None
    hooked: bool = False
    deferred: bool = False
    call: CallSite | None = None


class Attachment:
    """One receiver attached to one model, until `close`; made by `attach.attach`.

    Args:
        model: any module; its attention sub-modules are found by the calls they make.
        receiver: who is asked and told.
        names: (qualified name, module) of everything that may call attention.
        silent: layers that have no softmax attention.
        reach_all: give every call a gradient path, also where the model's own graph has none.
    """

    def __init__(
        self,
        model: nn.Module,
        receiver: Receiver,
        names: Iterable[tuple[str, nn.Module]],
        silent: tuple[Site, ...],
        *,
        reach_all: bool = False,
    ) -> None:
        self.model, self.receiver, self.reach_all = model, receiver, reach_all
        self.open = True
        self.blind_calls = 0
        self.ran = False
        self.notices = Notices()
        self._settled = False
        self._forwards = 0
        self.packing = Packing(self.notices)
        self._local = threading.local()
        self._recomputations = Recomputations(self.passed)
        self._modules = {id(module): (_plain(name), module) for name, module in names}
        self._sites: dict[int, dict[Kind | None, Site]] = {}
        self._followed = {id(module) for module in model.modules() if takes_inputs(module)}
        self._followed |= {id(model), id(model._modules.get("_orig_mod"))}
        self.silent = silent
        self._undo: list[Callable[[], None]] = []
        with _lock:
            _attachments.append(self)
            for module in self._modules:
                _by_module[module] = (*_by_module.get(module, ()), self)
            self._guard()

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace `owner.name` by `make` of what is there, until this attachment settles."""
        override.acquire(owner, name, make)
        self.undo(lambda: override.release(owner, name))

    def undo(self, action: Callable[[], None]) -> None:
        """Do this when the attachment settles; what was noted last is done first."""
        self._undo.append(action)

    def _guard(self) -> None:
        """Tell traces which modules are watched, and whether they need a gradient path."""
        for module in self._modules:
            others = [other for other in _by_module.get(module, ()) if other.open]
            if others:
                traced[module] = any(other.reaches() for other in others)
            else:
                traced.pop(module, None)

    def reaches(self) -> bool:
        """True where calls need a gradient path of our own."""
        return self.reach_all or not any(parameter.requires_grad for parameter in self.model.parameters())

    def close(self) -> None:
        """Stop listening. Everything is put back now, or as soon as no checkpointed call awaits its backward."""
        self.open = False
        forget()
        with _lock:
            self._guard()
        self._settle()

    def _settle(self) -> None:
        with _lock:
            if self._settled or self.open:
                return
            if self._recomputations.pending():
                return
            self._settled = True
            _attachments.remove(self)
            _forget(_by_module, self._modules, self)
            while self._undo:
                self._undo.pop()()
            self._recomputations.clear()

    # -- forward -----------------------------------------------------------------------------------------------------

    def start(self, top: Frame) -> bool:
        """A followed module starts; True when it is the outermost one of this model on this thread."""
        if not self.open or getattr(self._local, "forward", None) is not None:
            return False
        self._local.forward = self._new_forward(top)
        self._local.loose = None
        return True

    def finish(self) -> None:
        self._local.forward = None

    def _new_forward(self, top: Frame | None) -> Forward:
        self._forwards += 1
        self.ran |= torch.is_grad_enabled()
        if self._forwards <= _CHECKED and not self.notices.told("padding") and looks_padded(self.model, top):
            self.notices.say_once(
                "padding",
                "the ids hold padding but no attention_mask was given, so padding is attended to and counted like text; "
                "pass attention_mask.",
            )
        forget()
        return Forward(self._forwards, torch.is_grad_enabled(), self.reaches(), top)

    def _current(self, module: nn.Module) -> Forward:
        """The running forward; a module called outside any followed one starts a forward of its own."""
        forward: Forward | None = getattr(self._local, "forward", None)
        if forward is not None:
            return forward
        loose: Forward | None = getattr(self._local, "loose", None)
        if loose is None or next(iter(loose.uses), None) == id(module):
            loose = self._local.loose = self._new_forward(None)
        return loose

    def expects_gradients(self) -> bool:
        """True where a gradient may come back: also inside reentrant checkpoints, whose forward runs without."""
        forward: Forward | None = getattr(self._local, "forward", None)
        return torch.is_grad_enabled() or (forward is not None and forward.gradients)

    def follows(self, module: nn.Module) -> bool:
        """True for the modules whose arguments describe the batch."""
        return id(module) in self._followed

    def site(self, module: nn.Module, kind: Kind | None) -> Site:
        """The site of a module's call; one whose kind its arguments do not tell belongs to the calls before it."""
        known = self._sites.setdefault(id(module), {})
        if kind is None and known:
            return next(iter(known.values()))
        if kind not in known:
            known[kind] = describe(self._modules[id(module)][0], module, kind)
        return known[kind]

    def plan(self, module: nn.Module, query: Tensor, kind: Callable[[], Kind | None]) -> Plan | None:
        """Whether this call is observed, and how; None leaves it alone."""
        if not self.open:
            if saving_is_hooked():
                self._recomputations.remember(module, query, None)
            return None
        forward = self._current(module)
        use = forward.use(module)
        deferred = not torch.is_grad_enabled()
        if getattr(self.receiver, "edits", False):
            return self._edit(module, forward, use, self.site(module, kind()))
        if deferred and not forward.gradients:
            self._blind(module)
            return None
        site = self.site(module, kind())
        needs = self.receiver.wants(site)
        if needs is None:
            if deferred or saving_is_hooked():
                self._recomputations.remember(module, query, None)
            return None
        anchor = torch.zeros((), requires_grad=True) if forward.reach or needs.inputs else None
        return Plan(self, module, site, needs, forward, use, anchor, saving_is_hooked(), deferred)

    def _edit(self, module: nn.Module, forward: Forward, use: int, site: Site) -> Plan | None:
        """The plan of a receiver that edits calls in the forward pass and awaits no gradient."""
        needs = self.receiver.wants(site)
        if needs is None:
            return None
        if saving_is_hooked() or (forward.gradients and not torch.is_grad_enabled()):
            self.receiver.refuse(UnsupportedKernel(CHECKPOINTED))
            return None
        return Plan(self, module, site, needs, forward, use, None)

    def _blind(self, module: nn.Module) -> None:
        """Count a call without gradients; in train mode that is seldom meant, so it is said, once."""
        self.blind_calls += 1
        if module.training:
            self.notices.say_once(
                "no gradient",
                "attention runs under torch.no_grad() in train mode, where no gradient can come back; such forwards are "
                "left out.",
            )

    def say_hidden(self, implementation: str) -> None:
        """Name, once, the columns that a kernel with hidden dropout does not allow."""
        self.notices.say_once(
            "hidden dropout",
            f"{implementation} drops attention weights and does not say which, so columns that need them (advantage, "
            "routing, content, alignment, coherence, update) are refused; set the attention dropout to 0, or run watched "
            "steps with attn_implementation='eager' or under sdpa_kernel(SDPBackend.MATH).",
        )

    def compiled_plan(self, module: int, kind: Callable[[], Kind | None]) -> Plan | None:
        """Whether a call of a compiled graph is observed; whether it has gradients was asked when it was traced."""
        owner = self._modules[module][1]
        forward = self._current(owner)
        use, site = forward.use(owner), self.site(owner, kind())
        needs = self.receiver.wants(site)
        return None if needs is None else Plan(self, owner, site, needs, forward, use, None)

    def repeat(self, module: nn.Module | None, query: Tensor) -> Plan | None:
        """The decision of the original forward, for the same call recomputed (by `module`, where that is known)."""
        entry = self._recomputations.match(module, query)
        if entry is None or entry.decision is None:
            return None
        call, anchored = entry.decision.call, entry.decision.anchored
        anchor = torch.zeros((), requires_grad=True) if anchored else None
        return Plan(self, entry.module, call.site, entry.decision.needs, None, call.use, anchor, call=call)

    def await_recomputation(self, plan: Plan, query: Tensor, call: CallSite, delivery: Delivery | None) -> None:
        """Note that a checkpointed call is observed, so that its recomputation will be as well."""
        decision = Decision(call, plan.needs, plan.anchor is not None)
        self._recomputations.remember(plan.module, query, decision, delivery)

    # -- backward ----------------------------------------------------------------------------------------------------

    def deliver(self, call: AttentionCall) -> None:
        if self.open:
            # a backward inside an autocast region must not compute the law in half precision
            with torch.autocast(call.upstream.device.type, enabled=False):
                self.receiver.receive(call)

    def flash(self, call: AttentionCall, flash: Flash) -> tuple[Tensor, Tensor, Tensor] | None:
        if not self.open:
            return None
        with torch.autocast(call.upstream.device.type, enabled=False):
            return cast(FlashReceiver, self.receiver).receive_flash(call, flash)

    def fail(self, error: Exception) -> None:
        """An error of ours never reaches the user's backward: the attachment closes and the receiver keeps it."""
        if self.open:
            self.receiver.refuse(error)
            self.close()

    def passed(self) -> None:
        if not self.open:
            self._settle()


def _forget(table: dict[int, tuple[Attachment, ...]], keys: Any, attachment: Attachment) -> None:
    for key in keys:
        left = tuple(other for other in table.get(key, ()) if other is not attachment)
        if left:
            table[key] = left
        else:
            table.pop(key, None)


def _plain(name: str) -> str:
    """A module's name without what compiling or bridging puts in between."""
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "_original_component"))


def _unnamed() -> None:
    return None


def plans(module: nn.Module | None, query: Tensor, kind: Callable[[], Kind | None] = _unnamed) -> list[Plan]:
    """Who observes this call of `module` with `query` (B,H,Q,D); `kind`: what the call's arguments say of its kind."""
    if recomputing():
        if not torch.is_grad_enabled() or (module is not None and id(module) not in _by_module):
            return []
        return [plan for attachment in tuple(_attachments) if (plan := attachment.repeat(module, query)) is not None]
    attachments = _by_module.get(id(module))
    if not attachments or module is None:
        return []
    trouble = _trouble(query)
    if trouble is not None:
        for attachment in attachments:
            attachment.receiver.refuse(UnsupportedKernel(trouble))
        return []
    return [plan for attachment in attachments if (plan := attachment.plan(module, query, kind)) is not None]


def _trouble(query: Tensor) -> str | None:
    """Why no call can be observed where the model runs now."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return (
            "The model runs inside a torch.func transform (vmap, grad, jvp), where gradients cannot be observed; "
            "use loss.backward() for watched steps."
        )
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(query, distributed.DTensor):
        return SHARDED
    return None


def attached(module: int) -> tuple[Attachment, ...]:
    """Who is attached to the module with this id."""
    return _by_module.get(module, ())


def watched(module: nn.Module) -> bool:
    """True while somebody watches this module, or awaits a recomputation of it."""
    return id(module) in _by_module


def refuse(running: Running | None, error: Exception) -> None:
    """Attention of a watched module that cannot be read: its receivers are told, unless no gradient would come anyway."""
    for attachment in _by_module.get(id(running.module), ()) if running is not None else ():
        assert running is not None
        if attachment.receiver.wants(attachment.site(running.module, None)) is None:
            continue
        if attachment.expects_gradients():
            attachment.receiver.refuse(error)
        else:
            attachment.blind_calls += 1
