"""What the attention-free controls of a shipped model reached: trained once, recorded beside the model, printed with it.

Training them again takes hours; their figures come from `scripts/shipping/train_controls.py`, on fresh sequences as the
model's own.
"""

import json
from pathlib import Path

import pandas as pd

FAILS = 0.05  # bits of KL at a position from which a control is said to fail there


def recorded_controls(folder: Path) -> pd.DataFrame | None:
    """One row per control at its best learning rate, trained for the model's own number of steps; None where there is no
    record.

    Columns: parameters, learning_rate, steps, entropy_error and kl (bits, over all supervised positions), worst (position)
    and kl_there, fails (the positions with more than 0.05 bits, as ranges).
    """
    path = folder / "controls.json"
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    steps = max(run["steps"] for run in found["runs"])
    rows = {}
    for run in found["runs"]:
        if run["steps"] != steps:
            continue  # a short one, which chose the learning rate
        positions = {int(place): value for place, value in run["kl_by_position"].items()}
        worst = max(positions, key=lambda place: positions[place])
        rows[run["control"]] = {
            "parameters": run["parameters"],
            "learning_rate": run["learning_rate"],
            "steps": run["steps"],
            "entropy_error": run["held_out"]["entropy_error"],
            "kl": run["held_out"]["kl"],
            "worst": worst,
            "kl_there": positions[worst],
            "fails": ranges(list(positions), [place for place, value in positions.items() if value > FAILS]),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def ranges(asked: list[int], chosen: list[int]) -> str:
    """Runs of neighbours among the asked positions, such as "3–9, 15"; "nowhere" and "everywhere" as words."""
    if not chosen:
        return "nowhere"
    if set(chosen) == set(asked):
        return "everywhere"
    order = {place: number for number, place in enumerate(sorted(asked))}
    runs: list[list[int]] = []
    for place in sorted(chosen):
        if runs and order[place] == order[runs[-1][1]] + 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)
