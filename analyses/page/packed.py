"""What the page draws, packed so that it stays under five megabytes.

Maps and edges are small integers, compressed and written as text: the page inflates them when a head is chosen. A map's
cells have 8 bits on a square-root scale of the head's largest value, an edge's attention and score gradient likewise; the
files beside the page hold what was measured. Every head has its line in the table and its cell in the picture; maps, pairs
and words are added head by head, strongest first, until the page is full.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from ...probe.columns import COLUMNS, columns_of
from ...probe.state import without_head
from ..files.export import jsonable
from ..runs.maps import HeadMap, Maps
from .courses import curve_lines, history_lines, short

EDGES = 2_000  # per head, over both directions
LISTED = 12  # edges per direction that are shown with their tokens
POINTS = 4_000  # of a manifold
MANY = 1_000  # heads: of more, numbers have four digits, which is still one more than the page shows

WITH_INTERVAL = columns_of("page")[:3]


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


def edge_lists(rows: pd.DataFrame) -> dict[str, list[Any]]:
    """The strongest pairs of one head in each direction, with their tokens."""
    names = ["query_token", "key_token", "query_position", "key_position", "attention", "advantage", "score_gradient"]
    rows = rows if "knockout" in rows else rows.assign(knockout=np.nan)  # of a run of an earlier version
    names.append("knockout")
    found = {}
    for direction, group in rows[rows["rank"] <= LISTED].groupby("direction", observed=True, sort=False):
        table = group[names].astype(object).values.tolist()
        found[str(direction)] = [
            [part if index < 4 else short(part) for index, part in enumerate(row)] for row in table
        ]
    return found


def edge_points(rows: pd.DataFrame, sequence: int = 0) -> dict[str, Any] | None:
    """The strongest pairs of one head in the window that the maps show: steps from query to query, keys, attention, score
    gradient. Positions have 16 bits, or 32 (`wide`) where a text is longer.
    """
    rows = rows[rows["sequence"] == sequence]
    if rows.empty:
        return None
    strongest = rows.reindex(rows["score_gradient"].abs().sort_values(ascending=False).index[:EDGES])
    strongest = strongest.sort_values(["query_position", "key_position"])
    query, key = (strongest[f"{side}_position"].to_numpy(dtype=np.int64) for side in ("query", "key"))
    gradient = strongest["score_gradient"].to_numpy(dtype=float)
    top = float(np.abs(gradient).max())
    wide = int(max(query.max(), key.max())) >= 1 << 16
    step, key = (values.astype("<u4" if wide else "<u2") for values in (np.diff(query, prepend=0), key))
    attention = unsigned(strongest["attention"].to_numpy(dtype=float), 1.0)
    data = packed(step, key, attention, signed(gradient, top))
    return {"count": len(strongest), "top": short(top), "data": data, "wide": wide}


def head_columns(heads: pd.DataFrame) -> dict[str, Any]:
    """The table of heads, column by column: identity, line of the picture, the shown columns, three intervals. Texts that
    many heads share are numbered.
    """
    found: dict[str, Any] = {"label": heads["label"].astype(str).tolist(), "row": _lines(heads)[0]}
    for name in ("kind", "module", "status"):
        texts = heads[name].astype(object) if name in heads else pd.Series([None] * len(heads), dtype=object)
        codes, known = pd.factorize(texts.where(texts.notna(), None), use_na_sentinel=False)
        found[name] = {"texts": [None if pd.isna(text) else str(text) for text in known], "codes": codes.tolist()}
    for name in columns_of("page"):
        for column in (name, f"{name}_low", f"{name}_high"):
            if column in heads and (column == name or name in WITH_INTERVAL):
                found[column] = [short(value, 6 if len(heads) <= MANY else 4) for value in heads[column]]
    return found


def _lines(heads: pd.DataFrame) -> tuple[list[int], list[str]]:
    """The lines of the layer × head picture, one per module and use: of which line every head is, and their names."""
    numbers: dict[tuple[str, int], int] = {}
    names: list[str] = []
    own: list[int] = []
    identity = (heads["label"].astype(str), heads["module"].astype(str), heads["use"], heads["head"])
    for label, module, use, head in zip(*identity, strict=True):
        if (module, int(use)) not in numbers:
            numbers[module, int(use)] = len(names)
            names.append(without_head(label, int(head), int(use)))
        own.append(numbers[module, int(use)])
    return own, names


def words(rows: pd.DataFrame) -> dict[str, list[Any]]:
    """The tokens that one head's values are pushed to promote and to suppress."""
    found: dict[str, list[Any]] = {}
    for row in rows.to_dict("records"):
        found.setdefault(str(row["direction"]), []).append([row["token"], short(row["strength"]), short(row["p"])])
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


