"""What a Bayesian would say after labelled examples: latent posterior, label predictive, and their expected entropies.

A latent label is one of two with probability ½; every label shown matches it with probability 0.9. What comes next is a
*label*, so the right answer is the label predictive, not the posterior of the latent one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

SHOTS = (0, 1, 2, 4, 8)
LIKELIHOOD = 0.9


def binary_entropy(p: ArrayLike) -> Array:
    """−p log₂ p − (1−p) log₂(1−p), bits."""
    p = np.asarray(p, dtype=np.float64)
    q = 1 - p
    with np.errstate(divide="ignore", invalid="ignore"):
        return -(np.where(p > 0, p * np.log2(p), 0.0) + np.where(q > 0, q * np.log2(q), 0.0))


def posterior(first: ArrayLike, second: ArrayLike, likelihood: float = LIKELIHOOD) -> Array:
    """Probability that the latent label is the first one after n₁ and n₂ labels: σ((n₁ − n₂) ln(ℓ/(1−ℓ)))."""
    odds = (np.asarray(first, dtype=np.float64) - np.asarray(second)) * math.log(likelihood / (1 - likelihood))
    return np.asarray(1 / (1 + np.exp(-odds)))


def predictive(first: ArrayLike, second: ArrayLike, likelihood: float = LIKELIHOOD) -> Array:
    """Probability that the next *label* is the first one: ℓ p + (1−ℓ)(1−p)."""
    p = posterior(first, second, likelihood)
    return np.asarray(likelihood * p + (1 - likelihood) * (1 - p))


def beta_bernoulli(first: ArrayLike, second: ArrayLike) -> Array:
    """The same for a label frequency with a uniform prior: (n₁ + 1)/(n₁ + n₂ + 2)."""
    return np.asarray((np.asarray(first, dtype=np.float64) + 1) / (np.asarray(first) + np.asarray(second) + 2))


def chances(shots: int, likelihood: float = LIKELIHOOD) -> Array:
    """(k+1,) probability of n₁ = 0 … k, the latent label being either with probability ½."""
    counts = np.arange(shots + 1)
    ways = np.array([math.comb(shots, int(count)) for count in counts], dtype=np.float64)
    one = likelihood**counts * (1 - likelihood) ** (shots - counts)
    return np.asarray(ways * (one + one[::-1]) / 2)


def expected_entropy(shots: int, of: Literal["label", "latent"] = "label", likelihood: float = LIKELIHOOD) -> float:
    """Expected entropy, bits, of the label predictive or the latent posterior after `shots` examples."""
    counts = np.arange(shots + 1)
    p = (predictive if of == "label" else posterior)(counts, shots - counts, likelihood)
    return float((chances(shots, likelihood) * binary_entropy(p)).sum())


def perfect_against_latent(shots: Sequence[int] = SHOTS, likelihood: float = LIKELIHOOD) -> float:
    """Entropy error, bits, of a perfect Bayesian's label predictive held against the latent posterior: its mean over k."""
    errors = [
        expected_entropy(count, "label", likelihood) - expected_entropy(count, "latent", likelihood) for count in shots
    ]
    return float(np.mean(errors))


def constant_against_latent(per_shots: bool, shots: Sequence[int] = SHOTS, likelihood: float = LIKELIHOOD) -> float:
    """Entropy error, bits, of the best constant (one for all, or one for each k) against the latent posterior: what knows
    nothing scores, beside which a perfect Bayesian's 0.287 looks poor.
    """
    values = [binary_entropy(posterior(np.arange(k + 1), k - np.arange(k + 1), likelihood)) for k in shots]
    weights = [chances(k, likelihood) / len(shots) for k in shots]
    if not per_shots:
        values, weights = [np.concatenate(values)], [np.concatenate(weights)]
    errors = [min((weight * np.abs(value - x)).sum() for x in value) for value, weight in zip(values, weights)]
    return float(np.sum(errors))
