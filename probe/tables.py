"""From sums to tidy DataFrames: one row per key, documented dtypes, the same in every command.

Labels are categoricals, counts nullable integers, numbers float64 with NaN where nothing was counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..hooks.sequences import NON_TOKENS
from ..hooks.site import Site
from . import bootstrap
from .columns import HEADS, INDEX, KEY_ROWS, QUERY_ROWS, SUMS
from .edges import EdgeRows, TopEdges
from .state import Entry, Key, State, Step, label, shared_modules
from .statistics import Sums
from .tokens import Side

CAPTURED, NO_SOFTMAX, NO_CALL = "softmax attention", "no softmax attention", "no attention call was seen"
_LABELS = ("module", "label", "stack", "kind", "status", "interval", "side", "direction")
_INTEGERS = ("use", "backward", "head", "layer", "kv_head", "queries", "step", "position", "token_id", "sequence")
_PAIRS = ("query_position", "key_position", "query_token_id", "key_token_id", "rank", "keys")


def _typed(table: pd.DataFrame, *, sums: bool = False) -> pd.DataFrame:
    """The documented dtypes: categorical labels, nullable integers, strings, float64; raw sums are all float64."""
    for name in table.columns:
        if sums and name in SUMS:
            table[name] = table[name].astype("float64")
        elif name in _LABELS or (sums and name == "sequence"):
            table[name] = table[name].astype("category")
        elif name in _INTEGERS or name in _PAIRS:
            table[name] = pd.array(table[name], dtype="Int64")
        elif name in ("token", "query_token", "key_token"):
            table[name] = table[name].astype("string")
        elif table[name].dtype != bool:
            table[name] = table[name].astype("float64")
    return table


def _ordered(state: State, backward: int) -> list[tuple[Key, Entry]]:
    """Entries by stack, layer, module and use."""
    return sorted(
        ((key, entry) for key, entry in state.entries.items() if key.backward == backward and entry.heads),
        key=lambda pair: (pair[0].site.stack, pair[0].site.layer, pair[0].site.module, pair[0].use),
    )


def _identity(key: Key, heads: int, group: int, shared: Collection[str] = ()) -> dict[str, Any]:
    return {
        "module": [key.site.module] * heads,
        "use": [key.use] * heads,
        "head": range(heads),
        "label": [label(key, head, shared) for head in range(heads)],
        "layer": [None if key.site.layer < 0 else key.site.layer] * heads,
        "stack": [key.site.stack] * heads,
        "kind": [key.site.kind] * heads,
        "kv_head": [head // group for head in range(heads)],
    }


def _columns(key: Key, values: dict[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """Columns as reported: positions of two sequences have no distance."""
    if key.site.kind == "cross":
        values = {**values, "mean_distance": np.full_like(values["mean_distance"], np.nan)}
    return values


def _status(sums: Sums, reachable: bool, skipped: bool = False) -> list[str]:
    texts = []
    residual = sums.columns()["law_residual"]
    for head in range(len(sums.total)):
        bad = int(sums.bad_steps[head] + sums.bad_now[head])
        blind = int(sums.total[head, INDEX["blind_queries"]])
        queries = int(sums.total[head, INDEX["queries"]])
        parts = []
        if skipped:
            parts.append("skipped by the loss scaler")
        if bad:
            parts.append(f"non-finite ({bad} step{'s' * (bad > 1)})")
        if blind:
            parts.append(f"no visible key ({blind} row{'s' * (blind > 1)})")
        if not queries and not bad and not blind:
            parts.append("no gradient" if reachable else "no gradient path")
        if sums.total[head, INDEX["hidden_queries"]]:
            parts.append("dropout hidden by the kernel")
        if queries and residual[head] > sums.imprecise:
            parts.append(f"law residual {residual[head]:.0e}")
        texts.append("; ".join(parts) or "ok")
    return texts


def heads(state: State, *, intervals: bool = False, backward: int = 0) -> pd.DataFrame:
    """One row per module, use and head; see `Watch.heads`."""
    tables, shared = [], shared_modules(state.entries)
    for key, entry in _ordered(state, backward):
        table: dict[str, Any] = _identity(key, entry.heads, entry.group, shared)
        values = _columns(key, entry.sums.columns())
        ends = entry.sums.intervals() if intervals else {}
        for name in HEADS:
            table[name] = values[name]
            if name in ends and name != "queries":
                hidden = np.isnan(values[name])
                table[f"{name}_low"] = np.where(hidden, np.nan, ends[name][0])
                table[f"{name}_high"] = np.where(hidden, np.nan, ends[name][1])
        table["status"] = _status(entry.sums, entry.reachable)
        if intervals:
            table["interval"] = bootstrap.told(len(entry.sums.sequences))
        tables.append(pd.DataFrame(table))
    return _typed(_stacked(tables, [*_identity(_NOBODY, 0, 1), *HEADS, "status"]))


def step_heads(state: State, rows: pd.DataFrame, backward: int) -> pd.DataFrame:
    """The heads table of one step, from its rows of the history."""
    keys = ["module", "use", "head"]
    plain = {name: str for name in ("module", "label", "stack", "kind", "status") if name in rows}
    shared = shared_modules(state.entries)
    identities = [
        pd.DataFrame(_identity(key, entry.heads, entry.group, shared)) for key, entry in _ordered(state, backward)
    ]
    known = _stacked(identities, list(_identity(_NOBODY, 0, 1))).astype({"module": str})
    rows = rows[rows["backward"] == backward].astype(plain)[[*keys, *HEADS, "status"]]
    merged = known.merge(rows.astype({"use": "int64", "head": "int64"}), on=keys, how="inner")
    return _typed(merged)


def joined(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Tables of one kind below each other, with the documented dtypes."""
    full = [table for table in tables if len(table)]
    if not full:
        return tables[-1]
    if len(full) == 1:
        return _typed(full[0])
    plain = [table.astype({name: "object" for name in _LABELS if name in table}) for table in full]
    return _typed(pd.concat(plain, ignore_index=True))


