#!/usr/bin/env python3
"""A pandas report and a figure from a run folder: scripts/export_report.py RUN [OUT].

RUN is what `advantage-probe analyze` wrote. OUT gets a table per layer, the map of all heads as PNG, SVG and PDF with its
data and its caption, and the page.
"""

import sys
from pathlib import Path

from advantage_probe.analyses import figures, plots
from advantage_probe.analyses.stored import open_run


def main() -> None:
    """Writes the files and prints the table."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    run = open_run(sys.argv[1])
    out = Path(sys.argv[2] if len(sys.argv) > 2 else "exported")
    out.mkdir(parents=True, exist_ok=True)
    layers = run.heads.groupby("layer", observed=True)[
        ["routing_pressure", "content_relative", "attention_entropy"]
    ].median()
    layers.to_csv(out / "layers.csv")
    print(layers.round(3))
    drawn = plots.layer_head(run.heads, "routing_pressure")
    caption = figures.Caption(
        f"Routing pressure √Σ D² of every head of {run.record['model']}.",
        f"{run.record['windows']} windows, {run.record['targets']} targets",
        "loss per unit score, summed loss",
        command=" ".join(sys.argv),
    )
    for path in figures.save(drawn, out / "routing", run.heads[["label", "routing_pressure"]], caption):
        print(path)


if __name__ == "__main__":
    main()
