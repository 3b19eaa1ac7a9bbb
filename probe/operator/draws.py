"""Bootstrap weights drawn by the operator: the numbers of `bootstrap.py`, several hundred times faster."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from . import build


def drawn(identities: Sequence[int], replicates: int, cumulative: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """(replicates, len(identities)): Poisson weights by inverting `cumulative`; None where no operator is loaded, which
    reading a state is no reason to do.
    """
    if not build.loaded():
        return None
    keys = np.array(identities, dtype=np.uint64)
    weights = np.empty((replicates, len(keys)))
    table = np.ascontiguousarray(cumulative, dtype=np.float64)
    build.library().advantage_probe_draws(
        ctypes.c_void_p(keys.ctypes.data),
        ctypes.c_int64(len(keys)),
        ctypes.c_int64(replicates),
        ctypes.c_void_p(table.ctypes.data),
        ctypes.c_int64(len(table)),
        ctypes.c_void_p(weights.ctypes.data),
    )
    return weights
