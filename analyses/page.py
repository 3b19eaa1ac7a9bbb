"""What the page draws, packed so that 144 heads over 2,048 tokens stay under five megabytes.

Maps and edges are small integers, compressed and written as text: the page inflates them when a head is chosen. A map's
cells have 8 bits on a square-root scale of the head's largest value, an edge's attention and score gradient likewise; the
files beside the page hold what was measured.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from .export import jsonable
from .maps import HeadMap, Maps

EDGES = 2_000  # per head, over both directions
LISTED = 12  # edges per direction that are shown with their tokens
POINTS = 4_000  # of a manifold
DRAWN = 1_000  # heads with maps and pairs; of the others the page has the table and the layer × head picture

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
WITH_INTERVAL = ("routing_pressure", "content_relative", "alignment")


def short(value: Any) -> float | None:
    """Six significant digits: more than the page shows, few enough to keep it small."""
    return None if pd.isna(value) else float(f"{value:.6g}")


def packed(*parts: np.ndarray) -> str:
    """Little-endian bytes of arrays, one after the other, compressed, as text."""
    return base64.b64encode(zlib.compress(b"".join(part.tobytes() for part in parts), 9)).decode("ascii")


def unsigned(values: np.ndarray, top: float) -> np.ndarray:
    """(…) of [0, top] as 8 bits on a square-root scale; 0 for nothing at all, as of hidden keys."""
    share = np.sqrt(np.clip(np.nan_to_num(values) / (top or 1.0), 0, 1))
    return np.where(values > 0, np.maximum(np.round(255 * share), 1), 0).astype(np.uint8)


def signed(values: np.ndarray, top: float) -> np.ndarray:
    """(…) of [−top, top] as 8 bits with a sign, on a square-root scale."""
    share = np.clip(np.nan_to_num(values) / (top or 1.0), -1, 1)
    return np.round(127 * np.sign(share) * np.sqrt(np.abs(share))).astype(np.int8)


def map_data(one: HeadMap) -> dict[str, Any]:
    """One head's map: cells, the tokens that they cover, the largest values, and both grids."""
    attention, gradient = one.attention, one.score_gradient
    tops = [float(np.nan_to_num(np.abs(grid)).max()) for grid in (attention, gradient)]
    return {
        "cells": list(attention.shape),
        "length": list(one.length),
        "tops": [short(top) for top in tops],
        "data": packed(unsigned(attention, tops[0]), signed(gradient, tops[1])),
    }


def all_maps(maps: Maps) -> dict[str, Any]:
    """Maps by label, the finer one where there is one; and which are fine. A file keeps no order, so it is made here."""
    chosen: Mapping[str, HeadMap] = {**maps.pooled, **maps.fine}
    return {"heads": {name: map_data(chosen[name]) for name in sorted(chosen)}, "fine": sorted(maps.fine)}


def edge_lists(edges: pd.DataFrame) -> dict[str, dict[str, list[Any]]]:
    """The strongest pairs of every head and direction, with their tokens."""
    found: dict[str, dict[str, list[Any]]] = {}
    names = ["query_token", "key_token", "query_position", "key_position", "attention", "advantage", "score_gradient"]
    table = edges[edges["rank"] <= LISTED]
    for (name, direction), group in table.groupby(["label", "direction"], observed=True, sort=False):
        rows = group[names].astype(object).values.tolist()
        found.setdefault(str(name), {})[str(direction)] = [
            [part if index < 4 else short(part) for index, part in enumerate(row)] for row in rows
        ]
    return found


def edge_points(edges: pd.DataFrame, sequence: int = 0) -> dict[str, Any]:
    """Per head, the strongest pairs of the window that the maps show: positions, attention, score gradient."""
    found = {}
    table = edges[edges["sequence"] == sequence]
    for name, group in table.groupby(table["label"].astype(str), sort=False):
        strongest = group.reindex(group["score_gradient"].abs().sort_values(ascending=False).index[:EDGES])
        strongest = strongest.sort_values(["query_position", "key_position"])
        query = strongest["query_position"].to_numpy(dtype=np.uint16)
        key = strongest["key_position"].to_numpy(dtype=np.uint16)
        gradient = strongest["score_gradient"].to_numpy(dtype=float)
        top = float(np.abs(gradient).max())
        step = np.diff(query, prepend=np.uint16(0)).astype(np.uint16)
        attention = unsigned(strongest["attention"].to_numpy(dtype=float), 1.0)
        found[str(name)] = {
            "count": len(strongest),
            "top": short(top),
            "data": packed(step, key, attention, signed(gradient, top)),
        }
    return found


