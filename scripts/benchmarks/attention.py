#!/usr/bin/env python3
"""What the pass costs beside attention itself: scripts/benchmarks/attention.py [--lengths 1024 4096] [--rounds 9].

Forward and backward of one causal scaled_dot_product_attention call with 12 heads of width 64, alone and watched
with `detail="heads"`, `"tokens"` and `"edges"`; processor time of one thread, interleaved, medians.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

import advantage_probe as ap

ARMS: dict[str, dict[str, str]] = {
    "heads": {},
    "tokens": {"detail": "tokens"},
    "edges": {"detail": "edges"},
}


class Bare(nn.Module):
    """Attention and nothing else."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, input_ids: Tensor | None = None) -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def measured(length: int, rounds: int) -> dict[str, float]:
    """Median seconds per arm."""
    model, generator = Bare(), torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 12, length, 64, generator=generator).requires_grad_() for _ in range(3)]
    upstream = torch.randn(1, 12, length, 64, generator=generator)
    ids = torch.arange(length)[None]  # what a watch knows the sequence by
    times: dict[str, list[float]] = {"alone": [], **{name: [] for name in ARMS}}
    for turn in range(rounds + 1):
        for name, found in times.items():
            watch = None if name == "alone" else ap.watch(model, **ARMS[name])
            began = time.process_time()
            model(*inputs, input_ids=ids).backward(upstream)
            if watch is not None:
                watch.step(loss_weight=1.0)
            if turn:  # the first one warms up
                found.append(time.process_time() - began)
            if watch is not None:
                watch.close()
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """One line per length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| T | alone, ms | {' | '.join(ARMS)} |\n|{'---|' * (len(ARMS) + 2)}")
    for length in options.lengths:
        found = measured(length, options.rounds)
        ratios = " | ".join(f"{found[name] / found['alone']:.2f}" for name in ARMS)
        print(f"| {length} | {1e3 * found['alone']:.0f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
