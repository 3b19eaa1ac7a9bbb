#!/usr/bin/env python3
"""Train one recipe on `bijection-repeats` with several seeds: train_seeds.py FOLDER --layers 4 --seeds 0 1 2.

The recipe is the shipped one with its whole schedule squeezed into 4,000 steps (or --steps), at two layers or at four.
Every run lies in FOLDER/LAYERS-layers/seed-N, resumable; with --strip the weights of a handful of steps are kept in its
`strip`, which `advantage-probe manifold --strip` draws one after the other.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch

from advantage_probe.analyses.wind_tunnels.tasks.registry import tunnel
from advantage_probe.analyses.wind_tunnels.training.checkpoints import CARD, load_card, load_weights, save_model
from advantage_probe.analyses.wind_tunnels.training.models import build
from advantage_probe.analyses.wind_tunnels.training.recipes import SHIPPED, Recipe, shortened
from advantage_probe.analyses.wind_tunnels.training.runner import card, train

TASK = "bijection-repeats"
LN2, BOUND = 0.6931471805599453, 0.02  # nats of excess over Bayes
STRIP = (0, 100, 200, 400, 600, 800, 1_000, 1_500, 2_000, 3_000, 4_000)


def recipe(layers: int, seed: int, steps: int = 4_000, growth: int = 0) -> Recipe:
    """The shipped recipe in so many steps, with so many layers; episodes grow for longer where `growth` says so."""
    squeezed = shortened(SHIPPED[TASK], steps / SHIPPED[TASK].steps)
    squeezed = replace(squeezed, growth=growth or squeezed.growth)
    return replace(squeezed, shape=replace(squeezed.shape, layers=layers), seed=seed)


def run(folder: Path, layers: int, seed: int, steps: int, growth: int, strip: bool) -> None:
    """One seed; a finished one is left as it is."""
    if (folder / CARD).is_file():
        return
    task, wanted = tunnel(TASK), recipe(layers, seed, steps, growth)
    command = f"scripts/shipping/train_seeds.py . --layers {layers} --seeds {seed} --steps {steps} --growth {growth}"
    model = build(wanted.shape, task, seed)

    def keep(step: int, *_: object) -> None:
        if strip and step in STRIP:
            state = card(TASK, wanted, command, [], model) | {"step": step}
            save_model(folder / "strip" / f"step-{step:07d}", model, state)

    if not (folder / "run.pt").is_file():
        keep(0)
    began = time.process_time()
    _, curve = train(task, wanted, folder, name=TASK, command=command, resume=True, model=model, progress=keep)
    print(
        f"{layers} layers, seed {seed}: {curve[-1]} after {time.process_time() - began:.0f} s of one core", flush=True
    )


def again(folder: Path, layers: int, seed: int, steps: int) -> None:
    """So many more steps from a fresh schedule for a finished run that is more than .02 nats from Bayes; its weights and
    card are replaced, the card says so, and its curve goes on.
    """
    first = load_card(folder)
    reached = first["curve"][-1]
    if reached["kl"] * LN2 <= BOUND:
        return
    task, wanted = tunnel(TASK), recipe(layers, seed + 100, steps)
    wanted = replace(wanted, growth=0, first_length=0, warm_up=50)
    model = build(wanted.shape, task, seed)
    load_weights(folder, model)
    command = f"{first['command']}, then --again {steps}"
    model, curve = train(task, wanted, folder / "again", name=TASK, command=command, resume=True, model=model)
    curve = first["curve"] + [row | {"step": row["step"] + reached["step"]} for row in curve]
    save_model(folder, model, first | {"command": command, "again": steps, "curve": curve})
    print(f"{layers} layers, seed {seed}, {steps} steps more: {curve[-1]}", flush=True)


def main() -> None:
    """One thread, so that a seed gives one result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=4_000)
    parser.add_argument("--growth", type=int, default=0, help="steps over which episodes grow [default: squeezed too]")
    parser.add_argument("--again", type=int, help="more steps for finished runs that are over .02 nats from Bayes")
    parser.add_argument("--strip", action="store_true", help="keep the weights of a handful of steps")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for seed in given.seeds:
        if given.again:
            again(given.folder / f"{given.layers}-layers" / f"seed-{seed}", given.layers, seed, given.again)
            continue
        run(
            given.folder / f"{given.layers}-layers" / f"seed-{seed}",
            given.layers,
            seed,
            given.steps,
            given.growth,
            given.strip,
        )


if __name__ == "__main__":
    main()
