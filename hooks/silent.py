"""Modules of which nothing is captured: layers that mix tokens without softmax attention (state spaces, recurrences,
convolutions), and attention that made no call.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from torch import nn

from .site import Site, describe

_ATTENTION = re.compile(r"Attention\d*$")
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


def uncalled(model: nn.Module, called: Collection[str], others: Iterable[Site] = ()) -> tuple[Site, ...]:
    """The outermost modules of `model` whose class says that they are attention, while none of the modules `called` (by
    name) lies in them or around them; `others` and what lies in them are known to be something else.
    """
    found: list[Site] = []
    for whole, module in model.named_modules():
        name = ".".join(part for part in whole.split(".") if part not in ("_orig_mod", "_original_component"))
        if not name or not _ATTENTION.search(type(module).__name__):
            continue
        known = [*called, *(site.module for site in (*others, *found))]
        related = any(name == one or name.startswith(f"{one}.") or one.startswith(f"{name}.") for one in known)
        if not related:
            found.append(describe(name, module, "decoder_self"))
    return tuple(found)
