#!/usr/bin/env python3
"""Train the attention-free controls of shipped tunnels and write their figures: scripts/train_controls.py FOLDER NAME
….
"""

import json
import sys
from pathlib import Path

import torch
from advantage_probe.analyses.wind_tunnels.calibration import by_position, errors, held_out, model_rows, table
from advantage_probe.analyses.wind_tunnels.checkpoints import write_atomically
from advantage_probe.analyses.wind_tunnels.controls import KINDS, called, train_controls
from advantage_probe.analyses.wind_tunnels.recipes import SHIPPED
from advantage_probe.analyses.wind_tunnels.registry import tunnel


def main() -> None:
    """One JSON per tunnel: final figures of every learning rate, the best of each kind on fresh sequences, and its KL
    per position.
    """
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:]:
        task, found = tunnel(name), {}
        for kind in KINDS:
            models, figures = train_controls(task, SHIPPED[name], (kind,), report=lambda line: print(line, flush=True))
            episodes = held_out(task)
            rows, outside = model_rows(models[kind], episodes.tokens, task.outcomes, called)
            judged = table(task, {kind: (rows, outside)}, episodes).loc[kind]
            positions = by_position(errors(rows, task.predictive(episodes.tokens), outside))
            found[kind] = {
                "runs": figures.to_dict("records"),
                "held_out": {key: round(float(value), 6) for key, value in judged.items()},
                "kl_by_position": {str(key): round(float(value), 6) for key, value in positions["kl"].items()},
            }
            text = json.dumps({"tunnel": name, "sequences": 2_000, "controls": found}, indent=1) + "\n"
            write_atomically(folder / f"{name}.json", lambda path, text=text: path.write_text(text) and None)
            print(judged.to_string(), flush=True)


if __name__ == "__main__":
    main()
