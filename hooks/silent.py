"""Layers of a hybrid model that mix tokens without softmax attention: state spaces, recurrences, convolutions."""

from __future__ import annotations

import re

from torch import nn

from .site import Site, describe

_MIXERS = re.compile(
    r"(Mamba\d*|Mixer|MambaLayer|GatedDeltaNet|DeltaNet|DeltaAttention|ShortConv|RecurrentBlock|Rglru|RGLRU"
    r"|LightningAttention|LinearAttention|RwkvSelfAttention|Retention)$"
)


def silent(model: nn.Module) -> tuple[Site, ...]:
    """The outermost modules of `model` whose class says that they mix tokens without a softmax."""
    found: list[Site] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{site.module}.") for site in found)
        if name and not inside and _MIXERS.search(type(module).__name__):
            found.append(describe(name, module, "decoder_self"))
    return tuple(found)
