"""Entropies and divergences in bits, float64, with NaN rows (nothing asked) left NaN.

Shapes: (..., O) distributions over O outcomes.
"""

import math

import torch
from torch import Tensor

LN2 = math.log(2.0)


def entropy_bits(probabilities: Tensor) -> Tensor:
    """Σ −p log2 p over the last axis, (..., O) → (...); exactly +0.0 for a certain outcome."""
    return torch.special.entr(probabilities.double()).sum(-1) / LN2 + 0.0


def kl_bits(truth: Tensor, model: Tensor) -> Tensor:
    """KL(truth ‖ model) in bits, (..., O) → (...); infinite where the model excludes what can happen."""
    truth, model = truth.double(), model.double()
    cross = torch.where(truth > 0, truth * (truth.log() - model.log()), torch.where(truth.isnan(), truth, 0.0))
    return cross.sum(-1) / LN2


def total_variation(truth: Tensor, model: Tensor) -> Tensor:
    """½ Σ |truth − model|, (..., O) → (...)."""
    return (truth.double() - model.double()).abs().sum(-1) / 2


def asked(predictive: Tensor) -> Tensor:
    """(..., O) → (...) bool: positions where the task asks something."""
    return ~predictive.isnan().any(-1)


def never_asked(*shape: int) -> Tensor:
    """A float64 table of `shape` (n, L, O) that asks nothing yet."""
    return torch.full(shape, math.nan, dtype=torch.float64)


def uniform_like(predictive: Tensor) -> Tensor:
    """1/O wherever something is asked."""
    return torch.where(predictive.isnan(), predictive, 1.0 / predictive.shape[-1])


def constant_like(predictive: Tensor, row: Tensor) -> Tensor:
    """`row` (O) or (L, O) wherever something is asked."""
    return torch.where(predictive.isnan(), predictive, row.double())
