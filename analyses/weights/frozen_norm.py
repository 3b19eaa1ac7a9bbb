"""A norm with its scale frozen at what it was: then it is linear, and what it is given in parts comes out in parts.

Every norm in use is N(y) = c(y) · γ ⊙ P y + b, P the identity (RMS) or the subtraction of the mean (LayerNorm), and c(y)
a number per row. γ and P are found by running the module and checked on the rows that it was given, so that neither a name
nor a convention (γ or 1 + γ) is trusted; what does not fit is refused.

Shapes: P rows, M width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...hooks.errors import UnsupportedFamily

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclass(frozen=True, eq=False)
class FrozenNorm:
    """`gain` γ and `bias` b (M,), `factor` c (P,1) at its rows; `centred`: P takes the mean off."""

    gain: Tensor
    bias: Tensor
    factor: Tensor
    centred: bool

    def apply(self, rows: Tensor) -> Tensor:
        """(P,M) what parts of the norm's input contribute to its output, the bias left out: it belongs to no part."""
        return self.factor * self.gain * self._projected(rows)

    def pull(self, rows: Tensor) -> Tensor:
        """(P,M) the transpose: a direction behind the norm as one before it, pull(g)·x = g·apply(x)."""
        return self._projected(self.factor * self.gain * rows)

    def _projected(self, rows: Tensor) -> Tensor:
        return rows - rows.mean(-1, keepdim=True) if self.centred else rows


@torch.no_grad()
def frozen(norm: nn.Module, name: str, given: Tensor) -> FrozenNorm:
    """`norm`, which is called `name`, frozen at the rows `given` (P,M), of the dtype that it runs in.

    Raises:
        UnsupportedFamily: where it does not have this form.
    """
    width = given.shape[-1]
    wide = torch.promote_types(given.dtype, torch.float32)
    bias = norm(torch.zeros_like(given[:1]))[0].to(wide)
    made, rows = norm(given).to(wide) - bias, given.to(wide)
    # about 1 and 5: neither 0 nor the mean is near any of these, so that both can be divided out, and the two are so far
    # apart that the wrong one gives a γ which no row bears out, also where the rows at hand have mean 0
    steps = torch.linspace(1.0, 2.0, width)[None] + torch.tensor([0.0, 4.0]).repeat(width)[:width]
    shape = steps.to(given)
    known = norm(shape).to(wide) - bias
    for centred in (False, True):
        one = torch.ones(1, 1).to(rows)
        gain = (known / FrozenNorm(one[0], bias, one, centred).apply(shape.to(wide)))[0]
        inside = FrozenNorm(gain, bias, one, centred).apply(rows)
        factor = (made * inside).sum(-1, keepdim=True) / inside.square().sum(-1, keepdim=True).clamp(min=1e-30)
        off = float((factor * inside - made).norm() / made.norm().clamp(min=1e-30))
        if off <= TOLERANCE[given.dtype]:
            return FrozenNorm(gain, bias, factor, centred)
    raise UnsupportedFamily(
        f"{name} lies between heads and the residual stream and is no scaled norm of one row, so it has no scale to freeze."
    )
