"""Many edges removed for real, many at a time: every copy of a sequence in a batch loses one edge of one head.

Shapes: E edges, T tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...hooks.sequences import digest
from ..inputs.corpus import Batch
from ..inputs.objective import Objective
from .attention_edits import AttentionEdit, drop_edges, edited_attention

AT_ONCE = 16  # copies in a batch
COLUMNS = (
    "label",
    "sequence",
    "query_position",
    "key_position",
    "query_token",
    "key_token",
    "attention",
    "knockout",
    "true",
    "ratio",
)


@torch.no_grad()
def true_changes(
    model: nn.Module,
    ids: Tensor,
    targets: Tensor,
    edges: pd.DataFrame,
    loss: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    against: Tensor | None = None,
    *,
    at_once: int = AT_ONCE,
    progress: Callable[[int], None] | None = None,
) -> NDArray[np.float64]:
    """(E,) change of the loss of each edge's own sequence when that edge alone is removed.

    Args:
        ids, targets (n,T): sequences without padding. edges: module, use, head, sequence (a row of `ids`), query_position,
            key_position. loss: of (logits, targets, rivals), summed over targets.
    """

    def each(rows: Tensor) -> list[float]:
        logits = model(input_ids=ids[rows], use_cache=False).logits.double()  # differences of losses are small
        rivals = [None] * len(rows) if against is None else [against[row : row + 1] for row in rows.tolist()]
        wanted = targets[rows]
        return [
            float(loss(logits[place : place + 1], wanted[place : place + 1], rivals[place]))
            for place in range(len(rows))
        ]

    rows = torch.tensor(edges["sequence"].to_numpy(dtype=np.int64))
    used = rows.unique()
    before: dict[int, float] = {}
    for part in used.split(at_once):
        before |= dict(zip(part.tolist(), each(part)))
    found = np.zeros(len(edges))
    records = edges.to_dict("records")
    for first in range(0, len(edges), at_once):
        part = slice(first, first + at_once)
        by_head: dict[tuple[str, int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for copy, edge in enumerate(records[part]):
            place = (copy, int(edge["query_position"]), int(edge["key_position"]))
            by_head[str(edge["module"]), int(edge["use"]), int(edge["head"])].append(place)
        edits = [
            AttentionEdit(module, drop_edges(places), heads=(head,), use=use)
            for (module, use, head), places in by_head.items()
        ]
        with ExitStack() as stack:
            stack.enter_context(edited_attention(model, *edits))
            after = each(rows[part])
        found[part] = [value - before[int(row)] for value, row in zip(after, rows[part])]
        if progress is not None:
            progress(min(first + at_once, len(edges)))
    return found


def checked(
    model: nn.Module,
    groups: Sequence[tuple[Batch, Tensor | None]],
    edges: pd.DataFrame,
    sequences: Sequence[int],
    asked: Objective,
    count: int,
) -> pd.DataFrame:
    """The `count` edges of the largest |knockout|, each removed for real: one row an edge, with `true` and `ratio`.

    Args:
        groups: the batches that the edges come from, with what their targets are held against.
        sequences: identities, in the order in which the edges number them.
    """
    order = edges["knockout"].abs().sort_values(ascending=False, na_position="last").index[:count]
    chosen = edges.loc[order]
    chosen = chosen[chosen["knockout"].notna()]
    number = {identity: place for place, identity in enumerate(sequences)}
    wanted = set(chosen["sequence"].astype(int))
    device = next(model.parameters()).device
    true = pd.Series(np.nan, index=chosen.index)
    for batch, rivals in groups:
        for row in range(len(batch.ids)):
            length = int(batch.mask[row].sum())
            own = batch.ids[row, :length].to(torch.int64)
            place = number.get(digest(own.contiguous().numpy().tobytes()))
            if place is None or place not in wanted:
                continue
            wanted.discard(place)
            there = chosen[chosen["sequence"] == place]
            against = None if rivals is None else rivals[row : row + 1, :length].to(device)
            true[there.index] = true_changes(
                model,
                own[None].to(device),
                batch.targets[row : row + 1, :length].to(device),
                there.assign(sequence=0),
                asked.summed,
                against,
            )
    table = chosen.assign(true=true)
    return table.assign(ratio=table["true"] / table["knockout"])[list(COLUMNS)].reset_index(drop=True)
