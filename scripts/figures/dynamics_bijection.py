#!/usr/bin/env python3
"""The README's figures on training dynamics: scripts/figures/dynamics_bijection.py FOLDER [--shipped].

Five seeds of a two-layer model of width 64 on `bijection-repeats` with 8 symbols, each examined with its ten
continuations. Every finished part stays in FOLDER, so a killed run goes on where it was. `--shipped` instead trains
one model of the shipped size and examines it without continuations: an illustration, one seed, no interval.
"""

import argparse
import pickle
import time
from dataclasses import replace
from pathlib import Path

import torch

from advantage_probe.analyses.commands.console import progress
from advantage_probe.analyses.dynamics import course
from advantage_probe.analyses.dynamics import examined as dynamics
from advantage_probe.analyses.dynamics import report as dynamics_report
from advantage_probe.analyses.files.folders import new_folder
from advantage_probe.analyses.wind_tunnels.training.recipes import SHIPPED

SEEDS = (0, 1, 2, 3, 4)


def examined(folder: Path, wanted: course.Course, causal: bool) -> dynamics.Examined:
    """Train and examine one run, or read what was found before."""
    found = folder / "examined.pickle"
    if not found.is_file():
        seed, began = wanted.recipe.seed, time.process_time()
        with progress(f"seed {seed}") as note:
            steps = [0]

            def tick() -> None:
                steps[0] += 1
                note(steps[0], wanted.recipe.steps, "training")

            course.train(wanted, folder, tick)
        with progress(f"seed {seed}") as note:
            run = dynamics.examine(folder, causal=causal, progress=note)
        found.write_bytes(pickle.dumps(run))
        print(f"seed {seed}: {time.process_time() - began:.0f} s of one core", flush=True)
    return pickle.loads(found.read_bytes())


def main() -> None:
    """Train, examine, print; figure, tables and the JSON object go to FOLDER/report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shipped", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.shipped:
        wanted = [course.Course("bijection-repeats", SHIPPED["bijection-repeats"])]
    else:
        wanted = [replace(course.SMALL, recipe=replace(course.SMALL.recipe, seed=seed)) for seed in SEEDS]
    runs = [examined(given.folder / f"seed-{one.recipe.seed}", one, not given.shipped) for one in wanted]
    with new_folder(given.folder / "report", overwrite=True) as folder:
        command = f"scripts/figures/dynamics_bijection.py FOLDER{' --shipped' if given.shipped else ''}"
        dynamics_report.write(runs, folder, command=command)
    print(dynamics_report.text(runs))


if __name__ == "__main__":
    main()
