#!/usr/bin/env python3
"""Train the LSTM control of a tunnel for longer than the transformer was: scripts/shipping/longer_control.py FOLDER.

On `bijection-distinct` an LSTM of the transformer's size and steps is under-trained; this is the same control under the
same recipe with a longer schedule, resumable, and its held-out figures on 2,000 sequences.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from advantage_probe.analyses.wind_tunnels.tasks.registry import tunnel
from advantage_probe.analyses.wind_tunnels.training.controls import called, control, sized_like
from advantage_probe.analyses.wind_tunnels.training.models import parameter_count
from advantage_probe.analyses.wind_tunnels.training.recipes import SHIPPED
from advantage_probe.analyses.wind_tunnels.training.runner import train
from advantage_probe.analyses.wind_tunnels.truth.calibration import held_out, model_rows, table


def main() -> None:
    """One run; its figures go to FOLDER/figures.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", default="bijection-distinct", choices=sorted(SHIPPED))
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--rate", type=float, default=1e-3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    task = tunnel(given.name)
    recipe = replace(SHIPPED[given.name], steps=given.steps, learning_rate=given.rate)
    model = control("LSTM", task, sized_like(task, recipe), recipe.seed)
    settings = {"name": f"{given.name}, LSTM", "command": "scripts/shipping/longer_control.py", "interval": 500}
    model, curve = train(task, recipe, given.folder, model=model, forward=called, resume=True, **settings)
    episodes = held_out(task, 2_000)
    rows, outside = model_rows(model, episodes.tokens, task.outcomes, called)
    judged = table(task, {"LSTM": (rows, outside)}, episodes).loc["LSTM"].to_dict()
    found = {"tunnel": given.name, "control": "LSTM", "steps": given.steps, "learning_rate": given.rate}
    found |= {"parameters": parameter_count(model), "held_out": judged, "curve": curve}
    (given.folder / "figures.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{given.name}: LSTM, {given.steps} steps at {given.rate:g}: KL {judged['kl']:.5f} bits")


if __name__ == "__main__":
    main()