EDGES = (
    "module",
    "use",
    "head",
    "label",
    "layer",
    "direction",
    "rank",
    "sequence",
    "query_position",
    "key_position",
    "query_token_id",
    "key_token_id",
    "attention",
    "advantage",
    "compatibility",
    "alpha_b",
    "score_gradient",
    "knockout",
)
HISTORY = [
    "step",
    "module",
    "use",
    "backward",
    "head",
    "label",
    "layer",
    "loss_weight",
    "loss_scale",
    *HEADS,
    "status",
]


def sequences(state: State, backward: int = 0) -> pd.DataFrame:
    """One row per sequence, module, use and head: the sums that the columns of the heads table are functions of."""
    tables, shared = [], shared_modules(state.entries)
    for key, entry in _ordered(state, backward):
        for identity, sums in (entry.singly or {}).items():
            table = {"sequence": f"{identity:016x}", **_identity(key, entry.heads, entry.group, shared)}
            tables.append(pd.DataFrame(table | dict(zip(SUMS, sums.numpy().T))))
    return _typed(_stacked(tables, ["sequence", *_identity(_NOBODY, 0, 1), *SUMS]), sums=True)


def history(steps: Sequence[Step]) -> pd.DataFrame:
    """One row per step, module, use, delivery and head."""
    tables, shared = [], shared_modules(key for step in steps for key in step.sums)
    for step in steps:
        for key, sums in sorted(step.sums.items(), key=lambda pair: (pair[0].site.layer, pair[0])):
            count = len(sums.total)
            table: dict[str, Any] = {
                "step": step.number,
                "module": key.site.module,
                "use": key.use,
                "backward": key.backward,
                "head": range(count),
                "label": [label(key, head, shared) for head in range(count)],
                "layer": None if key.site.layer < 0 else key.site.layer,
                "loss_weight": np.nan if step.loss_weight is None else step.loss_weight,
                "loss_scale": np.nan if step.loss_scale is None else step.loss_scale,
            }
            table |= _columns(key, sums.columns())
            table["status"] = _status(sums, True, step.skipped)
            tables.append(pd.DataFrame(table, index=range(count)))
    return _typed(_stacked(tables, HISTORY))