def _by_head(table: pd.DataFrame | None) -> dict[str, Any]:
    """Label → the places of its rows."""
    if table is None or table.empty:
        return {}
    return table.groupby(table["label"].astype(str), sort=False).indices


def head_parts(
    heads: pd.DataFrame, edges: pd.DataFrame, maps: Maps, vocabulary: pd.DataFrame | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Maps, pairs and words of every head, strongest first."""
    pairs, said = _by_head(edges), _by_head(vocabulary)
    chosen: Mapping[str, HeadMap] = {**maps.pooled, **maps.fine}
    for name in heads.sort_values("routing_pressure", ascending=False)["label"].astype(str):
        parts: dict[str, Any] = {}
        if name in chosen:
            parts["maps"] = map_data(chosen[name])
        if name in pairs:
            own = edges.iloc[pairs[name]]
            parts |= {"edges": edge_lists(own), "points": edge_points(own)}
        if vocabulary is not None and name in said:
            parts["vocabulary"] = words(vocabulary.iloc[said[name]])
        yield name, {kind: part for kind, part in parts.items() if part}


def size_of(value: Any) -> int:
    """Bytes of a value in the page."""
    return len(json.dumps(jsonable(value), ensure_ascii=True, separators=(",", ":")))


def data_of(
    heads: pd.DataFrame,
    edges: pd.DataFrame,
    maps: Maps,
    tokens: list[str | None],
    resolved: list[str] | None,
    more: Mapping[str, pd.DataFrame],
    room: int,
) -> dict[str, Any]:
    """Everything that the page's script draws, as plain JSON values.

    Args:
        tokens: of the window that the maps show. resolved: heads told apart from the median head; None: not known.
        more: frames by name: vocabulary, manifold, history, curve.
        room: bytes that all of it may take; heads whose maps, pairs and words no longer fit go without (`drawn` says how
            many have theirs).
    """
    names = [name for name in columns_of("page") if name in heads]
    data: dict[str, Any] = jsonable(
        {
            "heads": head_columns(heads),
            "columns": [
                {
                    "name": name,
                    "unit": COLUMNS[name].unit,
                    "signed": COLUMNS[name].signed,
                    "meaning": COLUMNS[name].meaning,
                }
                for name in names
            ],
            "rows": _lines(heads)[1],
            "resolved": resolved,
            "tokens": tokens,
            "manifold": manifold_points(more.get("manifold")),
            "history": history_lines(more.get("history")),
            "curves": curve_lines(more.get("curve")),
            "shown": LISTED,
        }
    )
    kinds: dict[str, dict[str, Any]] = {name: {} for name in ("maps", "edges", "points", "vocabulary")}
    left, data["drawn"] = room - size_of(data), 0
    for name, parts in head_parts(heads, edges, maps, more.get("vocabulary")):
        left -= size_of({name: None}) * len(parts) + sum(size_of(part) for part in parts.values())
        if left < 0:
            break
        data["drawn"] += bool(parts)
        for kind, part in parts.items():
            kinds[kind][name] = jsonable(part)
    return {**data, **kinds, "fine": sorted(set(maps.fine) & set(kinds["maps"]))}
