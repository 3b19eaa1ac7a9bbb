"""Which numbers of a model route (W_Q, W_K), which carry content (W_V, W_O), and where a layer's values come out.

Freezing, decomposing a step and replacing values all need to know; they ask here and nowhere else. Families are told apart
by the names of their projections, GPT-2's fused `c_attn` by slices.

Shapes: B batch, T positions, K key/value heads, V value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...hooks.errors import BadRequest

Role = Literal["query", "key", "value", "output"]
ROUTING: tuple[Role, ...] = ("query", "key")
CONTENT: tuple[Role, ...] = ("value", "output")
_FUSED: tuple[Role, ...] = ("query", "key", "value")
_NAMES: dict[str, Role] = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "out_proj": "output",
}


@dataclass(frozen=True)
class Part:
    """A slice of one parameter: `start`…`stop` along `axis` (all of it where stop is None)."""

    role: Role
    module: str
    parameter: str
    axis: int = 0
    start: int = 0
    stop: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """The slice of a tensor of the parameter's shape (the parameter, its gradient, a change of it); a view."""
        stop = tensor.shape[self.axis] if self.stop is None else self.stop
        return tensor.narrow(self.axis, self.start, stop - self.start)


def parts(model: nn.Module) -> list[Part]:
    """Every slice that has a role, of all attention modules; `module` is the name of the attention module.

    Raises:
        BadRequest: where no projection is recognised.
    """
    found: list[Part] = []
    for name, module in model.named_modules():
        for child, role in _NAMES.items():
            projection = getattr(module, child, None)
            if isinstance(projection, nn.Linear) and isinstance(getattr(module, "v_proj", None), nn.Linear):
                found += [Part(role, name, f"{name}.{child}.{kind}") for kind, _ in projection.named_parameters()]
        fused = getattr(module, "c_attn", None)
        if fused is not None and hasattr(fused, "nf"):  # GPT-2: a Conv1D of 3 widths, inputs first
            width = fused.nf // 3
            for place, role in enumerate(_FUSED):
                span = (place * width, (place + 1) * width)
                found.append(Part(role, name, f"{name}.c_attn.weight", 1, *span))
                found.append(Part(role, name, f"{name}.c_attn.bias", 0, *span))
            found += [Part("output", name, f"{name}.c_proj.{kind}") for kind in ("weight", "bias")]
    if not found:
        raise BadRequest(
            f"{type(model).__name__} has no attention with q_proj, k_proj, v_proj and o_proj, nor GPT-2's c_attn: its "
            "routing and content cannot be told apart."
        )
    return found


class Frozen:
    """Keeps the numbers of some roles where they are: `restore()` after every optimizer step.

    The optimizer still sees their gradients, so that clipping and everything else stays as in the run it is compared with.
    """

    def __init__(self, model: nn.Module, roles: tuple[Role, ...]) -> None:
        parameters = dict(model.named_parameters())
        self._kept = [
            (slot, slot.clone())
            for part in parts(model)
            if part.role in roles
            for slot in (part.of(parameters[part.parameter].data),)
        ]

    def restore(self) -> None:
        """Put everything back."""
        for slot, value in self._kept:
            slot.copy_(value)


@contextmanager
def added_values(model: nn.Module, module: str, change: Tensor) -> Iterator[None]:
    """Within the block, the values of attention module `module` are v + `change` (B,K,T,V), attention untouched there.

    Raises:
        BadRequest: where the module's values cannot be reached.
    """
    attention: Any = model.get_submodule(module)
    flat = change.transpose(1, 2).flatten(2)
    projection = getattr(attention, "v_proj", None)
    start = 0
    if projection is None:
        projection = getattr(attention, "c_attn", None)
        if projection is None:
            raise BadRequest(f"the values of {module!r} come from no v_proj or c_attn and cannot be replaced.")
        start = projection.nf - flat.shape[-1]

    def add(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        if start == 0:
            return output + flat
        return torch.cat((output[..., :start], output[..., start:] + flat), -1)

    handle = projection.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()
