"""Plain PyTorch: `F.scaled_dot_product_attention` and `nn.MultiheadAttention`.

How it sees the call: while a watch is open, the function object in `torch.nn.functional`, and every global of a watched
module's code that is the same object, is a wrapper that reads the arguments and runs the original; the innermost
watched module that runs on this thread is the one that called, and `nn.MultiheadAttention` with weights runs its own
code with private globals. What it cannot see: attention written out by hand (join it with `expose`), flex attention,
and the fused inference path of encoder layers, which has no gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import override
from ..attachment import SHARDED, plans, refuse
from ..dropout import replay, unreadable
from ..errors import UnsupportedKernel
from ..flash import Seam
from ..forward import Running, stacks
from ..observation import Observation, Reading, observe
from ..site import Kind
from ..visibility import Structure, Visibility
from . import compiled

Override = tuple[Any, str, Callable[[Any], Any]]

_ATTENTION = "scaled_dot_product_attention"
_FLEX = "flex_attention"
_NESTED = "Nested tensors have rows of different length, which cannot be read; pad the batch instead."
_COMPILED = (
    "nn.MultiheadAttention with need_weights=True writes its softmax out and cannot be read inside a compiled model; pass "
    "need_weights=False, or run watched steps under torch.compiler.set_stance('force_eager')."
)
_FUSED = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd")


def overrides(model: nn.Module) -> list[Override]:
    """What has to be replaced while `model` is watched: (owner, name, replacement of the current value)."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    replaced: list[Override] = [(F, _ATTENTION, _attending), (F, "multi_head_attention_forward", _weighing)]
    replaced += [(torch, name, _fused) for name in _FUSED]
    replaced += [(flex, _FLEX, _flexing)] if flex is not None else []
    originals = {id(override.original(owner, name, vars(owner)[name])): make for owner, name, make in replaced}
    found = [
        (namespace, name, make)
        for namespace in _namespaces(model)
        for name, value in namespace.items()
        if (make := originals.get(id(override.original(namespace, name, value)))) is not None
    ]
    return replaced + found


