"""Families of transformers that compute attention by hand: BLOOM, Falcon, MPT, GPT-Neo, XGLM, DeBERTa and others.

How it sees the call: attention classes whose code contains a softmax and does not ask the registry run under a `Chain`,
which reads q, k, scores, w, v and head output off the operations of the implementation that was loaded. What it cannot
see: attention in several pieces (Longformer, Nyströmformer), as einsum (XLNet, Funnel) or without a softmax of the
scores (Reformer's hashes); those are refused by the family's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..attachment import refuse, watched
from ..errors import UnsupportedFamily
from ..forward import stacks
from . import compiled
from .chain import Chain

_COMPILED = (
    "computes attention by hand, which cannot be read inside a compiled model; run watched steps under "
    "torch.compiler.set_stance('force_eager')."
)
_known: dict[Any, bool] = {}


def by_hand(kind: type[nn.Module]) -> bool:
    """True for attention classes of transformers that write their softmax out."""
    if kind not in _known:
        _known[kind] = _writes_softmax(kind)
    return _known[kind]


def _writes_softmax(kind: type[nn.Module]) -> bool:
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    ours = owner.__module__.startswith(("transformers.models.", "transformers_modules."))
    return (
        ours
        and "Attention" in owner.__name__
        and "ALL_ATTENTION_FUNCTIONS" not in names_in(owner)
        and has_softmax(owner)
    )


def names_in(kind: type[nn.Module]) -> set[str]:
    """Every name that the code of a class's own methods uses."""
    names: set[str] = set()
    for member in vars(kind).values():
        while hasattr(member, "__wrapped__"):
            member = member.__wrapped__
        code = getattr(member, "__code__", None)
        if code is not None:
            names |= set(code.co_names)
    return names


def has_softmax(kind: type[nn.Module]) -> bool:
    """True for classes whose own methods write a softmax out."""
    return bool(names_in(kind) & {"softmax", "Softmax", "XSoftmax", "logsumexp"})


def overrides(model: nn.Module) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """What has to be replaced while `model` is watched."""
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        if by_hand(kind):
            yield kind, "forward", chained


def chained(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `forward` whose operations are read while somebody watches the module."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _traced(self, original(self, *args, **kwargs))
        if stacks.calls or not watched(self):
            return original(self, *args, **kwargs)
        chain, read = Chain(self), stacks.read
        with chain:
            result = original(self, *args, **kwargs)
        if chain.trouble is not None and stacks.read == read:  # not read by the module's own kernel either
            refuse(stacks.innermost(), _refusal(self, chain.trouble))
        return result

    return forward


def _traced(module: nn.Module, result: Any) -> Any:
    """The result of a call inside a graph that is being compiled, where operations cannot be followed."""
    first = result[0] if isinstance(result, tuple) else result
    name = id(module)
    if name not in compiled.watched or not torch.is_grad_enabled() or not isinstance(first, torch.Tensor):
        return result
    first = compiled.refuse(name, first, f"{type(module).__name__} {_COMPILED}")
    return (first, *result[1:]) if isinstance(result, tuple) else first


def _refusal(module: nn.Module, trouble: str) -> UnsupportedFamily:
    parts = type(module).__module__.split(".")
    return UnsupportedFamily(
        f"{parts[2] if len(parts) > 2 else parts[0]}: {type(module).__name__} computes attention in a way that cannot be "
        f"read ({trouble}); watch other layers with layers=, or a family that uses scaled_dot_product_attention."
    )
