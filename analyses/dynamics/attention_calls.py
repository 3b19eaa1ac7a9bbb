"""Full attention tensors of a small model on a fixed batch, in float64: what the dynamics are computed from.

Everything is done on a float64 copy, because differences of attention after one small step drown in float32. Only for
models and batches whose T × T tensors fit in memory.

Shapes: B batch, H query heads, K key/value heads, T positions, D head width, V value width, W input width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...hooks.attach import calls
from ...hooks.call import AttentionCall
from ...hooks.errors import BadRequest, NoAttentionSeen
from ...probe.law.definition import law

Loss = Callable[[nn.Module], Tensor]


@dataclass(frozen=True, eq=False)
class Head:
    """One attention module on the batch, all heads together.

    Attributes:
        attention, advantage, score_gradient, visible (B,H,T,T); value, value_gradient (B,K,T,V), m_j summed over the query
        heads of a group; upstream (B,H,T,V); inputs (B,T,W) what the projections read.
    """

    module: str
    layer: int | None
    attention: Tensor
    advantage: Tensor
    score_gradient: Tensor
    visible: Tensor
    value: Tensor
    value_gradient: Tensor
    upstream: Tensor
    inputs: Tensor

    @property
    def group(self) -> int:
        return self.attention.shape[1] // self.value.shape[1]


def heads(model: nn.Module, loss: Loss) -> dict[str, Head]:
    """Module name → `Head`, in the order of the layers; parameter gradients of `loss` are left in `.grad`.

    Args:
        model: in the dtype that is wanted, as made by `double`.
        loss: computes the loss on the fixed batch, *summed* over targets; u is its gradient.

    Raises:
        NoAttentionSeen: where no call could be read. BadRequest: where a module is called more than once.
    """
    delivered: list[AttentionCall] = []
    read: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            read[name] = (given[0] if given else named["hidden_states"]).detach()

        return hook

    # every module is listened to and only the attention ones are kept: their names are known after the forward
    handles = [
        module.register_forward_pre_hook(keep(name), with_kwargs=True)
        for name, module in model.named_modules()
        if hasattr(module, "v_proj") or hasattr(module, "c_attn")
    ]
    try:
        model.zero_grad(set_to_none=True)
        with calls(model, delivered.append):
            loss(model).backward()
    finally:
        for handle in handles:
            handle.remove()
    found: dict[str, Head] = {}
    for call in delivered:
        name = call.site.module
        if name in found:
            raise BadRequest(f"{name} is called more than once in a forward; its steps cannot be told apart.")
        terms = law(call)
        gradient = terms.value_gradient
        found[name] = Head(
            name,
            call.site.layer,
            terms.attention.detach(),
            terms.advantage.detach(),
            terms.score_gradient.detach(),
            terms.visible,
            call.value.detach(),
            gradient.unflatten(1, (-1, call.group)).sum(2).detach(),
            call.upstream.detach(),
            read.get(name, torch.empty(0)),
        )
    if not found:
        raise NoAttentionSeen(f"{type(model).__name__} made no attention call that the probe can read.")
    return dict(sorted(found.items(), key=lambda item: (item[1].layer or 0, item[0])))


def moved(model: nn.Module, change: dict[str, Tensor], factor: float = 1.0) -> nn.Module:
    """A copy of `model` with `factor` × `change` (by parameter name) added."""
    other = copy.deepcopy(model)
    other.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if name in change:
                parameter.add_(factor * change[name].to(parameter.dtype))
    return other


def step_of(before: nn.Module, after: nn.Module) -> dict[str, Tensor]:
    """after − before, by parameter name, float64."""
    old = dict(before.named_parameters())
    return {
        name: (parameter.detach().double() - old[name].detach().double())
        for name, parameter in after.named_parameters()
    }


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients that a backward left, by parameter name; parameters without one are missing."""
    return {
        name: parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
