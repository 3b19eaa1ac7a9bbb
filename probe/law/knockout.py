"""What an edge is worth: the first-order change of the loss when key j is removed from row i and the row renormalised.

Without key j the other weights grow by 1/(1 − α_ij), so that the head's output moves by exactly

    Δo = (α_ij o_i − w_ij v_j) / (1 − α_ij)        and to first order        ΔL = u_i·Δo = −D_ij / (1 − α_ij).

Without dropout that is α A/(1 − α). With sinks the hidden column stays in the normaliser, so α is over all columns. With
dropout it is the change under the mask that was drawn. At most one key of a row has α > ½; there 1 − α cancels, and
the same number comes from the remaining keys: rest = Σ_{k≠j} α_k, ΔL = (α_j/rest) Σ_{k≠j} w_k b_k − w_j b_j.

Attribution patching that recomputes the softmax with the key masked (AtP*, arXiv 2403.00745) gives the same number.

Shapes: … rows, S keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


def knockout(attention: Tensor, weights: Tensor, compatibility: Tensor, sink: Tensor) -> Tensor:
    """(…,S) ΔL of every edge, in units of the loss; NaN where nothing would be left, whatever where the key is hidden.

    Args:
        attention, weights, compatibility (…,S): α, w and b, 0 where hidden. sink (…): mass on the hidden column.
    """
    mixed = weights * compatibility
    reached = mixed.sum(-1, keepdim=True)
    plain = (attention * reached - mixed) / (1 - attention)
    largest = attention.argmax(-1, keepdim=True)
    share = attention.gather(-1, largest)
    rest = attention.scatter(-1, largest, 0.0).sum(-1, keepdim=True) + sink[..., None]
    others = mixed.scatter(-1, largest, 0.0).sum(-1, keepdim=True)
    exact = share * others / rest - mixed.gather(-1, largest)
    exact = torch.where(rest > 0, exact, torch.nan)
    return plain.scatter(-1, largest, torch.where(share > 0.5, exact, plain.gather(-1, largest)))
