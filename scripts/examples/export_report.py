#!/usr/bin/env python3
"""A pandas report and figures from a run folder: scripts/examples/export_report.py RUN [OUT [HEAD]].

RUN is what `advantage-probe analyze` wrote. OUT gets a table per layer, the map of all heads, and one head over the text
(default: that of largest routing pressure), each picture as PNG, SVG and PDF with its data and its caption.
"""

import sys
from pathlib import Path

from advantage_probe.analyses.pictures import figures, plots
from advantage_probe.analyses.pictures.head_figure import write_head
from advantage_probe.analyses.runs.stored import open_run


def main() -> None:
    """Writes the files, prints the table and the names."""
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
    written = figures.save(drawn, out / "routing", run.heads[["label", "routing_pressure"]], caption)
    strongest = run.heads.sort_values("routing_pressure")["label"].astype(str).iloc[-1]
    head = sys.argv[3] if len(sys.argv) > 3 else strongest
    one = run.maps.fine.get(head) or run.maps.pooled.get(head)
    if one is None:
        sys.exit(f"The run has no map of {head!r}; heads: {', '.join(list(run.maps.pooled)[:8])}, …")
    known = run.tokens.dropna(subset="token").drop_duplicates("token_id").set_index("token_id")["token"].astype(object)
    tokens = [known.get(number, "") for number in run.maps.tokens]
    written += write_head(one, head, tokens, str(run.record["model"]), out / "head", " ".join(sys.argv))
    print(*written, sep="\n")


if __name__ == "__main__":
    main()
