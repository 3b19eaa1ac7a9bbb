"""Quantiles of Student's t, from the finite series of the distribution for whole degrees of freedom, so that no statistics
library is needed.
"""

from __future__ import annotations

import math
from functools import cache


def central(t: float, freedom: int) -> float:
    """P(|T| < t) of Student's t, t ≥ 0 (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = total = (cosine if odd else 1.0) if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


@cache
def quantile(confidence: float, freedom: int) -> float:
    """The t with P(|T| < t) = `confidence`, 0 < confidence < 1, by bisection."""
    low, high = 0.0, 1.0
    while central(high, freedom) < confidence:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if central(middle, freedom) < confidence else (low, middle)
    return (low + high) / 2
