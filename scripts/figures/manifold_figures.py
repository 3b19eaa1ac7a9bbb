#!/usr/bin/env python3
"""The figures of analyses/manifolds/README.md: scripts/figures/manifold_figures.py FOLDER RUNS.

For the two-layer and the four-layer model of `bijection-repeats`, values, outputs and stream: shares and their nulls, the
held-out order of every seed, and where repeated keys lie. RUNS is the folder that scripts/shipping/train_seeds.py filled;
seed 0 of either depth is the shipped model. Pictures go to FOLDER, the tables are printed and kept as JSON beside them.
"""

import argparse
from pathlib import Path

import pandas as pd
import torch

from advantage_probe.analyses.files.export import write_json
from advantage_probe.analyses.manifolds.group_pictures import write_manifold
from advantage_probe.analyses.manifolds.group_report import tunnel_groups
from advantage_probe.analyses.manifolds.groups import first_key, marks_of
from advantage_probe.analyses.manifolds.pictures import number
from advantage_probe.analyses.manifolds.stages import stages, unit
from advantage_probe.analyses.manifolds.verdict import placed
from advantage_probe.analyses.wind_tunnels.truth.against_truth import batches
from advantage_probe.analyses.wind_tunnels.truth.shipped import load

MODELS = {2: "bijection-repeats", 4: "bijection-repeats-4"}
SITES = ("value", "output", "residual")


def print_stages(layers: int, name: str, given: argparse.Namespace) -> None:
    """Where repeated keys lie after every attention and every feed-forward, one column a run."""
    columns: dict[str, dict[str, str]] = {}
    runs = [
        name,
        *(str(path.parent) for path in sorted((given.runs / f"{layers}-layers").glob("seed-[1-9]*/card.json"))),
    ]
    for run in runs:
        task, model, _ = load(run)
        drawn = task.sample(given.episodes, torch.Generator().manual_seed(given.seed))
        marks = marks_of(task, drawn.tokens)
        for stage, stream in stages(model, batches(drawn, 64)).items():
            rows = unit(marks.of(stream))
            stay, _ = first_key(marks, rows)
            found = placed(rows[stay], marks.where(stay))
            columns.setdefault(Path(run).name, {})[stage] = f"{found.plain.place:+.2f} {found.word}"
    print(f"\n{name}: place of repeated keys in the stream (+1 count, −1 low-entropy end), rows of unit size")
    print(pd.DataFrame(columns).to_string(), flush=True)


def main() -> None:
    """Every depth and site; one thread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1, help="of the episodes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    for layers, name in MODELS.items():
        print_stages(layers, name, given)
        seeds = sorted((given.runs / f"{layers}-layers").glob("seed-*/card.json"))
        beside = [str(path.parent) for path in seeds if path.parent.name != "seed-0"]
        for where in SITES:
            found = tunnel_groups(
                name,
                "count",
                where=where,  # type: ignore[arg-type]
                beside=beside,
                episodes=given.episodes,
                seed=given.seed,
                cut=where != "residual",
            )
            print(f"\n{name}, {where}: {given.episodes} episodes, seed {given.seed}, runs {found.record['runs']}")
            for title, frame in found.frames.items():
                if title not in ("curves", "points"):
                    print(f"{title}\n{frame.to_string(index=False, float_format=number, na_rep='–')}")
            print(*found.words, sep="\n", flush=True)
            stem = given.folder / f"manifold-{layers}-{where}"
            write_manifold(found, stem, "scripts/figures/manifold_figures.py FOLDER RUNS")
            tables = {title: frame.to_dict("records") for title, frame in found.frames.items() if title != "points"}
            write_json(found.record | {"sentences": found.words} | tables, stem.with_suffix(".json"))


if __name__ == "__main__":
    main()
