#!/usr/bin/env python3
"""Print the README's tables on EM against SGD from a finished run: scripts/figures/em.py FOLDER [PICTURES].

FOLDER is the --out of `advantage-probe em`; its pictures are drawn anew into PICTURES where that is given.
"""

import json
import sys
from pathlib import Path
from statistics import mean, stdev

import pandas as pd

from advantage_probe.analyses.em.pictures import write_pictures
from advantage_probe.analyses.em.report import SAYS, names, sentences, spanned


def spread(numbers: list[float], places: int = 4) -> str:
    """Mean ± sample standard deviation over seeds."""
    return f"{mean(numbers):.{places}f} ± {stdev(numbers):.3f}"


def main() -> None:
    """Arms with held-out first, paired differences, the two sentences."""
    folder = Path(sys.argv[1])
    found = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    print("| arm | held-out loss | above the filter | KL held-out | train loss | steps to own SGD loss | passes |")
    print("|---|---|---|---|---|---|---|")
    for name, arm in found["arms"].items():
        says = (
            SAYS.get(name)
            or f"Adam {arm['rate']:g} (best of three rates by held-out minimum, {mean(arm['heldout_loss_minimum']):.4f})"
        )
        cells = [
            spread(arm["heldout_loss"]),
            spread(arm["heldout_excess"]),
            f"{mean(arm['heldout_kl']):.3f}",
            spread(arm["loss"]),
        ]
        cells += [spanned(arm["steps_to_own_sgd_loss"]), spanned(arm["passes_to_own_sgd_loss"])]
        print(f"| {says} | {' | '.join(cells)} |")
    print("\n| paired difference, 95 % | held-out | train |\n|---|---|---|")
    pairs: dict[tuple[str, str], list[str]] = {}
    for it in found["paired"]:
        shown = f"{it['mean']:+.4f} ± {it['high'] - it['mean']:.4f}"
        pairs.setdefault((it["arm"], it["against"]), []).append(shown)
    for (arm, other), cells in pairs.items():
        print(f"| {SAYS[arm]} − {SAYS[other]} | {' | '.join(cells)} |")
    print()
    for sentence in sentences(found["arms"], found["steps"]):
        print(f"> {sentence}")
    if len(sys.argv) > 2:
        curves, paths = (pd.read_parquet(folder / f"{name}.parquet") for name in ("curves", "trajectories"))
        command = "advantage-probe em --out FOLDER; scripts/figures/em.py FOLDER"
        write_pictures(curves, paths, found, names(found), Path(sys.argv[2]), command)


if __name__ == "__main__":
    main()
