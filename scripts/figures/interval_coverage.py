#!/usr/bin/env python3
"""How often the intervals of the heads table hold the truth, by simulation: interval_coverage.py [--trials 400]

Sums of sequences are drawn from distributions whose truth is known: every per-row sum is its row count times a draw with a
mean of its own, light-tailed (gamma, shape 4), skewed (log-normal, σ = 1) or heavy (log-normal, σ = 1.5); signed sums are
centred draws around a mean. The truth of a column is its definition applied to the means.
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd

from advantage_probe.probe import bootstrap
from advantage_probe.probe.columns import COLUMNS, HEADS, INDEX, SUMS, columns
from advantage_probe.probe.statistics import intervals

SIGNED = ("alignment", "over_uniform", "cosine_sum")
COUNTS = (12, 24, 100)
ROWS = 41.5  # mean of the row counts


def draw(count: int, tail: str, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Sums (count, C) of sequences, and their expected values (C,)."""
    rows = generator.integers(20, 64, count).astype(float)
    sigma = {"skewed": 1.0, "heavy": 1.5}.get(tail)
    sums, expected = np.zeros((count, len(SUMS))), np.zeros(len(SUMS))
    for name, place in INDEX.items():
        if sigma is None:
            positive = generator.gamma(4, 0.25, count)
        else:
            positive = np.exp(generator.normal(-(sigma**2) / 2, sigma, count))
        if name in ("queries", "keys", "aligned"):
            values, mean = np.ones(count), 1.0
        elif name in ("hidden_queries", "blind_queries"):
            values, mean = np.zeros(count), 0.0
        elif name in SIGNED:
            values, mean = 0.3 * (positive - 1.0) + 0.2, 0.2
        else:
            mean = 1.0 + 0.1 * place
            values = mean * positive
        sums[:, place], expected[place] = rows * values, ROWS * mean
    return sums, expected


def coverage(count: int, tail: str, trials: int, seed: int = 0) -> pd.Series:
    """Share of trials in which the interval of every column holds the truth."""
    generator = np.random.default_rng(seed)
    names = [name for name in HEADS if name != "queries"]
    hits = dict.fromkeys(names, 0)
    for trial in range(trials):
        sums, expected = draw(count, tail, generator)
        weights = bootstrap.weights([(trial << 20) + place for place in range(count)]).numpy()
        truth = columns(expected[None])
        found = intervals(sums.sum(0)[None], (weights @ sums)[:, None], count, names)
        for name in names:
            low, high = found[name]
            hits[name] += bool(low[0] <= truth[name][0] <= high[0])
    return pd.Series({name: value / trials for name, value in hits.items()})


def main() -> None:
    """A table: one row a column, one column a tail and a number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=400)
    given = parser.parse_args()
    tails = ("light", "skewed", "heavy")
    found = {f"{tail} {count}": coverage(count, tail, given.trials) for tail in tails for count in COUNTS}
    table = pd.DataFrame(found)
    table.insert(0, "scale", [COLUMNS[str(name)].scale for name in table.index])
    print(table.round(3).to_string())


if __name__ == "__main__":
    main()
