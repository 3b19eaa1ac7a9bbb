"""Models in another precision: float64 copies, and copies of de-quantised weights with rounding noise.

De-quantised weights sit on a coarse grid; what a figure owes to the grid is seen by drawing weights that would have been
rounded to the same grid points.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

BLOCK, LEVELS = 32, 15  # weights that share a step, and steps between the least and the largest of them (4 bits)


def double(model: nn.Module) -> nn.Module:
    """A float64 copy in eval mode, to be moved about freely."""
    return copy.deepcopy(model).double().eval()


def origin(folder: str | Path) -> str:
    """What a model folder says of its weights: "de-quantised from …", or "" when it says nothing."""
    file = Path(folder) / "ORIGIN.json"
    if not file.is_file():
        return ""
    note = json.loads(file.read_text(encoding="utf-8")).get("note", "")
    return note if str(note).startswith("de-quantised") else ""


def step(weight: Tensor) -> Tensor:
    """The grid step at every entry of a weight: the span of its block of 32 along the row, over 15."""
    flat = weight.reshape(-1)
    whole = flat[: len(flat) // BLOCK * BLOCK].reshape(-1, BLOCK)
    spans = (whole.amax(1) - whole.amin(1)) / LEVELS
    steps = torch.zeros_like(flat)
    steps[: whole.numel()] = spans.repeat_interleave(BLOCK)
    return steps.reshape(weight.shape)


@contextmanager
def rounding_noise(model: nn.Module, seed: int) -> Iterator[None]:
    """Every matrix of the model plus uniform noise of ± half a grid step; the weights are put back afterwards."""
    generator = torch.Generator().manual_seed(seed)
    before: list[tuple[nn.Parameter, Tensor]] = []
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() != 2:
                    continue
                before.append((parameter, parameter.detach().clone()))
                noise = torch.rand(parameter.shape, generator=generator) - 0.5
                parameter.add_(noise.to(parameter.device, parameter.dtype) * step(parameter))
        yield
    finally:
        with torch.no_grad():
            for parameter, kept in before:
                parameter.copy_(kept)
