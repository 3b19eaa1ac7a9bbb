"""A second implementation of attention that keeps what the law speaks about, and a receiver that keeps every call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from advantage_probe.hooks.attach import attach
from advantage_probe.hooks.call import AttentionCall, CallSite, Needs
from advantage_probe.hooks.site import Site

NAME = "advantage_probe_reference"


@dataclass(eq=False)
class Kept:
    """One call of the reference: its module, the score that enters the softmax, α, value and head output."""

    module: nn.Module
    score: Tensor
    attention: Tensor
    value: Tensor
    output: Tensor


KEPT: list[Kept] = []


def reference_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention written out head by head, with the score, value and output kept and their gradients retained."""
    group = query.shape[1] // key.shape[1]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = []
    for head in range(query.shape[1]):
        rows.append(query[:, head] @ key[:, head // group].transpose(-1, -2) * scaling)
    score = torch.stack(rows, 1)
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    if position_bias is not None:
        score = score + position_bias
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            score = score.masked_fill(~attention_mask, -torch.inf)
        else:
            hidden = attention_mask[..., : key.shape[2]] < torch.finfo(attention_mask.dtype).min / 2
            score = score + attention_mask[..., : key.shape[2]].masked_fill(hidden, -torch.inf)
    elif query.shape[2] > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        order = torch.ones(score.shape[-2:], dtype=torch.bool).tril()
        score = score.masked_fill(~order, -torch.inf)
    sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*score.shape[:3], 1)
        attention = torch.softmax(torch.cat([score, column.to(score.dtype)], -1), -1)[..., :-1]
    else:
        attention = torch.softmax(score, -1)
    output = torch.stack([attention[:, head] @ value[:, head // group] for head in range(query.shape[1])], 1)
    for tensor in (score, value, output):
        if tensor.requires_grad:
            tensor.retain_grad()
    KEPT.append(Kept(module, score, attention, value, output))
    return output.transpose(1, 2), attention


@contextmanager
def reference_registered() -> Iterator[list[Kept]]:
    """Register the reference under a name of its own, with eager's masks; yields the list of kept calls."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, reference_attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    KEPT.clear()
    try:
        yield KEPT
    finally:
        AttentionInterface._global_mapping.pop(NAME, None)
        AttentionMaskInterface._global_mapping.pop(NAME, None)
        KEPT.clear()


class Recorder:
    """A receiver that keeps every call as it was delivered."""

    def __init__(self, *, inputs: bool = False) -> None:
        self.inputs = inputs
        self.calls: list[AttentionCall] = []
        self.sites: list[tuple[CallSite, bool]] = []
        self.errors: list[Exception] = []

    def wants(self, site: Site) -> Needs:
        return Needs(self.inputs)

    def seen(self, call: CallSite, heads: int, group: int, reachable: bool) -> None:
        self.sites.append((call, reachable))

    def receive(self, call: AttentionCall) -> None:
        self.calls.append(call)

    def refuse(self, error: Exception) -> None:
        self.errors.append(error)


@contextmanager
def recorded(model: nn.Module, **options: Any) -> Iterator[Recorder]:
    recorder = Recorder(inputs=options.pop("inputs", False))
    attachment = attach(model, recorder, **options)
    try:
        yield recorder
    finally:
        attachment.close()


def relative(found: Tensor, true: Tensor) -> float:
    """max |found − true| / max |true|."""
    found, true = found.detach(), true.detach()
    return float((found - true).abs().max() / true.abs().max())


def gradients(model: nn.Module) -> list[Tensor]:
    """Copies of all parameter gradients, which are then taken off the model."""
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    assert found
    return found


def untouched() -> None:
    """Nothing of ours is left in transformers or in torch."""
    import zoo
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    assert ALL_ATTENTION_FUNCTIONS._local_mapping == {}
    assert not hasattr(AttentionInterface.get_interface, "__closure__") or (
        AttentionInterface.get_interface.__module__ == "transformers.modeling_utils"
    )
    for kind in (type(zoo.llama()), type(zoo.gpt2())):
        assert "__call__" not in vars(kind)
