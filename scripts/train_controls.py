#!/usr/bin/env python3
"""Train the attention-free controls of shipped tunnels and write their figures: scripts/train_controls.py --help."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from advantage_probe.analyses.wind_tunnels.calibration import by_position, errors, held_out, model_rows, table
from advantage_probe.analyses.wind_tunnels.checkpoints import write_atomically
from advantage_probe.analyses.wind_tunnels.controls import KINDS, RATES, called, sized_like, train_control
from advantage_probe.analyses.wind_tunnels.recipes import SHIPPED
from advantage_probe.analyses.wind_tunnels.registry import tunnel


def main() -> None:
    """One JSON per tunnel: every control at every learning rate, on fresh sequences and per position; written after
    each run.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+", choices=sorted(SHIPPED))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        path = options.folder / f"{name}.json"
        found = json.loads(path.read_text()) if path.exists() else {"tunnel": name, "sequences": 2_000, "runs": []}
        done = {(run["control"], run["learning_rate"]) for run in found["runs"]}
        task, recipe = tunnel(name), SHIPPED[name]
        episodes = held_out(task, found["sequences"])
        truth = task.predictive(episodes.tokens)
        for kind in options.kinds:
            for rate in options.rates:
                if (kind, rate) in done:
                    continue
                parameters = sized_like(task, recipe)
                model, _ = train_control(kind, task, replace(recipe, learning_rate=rate), parameters)
                rows, outside = model_rows(model, episodes.tokens, task.outcomes, called)
                judged = table(task, {kind: (rows, outside)}, episodes).loc[kind]
                positions = by_position(errors(rows, truth, outside))
                found["runs"].append(
                    {
                        "control": kind,
                        "learning_rate": rate,
                        "steps": recipe.steps,
                        "held_out": {key: round(float(value), 6) for key, value in judged.items()},
                        "kl_by_position": {str(key): round(float(value), 6) for key, value in positions["kl"].items()},
                    }
                )
                text = json.dumps(found, indent=1) + "\n"
                write_atomically(path, lambda partial, text=text: partial.write_text(text) and None)  # type: ignore[misc]
                print(f"{name}: {kind} at {rate:g}: KL {judged['kl']:.5f} bits", flush=True)


if __name__ == "__main__":
    main()
