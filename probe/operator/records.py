"""`call.h` in Python: the record that one attention call is handed over in."""

from __future__ import annotations

import ctypes

from torch import Tensor

_Planes = ctypes.c_int64 * 4
ABSENT = (0, 0, 0, 0)
# the sums in the order in which `totals.cpp` leaves them, which is the order in which they are stored
SUMS = (
    "queries",
    "blind_queries",
    "entropy",
    "sink",
    "first_key",
    "distance",
    "advantage_square",
    "missed",
    "alignment",
    "aligned",
    "score_square",
    "value_gradient_square",
    "group_gradient_square",
    "value_square",
    "keys",
    "usage_entropy",
    "uniform_entropy",
    "over_uniform",
    "coherence_sum",
    "coherence_bound",
    "cosine_sum",
    "cosine_bound",
    "residual",
    "residual_scale",
    "hidden_queries",
)


class Record(ctypes.Structure):
    """`advantage_probe::Call`, field by field; explained there."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "heads", "owners", "queries", "keys", "width", "value_width")),
        *((name, _Planes) for name in ("query", "key", "value", "upstream", "output", "normalizer")),
        *((name, _Planes) for name in ("grad_query", "grad_key", "grad_value", "own", "mask", "bias", "weights")),
        ("sinks", ctypes.c_int64),
        *((name, _Planes) for name in ("usable", "seen")),
        *((name, ctypes.c_int64) for name in ("causal", "offset", "window", "precise")),
        *((name, ctypes.c_int64) for name in ("reach", "first_position", "tokens", "capacity", "by_knockout")),
        *((name, ctypes.c_int64) for name in ("rows", "aligned", "distances", "usage", "user_norm")),
        *((name, ctypes.c_int64) for name in ("edge_places", "edge_numbers")),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
    ]


class Totals(ctypes.Structure):
    """`advantage_probe::Totals`, field by field; explained there."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "heads", "owners", "queries", "keys", "width")),
        *((name, _Planes) for name in ("m", "value")),
        *((name, ctypes.c_int64) for name in ("rows", "aligned", "distances", "usage", "user_norm")),
        *((name, _Planes) for name in ("usable", "used", "uniform_entropy")),
        *((name, ctypes.c_int64) for name in ("blind", "first", "first_position", "sums", "total", "moment")),
    ]


def planes(tensor: Tensor | None) -> tuple[int, int, int, int]:
    """Address and strides of a (B,heads,rows,·) tensor with a contiguous last axis, of (B,heads,rows), or of (B,heads)."""
    if tensor is None:
        return ABSENT
    batch, head, row, *_ = (*tensor.stride(), 0)
    return tensor.data_ptr(), batch, head, row
