"""The chain product → softmax → product inside one call of a module that writes its attention out.

A `TorchFunctionMode` that lives for this one call looks at the operations. It follows what becomes of every product:
factors, caps, masks, a column of sinks. The product whose descendant enters the one softmax gives q and k, the
descendant is the score, the softmax's descendant times a tensor gives w and v. What was added to the scores (mask, ALiBi,
relative positions) is the difference between the score and scale · q·k.

Shapes: B batch, H query heads, K key/value heads, Q query positions, S key positions, D head width.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..attachment import plans
from ..forward import stacks
from ..observation import Reading, observe
from ..site import Kind
from ..visibility import Structure, Visibility

_PRODUCTS = ("bmm", "matmul", "__matmul__", "baddbmm")
_TIMES = ("mul", "mul_", "multiply", "__mul__", "__imul__", "__rmul__")
_OVER = ("div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__")
_UNRELATED = ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")


@dataclass(frozen=True, eq=False)
class _Scores:
    """A product of two tensors that may turn out to be the scores, and what was done to it so far.

    `key` is (…, D, S). `factor`: one number per head by which the scores were multiplied; `hidden`: True where they were
    multiplied by 0; `inside`: scale before a tanh; `sinks`: the column that was appended, and the scores before that.
    """

    query: Tensor
    key: Tensor
    scale: float
    factor: Tensor | None = None
    hidden: Tensor | None = None
    inside: float | None = None
    sinks: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, eq=False)
class _Weights:
    """The softmax of a score, or what became of it."""

    scores: _Scores
    score: Tensor
    dropped: bool = False


class Chain(TorchFunctionMode):
    """The operations of one call of `module`; `trouble` says why they could not be read, None when they were."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.trouble: str | None = "no product, softmax and product follow each other"
        self._known: dict[int, tuple[weakref.ref[Tensor], _Scores | _Weights]] = {}
        self._softmaxes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if stacks.calls:  # inside a kernel that another adapter reads
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _PRODUCTS:
            return self._product(func, name, args, kwargs)
        result = func(*args, **kwargs)
        if name == "softmax":
            self._softmax(args[0] if args else kwargs.get("input"), result)
        elif isinstance(result, Tensor) and result.is_floating_point() and name not in _UNRELATED:
            self._follow(name, args, kwargs, result)
        return result

    def _state(self, tensor: Any) -> _Scores | _Weights | None:
        reference, state = self._known.get(id(tensor), (None, None))
        return state if reference is not None and reference() is tensor else None

    def _note(self, tensor: Tensor, state: _Scores | _Weights) -> None:
        self._known[id(tensor)] = (weakref.ref(tensor), state)

    def _product(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
        given = (*args, kwargs.get("batch1"), kwargs.get("batch2"))
        first, second = [part for part in given if isinstance(part, Tensor)][-2:]
        weights = self._state(first)
        if isinstance(weights, _Weights):
            return self._finish(func, weights, first, second, args, kwargs)
        if self._softmaxes or first.dim() < 3 or second.dim() < 3:
            result: Tensor = func(*args, **kwargs)
            return result
        # tensors of our own, so that gradients of q and k through this product can be told from others
        mine = {id(first): first.view_as(first), id(second): second.view_as(second)}
        args = tuple(mine.get(id(part), part) for part in args)
        kwargs = {key: mine.get(id(part), part) for key, part in kwargs.items()}
        result = func(*args, **kwargs)
        scale = float(kwargs.get("alpha", 1.0)) if name == "baddbmm" else 1.0
        self._note(result, _Scores(mine[id(first)], mine[id(second)], scale))
        return result

    def _follow(self, name: str, args: Any, kwargs: Any, result: Tensor) -> None:
        parts = args[0] if name == "cat" and args and isinstance(args[0], (list, tuple)) else (*args, *kwargs.values())
        found = [(part, state) for part in parts if (state := self._state(part)) is not None]
        if not found:
            return
        operand, state = found[0]
        if isinstance(state, _Weights):
            last = state.score.shape[-1] - 1
            if name == "__getitem__" and state.scores.sinks is not None and result.shape[-1] == last:
                self._note(result, state)
            elif result.numel() == operand.numel():
                p, training = kwargs.get("p", args[1] if len(args) > 1 else 0.5), kwargs.get("training", True)
                dropped = name == "dropout" and bool(training) and float(p) > 0
                self._note(result, replace(state, dropped=state.dropped or dropped))
        elif name == "cat":
            if len(parts) == 2 and parts[0] is operand and result.shape[-1] == operand.shape[-1] + 1:
                self._note(result, replace(state, sinks=(parts[1], operand)))
        elif result.numel() == operand.numel():
            other = next((part for part in args[:2] if part is not operand), None) if len(args) > 1 else None
            self._note(result, _changed(state, name, other))

    def _softmax(self, score: Any, result: Tensor) -> None:
        state = self._state(score)
        self._softmaxes += isinstance(state, _Scores) or self._softmaxes > 0
        if self._softmaxes > 1:
            self.trouble = "there is more than one softmax"
            self._known.clear()
        elif isinstance(state, _Scores):
            self._note(result, _Weights(state, score))

    def _finish(self, func: Any, state: _Weights, weights: Tensor, value: Tensor, args: Any, kwargs: Any) -> Tensor:
        own = value.view_as(value)
        result: Tensor = func(*(own if part is value else part for part in args), **kwargs)
        self._known.clear()
        scores, score = state.scores, state.score if state.scores.sinks is None else state.scores.sinks[1]
        factor: Tensor | float = 1.0 if scores.factor is None else scores.factor.detach()
        query = scores.query if scores.factor is None else scores.query * factor
        parts = (query, scores.key.transpose(-1, -2), own, score, weights, result)
        if not all(part.dim() == 4 or self._splits(part) for part in parts):
            self.trouble = "batch and heads share one axis and the module does not say how many heads there are"
            return result
        self.trouble = None
        query, key, four, score, after, output = (self._heads(part) for part in parts)
        hidden = score <= torch.finfo(score.dtype).min / 2
        if scores.hidden is not None:
            hidden = hidden | scores.hidden
        observers = plans(self.module, query, lambda: _kind(~hidden))
        if not observers:
            return result
        group = self._group(key, four)

        def read() -> Reading:
            cap = None if scores.inside is None else scores.scale
            scale = scores.scale if scores.inside is None else scores.inside * scores.scale
            with torch.no_grad():
                raw = (query @ key.transpose(-1, -2)).to(score.dtype) * scale
                raw = raw if cap is None else cap * torch.tanh(raw / cap)
                mask = (score - raw).masked_fill_(hidden, -torch.inf)
            return Reading(
                "by hand",
                Structure(),
                scale,
                cap,
                dropout=float(state.dropped),
                mask=mask,
                sinks=None if scores.sinks is None else self._heads(scores.sinks[0])[0, :, 0, 0],
                weights=state.dropped,
                late={
                    "query": (scores.query, lambda gradient: self._heads(gradient / factor)),
                    "key": (scores.key, lambda gradient: _pooled(self._heads(gradient.transpose(-1, -2)), group)),
                    "value": (own, lambda gradient: _pooled(self._heads(gradient), group)),
                },
            )

        fewer, values = (key, four) if group == 1 else (key[:, ::group], four[:, ::group])

        def run(_query: Tensor, _key: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
            if used is values:
                return output.transpose(1, 2), after
            return (after @ used.to(after.dtype).repeat_interleave(group, 1)).transpose(1, 2), after

        seen, _ = observe(observers, query, fewer, values, run, read)
        return seen.transpose(1, 2).reshape(result.shape)

    def _group(self, key: Tensor, value: Tensor) -> int:
        """How often each key/value head was repeated before the products, 1 when it was not."""
        for module in (self.module, self.module._modules.get("_original_component")):
            group = getattr(module, "num_key_value_groups", 1)
            if isinstance(group, int) and group > 1 and key.shape[1] % group == 0:
                with torch.no_grad():
                    repeated = [
                        torch.equal(part, part[:, ::group].repeat_interleave(group, 1)) for part in (key, value)
                    ]
                return group if all(repeated) else 1
        return 1

    def _count(self) -> int | None:
        return next((number for name in _HEADS if isinstance(number := getattr(self.module, name, None), int)), None)

    def _splits(self, tensor: Tensor) -> bool:
        count = self._count()
        return tensor.dim() == 3 and count is not None and tensor.shape[0] % count == 0

    def _heads(self, tensor: Tensor) -> Tensor:
        """(B,H,…) of a tensor with four axes, or with batch and heads on one."""
        return tensor if tensor.dim() == 4 else tensor.unflatten(0, (-1, self._count() or 1))


def _changed(state: _Scores, name: str, other: Any) -> _Scores:
    """The state after one operation that keeps the shape; whatever is added shows in the difference at the end."""
    if name in ("tanh", "tanh_"):
        return replace(state, inside=state.scale, scale=1.0)
    if name not in _TIMES and name not in _OVER:
        return state
    divided = name in _OVER
    if not isinstance(other, Tensor) or other.numel() == 1:
        return replace(state, scale=state.scale / float(other) if divided else state.scale * float(other))
    if other.shape[-2:] == (1, 1):
        other = 1 / other if divided else other
        return replace(state, factor=other if state.factor is None else state.factor * other)
    if not divided:
        hidden = other == 0
        return replace(state, hidden=hidden if state.hidden is None else state.hidden | hidden)
    return state


def _pooled(gradient: Tensor, group: int) -> Tensor:
    """(B,K,…): gradients of repeated heads, summed over the heads that share one."""
    return gradient if group == 1 else gradient.unflatten(1, (-1, group)).sum(2)


def _kind(visible: Tensor) -> Kind | None:
    """What the mask (B,H,Q,S) says of the kind of attention."""
    queries, keys = visible.shape[2:]
    if queries == 1:
        return None
    if Visibility(Structure(), queries, keys, visible).ordered():
        return "decoder_self"
    return "encoder_self" if queries == keys else "cross"
