"""Paired differences over a few seeds, with Student's t: a bootstrap of five is too narrow.

The quantile comes from the finite series of the distribution for whole degrees of freedom, so that no statistics library
is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Paired:
    """Mean difference over `seeds` pairs and the half-width of its interval, in the unit of what was compared."""

    mean: float
    half: float
    seeds: int

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def paired(first: Sequence[float], second: Sequence[float], confidence: float = 0.95) -> Paired:
    """first − second, seed by seed; with one seed nothing bounds the difference and the half-width is infinite."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    count = len(differences)
    mean = sum(differences) / count
    if count < 2:
        return Paired(mean, math.inf, count)
    deviation = math.sqrt(sum((difference - mean) ** 2 for difference in differences) / (count - 1))
    return Paired(mean, quantile(confidence, count - 1) * deviation / math.sqrt(count), count)


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


def quantile(confidence: float, freedom: int) -> float:
    """The t with P(|T| < t) = `confidence`, 0 < confidence < 1, by bisection."""
    low, high = 0.0, 1.0
    while central(high, freedom) < confidence:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if central(middle, freedom) < confidence else (low, middle)
    return (low + high) / 2
