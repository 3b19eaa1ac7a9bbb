"""Edges removed for real: what the loss does when a key is masked for one row, beside what was predicted to first order.

The masked forward runs on the model's own kernel; the affected rows of the head's output are computed anew without
the key and written over (`attention_edits`). One forward an edge, on the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pandas as pd
import torch
from torch import nn

from ...hooks.errors import BadInput
from .attention_edits import AttentionEdit, drop_edges, edited_attention
from .question import Question
from .untouched import as_it_was

COLUMNS = ("label", "sequence", "query_position", "key_position", "query_token", "key_token", "attention")


class Source(Protocol):
    """Where a head came from."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def question(self) -> Question: ...


class Taken(Protocol):
    """What is needed of a head."""

    @property
    def label(self) -> str: ...

    @property
    def module(self) -> str: ...

    @property
    def head(self) -> int: ...

    @property
    def use(self) -> int: ...

    @property
    def source(self) -> Source | None: ...

    def frame(self) -> pd.DataFrame: ...


def check(
    head: Taken,
    edges: int | pd.DataFrame | Sequence[tuple[int, int, int]] = 20,
    progress: Callable[[int, int, str], None] | None = None,
) -> pd.DataFrame:
    """Remove edges one at a time and measure the loss.

    Args:
        edges: how many of the largest predicted ones; or a frame with sequence, query_position and key_position; or such
            triples.

    Returns:
        One row an edge: which, its attention, `predicted` and `true` change of the loss, and `ratio` true / predicted.

    Raises:
        BadInput: for a head that was read from a file, or an edge that the row cannot see.
    """
    if head.source is None:
        raise BadInput("This head was read from a file and has no model to check it on; take it anew with ap.head().")
    pairs = head.frame()
    chosen = _chosen(head, pairs, edges)
    model, asked = head.source.model, head.source.question
    rows = []
    with as_it_was(model), torch.no_grad():
        before = asked.measured(model(**asked.inputs))
        for number, row in enumerate(chosen.to_dict("records")):
            place = (int(row["sequence"]), int(row["query_position"]), int(row["key_position"]))
            edit = AttentionEdit(head.module, drop_edges([place]), heads=(head.head,), use=head.use)
            with edited_attention(model, edit):
                after = asked.measured(model(**asked.inputs))
            rows.append({"predicted": row["knockout"], "true": after - before})
            if progress is not None:
                progress(number + 1, len(chosen), head.label)
    found = pd.DataFrame(rows, columns=["predicted", "true"], index=chosen.index)
    table: dict[str, Any] = {"label": head.label} | {name: chosen[name] for name in COLUMNS[1:]}
    out = pd.DataFrame(table, index=chosen.index).join(found)
    return out.assign(ratio=out["true"] / out["predicted"]).reset_index(drop=True)


def _chosen(head: Taken, pairs: pd.DataFrame, edges: Any) -> pd.DataFrame:
    if isinstance(edges, int):
        order = pairs["knockout"].abs().sort_values(ascending=False, na_position="last").index[:edges]
        return pairs.loc[order]
    keys = ["sequence", "query_position", "key_position"]
    if isinstance(edges, pd.DataFrame):
        missing = [name for name in keys if name not in edges]
        if missing:
            raise BadInput(f"Edges need the column {missing[0]!r}; they have {', '.join(map(str, edges.columns[:6]))}.")
        wanted = edges[keys].astype("int64").reset_index(drop=True)
    else:
        wanted = pd.DataFrame([tuple(edge) for edge in edges], columns=keys).astype("int64")
    found = wanted.merge(pairs, on=keys, how="left")
    unseen = found["attention"].isna()
    if unseen.any():
        row = found[unseen].iloc[0]
        raise BadInput(
            f"Query {int(row['query_position'])} of sequence {int(row['sequence'])} does not see key "
            f"{int(row['key_position'])} in {head.label}; name a pair of head.frame()."
        )
    return found
