#!/usr/bin/env python3
"""Train the attention-free controls of shipped tunnels and write their figures: train_controls.py --help."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from advantage_probe.analyses.wind_tunnels.tasks.registry import tunnel
from advantage_probe.analyses.wind_tunnels.training.checkpoints import write_whole
from advantage_probe.analyses.wind_tunnels.training.controls import (
    KINDS,
    RATES,
    Kind,
    called,
    sized_like,
    train_control,
)
from advantage_probe.analyses.wind_tunnels.training.models import parameter_count
from advantage_probe.analyses.wind_tunnels.training.recipes import SHIPPED, Recipe, shortened, task_of
from advantage_probe.analyses.wind_tunnels.truth.calibration import by_position, errors, held_out, model_rows, table


class Ledger:
    """The finished runs of one tunnel, in a file that is rewritten after each."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path, self.task, self.recipe = name, path, tunnel(task_of(name)), SHIPPED[name]
        self.found = json.loads(path.read_text()) if path.exists() else {"tunnel": name, "sequences": 2_000, "runs": []}
        self.episodes = held_out(self.task, self.found["sequences"])

    def kl(self, kind: Kind, recipe: Recipe, rate: float) -> float:
        """Held-out KL in bits of one control, from the file where it holds that run, else trained now."""
        wanted = (kind, rate, recipe.steps)
        for known in self.found["runs"]:
            if (known["control"], known["learning_rate"], known["steps"]) == wanted:
                return known["held_out"]["kl"]
        parameters = sized_like(self.task, self.recipe)
        model, _ = train_control(kind, self.task, replace(recipe, learning_rate=rate), parameters)
        rows, outside = model_rows(model, self.episodes.tokens, self.task.outcomes, called)
        judged = table(self.task, {kind: (rows, outside)}, self.episodes).loc[kind]
        positions = by_position(errors(rows, self.task.predictive(self.episodes.tokens), outside))["kl"]
        self.found["runs"].append(
            {
                "control": kind,
                "learning_rate": rate,
                "steps": recipe.steps,
                "parameters": parameter_count(model),
                "held_out": {key: round(float(value), 6) for key, value in judged.items()},
                "kl_by_position": {str(key): round(float(value), 6) for key, value in positions.items()},
            }
        )
        text = json.dumps(self.found, indent=1) + "\n"
        write_whole(self.path, lambda partial: partial.write_text(text))
        print(f"{self.name}: {kind} at {rate:g}, {recipe.steps} steps: KL {judged['kl']:.5f} bits", flush=True)
        return float(judged["kl"])


def main() -> None:
    """One JSON per tunnel: every control at every rate for a tenth of the steps, then at the best of them for all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+", choices=sorted(SHIPPED))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--screen", type=float, default=0.1, help="share of the steps that decides the rate")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        ledger = Ledger(name, options.folder / f"{name}.json")
        screen = shortened(ledger.recipe, options.screen)
        for kind in options.kinds:
            screened = {rate: ledger.kl(kind, screen, rate) for rate in options.rates}
            ledger.kl(kind, ledger.recipe, min(screened, key=screened.__getitem__))


if __name__ == "__main__":
    main()
