#!/usr/bin/env python3
"""What a watch costs between observed steps: scripts/benchmarks/unobserved.py [--json FILE].

Training steps (forward, backward, AdamW) of one model without a watch and inside one that observes none of them, in
alternating blocks of ten, 200 of each; medians and their ratio. A second pair of unwatched blocks gives the noise.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import advantage_probe as ap

SIZES = {
    "tunnel: 2 layers x 4 heads x 96, T=36, batch 64": ((2, 4, 96), 36, 64),
    "4 layers x 4 heads x 256, T=256, batch 8": ((4, 4, 256), 256, 8),
}
BLOCKS, LENGTH = 20, 10


def measured(shape: tuple[int, int, int], length: int, batch: int) -> dict[str, float]:
    """Median seconds of a step: unwatched, unwatched again, unobserved."""
    layers, heads, width = shape
    torch.manual_seed(0)
    shape_of = {"n_layer": layers, "n_head": heads, "n_embd": width, "n_positions": length}
    config = GPT2Config(**shape_of, vocab_size=64, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 64, (batch, length))

    def step() -> float:
        began = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    def unwatched() -> list[float]:
        return [step() for _ in range(LENGTH)]

    def unobserved() -> list[float]:
        with ap.watch(model, every=10**9) as watch:
            watch.seek(1)
            found = []
            for _ in range(LENGTH):
                began = time.perf_counter()
                step()
                watch.step()
                found.append(time.perf_counter() - began)
        return found

    arms = {"unwatched": unwatched, "unwatched again": unwatched, "unobserved": unobserved}
    for _ in range(3):
        step()
    times: dict[str, list[float]] = {name: [] for name in arms}
    for block in range(BLOCKS):
        order = list(arms)[block % 3 :] + list(arms)[: block % 3]
        for name in order:
            times[name] += arms[name]()
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Prints one line per size; `--json` also writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = {}
    for name, size in SIZES.items():
        found = measured(*size)
        ratio, noise = (found[arm] / found["unwatched"] for arm in ("unobserved", "unwatched again"))
        figures[name] = {**found, "ratio": ratio, "noise": noise}
        print(
            f"{name}: {1e3 * found['unwatched']:.2f} ms a step, unobserved x{ratio:.4f} (noise x{noise:.4f})",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
