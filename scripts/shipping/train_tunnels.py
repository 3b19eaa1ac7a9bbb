#!/usr/bin/env python3
"""Train the shipped tunnels, one after the other, each resumable: train_tunnels.py FOLDER [NAME[:sampled] …].

`hmm:sampled` trains on sampled states instead of exact posteriors: the curve that is shipped beside the distilled one.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from advantage_probe.analyses.wind_tunnels.tasks.registry import tunnel
from advantage_probe.analyses.wind_tunnels.training.recipes import SHIPPED, task_of
from advantage_probe.analyses.wind_tunnels.training.runner import train


def main() -> None:
    """Every named recipe into FOLDER/NAME, on one thread so that a seed gives one result."""
    torch.set_num_threads(1)
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(SHIPPED)
    for wanted in names:
        name, _, targets = wanted.partition(":")
        recipe, into = SHIPPED[name], name
        if targets == "sampled":
            recipe, into = replace(recipe, distilled=False), f"{name}-sampled"
        began, command = time.monotonic(), f"scripts/shipping/train_tunnels.py . {wanted}"
        _, curve = train(tunnel(task_of(name)), recipe, folder / into, name=task_of(name), command=command, resume=True)
        print(f"{name}: {curve[-1]} after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
