"""Replaced `__call__`s: which watched module runs, and where a top-level forward begins and ends.

The replacement is made on the class while a watch is open and looks the instance up, so that nothing is hung on modules:
copies, pickles and saved models carry nothing of ours, and unwatched instances run as before.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..attachment import Attachment, attached
from ..errors import Notices
from ..forward import enter, frames, leave, stacks
from ..sequences import frame
from ..tap import recomputing
from . import compiled
from .families import has_softmax

_unseen: dict[Any, bool] = {}
_notices = Notices()


def overrides(model: nn.Module) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """What has to be replaced while `model` is watched."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    wrapper = dynamo.OptimizedModule if dynamo is not None else None
    if wrapper is not None:
        yield wrapper, "__call__", _wrapping
    for kind in dict.fromkeys(type(module) for module in model.modules() if module is model or _may_attend(module)):
        if kind is not wrapper:
            yield kind, "__call__", _following


def _may_attend(module: nn.Module) -> bool:
    """False for the layers of torch itself that compute no attention: they need not be followed."""
    kind = type(module)
    return not kind.__module__.startswith(("torch.nn.", "torch.jit")) or isinstance(module, nn.MultiheadAttention)


def looks_unseen(kind: type[nn.Module]) -> bool:
    """True for classes that call themselves attention and write a softmax out, so that a call may have gone unseen."""
    if kind not in _unseen:
        named = re.search("attention|attn", kind.__name__, re.IGNORECASE) is not None
        library = kind.__module__.split(".")[0] in ("torch", "transformers", "transformers_modules", "transformer_lens")
        _unseen[kind] = named and not library and has_softmax(kind)
    return _unseen[kind]


def _say(kind: type[nn.Module]) -> None:
    _unseen[kind] = False
    _notices.say_once(
        (kind.__module__, kind.__qualname__),
        f"{kind.__name__} ran and writes its own softmax, but no attention call was seen in it; if it computes attention, "
        "let it be seen with y = advantage_probe.expose(self, q, k, v, y, …).",
        stacklevel=5,
    )


def _following(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `__call__` for a class, which notes the calls of watched instances and leaves all others alone."""

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return compiled.follow(original, self, args, kwargs)
        attachments = attached(id(self))
        if not attachments:
            return _unwatched(original, self, args, kwargs) if recomputing() else original(self, *args, **kwargs)
        return _followed(attachments, self, original, self, args, kwargs)

    return __call__


def _unwatched(original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A recomputed call of a module that nobody watches: what it calls must not be taken for a twin's call."""
    enter(module, args, kwargs)
    try:
        return original(module, *args, **kwargs)
    finally:
        leave()


def _wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    """The `__call__` of compiled modules: it stands for the module that was compiled, whose own is inside the graph."""

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner = self._modules.get("_orig_mod")
        attachments = () if torch.compiler.is_compiling() else attached(id(inner))
        if inner is None or not attachments:
            return original(self, *args, **kwargs)
        return _followed(attachments, inner, original, self, args, kwargs)

    return __call__


def _followed(
    attachments: tuple[Attachment, ...],
    module: nn.Module,
    original: Callable[..., Any],
    called: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    enter(module, args, kwargs)
    read = stacks.read
    started: list[Attachment] = []
    following = [] if recomputing() else [attachment for attachment in attachments if attachment.follows(module)]
    if following:
        entry = frame(module, args, kwargs)
        frames.stack.append(entry)
        started = [attachment for attachment in following if attachment.start(entry)]
    try:
        result = original(called, *args, **kwargs)
        if stacks.read == read and torch.is_grad_enabled() and looks_unseen(type(module)):
            _say(type(module))
        return result
    finally:
        if following:
            frames.stack.pop()
        leave()
        for attachment in started:
            attachment.finish()
