"""Hugging Face transformers: every call that goes through its attention registry.

How it sees the call: while a watch is open, `AttentionInterface.get_interface` and the registry's entries hand out
wrappers around whatever implementation the model was loaded with; the wrapper gets query, key, value after rotary
embedding, the ready-made mask and the score scale, and returns the kernel's own output. No implementation name of our
own is ever registered: models branch on the name, and a private one silently turns sparse attention dense. What it
cannot see: attention that a family computes by hand, block masks of flex attention, and masks inside a fused kernel.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import override
from ..attachment import plans
from ..dropout import replay, unreadable
from ..errors import UnsupportedKernel
from ..forward import stacks
from ..observation import Reading, additive, observe
from ..visibility import Structure
from . import compiled

_OURS = "__advantage_probe_original__"
_wrappers: dict[tuple[str, Callable[..., Any]], Callable[..., Any]] = {}
_entries: dict[str, tuple[bool, Callable[..., Any], Callable[..., Any]]] = {}
_count = 0


def _interface() -> Any | None:
    library = sys.modules.get("transformers.modeling_utils")
    return getattr(library, "AttentionInterface", None)


def acquire() -> None:
    """Hand out wrappers from now on (counted)."""
    global _count
    kind = _interface()
    if kind is None:
        return
    override.acquire(kind, "get_interface", _dispatching)
    _count += 1
    if _count == 1:
        registry = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
        for name in list(registry.valid_keys()):
            original = registry[name]
            wrapper = _wrapper(name, original)
            _entries[name] = (name in registry._local_mapping, original, wrapper)
            registry[name] = wrapper


def release() -> None:
    """Undo one `acquire`; the last one puts the original entries back."""
    global _count
    kind = _interface()
    if kind is None or _count == 0:
        return
    override.release(kind, "get_interface")
    _count -= 1
    if _count == 0:
        registry = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
        for name, (local, original, wrapper) in _entries.items():
            if registry._local_mapping.get(name) is not wrapper:
                continue  # somebody registered another function meanwhile: theirs stays
            if local:
                registry[name] = original
            else:
                del registry[name]
        _entries.clear()


def _dispatching(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(self, attn_implementation, default)
        return _wrapper(attn_implementation or "eager", function)

    return get_interface


def _wrapper(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The observing version of an attention function; always the same object for the same function."""
    function = getattr(function, _OURS, function)
    key = (name, function)
    if key not in _wrappers:
        _wrappers[key] = _observing(name, function)
    return _wrappers[key]


