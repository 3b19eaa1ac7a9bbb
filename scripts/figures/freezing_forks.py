#!/usr/bin/env python3
"""What freezing routing, content, or routing with embeddings costs: scripts/figures/freezing_forks.py FOLDER --seeds 0 1 2.

A two-layer model of width 64 on `bijection-repeats` with 8 symbols, episodes of whole length from the first step on,
3,000 steps, forks at 10, 20 and 50 % (the warm-up ends at step 50). Everything stays in FOLDER; costs.csv holds every seed
that is done, and the table over seeds is printed from it.
"""

import argparse
import time
from pathlib import Path

import pandas as pd
import torch

from advantage_probe.analyses.dynamics import course
from advantage_probe.analyses.dynamics.freezing import STEPS, costs, forks, over_seeds, plain


def main() -> None:
    """Train, fork, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    for seed in given.seeds:
        wanted, file = plain(seed, given.steps), given.folder / f"costs-{seed}.csv"
        if not file.is_file():
            began = time.process_time()
            course.train(wanted, given.folder / f"seed-{seed}")
            table = costs(given.folder / f"seed-{seed}", forks(wanted), lambda note: print(note, flush=True))
            table.to_csv(file, index=False)
            print(f"seed {seed}: {time.process_time() - began:.0f} s of one core", flush=True)
    whole = pd.concat([pd.read_csv(file) for file in sorted(given.folder.glob("costs-*.csv"))], ignore_index=True)
    whole.to_csv(given.folder / "costs.csv", index=False)
    print(over_seeds(whole).to_string(index=False, float_format=lambda value: f"{value:.4f}"))


if __name__ == "__main__":
    main()
