"""The one-file HTML report: opened offline, nothing fetched, every string escaped.

The page shows a selection (the columns below, the strongest pairs); the files beside it hold everything.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from .analyze import Run
from .export import jsonable

SHOWN_EDGES = 12

# column → (unit, drawn on a scale that is symmetric around zero, what it says)
SHOWN: dict[str, tuple[str, bool, str]] = {
    "routing_pressure": ("loss", False, "√Σ (∂L/∂s)²: how hard the loss pulls on where the head looks"),
    "content_relative": ("loss", False, "‖αᵀU‖ · rms‖v‖: how hard the loss pulls on what the head moves, gauge-free"),
    "alignment": (
        "",
        True,
        "correlation of attention with advantage: positive where it attends to what lowers the loss",
    ),
    "edge_over_uniform": ("loss", True, "how much better its routing is than even attention, to first order"),
    "coherence": ("", False, "1: all users of a key push it the same way; 0: they cancel"),
    "update_cosine": ("", True, "cosine of the value update with the value: growth or shrinking"),
    "attention_entropy": ("nats", False, "entropy of attention, mean over queries"),
    "effective_keys": ("keys", False, "exp of the entropy: how many keys a query looks at"),
    "mean_distance": ("tokens", False, "how far back the head looks"),
    "first_key_share": ("", False, "attention on the first token"),
    "law_residual": ("", False, "do recomputed weights reproduce the kernel's own output"),
}


def sentences(run: Run) -> list[str]:
    """What was measured, whether it can be believed, and how the pictures may be read."""
    record, heads = run.record, run.heads
    ok = heads[heads["status"].astype(str) == "ok"]
    worst = heads["law_residual"].max()
    lines = [
        f"Measured: {len(heads)} attention heads of {record.get('model')}, on {record.get('targets')} next-token targets "
        f"in {record.get('windows')} windows of text; mean cross-entropy {record.get('loss', float('nan')):.3f} nats.",
        f"Can it be believed: the weights recomputed here reproduce every head's own output along its gradient to "
        f"{worst:.0e}; {len(ok)} of {len(heads)} heads are without remark.",
    ]
    lines.append(
        "The map shows point estimates; the table gives pointwise 95 % intervals over windows, which say nothing about "
        "which of many heads is the largest."
    )
    return lines


def _edges(run: Run) -> dict[str, dict[str, list[Any]]]:
    found: dict[str, dict[str, list[Any]]] = {}
    table = run.edges[run.edges["rank"] <= SHOWN_EDGES]
    names = ["query_token", "key_token", "query_position", "key_position", "attention", "advantage", "score_gradient"]
    for (name, direction), group in table.groupby(["label", "direction"], observed=True, sort=False):
        rows = group[names].astype(object).values.tolist()
        found.setdefault(str(name), {})[str(direction)] = [
            [part if index < 4 else _short(part) for index, part in enumerate(row)] for row in rows
        ]
    return found


def _short(value: Any) -> float | None:
    """Six significant digits: more than the page shows, few enough to keep it small."""
    return None if pd.isna(value) else float(f"{value:.6g}")


def data_of(run: Run) -> dict[str, Any]:
    """What the page's script draws."""
    names = [name for name in SHOWN if name in run.heads]
    heads = []
    for row in run.heads.to_dict("records"):
        head = {name: row[name] for name in ("label", "kind", "module", "status", "layer", "head")}
        for name in names:
            for column in (name, f"{name}_low", f"{name}_high"):
                if column in row and (column == name or name in ("routing_pressure", "content_relative", "alignment")):
                    head[column] = _short(row[column])
        heads.append(head)
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for row in run.heads.itertuples():
        entry = rows.setdefault(
            (str(row.module), int(row.use)), {"name": str(row.label).rsplit("H", 1)[0], "labels": []}
        )
        entry["labels"].append(str(row.label))
    return {
        "heads": heads,
        "columns": [{"name": n, "unit": SHOWN[n][0], "signed": SHOWN[n][1], "meaning": SHOWN[n][2]} for n in names],
        "rows": list(rows.values()),
        "width": max((len(entry["labels"]) for entry in rows.values()), default=0),
        "edges": _edges(run),
        "shown": SHOWN_EDGES,
    }


def html(run: Run) -> str:
    """The page."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    folder = Path(__file__).parent / "templates"
    template = Environment(loader=FileSystemLoader(folder, encoding="utf-8"), autoescape=True).get_template(
        "report.html.jinja"
    )
    # inside a script element only "<" could end it: its escape means the same in JSON
    data = json.dumps(jsonable(data_of(run)), ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    record = run.record
    flat = {**{k: v for k, v in record.items() if k not in ("versions", "texts")}, **record.get("versions", {})}
    return template.render(
        title=record.get("model", "a model"),
        subtitle=f"{record.get('architecture')} · {record.get('attention_implementation')} · {record.get('dtype')}",
        sentences=sentences(run),
        columns=[{"name": name} for name in SHOWN if name in run.heads],
        sequences=record.get("windows"),
        provenance=[*flat.items(), ("texts", ", ".join(record.get("texts", [])))],
        data=Markup(data),
    )
