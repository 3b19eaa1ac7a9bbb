"""What a row of every table is keyed on: the module that made the call, its use within the forward, and the head.

The qualified module name is the only key that is unique in every model: `layer_idx` is shared by encoder, decoder and
cross attention, is None or -1 in some modules, and is absent in others. Layer, stack and kind only describe the key.
Modules of which nothing is captured are described here as well: layers that mix tokens without softmax attention (state
spaces, recurrences, convolutions), and attention that made no call.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn

Kind = Literal["encoder_self", "decoder_self", "cross"]

_LAYERS = re.compile(
    r"(?:^|\.)(?:layers?|h|blocks?|block|layer_list|albert_layers|resblocks|(?:en|de)coder(?:_blocks)?)\.(\d+)"
)
_CROSS = re.compile(
    r"^(?:enc(?:oder)?_?dec(?:oder)?_?att(?:ention|n)|encoder_att(?:ention|n)|cross_?att(?:ention|n)|encdecattention)",
    re.IGNORECASE,
)
_ATTENTION = re.compile(r"Attention\d*$")
_MIXERS = re.compile(
    r"(Mamba\d*|Mixer|MambaLayer|GatedDeltaNet|DeltaNet|DeltaAttention|ShortConv|RecurrentBlock|Rglru|RGLRU"
    r"|LightningAttention|LinearAttention|RwkvSelfAttention|Retention)$"
)
_STACKS = (
    ("vision", re.compile(r"^(vision|visual|image|pixel)", re.IGNORECASE)),
    ("audio", re.compile(r"^(audio|speech)", re.IGNORECASE)),
    ("encoder", re.compile(r"^(text_)?encoder(_blocks)?$", re.IGNORECASE)),
    ("decoder", re.compile(r"^(text_)?decoder(_blocks)?$", re.IGNORECASE)),
)


@dataclass(frozen=True, order=True)
class Site:
    """One attention module of a model.

    Attributes:
        module: qualified name in the watched model, the key of every table.
        layer: index of the layer in its stack, -1 when the name carries none.
        stack: "encoder", "decoder", "vision", "audio" or "" when the model has one stack only.
        kind: "encoder_self" (two-sided), "decoder_self" (causal) or "cross".
    """

    module: str
    layer: int
    stack: str
    kind: Kind


def _is_cross(name: str, module: nn.Module) -> bool:
    if getattr(module, "is_cross_attention", False) is True:
        return True
    # whole components only: a substring match once called decoder self-attention "cross"
    return any(_CROSS.match(part) for part in name.split(".")) or "CrossAttention" in type(module).__name__


def describe(name: str, module: nn.Module, hint: Kind | None = None) -> Site:
    """The `Site` of attention module `module`, called `name` in the watched model.

    `hint`: what the arguments of a call say of its kind, for modules that say nothing themselves.
    """
    numbers = _LAYERS.findall(name)
    if numbers:
        layer = int(numbers[0])
    else:
        index = getattr(module, "layer_idx", None)
        layer = index if isinstance(index, int) and not isinstance(index, bool) and index >= 0 else -1
    parts = name.split(".")
    stack = next((label for part in parts for label, pattern in _STACKS if pattern.match(part)), "")
    kind: Kind
    if _is_cross(name, module):
        kind = "cross"
    elif hint is not None:
        kind = hint
    elif stack == "decoder" or getattr(module, "is_decoder", False) is True:
        kind = "decoder_self"
    elif stack in ("encoder", "vision", "audio"):
        kind = "encoder_self"
    else:
        causal = getattr(module, "is_causal", None)
        kind = "decoder_self" if causal or (causal is None and not hasattr(module, "is_decoder")) else "encoder_self"
    return Site(name, layer, stack, kind)


def unmixed(model: nn.Module) -> tuple[Site, ...]:
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
