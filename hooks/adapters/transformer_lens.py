"""TransformerLens 4: the attention that a `TransformerBridge` computes with its own hook points.

How it sees the call: an attention bridge computes product → softmax → product in PyTorch, with the model's mask, cap,
sinks and dropout, so its `forward` runs under a `Chain`; the head output is taken at the last product, before a gate and
before `o.hook_in`. What it cannot see: bridges that keep the original attention are read where that one is (registry,
functional), and values are those of the weights as they stand, after whatever processing was done to them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .families import chained


@dataclass(frozen=True)
class Processing:
    """What was done to the weights of a bridge, read off the weights themselves."""

    value_biases_folded: bool
    writing_weights_centred: bool
    norms_folded: bool

    def __str__(self) -> str:
        done = {
            "value biases folded": self.value_biases_folded,
            "writing weights centred": self.writing_weights_centred,
            "norms folded": self.norms_folded,
        }
        return ", ".join(name for name, yes in done.items() if yes) or "none"


def _is(module: nn.Module, name: str, where: str) -> bool:
    library = sys.modules.get(where)
    return library is not None and isinstance(module, getattr(library, name))


def is_bridge(model: nn.Module) -> bool:
    """True for a `TransformerBridge`."""
    return _is(model, "TransformerBridge", "transformer_lens.model_bridge.transformer_bridge")


def is_attention(module: nn.Module) -> bool:
    """True for the attention component of a bridge."""
    return _is(module, "AttentionBridge", "transformer_lens.model_bridge.generalized_components.attention")


def overrides(model: nn.Module) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """What has to be replaced while `model` is watched."""
    for kind in dict.fromkeys(type(module) for module in model.modules() if is_attention(module)):
        yield kind, "forward", chained


def names(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules by the names that TransformerLens uses (`blocks.0.attn`), where a module has several."""
    seen: dict[int, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        known = seen.get(id(module))
        if known is None or (known[0].startswith("original_model") and not name.startswith("original_model")):
            seen[id(module)] = (name, module)
    yield from seen.values()


def processing(model: Any) -> Processing | None:
    """Which weight processing a bridge has been through; None for weights as they were loaded."""
    if not is_bridge(model) or not getattr(model, "_weights_processed", False):
        return None
    folded, centred = True, True
    with torch.no_grad():
        for module in model.modules():
            if is_attention(module):
                bias = getattr(getattr(module, "v", None), "bias", None)
                folded &= isinstance(bias, torch.Tensor) and not bool(bias.any())
                weight = getattr(getattr(module, "o", None), "weight", None)
                if isinstance(weight, torch.Tensor):
                    means = min(float(weight.float().mean(axis).abs().max()) for axis in (0, -1))
                    centred &= means < 1e-5 * float(weight.abs().max())
    return Processing(folded, centred, bool(getattr(model.adapter, "_fold_ln_requested", False)))
