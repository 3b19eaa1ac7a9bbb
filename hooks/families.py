"""Families of transformers that compute attention by hand: BLOOM, Falcon, MPT, GPT-Neo, XGLM, DeBERTa and others.

How it sees the call: while such a module runs, a mode that belongs to this one call looks at the operations of its
`forward`, finds the one chain product → softmax → product, and reads q, k, the scores that enter the softmax, w, v and
the head output off it; what was added to the scores (mask, ALiBi, relative positions) is the difference to scale · q·k.
What it cannot see: attention in several pieces (Longformer, BigBird's blocks), as einsum (XLNet, Funnel) or without a
softmax; those are refused by the family's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .observe import Reading, observe
from .refusals import UnsupportedFamily
from .running import stacks
from .site import Kind
from .visibility import Structure, Visibility

_PRODUCTS = ("bmm", "matmul", "__matmul__", "baddbmm", "einsum")
_FACTORS = (
    "mul",
    "mul_",
    "__mul__",
    "__imul__",
    "__rmul__",
    "div",
    "div_",
    "__truediv__",
    "__itruediv__",
    "true_divide",
)
_known: dict[Any, bool] = {}
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")


def by_hand(kind: type[nn.Module]) -> bool:
    """True for attention classes of transformers that write their softmax out."""
    if kind not in _known:
        _known[kind] = _writes_softmax(kind)
    return _known[kind]


def _writes_softmax(kind: type[nn.Module]) -> bool:
    if not kind.__module__.startswith("transformers.models.") or "Attention" not in kind.__name__:
        return False
    names: set[str] = set()
    for member in vars(kind).values():
        while hasattr(member, "__wrapped__"):
            member = member.__wrapped__
        code = getattr(member, "__code__", None)
        if code is not None:
            names |= set(code.co_names)
    return bool(names & {"softmax", "Softmax", "XSoftmax", "logsumexp"}) and "ALL_ATTENTION_FUNCTIONS" not in names


def overrides(model: nn.Module) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """What has to be replaced while `model` is watched."""
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        if by_hand(kind):
            yield kind, "forward", _spied


def _spied(original: Callable[..., Any]) -> Callable[..., Any]:
    from .attach import refuse, watched

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not watched(self) or self in stacks.calls:
            return original(self, *args, **kwargs)
        spy = _Spy(self)
        with spy:
            result = original(self, *args, **kwargs)
        if spy.trouble is not None:
            refuse(stacks.innermost(), spy.refusal())
        return result

    return forward


@dataclass(eq=False)
class _Product:
    """A product of two tensors that may turn out to be the scores."""

    query: Tensor
    key: Tensor  # (…, D, S)
    scale: float
    current: Tensor  # what became of it
    factor: Tensor | None = None  # one number per head, where the scores were multiplied by that
    hidden: Tensor | None = None  # True where the scores were multiplied by 0


class _Spy(TorchFunctionMode):
    """The operations of one call of one module, until its chain is complete."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.trouble: str | None = "no product, softmax and product follow each other"
        self._products: list[_Product] = []
        self._scores: Tensor | None = None
        self._chosen: _Product | None = None
        self._weights: Tensor | None = None
        self._dropped = False

    def refusal(self) -> UnsupportedFamily:
        family = type(self.module).__module__.split(".")[2]
        return UnsupportedFamily(
            f"{family}: {type(self.module).__name__} computes attention in a way that cannot be read ({self.trouble}); "
            "watch other layers of the model with layers=, or a family that uses scaled_dot_product_attention."
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _PRODUCTS:
            return self._product(func, name, args, kwargs)
        given = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("input")
        result = func(*args, **kwargs)
        if name == "softmax":
            self._softmax(given, result)
        elif name == "scaled_dot_product_attention":
            self.trouble = None  # read where that function is
        elif isinstance(result, Tensor):
            self._follow(name, args, kwargs, result)
        return result

    def _product(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
        if name == "einsum":
            result: Tensor = func(*args, **kwargs)
            return result
        tensors = [
            part for part in (*args, *(kwargs.get(f"batch{place}") for place in (1, 2))) if isinstance(part, Tensor)
        ]
        first, second = tensors[-2:]
        if self._weights is not None and first is self._weights:
            return self._finish(func, first, second, args, kwargs)
        if self._weights is not None or first.dim() < 3 or second.dim() < 3:
            result = func(*args, **kwargs)
            self._follow(name, args, kwargs, result)
            return result
        mine = {id(first): first.view_as(first), id(second): second.view_as(second)}
        args = tuple(mine.get(id(part), part) for part in args)
        kwargs = {key: mine.get(id(part), part) for key, part in kwargs.items()}
        result = func(*args, **kwargs)
        scale = float(kwargs.get("alpha", 1.0)) if name == "baddbmm" else 1.0
        self._products.append(_Product(mine[id(first)], mine[id(second)], scale, result))
        return result

    def _follow(self, name: str, args: Any, kwargs: Any, result: Tensor) -> None:
        """Keep track of what becomes of scores and weights."""
        operands = [part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)]
        if self._weights is not None:
            if any(part is self._weights for part in operands) and result.numel() == self._weights.numel():
                if name == "dropout" and result is not self._weights:
                    p, training = kwargs.get("p", 0.5), kwargs.get("training", True)
                    self._dropped |= bool(training) and float(args[1] if len(args) > 1 else p) > 0
                self._weights = result
            return
        for product in self._products:
            if any(part is product.current for part in operands) and result.numel() == product.current.numel():
                if name in _FACTORS and len(args) > 1:
                    _multiply(product, args[1] if args[0] is product.current else args[0], "div" in name)
                product.current = result

    def _softmax(self, scores: Any, result: Tensor) -> None:
        if self._chosen is not None:
            self.trouble = "there is more than one softmax"
            self._weights, self._products = None, []
            return
        chosen = next((product for product in self._products if product.current is scores), None)
        if chosen is None:
            return
        self._chosen, self._scores, self._weights = chosen, scores, result

    def _finish(self, func: Any, weights: Tensor, value: Tensor, args: Any, kwargs: Any) -> Tensor:
        from .attach import plans

        assert self._chosen is not None
        assert self._scores is not None
        own = value.view_as(value)
        args = tuple(own if part is value else part for part in args)
        result: Tensor = func(*args, **kwargs)
        chosen, scores, dropped = self._chosen, self._scores, self._dropped
        self._weights, self._products = None, []
        factor: Tensor | float = 1.0 if chosen.factor is None else chosen.factor.detach()
        query = chosen.query if chosen.factor is None else chosen.query * factor
        parts = (query, chosen.key.transpose(-1, -2), own, scores, weights, result)
        if not all(part.dim() == 4 or self._splits(part) for part in parts):
            self.trouble = "batch and heads share one axis and the module does not say how many heads there are"
            return result
        query, key, four, score, after, output = (self._heads(part) for part in parts)
        self.trouble = None
        hidden = score <= torch.finfo(score.dtype).min / 2
        if chosen.hidden is not None:
            hidden = hidden | chosen.hidden
        observers = plans(self.module, query, lambda: _kind(~hidden))
        if not observers:
            return result

        def read() -> Reading:
            with torch.no_grad():
                group = query.shape[1] // key.shape[1]
                raw = query @ (key.repeat_interleave(group, 1) if group > 1 else key).transpose(-1, -2)
                mask = (score - raw.to(score.dtype) * chosen.scale).masked_fill_(hidden, -torch.inf)
            return Reading(
                "by hand",
                Structure(),
                chosen.scale,
                dropout=float(dropped),
                mask=mask,
                weights=dropped,
                late={
                    "query": (chosen.query, lambda gradient: self._heads(gradient / factor)),
                    "key": (chosen.key, lambda gradient: self._heads(gradient.transpose(-1, -2))),
                    "value": (own, self._heads),
                },
            )

        seen, _ = observe(observers, query, key, four, lambda *_: (output.transpose(1, 2), after), read)
        return seen.transpose(1, 2).reshape(result.shape)

    def _count(self) -> int | None:
        return next((number for name in _HEADS if isinstance(number := getattr(self.module, name, None), int)), None)

    def _splits(self, tensor: Tensor) -> bool:
        count = self._count()
        return tensor.dim() == 3 and count is not None and tensor.shape[0] % count == 0

    def _heads(self, tensor: Tensor) -> Tensor:
        """(B,H,…) of a tensor with four axes, or with batch and heads on one."""
        return tensor if tensor.dim() == 4 else tensor.unflatten(0, (-1, self._count() or 1))


def _multiply(product: _Product, other: Any, divided: bool) -> None:
    """Note that scores were multiplied or divided by a number, or by one number per head."""
    if isinstance(other, Tensor) and other.numel() > 1:
        if other.shape[-2:] == (1, 1):
            other = 1 / other if divided else other
            product.factor = other if product.factor is None else product.factor * other
        elif not divided:
            hidden = other == 0
            product.hidden = hidden if product.hidden is None else product.hidden | hidden
    else:
        product.scale *= 1 / float(other) if divided else float(other)


def _kind(visible: Tensor) -> Kind | None:
    """What the mask (B,H,Q,S) says of the kind of attention."""
    queries, keys = visible.shape[2:]
    if queries == 1:
        return None
    if Visibility(Structure(), queries, keys, visible).ordered():
        return "decoder_self"
    return "encoder_self" if queries == keys else "cross"
