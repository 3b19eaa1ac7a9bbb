"""A model that is looked at and left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Parameters' gradients, buffers and random state are put back to what they were."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    state = torch.get_rng_state()
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        torch.set_rng_state(state)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
