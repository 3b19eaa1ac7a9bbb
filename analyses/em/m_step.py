"""The M-step in closed form: where values go when responsibilities stay, without a learning rate.

With α fixed and cross-entropy summed, B = ½(I − 11ᵀ/C) is above the curvature of log-sum-exp, so M = W_O B W_Oᵀ is above
that of the loss in a head's output, and Jensen's inequality on Σ_j α_ij δ_j separates the keys:

    L(v + δ) ≤ L(v) + Σ_j m_j·δ_j + ½ Σ_j N_j δ_jᵀ M δ_j,        m_j = Σ_i α_ij u_i,  N_j = Σ_i α_ij

The right side is least at δ_j = −M⁺ m_j / N_j: the responsibility-normalised update in its own unit. For the means of a
Gaussian mixture (u_i = v − x_i, M = I) that is the textbook M-step. A shared matrix W_V minimises the same bound. The
naive v_j − m_j / N_j has no unit: it moves with the scale of the loss and of W_O.

Shapes: T positions, d input width, V value width, C outcomes; leading axes are batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-6  # of the trace, so that a normal matrix can be solved
RANK = 1e-6  # of the largest eigenvalue: below, a direction of M is none


def bound(outcomes: int) -> Tensor:
    """(C,C) float64, ½(I − 11ᵀ/C): above the Hessian of log-sum-exp everywhere (Böhning, 1992)."""
    return 0.5 * (torch.eye(outcomes, dtype=torch.float64) - 1 / outcomes)


def curvature(output: Tensor) -> Tensor:
    """M = W_O B W_Oᵀ, (…,V,V) float64, from W_O (…,V,C)."""
    output = output.double()
    return output @ bound(output.shape[-1]) @ output.mT


def free_step(gradient: Tensor, usage: Tensor, curved: Tensor) -> Tensor:
    """δ_j = −M⁺ m_j / N_j for values that are free, (…,T,V) float64.

    Args:
        gradient (…,T,V): m_j = ∂L/∂v_j of the loss *summed* over targets.
        usage (…,T): N_j > 0, the responsibilities on key j.
        curved (…,V,V): M.
    """
    return -(gradient.double() @ _inverse(curved)) / usage.double()[..., None]


def matrix_step(inputs: Tensor, gradient: Tensor, usage: Tensor, curved: Tensor) -> Tensor:
    """ΔW_V = −(XᵀNX + λ·tr·I)⁻¹ Xᵀm M⁺ for v_j = x_j W_V, (…,d,V) float64; arguments as in `free_step`, inputs (…,T,d)."""
    inputs = inputs.double()
    weighted = inputs.mT @ (usage.double()[..., None] * inputs)
    trace = weighted.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    weighted = weighted + RIDGE * trace * torch.eye(weighted.shape[-1], dtype=torch.float64)
    return -torch.linalg.solve(weighted, inputs.mT @ gradient.double()) @ _inverse(curved)


def majorised(change: Tensor, gradient: Tensor, usage: Tensor, curved: Tensor) -> Tensor:
    """What L(v + δ) − L(v) cannot exceed, (…): Σ_j m_j·δ_j + ½ Σ_j N_j δ_jᵀ M δ_j, in the unit of the loss."""
    change = change.double()
    linear = (gradient.double() * change).sum((-2, -1))
    return linear + 0.5 * (usage.double() * ((change @ curved) * change).sum(-1)).sum(-1)


def _inverse(curved: Tensor) -> Tensor:
    return torch.linalg.pinv(curved.double(), rtol=RANK, hermitian=True)
