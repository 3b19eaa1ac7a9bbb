"""Attaches a receiver to a model: picks the adapters, makes their replacements, and hands the attachment the way back."""

from __future__ import annotations

from torch import nn

from .adapters import families, functional, transformer_lens
from .adapters import huggingface as attention_registry
from .adapters import module_calls as following
from .attachment import Attachment
from .call import Receiver
from .silent import silent


def attach(model: nn.Module, receiver: Receiver, *, reach_all: bool = False) -> Attachment:
    """Show `receiver` the attention calls of `model` until the attachment is closed.

    Args:
        model: any module; nothing of it is changed.
        receiver: who is asked in the forward pass and told in the backward pass.
        reach_all: give every call a gradient path, also where the model's own graph has none.
    """
    attachment = Attachment(model, receiver, transformer_lens.names(model), silent(model), reach_all=reach_all)
    try:
        for adapter in (following, functional, families, transformer_lens):
            for owner, name, make in adapter.overrides(model):
                attachment.replace(owner, name, make)
        attention_registry.acquire()
        attachment.undo(attention_registry.release)
    except BaseException:
        attachment.close()
        raise
    transformer_lens.announce(model)
    return attachment