def modules(state: State, silent: Iterable[Site], uncalled: Iterable[Site] = ()) -> pd.DataFrame:
    """One row per attention module that was seen, per module that mixes tokens without a softmax, and per attention module
    that made no call.
    """
    rows = [
        {
            "module": key.site.module,
            "layer": None if key.site.layer < 0 else key.site.layer,
            "stack": key.site.stack,
            "kind": key.site.kind,
            "uses": 1 + max(other.use for other in state.entries if other.site == key.site),
            "heads": entry.heads,
            "kv_heads": entry.heads // entry.group,
            "status": CAPTURED,
        }
        for key, entry in _ordered(state, 0)
        if key.use == 0
    ]
    known = {row["module"] for row in rows}
    rows += [
        {
            "module": site.module,
            "layer": None if site.layer < 0 else site.layer,
            "stack": site.stack,
            "status": status,
        }
        for sites, status in ((silent, NO_SOFTMAX), (uncalled, NO_CALL))
        for site in sites
        if site.module not in known
    ]
    columns = ["module", "layer", "stack", "kind", "uses", "heads", "kv_heads", "status"]
    table = pd.DataFrame(rows, columns=columns).sort_values(["stack", "layer", "module"], ignore_index=True)
    for name in ("uses", "heads", "kv_heads"):
        table[name] = pd.array(table[name], dtype="Int64")
    return _typed(table)


def updates(state: State) -> pd.DataFrame:
    """One row per head: norm of the mean update, share of its second moment on one axis, and the direction itself.

    The direction −m̄ has one column per value coordinate (`update_0` …); heads of narrower values hold NaN in the rest.
    """
    tables, shared = [], shared_modules(state.entries)
    for key, entry in _ordered(state, 0):
        if entry.updates is None:
            continue
        parts = entry.updates.directions()
        table: dict[str, Any] = _identity(key, entry.heads, entry.group, shared)
        table |= {"keys": parts["keys"], "update_norm": parts["norm"], "share": parts["share"]}
        table |= {f"update_{place}": column for place, column in enumerate(parts["update"].T)}
        tables.append(pd.DataFrame(table))
    return _typed(_stacked(tables, [*_identity(_NOBODY, 0, 1), "keys", "update_norm", "share"]))


def tokens(state: State, tokenizer: Any = None) -> pd.DataFrame:
    """Query rows and key rows, one per head and token; columns of the other side are NaN."""
    order = {identity: number for number, identity in enumerate(state.sequences)}
    tables, shared = [], shared_modules(state.entries)
    for key, entry in _ordered(state, 0):
        for call in entry.tokens.calls if entry.tokens is not None else ():
            numbers = np.array([order[identity] for identity in call.identities])
            for name, side in (("query", call.queries), ("key", call.keys)):
                tables.append(_side(key, entry, name, side, numbers, shared))
    columns = ["module", "use", "head", "label", "layer", "kind", "side", "sequence", "position", "token_id"]
    table = _stacked(tables, [*columns, *QUERY_ROWS, *KEY_ROWS])
    table.insert(table.columns.get_loc("token_id") + 1, "token", _strings(table["token_id"], tokenizer))
    table.loc[table["token_id"] < 0, "token_id"] = None
    return _typed(table)


