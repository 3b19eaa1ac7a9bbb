"""How far a real step stays in the linear regime, and which part of what it learns goes through attention.

The ratio of measured to predicted change tends to 1 as the step shrinks, by the definition of a derivative: it tests code.
What informs is the *linear radius*, how many real steps long one may go before first order is off by a tenth, and the share
of the step's loss change that the heads' own first-order terms explain: ⟨∂L/∂W, ΔW⟩ of W_Q and W_K is Σ_ij D_ij Δs_ij, that
of W_V is Σ_j m_j·Δv_j, each with the layer's inputs as they were, so nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .attention_calls import Loss, gradients, moved
from .roles import parts

OFF = 0.1  # what counts as off
FINEST, COARSEST = (
    -8,
    6,
)  # powers of two of the real step that are tried; norms that compute in float32 drown finer ones


@dataclass(frozen=True)
class StepSize:
    """One real step.

    Attributes:
        norm: length of the step over all parameters. radius: largest tried multiple of it up to which |ΔL − ⟨g,Δ⟩| stays
            within a tenth of |⟨g,Δ⟩|; 0 where even the smallest is off. unbounded: no tried multiple was off.
        change: what the loss really did, `predicted`: ⟨g,Δ⟩, both in the loss's unit.
        routing, values, output, other: parts of `predicted` by W_Q and W_K, W_V, W_O, and everything else.
    """

    norm: float
    radius: float
    unbounded: bool
    change: float
    predicted: float
    routing: float
    values: float
    output: float
    other: float

    def shares(self) -> dict[str, float]:
        """Parts of the real loss change; they add up to predicted / change, 1 only in the linear regime."""
        names = ("routing", "values", "output", "other")
        return {name: getattr(self, name) / self.change if self.change else float("nan") for name in names}


def step_size(before: nn.Module, step: Mapping[str, Tensor], loss: Loss) -> StepSize:
    """The radius and the parts of one real step; `before` in float64, `loss` on the batch that made the step."""
    before.zero_grad(set_to_none=True)
    start = loss(before)
    start.backward()
    slope = gradients(before)
    first = float(start.detach())
    learnt = slope.keys() & step.keys()
    predicted = sum(float((slope[name] * step[name]).sum()) for name in learnt)
    held = {"routing": 0.0, "values": 0.0, "output": 0.0}
    where = {"query": "routing", "key": "routing", "value": "values", "output": "output"}
    for part in parts(before):
        if part.parameter in learnt:
            product = part.of(slope[part.parameter]) * part.of(step[part.parameter])
            held[where[part.role]] += float(product.sum())
    radius, unbounded, change = 0.0, True, 0.0
    with torch.no_grad():
        for power in range(FINEST, COARSEST + 1):
            factor = 2.0**power
            risen = float(loss(moved(before, dict(step), factor))) - first
            if power == 0:
                change = risen
            if unbounded and abs(risen - factor * predicted) <= OFF * abs(factor * predicted):
                radius = factor
            else:
                unbounded = False
            if not unbounded and power >= 0:
                break
    norm = sum(float(part.square().sum()) for part in step.values()) ** 0.5
    return StepSize(norm, radius, unbounded, change, predicted, **held, other=predicted - sum(held.values()))
