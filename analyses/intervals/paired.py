"""Paired differences over a few seeds, with Student's t: a bootstrap of five is too narrow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...probe.student import quantile


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
