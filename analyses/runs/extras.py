"""What the page shows beside the tables, for the heads that it shows first: values on their axes, and what they write.

Pictures, not claims: order by entropy is tested by `advantage-probe manifold`, with its nulls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor, nn

from ...hooks.errors import ProbeError
from ...probe.tables import spell
from ..inputs.corpus import Batch
from ..vectors.collecting import Array, collect
from ..vectors.pca import pca
from ..weights.vocabulary import vocabulary

POINTS = 4_000
AXES = 3
Asked = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def extras(
    model: nn.Module,
    groups: Sequence[tuple[Batch, Tensor | None]],
    labels: Mapping[str, int],
    layers: Sequence[int],
    tokenizer: Any,
    summed: Asked,
    entropy: Array | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[dict[str, pd.DataFrame], dict[str, str]]:
    """Frames `manifold` and `vocabulary`, as far as the model allows; and why not, where it does not.

    Args:
        groups: batches with what their targets are held against. labels: heads that the page shows first, and the
            key/value head that each reads. layers: those whose heads are read in the vocabulary.
        summed: the loss of (logits, targets, rivals), summed over targets.
        entropy (n,L): exact posterior entropy in bits, NaN where nothing is asked; None: the model's own.
    """
    frames: dict[str, pd.DataFrame] = {}
    reasons: dict[str, str] = {}
    jobs: dict[str, Callable[[], pd.DataFrame]] = {
        "manifold": lambda: points(model, [batch for batch, _ in groups], labels, tokenizer, entropy),
        "vocabulary": lambda: words(model, groups, layers, tokenizer, summed),
    }
    for place, (name, job) in enumerate(jobs.items()):
        if progress is not None:
            progress(place, len(jobs), name)
        try:
            found = job()
            if not found.empty:
                frames[name] = found
        except ProbeError as error:
            reasons[name] = str(error)
    if progress is not None:
        progress(len(jobs), len(jobs), "")
    return frames, reasons


def points(
    model: nn.Module, batches: Sequence[Batch], labels: Mapping[str, int], tokenizer: Any, entropy: Array | None
) -> pd.DataFrame:
    """Values of the chosen heads in their first principal axes: one row per head and token of whole windows.

    Columns: label, axis_1 … axis_3, entropy (bits), token, position, sequence.
    """
    lengths = Counter(int(count) for batch in batches for count in batch.mask.sum(1))
    length = max(lengths, key=lambda size: lengths[size] * size)
    whole: list[Batch] = []
    chosen: list[int] = []
    first = 0
    for batch in batches:
        full = (batch.mask.sum(1) == length).nonzero()[:, 0]
        if len(full) and sum(len(part.ids) for part in whole) * length < POINTS:
            whole.append(Batch(batch.ids[full, :length], batch.mask[full, :length], batch.targets[full, :length]))
            chosen += (first + full).tolist()
        first += len(batch.ids)
    seen = collect(model, whole, "value", "all")
    own = seen.entropy if entropy is None else entropy[chosen]
    ids = np.concatenate([part.ids.numpy() for part in whole])
    names = np.array(spell(tokenizer, sorted(set(ids.reshape(-1).tolist()))), dtype=object)
    order = {number: place for place, number in enumerate(sorted(set(ids.reshape(-1).tolist())))}
    tokens = names[np.vectorize(order.__getitem__)(ids)]
    tables = []
    by_head = seen.by("head")
    for name in dict.fromkeys(_owner(label, kv_head, by_head) for label, kv_head in labels.items()):
        if name is None:
            continue
        rows = by_head[name].reshape(-1, by_head[name].shape[-1])
        kept = np.isfinite(own.reshape(-1)) & np.isfinite(rows).all(1)
        if kept.sum() < 3:
            continue
        found = pca(rows[kept], source=name)
        places = np.argwhere(kept.reshape(own.shape))
        table = pd.DataFrame(found.project(rows[kept], min(AXES, len(found.axes)), source=name))
        table.columns = [f"axis_{axis + 1}" for axis in range(table.shape[1])]
        table = table.assign(
            label=name,
            entropy=own.reshape(-1)[kept],
            token=pd.Series(tokens.reshape(-1)[kept], dtype=object),
            position=places[:, 1],
            sequence=places[:, 0],
        )
        tables.append(table)
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def _owner(label: str, kv_head: int, known: dict[str, Array]) -> str | None:
    """The name under which a head's values are collected: its own, or that of the key/value head it reads."""
    if label in known:
        return label
    shared = f"{label.rsplit('H', 1)[0]}KV{kv_head}"
    return shared if shared in known else None


def words(
    model: nn.Module,
    groups: Sequence[tuple[Batch, Tensor | None]],
    layers: Sequence[int],
    tokenizer: Any,
    summed: Asked,
) -> pd.DataFrame:
    """What the values of the chosen layers' heads are pushed to promote and to suppress.

    Columns: label, direction ("promoted", "suppressed"), rank, token, strength (logit per unit step), random_edge (95 %
    point of random directions of the same norm), p.
    """
    if not layers:
        return pd.DataFrame()
    device = next(model.parameters()).device

    def loss(batch: Batch, rivals: Tensor | None) -> Callable[[], Tensor]:
        ids, mask, targets = (part.to(device) for part in (batch.ids, batch.mask, batch.targets))
        return lambda: summed(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, targets, rivals)

    found = vocabulary(model, [loss(*group) for group in groups], tokenizer, layers=layers, keys=0).tokens
    named = {"promote": "promoted", "suppress": "suppressed"}
    return pd.DataFrame(
        {
            "label": found["head"],
            "direction": found["pushed"].map(named),
            "rank": found["rank"],
            "token": found["token"],
            "strength": found["logit"],
            "random_edge": found["random_edge"],
            "p": found["p"],
        }
    )
