#!/usr/bin/env python3
"""Streaming PCA beside one float64 product X.T @ X and scikit-learn's IncrementalPCA, 1,000,000 × 64 rows.

The contenders run in turn, in every round, on the same rows and one thread; medians and interquartile ranges are printed,
after the three have been seen to agree.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.decomposition import IncrementalPCA

from advantage_probe.analyses.vectors.pca import StreamingPCA


def main() -> None:
    """Print seconds per contender and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64)
    given = parser.parse_args()
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(given.rows, given.width)) @ generator.normal(size=(given.width, given.width))
    shifted = rows + 1e4
    contenders: dict[str, Callable[[], Any]] = {
        "X.T @ X": lambda: rows.T @ rows,
        "StreamingPCA": lambda: StreamingPCA(given.width).update(rows).finish(),
        "StreamingPCA, offset 1e4": lambda: StreamingPCA(given.width).update(shifted).finish(),
        "IncrementalPCA": lambda: IncrementalPCA().fit(rows),
    }
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    results: dict[str, Any] = {}
    for _ in range(given.rounds):
        for name, work in contenders.items():
            began = time.perf_counter()
            results[name] = work()
            spent[name].append(time.perf_counter() - began)
    ours, theirs = results["StreamingPCA"].variances, results["IncrementalPCA"].explained_variance_
    if np.abs(ours - theirs).max() > 1e-8 * ours[0]:
        raise SystemExit("the variances disagree")
    unit = np.median(spent["X.T @ X"])
    print(f"{given.rows:,} × {given.width} float64 rows, one thread, {given.rounds} rounds")
    for name, times in spent.items():
        low, middle, high = np.percentile(times, [25, 50, 75])
        print(f"{name:<26}{middle:8.3f} s  [{low:.3f}, {high:.3f}]  {middle / unit:7.2f} × X.T @ X")
    print(f"IncrementalPCA / StreamingPCA: {np.median(spent['IncrementalPCA']) / np.median(spent['StreamingPCA']):.1f}")


if __name__ == "__main__":
    main()
