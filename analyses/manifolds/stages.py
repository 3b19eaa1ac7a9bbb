"""The stream of a tunnel's model at every stage: after each block's attention, and after its feed-forward.

Whoever reads the stream reads it through a norm, which takes its size out; and sizes differ between new and repeated keys
by a factor of two, in either direction. So rows are divided by their root mean square before anything is said of them.

Shapes: n episodes, L positions, W width.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...hooks.errors import UnsupportedFamily
from ..inputs.corpus import Batch

Array = NDArray[np.float64]

BEFORE_FEED_FORWARD = ("post_attention_layernorm", "ln_2")  # Llama, GPT-2


def unit(rows: Array) -> Array:
    """Rows divided by their root mean square."""
    size = np.sqrt((rows**2).mean(-1, keepdims=True))
    return np.asarray(rows / np.where(size > 0, size, 1.0))


@torch.no_grad()
def stages(model: nn.Module, batches: Iterable[Batch]) -> dict[str, Array]:
    """The stream (n,L,W) after the attention and after the feed-forward of every block, by name, not normed.

    Raises:
        UnsupportedFamily: for a model whose blocks name no norm before the feed-forward.
    """
    found: dict[str, list[Tensor]] = {}
    handles = []
    blocks = [
        (module, getattr(module, name))
        for module in model.modules()
        for name in BEFORE_FEED_FORWARD
        if isinstance(getattr(module, name, None), nn.Module)
    ]
    if not blocks:
        raise UnsupportedFamily(f"{type(model).__name__} names no norm before its feed-forwards.")
    try:
        for number, (block, norm) in enumerate(blocks):

            def middle(_: nn.Module, given: tuple[Tensor, ...], number: int = number) -> None:
                found.setdefault(f"L{number} after attention", []).append(given[0])

            def end(_: nn.Module, __: object, made: Tensor | tuple[Tensor, ...], number: int = number) -> None:
                found.setdefault(f"L{number} after feed-forward", []).append(
                    made if isinstance(made, Tensor) else made[0]
                )

            handles += [norm.register_forward_pre_hook(middle), block.register_forward_hook(end)]
        for batch in batches:
            model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.cat(parts).double().cpu().numpy() for name, parts in found.items()}