def _side(
    key: Key, entry: Entry, name: str, side: Side, numbers: NDArray[np.int64], shared: Collection[str]
) -> pd.DataFrame:
    count = len(side.row)
    repeated = {"sequence": numbers[side.row], "position": side.position, "token_id": side.token_id}
    table: dict[str, Any] = {
        "module": key.site.module,
        "use": key.use,
        "head": np.repeat(np.arange(entry.heads), count),
        "label": np.repeat([label(key, head, shared) for head in range(entry.heads)], count),
        "layer": key.site.layer,
        "kind": key.site.kind,
        "side": name,
    }
    table |= {column: np.tile(values, entry.heads) for column, values in repeated.items()}
    for column in (*QUERY_ROWS, *KEY_ROWS):
        table[column] = side.columns[column].T.reshape(-1) if column in side.columns else np.nan
    return pd.DataFrame(table, index=range(count * entry.heads))


def edges(state: State, top: int, tokenizer: Any = None) -> pd.DataFrame:
    """Per head the strongest routed and anti-routed pairs, strongest first."""
    order = {identity: number for number, identity in enumerate(state.sequences)}
    tables, shared = [], shared_modules(state.entries)
    for key, entry in _ordered(state, 0):
        if entry.edges is not None:
            for direction in ("routed", "anti_routed"):
                tables.append(_direction(key, entry.edges, direction, top, order, shared))
    table = _stacked(tables, EDGES)
    for side in ("query", "key"):
        place = table.columns.get_loc(f"{side}_token_id")
        table.insert(place + 1, f"{side}_token", _strings(table[f"{side}_token_id"], tokenizer))
        table.loc[table[f"{side}_token_id"] < 0, f"{side}_token_id"] = None
    return _typed(table)


def _direction(
    key: Key, kept: TopEdges, direction: str, top: int, order: dict[int, int], shared: Collection[str]
) -> pd.DataFrame:
    rows = getattr(kept, direction).map(lambda column: column[:, :top])
    heads_, count = rows.score_gradient.shape
    flat = {field.name: getattr(rows, field.name).flatten().numpy() for field in fields(EdgeRows)}
    numbers = np.array([order.get(identity, -1) for identity in kept.sequences] or [0])
    table = pd.DataFrame(
        {
            "module": key.site.module,
            "use": key.use,
            "head": np.repeat(np.arange(heads_), count),
            "label": np.repeat([label(key, head, shared) for head in range(heads_)], count),
            "layer": key.site.layer,
            "direction": direction,
            "rank": np.tile(np.arange(1, count + 1), heads_),
            **flat,
            "sequence": numbers[flat["sequence"]],
            "alpha_b": flat["attention"] * flat["compatibility"],
        }
    )[list(EDGES)]
    return table[table["score_gradient"] != 0]


def _strings(ids: Iterable[Any], tokenizer: Any) -> list[str | None]:
    """The token of every id as the tokenizer spells it; None without a tokenizer or a token."""
    known: dict[int, str | None] = {-1: None, **{number: f"<{name}>" for name, number in NON_TOKENS.items()}}
    if tokenizer is not None:
        unique = sorted({int(number) for number in ids if number is not None and number >= 0})
        known |= dict(zip(unique, spell(tokenizer, unique)))
    return [known.get(int(number)) if number is not None else None for number in ids]


def spell(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Each id decoded alone; pieces that are no text by themselves keep the vocabulary's own spelling."""
    pieces = tokenizer.convert_ids_to_tokens(list(ids)) if hasattr(tokenizer, "convert_ids_to_tokens") else None
    spelled = []
    for place, number in enumerate(ids):
        text = str(tokenizer.decode([number]))
        if pieces is not None and ("�" in text or text == ""):
            text = str(pieces[place])
        spelled.append(readable(text))
    return spelled


def readable(text: str) -> str:
    """Text that every encoder accepts: lone surrogates become their escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _stacked(tables: list[pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    if not tables:
        return pd.DataFrame({name: [] for name in columns})
    return pd.concat(tables, ignore_index=True)


class _Nobody:
    site = type("Site", (), {"module": "", "layer": -1, "stack": "", "kind": ""})()
    use = 0


_NOBODY: Any = _Nobody()