def head_rows(heads: pd.DataFrame) -> list[dict[str, Any]]:
    """The table of heads: identity, the shown columns, three intervals."""
    names = [name for name in SHOWN if name in heads]
    rows = []
    for row in heads.to_dict("records"):
        head = {name: row[name] for name in ("label", "kind", "module", "status", "layer", "head")}
        for name in names:
            for column in (name, f"{name}_low", f"{name}_high"):
                if column in row and (column == name or name in WITH_INTERVAL):
                    head[column] = short(row[column])
        rows.append(head)
    return rows


def lines(heads: pd.DataFrame) -> list[dict[str, Any]]:
    """The lines of the layer × head picture: one per module and use."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for row in heads.itertuples():
        name = str(row.label).rsplit("H", 1)[0].rstrip(".")
        rows.setdefault((str(row.module), int(row.use)), {"name": name, "labels": []})["labels"].append(str(row.label))
    return list(rows.values())


def vocabulary_rows(table: pd.DataFrame | None) -> dict[str, Any]:
    """Per head, the tokens that its values are pushed to promote and to suppress."""
    found: dict[str, dict[str, list[Any]]] = {}
    if table is not None:
        for row in table.to_dict("records"):
            own = found.setdefault(str(row["label"]), {}).setdefault(str(row["direction"]), [])
            own.append([row["token"], short(row["strength"]), short(row["p"])])
    return found


def manifold_points(table: pd.DataFrame | None) -> dict[str, Any]:
    """Per head or layer, points of a manifold: coordinates, entropy, token; thinned evenly to `POINTS` in all."""
    if table is None or table.empty:
        return {}
    axes = [name for name in table if str(name).startswith("axis_")][:3]
    step = max(1, -(-len(table) // POINTS))
    found = {}
    for name, rows in table.iloc[::step].groupby(table["label"].astype(str).iloc[::step], sort=False):
        found[str(name)] = {
            "axes": [[short(value) for value in rows[axis]] for axis in axes],
            "entropy": [short(value) for value in rows["entropy"]] if "entropy" in rows else None,
            "names": rows["token"].astype(object).tolist() if "token" in rows else None,
        }
    return found


def history_lines(table: pd.DataFrame | None) -> dict[str, Any]:
    """Steps and the columns of every head over them, for training runs."""
    if table is None or table.empty:
        return {}
    table = table[table["backward"] == 0].sort_values("step")
    steps = sorted(table["step"].unique())
    kept = [name for name in SHOWN if name in table]
    heads = {}
    for label, rows in table.groupby(table["label"].astype(str), sort=False):
        rows = rows.drop_duplicates("step").set_index("step").reindex(steps)
        heads[str(label)] = {name: [short(value) for value in rows[name]] for name in kept}
    return {"steps": [int(step) for step in steps], "heads": heads}


def data_of(
    heads: pd.DataFrame,
    edges: pd.DataFrame,
    maps: Maps,
    tokens: list[str | None],
    resolved: list[str] | None,
    more: Mapping[str, pd.DataFrame],
) -> dict[str, Any]:
    """Everything that the page's script draws, as plain JSON values.

    Args:
        tokens: of the window that the maps show. resolved: heads told apart from the median head; None: not known.
        more: frames by name: vocabulary, manifold, history.
    """
    names = [name for name in SHOWN if name in heads]
    if len(heads) > DRAWN:
        drawn = set(heads.sort_values("routing_pressure", ascending=False)["label"].astype(str).head(DRAWN))
        edges = edges[edges["label"].astype(str).isin(drawn)]
        pooled, fine = ({name: one for name, one in part.items() if name in drawn} for part in (maps.pooled, maps.fine))
        maps = Maps(pooled, fine, maps.tokens)
    rows = lines(heads)
    return jsonable(
        {
            "heads": head_rows(heads),
            "columns": [
                {"name": name, "unit": SHOWN[name][0], "signed": SHOWN[name][1], "meaning": SHOWN[name][2]}
                for name in names
            ],
            "rows": rows,
            "width": max((len(entry["labels"]) for entry in rows), default=0),
            "resolved": resolved,
            "edges": edge_lists(edges),
            "points": edge_points(edges),
            "maps": all_maps(maps),
            "tokens": tokens,
            "vocabulary": vocabulary_rows(more.get("vocabulary")),
            "manifold": manifold_points(more.get("manifold")),
            "history": history_lines(more.get("history")),
            "shown": LISTED,
        }
    )