def _namespaces(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Globals of the code of `model`'s own classes, and of the functions and modules that this code refers to."""
    own: dict[int, dict[str, Any]] = {}
    for kind in {base for module in model.modules() for base in type(module).__mro__}:
        if kind.__module__.split(".")[0] not in ("torch", "builtins", "transformers"):
            code = getattr(kind.__dict__.get("forward"), "__globals__", None)
            module = sys.modules.get(kind.__module__)
            for found in (code, None if module is None else vars(module)):
                if found is not None:
                    own[id(found)] = found
    near = dict(own)
    for namespace in own.values():
        for value in list(namespace.values()):
            other = None
            if isinstance(value, FunctionType):
                other = value.__globals__
            elif isinstance(value, ModuleType):
                other = vars(value)
            if other is not None and str(other.get("__name__", "")).split(".")[0] not in ("torch", "transformers"):
                near[id(other)] = other
    yield from near.values()


def _attending(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return _traced(original, query, key, value, *args, **kwargs)
        if stacks.calls or not isinstance(query, Tensor):
            return _within(original, query, key, value, *args, **kwargs)
        running, stacks.read = stacks.innermost(), stacks.read + 1
        given = {**dict(zip(("attn_mask", "dropout_p", "is_causal"), args)), **kwargs}
        if query.is_nested or _ringed(original):
            refuse(running, UnsupportedKernel(_NESTED if query.is_nested else SHARDED))
            return original(query, key, value, *args, **kwargs)
        q, k, v = _four_axes(query, key, value, bool(given.get("enable_gqa")))
        added = _added(running)
        observers = plans(
            None if running is None else running.module, q, lambda: _kind(running, q, k, given, len(added))
        )
        if not observers:
            return original(query, key, value, *args, **kwargs)

        def run(*used: Tensor) -> tuple[Tensor, None]:
            tensors = [
                mine if new is old else _as_given(new, mine, query)
                for new, old, mine in zip(used, (q, k, v), (query, key, value))
            ]
            return _heads_first(_within(original, *tensors, *args, **kwargs)).transpose(1, 2), None

        output, _ = observe(observers, q, k, v, run, lambda: read(query, q, k, given, added))
        output = output.transpose(1, 2)
        return output if query.dim() == 4 else output.reshape(*query.shape[:-2], *output.shape[-2:])

    return scaled_dot_product_attention


def _within(
    original: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """The kernel's own call of sdpa, inside a call that is being read: by the seam that waits for it, where one does."""
    seam = stacks.calls[-1] if stacks.calls else None
    if isinstance(seam, Seam):
        given = {**dict(zip(("attn_mask", "dropout_p", "is_causal"), args)), **kwargs}
        output = seam.attend(query, key, value, given)
        if output is not None:
            return output
    return original(query, key, value, *args, **kwargs)


def _traced(
    original: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """The same inside a graph that is being compiled."""
    output, module = original(query, key, value, *args, **kwargs), compiled.current()
    if module is None:
        return output
    if query.dim() != 4:
        return compiled.refuse(
            module,
            output,
            f"A query of {query.dim()} axes inside a compiled model cannot be read; give scaled_dot_product_attention "
            "four axes (batch, heads, tokens, width).",
        )
    given = {**dict(zip(("attn_mask", "dropout_p", "is_causal"), args)), **kwargs}
    q, k, v = _four_axes(query, key, value, bool(given.get("enable_gqa")))
    reading, trouble = compiled.read(lambda: read(query, q, k, given))
    if reading is None:
        return compiled.refuse(module, output, trouble)
    return compiled.behind(module, output.transpose(1, 2), q, k, v, reading).transpose(1, 2)


def _heads_first(tensor: Tensor) -> Tensor:
    """(B, H, length, width) of a tensor with any number of leading axes, the last of which are heads."""
    while tensor.dim() < 3:
        tensor = tensor[None]
    return tensor[:, None] if tensor.dim() == 3 else tensor.flatten(0, -4)


def _as_given(new: Tensor, given: Tensor, query: Tensor) -> Tensor:
    """A tensor with four axes in the shape in which the user gave it, or in the query's where that was broadcast."""
    if new.shape[:-2].numel() == given.shape[:-2].numel():
        return new.reshape(*given.shape[:-2], *new.shape[-2:])
    return new.reshape(*query.shape[:-3], *new.shape[1:]) if query.dim() > 3 else new


def _four_axes(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The three with four axes; leading axes that the kernel would broadcast are written out."""
    if max(tensor.dim() for tensor in (query, key, value)) > 4:
        leading = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in (query, key, value)))
        query, key, value = (tensor.expand(*leading, *tensor.shape[-3:]) for tensor in (query, key, value))
    q, k, v = (_heads_first(tensor) for tensor in (query, key, value))
    batch = max(tensor.shape[0] for tensor in (q, k, v))
    heads = q.shape[1]
    if not grouped and not (k.shape[1] == v.shape[1] and k.shape[1] in (1, heads)):
        heads = max(tensor.shape[1] for tensor in (q, k, v))
        k, v = (tensor.expand(-1, heads, -1, -1) for tensor in (k, v))
    q, k, v = (tensor if tensor.shape[0] == batch else tensor.expand(batch, -1, -1, -1) for tensor in (q, k, v))
    return (q if q.shape[1] == heads else q.expand(-1, heads, -1, -1)), k, v


def _added(running: Running | None) -> tuple[str, ...]:
    """Names of the key columns that nn.MultiheadAttention appends and that are no tokens."""
    module = None if running is None else running.module
    if not isinstance(module, nn.MultiheadAttention):
        return ()
    return ("bias_k",) * (module.bias_k is not None) + ("zero_attn",) * bool(module.add_zero_attn)


def _kind(running: Running | None, query: Tensor, key: Tensor, given: dict[str, Any], added: int) -> Kind | None:
    """What the arguments say about the kind of attention; None leaves it to the module's name."""
    if running is not None and running.crossing:
        return "cross"
    queries, keys = query.shape[2], key.shape[2]
    mask = _mask(given.get("attn_mask"))
    if given.get("is_causal"):
        return "decoder_self"
    if queries == 1:
        return None
    if mask is not None and Visibility(Structure(), queries, keys, mask, added=added).ordered():
        return "decoder_self"
    return "encoder_self" if queries == keys - added else "cross"


def _mask(mask: Tensor | None, leading: torch.Size | None = None) -> Tensor | None:
    """(B, H, Q, S) or what broadcasts to it, of a mask that broadcasts to a query with these axes before the last two."""
    if mask is None:
        return None
    axes = 4 if leading is None else len(leading) + 2
    while mask.dim() < 4:
        mask = mask[:, None] if mask.dim() == 3 and axes == 3 else mask[None]
    if leading is not None and axes > 4 and any(size != 1 for size in mask.shape[:-3]):
        mask = mask.expand(*leading[:-1], *mask.shape[-3:])
    return mask.flatten(0, -4)


def read(
    given_query: Tensor,
    query: Tensor,
    key: Tensor,
    given: dict[str, Any],
    added: tuple[str, ...] = (),
) -> Reading:
    """What `scaled_dot_product_attention` makes of its arguments.

    Raises:
        UnsupportedKernel: where heads and batch share one axis.
    """
    batch = _batch() if given_query.dim() == 3 else None
    if batch is not None and given_query.shape[0] > batch:
        raise UnsupportedKernel(
            f"A query of shape {tuple(given_query.shape)} holds {batch} sequences and their heads on one axis; "
            "give scaled_dot_product_attention four axes (batch, heads, tokens, width)."
        )
    mask, dropout, causal = given.get("attn_mask"), float(given.get("dropout_p") or 0.0), bool(given.get("is_causal"))
    scale = given.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    hidden = unreadable(query, key, mask, dropout, causal)
    return Reading(
        _ATTENTION,
        Structure(causal),
        scale,
        dropout=dropout,
        mask=_mask(mask, given_query.shape[:-2]),
        replay=replay(query.device, dropout, causal, scale) if dropout and not hidden else None,
        hidden=hidden,
        added=added,
    )


def _batch() -> int | None:
    from ..forward import frames

    inputs = frames.stack[0].inputs if frames.stack else ()
    return inputs[0].shape[0] if inputs and inputs[0].dim() > 1 else None


def _ringed(function: Any) -> bool:
    """True for the function that context parallelism puts in place: it sends keys around a ring of devices."""
    ring = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    return ring is not None and function in getattr(ring, "_replaced_functions", ())


def _flexing(original: Callable[..., Any]) -> Callable[..., Any]:
    def flex_attention(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and not stacks.calls:
            refuse(
                stacks.innermost(),
                UnsupportedKernel(
                    "flex attention keeps its mask and its score function inside the kernel; call "
                    "scaled_dot_product_attention with a mask in watched models."
                ),
            )
        return original(*args, **kwargs)

    return flex_attention


def _fused(original: Callable[..., Any]) -> Callable[..., Any]:
    """The inference path of encoder layers: noted as attention without a gradient."""

    def fused(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            refuse(
                stacks.innermost(),
                UnsupportedKernel(
                    "An encoder layer in eval mode without trainable weights takes PyTorch's fused inference path, "
                    "which has no gradient; call model.train() or torch.backends.mha.set_fastpath_enabled(False)."
                ),
            )
        return original(*args, **kwargs)

    return fused


def _weighing(original: Any) -> Callable[..., Any]:
    """`F.multi_head_attention_forward`, whose path with weights runs on private globals that see both products."""

    def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
        places = {name: place for place, name in enumerate(original.__code__.co_varnames[: len(args)])}
        wanted = args[places["need_weights"]] if "need_weights" in places else kwargs.get("need_weights", True)
        if torch.compiler.is_compiling():
            output, weights = original(*args, **kwargs)
            module = compiled.current() if wanted else None
            return output if module is None else compiled.refuse(module, output, _COMPILED), weights
        running = stacks.innermost()
        tensors = [entry for entry in (*args, *kwargs.values()) if isinstance(entry, Tensor)]
        if not wanted or running is None or stacks.calls:
            return original(*args, **kwargs)
        if torch.overrides.has_torch_function(tensors) or not isinstance(original, FunctionType):
            return original(*args, **kwargs)
        heads = args[places["num_heads"]] if "num_heads" in places else kwargs["num_heads"]
        private = {**original.__globals__, "torch": _Products(running, heads)}
        copy = FunctionType(original.__code__, private, original.__name__, original.__defaults__, original.__closure__)
        copy.__kwdefaults__ = original.__kwdefaults__
        return copy(*args, **kwargs)

    return multi_head_attention_forward


class _Products:
    """`torch` as the code of `multi_head_attention_forward` sees it: its two batched products are read on the way."""

    def __init__(self, running: Running, heads: int) -> None:
        self._running, self._heads = running, heads
        self._observation: Observation | None = None
        self._scored = False

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def baddbmm(self, mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Masked scores (B·H, Q, S) of scaled queries and transposed keys."""
        return torch.baddbmm(mask, *self._score(query, key, mask))

    def bmm(self, first: Tensor, second: Tensor) -> Tensor:
        """Scores on the first call, unless they came with a mask; else weights times values."""
        if not self._scored:
            return torch.bmm(*self._score(first, second, None))
        if self._observation is None:
            return torch.bmm(first, second)
        heads = self._heads

        def run(value: Tensor) -> tuple[Tensor, Tensor]:
            output = torch.bmm(first, value.flatten(0, 1))
            return output.unflatten(0, (-1, heads)).transpose(1, 2), first.unflatten(0, (-1, heads))

        output, _ = self._observation.complete(second.unflatten(0, (-1, heads)), run)
        return output.transpose(1, 2).flatten(0, 1)

    def _score(self, query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        self._scored = True
        stacks.read += 1
        heads, added = self._heads, _added(self._running)
        q, k = query.unflatten(0, (-1, heads)), key.transpose(1, 2).unflatten(0, (-1, heads))
        if mask is not None:
            mask = mask.unflatten(0, (-1, heads)) if mask.shape[0] != 1 else mask[None]
        module = self._running.module
        given = {"attn_mask": mask}
        observers = plans(module, q, lambda: _kind(self._running, q, k, given, len(added)))
        if not observers:
            return query, key
        dropout = float(getattr(module, "dropout", 0.0)) if module.training else 0.0

        def read_products() -> Reading:
            return Reading(
                "multi_head_attention",
                Structure(),
                1.0,  # the query comes scaled
                dropout=dropout,
                mask=mask,
                weights=dropout > 0,
                added=added,
            )

        self._observation = Observation(observers, q, k, read_products)
        if self._observation.query is q:
            return query, key
        return self._observation.query.flatten(0, 1), self._observation.key.flatten(0, 1).transpose(1, 2)
