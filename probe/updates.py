"""Responsibility-weighted update directions: where the loss pushes the values of each head.

The value law moves v_j along −m_j = −Σ_i w_ij u_i. Per head the mean of −m_j over the keys in use, and the uncentred
second moment Σ_j m_j m_jᵀ, are kept; both are sums. How much of the second moment lies along one direction tells whether
the keys are pushed the same way or each its own.

Shapes: B batch, H query heads, S key positions, V value width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..hooks.errors import MergeRefused
from .law.vectors import Vectors


@dataclass(eq=False)
class Updates:
    """Sums over keys in use, float64: total (H,V) of −m_j; moment (H,V,V) of m_j m_jᵀ; keys (H,)."""

    total: Tensor
    moment: Tensor
    keys: Tensor

    @classmethod
    def empty(cls, heads: int, width: int) -> Updates:
        return cls(
            torch.zeros(heads, width, dtype=torch.float64),
            torch.zeros(heads, width, width, dtype=torch.float64),
            torch.zeros(heads, dtype=torch.float64),
        )

    def add(self, rows: Vectors, scale: float = 1.0) -> None:
        """Add one call, whose u carries the factor `scale`; heads with non-finite numbers are left out."""
        if rows.totals is not None:
            found = rows.totals
            return self._add(found.total / scale, found.moment / scale**2, found.keys)
        m = rows.value_gradient if scale == 1.0 else rows.value_gradient / scale
        total = -m.sum((0, 2)).double().cpu()
        flat = m.transpose(0, 1).flatten(1, 2)
        moment = torch.matmul(flat.transpose(1, 2), flat).double().cpu()
        keys = (rows.uniform > 0).sum(-1).expand(m.shape[0], m.shape[1]).sum(0).double().cpu()
        self._add(total, moment, keys)

    def _add(self, total: Tensor, moment: Tensor, keys: Tensor) -> None:
        good = torch.isfinite(total).all(-1) & torch.isfinite(moment).flatten(1).all(-1)
        self.total += torch.where(good[:, None], total, 0.0)
        self.moment += torch.where(good[:, None, None], moment, 0.0)
        self.keys += torch.where(good, keys, 0.0)

    def divide(self, weight: float) -> None:
        self.total /= weight
        self.moment /= weight**2

    def merge(self, other: Updates) -> None:
        if self.total.shape != other.total.shape:
            raise MergeRefused(
                f"Update directions of shape {tuple(other.total.shape)} cannot be added to {tuple(self.total.shape)}; "
                "merge only watches of the same model."
            )
        self.total += other.total
        self.moment += other.moment
        self.keys += other.keys

    def copy(self) -> Updates:
        return Updates(self.total.clone(), self.moment.clone(), self.keys.clone())

    def directions(self) -> dict[str, NDArray[np.float64]]:
        """Per head: `update` (H,V), the mean of −m_j; its `norm`; `share` of the second moment on its largest axis."""
        keys = self.keys.clone()
        keys[keys == 0] = torch.nan
        mean = self.total / keys[:, None]
        eigenvalues = torch.linalg.eigvalsh(self.moment).clamp(min=0)
        whole = eigenvalues.sum(-1)
        share = torch.where(whole > 0, eigenvalues[:, -1] / whole, torch.nan)
        return {
            "update": mean.numpy(),
            "norm": mean.norm(dim=-1).numpy(),
            "share": share.numpy(),
            "keys": self.keys.numpy(),
        }