def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arguments that may follow module, query, key and value."""
    try:
        return tuple(inspect.signature(function).parameters)[4:]
    except (TypeError, ValueError):
        return ("attention_mask",)


def _observing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    names = _names(function)

    def attention_forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        if torch.compiler.is_compiling():
            return traced(module, query, key, value, *args, **kwargs)
        if any(running is module for running in stacks.calls):
            return function(module, query, key, value, *args, **kwargs)
        stacks.read += 1
        stacks.calls.append(module)  # what the kernel calls inside is part of this call
        try:
            return seen(module, query, key, value, *args, **kwargs)
        finally:
            stacks.calls.pop()

    def traced(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        name_in_trace = id(module)
        if name_in_trace not in compiled.watched or not torch.is_grad_enabled():
            return function(module, query, key, value, *args, **kwargs)
        given = {**dict(zip(names, args)), **kwargs}
        compiled.tracing.append(0)  # what the kernel calls inside is part of this call
        output, second = function(module, query, key, value, *args, **kwargs)
        compiled.tracing.pop()
        reading, trouble = compiled.read(lambda: read(name, module, query, key, given))
        if reading is None:
            return compiled.refuse(name_in_trace, output, trouble), second
        drawn = second if reading.weights else None
        return compiled.behind(name_in_trace, output, query, key, value, reading, drawn), second

    def seen(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        observers = plans(module, query)
        if not observers:
            return function(module, query, key, value, *args, **kwargs)
        given = {**dict(zip(names, args)), **kwargs}
        return observe(
            observers,
            query,
            key,
            value,
            lambda q, k, v: function(module, q, k, v, *args, **kwargs),
            lambda: read(name, module, query, key, given),
        )

    setattr(attention_forward, _OURS, function)
    return attention_forward


def read(name: str, module: nn.Module, query: Tensor, key: Tensor, given: dict[str, Any]) -> Reading:
    """What the implementation `name` makes of the arguments `given`.

    Raises:
        UnsupportedKernel: where the implementation hides who sees whom.
    """
    flash = "flash" in name
    if "flex" in name:
        raise UnsupportedKernel(
            "flex attention keeps its mask in a block mask that cannot be read; "
            "load the model with attn_implementation='sdpa' or 'eager'."
        )
    if name.startswith("paged|"):
        raise UnsupportedKernel(f"{name} serves continuous batching and has no backward; use 'sdpa' or 'eager'.")
    if any(given.get(sparse) is not None for sparse in ("indices", "block_indices")) and name not in ("sdpa", "eager"):
        raise UnsupportedKernel(
            f"{name} applies a sparse index inside the kernel; load with attn_implementation='sdpa' or 'eager', "
            "where the index is part of the mask."
        )
    if flash and given.get("cu_seq_lens_q") is not None:
        raise UnsupportedKernel(
            "Packed documents inside flash attention (cu_seq_lens) cannot be read; "
            "load with attn_implementation='sdpa' and leave the attention mask out."
        )
    mask = given.get("attention_mask")
    if mask is not None and not isinstance(mask, Tensor):
        raise UnsupportedKernel(
            f"{name} was given a {type(mask).__name__} as mask, which cannot be read; load with 'sdpa' or 'eager'."
        )
    scale = given.get("scaling")
    dropout = float(given.get("dropout") or 0.0)
    if name == "eager" and not module.training:
        dropout = 0.0
    queries, keys = query.shape[2], key.shape[2]
    causal = given.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal) and queries > 1
    structure = Structure()
    if flash:
        window = given.get("sliding_window")
        structure = Structure(causal, keys - queries, window if causal else None)
        if window is not None and not causal and queries > 1:
            raise UnsupportedKernel(f"A two-sided window inside {name} cannot be read; load with 'sdpa' or 'eager'.")
        if mask is not None and mask.dim() == 2:
            mask = mask[:, None, None, -keys:].bool()
    elif name != "eager":
        structure = Structure(causal and mask is None)
    told = name == "eager" or (name == "sdpa" and not unreadable(query, key, mask, dropout, structure.causal))
    scale = float(scale) if scale is not None else query.shape[-1] ** -0.5
    drops = dropout > 0 and told and name == "sdpa"
    sinks = None if name == "sdpa" else _first(given, "s_aux", "sinks")
    if sinks is None and name == "eager":
        sinks = getattr(module, "sinks", None)
    return Reading(
        name,
        structure,
        scale,
        softcap=None if name == "sdpa" else given.get("softcap"),
        dropout=dropout,
        mask=_expanded(mask, keys),
        bias=given.get("position_bias"),
        sinks=sinks if isinstance(sinks, Tensor) else None,
        weights=dropout > 0 and name == "eager",
        replay=replay(query.device, dropout, structure.causal, scale) if drops else None,
        hidden=dropout > 0 and not told,
    )


def _first(given: dict[str, Any], *names: str) -> Any:
    return next((given[name] for name in names if given.get(name) is not None), None)


def _expanded(mask: Tensor | None, keys: int) -> Tensor | None:
    """A mask with four axes, cut to the keys that take part."""
    if mask is None:
        return None
    while mask.dim() < 4:
        mask = mask[None]
    if not additive(mask) or mask.shape[-1] != keys:
        mask = mask[..., :keys]
    return mask
