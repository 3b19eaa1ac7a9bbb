"""What else people rank pairs by: direct logit attribution, and how far such rankings agree with the advantage.

A head's value v_j moves the logit of the target at query i along the direct path α_ij v_j·W_O·g_i, with g_i = ∂(logit of
the target − mean logit)/∂(residual stream) taken exactly at the stream of position i, through the final norm. What later
layers make of it is not in it; the advantage has that, through u. α·b (gradient × attention) is in the edges table already.
Where a norm lies between the heads and the stream (Gemma 2 and 3, OLMo 2), its scale is frozen at what it was: then the
heads, and the bias of W_O, add up to what the block wrote. Logits are those before a final cap or scale.

Shapes: B batch, T tokens, K key/value heads, V value width, M width of the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from ...hooks.attach import calls, within_one_sequence
from ...hooks.call import AttentionCall
from ...hooks.errors import UnsupportedFamily
from ...hooks.sequences import digest
from ..inputs.corpus import Batch
from .frozen_norm import frozen
from .projections import output_maps, unembedding

FEWEST = 8  # pairs of a head, below which no rank correlation is taken
RIVALS = ("alpha_b", "direct_logit", "attention")
STREAM = ""  # the place where the stream is read: before the final norm, or before the unembedding


@contextmanager
def _inputs(places: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    """Keeps what modules are given at each of their calls, by name."""
    kept: dict[str, list[Tensor]] = {name: [] for name in places}
    with ExitStack() as stack:
        for name, module in places.items():
            hook = module.register_forward_pre_hook(lambda _, given, own=kept[name]: own.append(given[0].detach()))
            stack.callback(hook.remove)
        yield kept


def directions(norm: nn.Module | None, stream: Tensor, words: Tensor) -> Tensor:
    """(P,M) ∂(w·norm(x))/∂x at x = stream (P,M), for words w (P,M)."""
    if norm is None:
        return words
    with torch.enable_grad():
        x = stream.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((norm(x) * words).sum(), x)
    return gradient


def direct_logit(
    model: nn.Module, groups: Sequence[tuple[Batch, Tensor | None]], edges: pd.DataFrame, sequences: Sequence[int]
) -> pd.Series:
    """Direct logit attribution of every pair of `edges`, logits; NaN where its query has no target.

    Args:
        groups: the batches that the edges come from, with what their targets are held against.
        sequences: identities, in the order in which the edges number them.

    Raises:
        UnsupportedFamily: where W_O or the unembedding cannot be found, or what lies between a head and the stream has no
            scale to freeze.
    """
    last = unembedding(model)
    maps = {entry.site.module: entry for entry in output_maps(model)}
    modules = dict(model.named_modules())
    norm = modules[last.norm] if last.norm is not None else None
    places = {entry.norm: modules[entry.norm] for entry in maps.values() if entry.norm is not None}
    places[STREAM] = norm if norm is not None else model.get_output_embeddings()  # type: ignore[operator]
    words = last.weight.detach().float()
    mean = words.mean(0)
    number = {identity: place for place, identity in enumerate(sequences)}
    found = pd.Series(np.nan, index=edges.index, dtype="float64")
    by_sequence = {int(place): rows for place, rows in edges.groupby("sequence")}
    device = next(model.parameters()).device
    for batch, rivals in groups:
        seen: dict[tuple[str, int], tuple[Tensor, int]] = {}  # values (B,K,T,V) and the size of their groups

        def look(call: AttentionCall, seen: dict[tuple[str, int], tuple[Tensor, int]] = seen) -> None:
            seen[call.site.module, call.use] = call.value.detach(), call.group

        looking = calls(model, look, wanted=within_one_sequence, forward=True)
        with looking, torch.no_grad(), _inputs(places) as kept:
            model(input_ids=batch.ids.to(device), attention_mask=batch.mask.to(device), use_cache=False)
        for row in range(len(batch.ids)):
            ids = batch.ids[row][batch.mask[row].bool()].to(torch.int64)
            place = number.pop(digest(ids.numpy().tobytes()), None)
            if place is None or place not in by_sequence:
                continue
            pairs = by_sequence[place]
            queries = torch.tensor(pairs["query_position"].to_numpy(dtype=np.int64))
            targets = batch.targets[row][queries]
            asked = targets >= 0
            wanted = words[targets.clamp(min=0).to(words.device)] - mean
            if rivals is not None:
                against = rivals[row][queries]
                other = words[against.clamp(min=0).to(words.device)]
                wanted = torch.where((against >= 0)[:, None].to(words.device), wanted + mean - other, wanted)
            g = directions(norm, kept[STREAM][-1][row][queries.to(device)].float(), wanted)
            keys = torch.tensor(pairs["key_position"].to_numpy(dtype=np.int64))
            alpha = torch.tensor(pairs["attention"].to_numpy(dtype=np.float64))
            values = np.full(len(pairs), np.nan)
            for (module, use, head), there in pairs.groupby(["module", "use", "head"], observed=True, sort=False):
                value, group = seen[str(module), int(use)]
                own = torch.tensor(pairs.index.isin(there.index))
                v = value[row, int(head) // group][keys[own].to(device)].float()
                entry, towards = maps[str(module)], g[own.to(g.device)]
                if entry.norm is not None:
                    given = kept[entry.norm][int(use)][row][queries[own].to(device)]
                    towards = frozen(modules[entry.norm], entry.norm, given).pull(towards)
                way = entry.weight[int(head)].detach().float().to(v.device)  # (V,M)
                values[own.numpy()] = ((v @ way) * towards).sum(-1).double().cpu() * alpha[own]
            found[pairs.index] = np.where(asked.numpy(), values, np.nan)
    return found


def agreement(edges: pd.DataFrame) -> pd.DataFrame:
    """Spearman's rank correlation of the advantage with other numbers, over the kept pairs of every head.

    Columns: label, pairs, and NAME_rank for α·b, direct logit attribution and attention; NaN below eight pairs. Kept pairs
    are those of the largest |D|, so this says how rankings agree among strong pairs, not among all.
    """
    rows: list[dict[str, Any]] = []
    for name, pairs in edges.groupby(edges["label"].astype(str), sort=False):
        row: dict[str, Any] = {"label": name, "pairs": len(pairs)}
        for rival in RIVALS:
            both = pairs[["advantage", rival]].dropna() if rival in pairs else pairs.iloc[:0]
            ranks = both.rank()
            varied = len(both) >= FEWEST and (ranks.nunique() > 1).all()
            row[f"{rival}_rank"] = float(np.corrcoef(ranks.to_numpy().T)[0, 1]) if varied else np.nan
        rows.append(row)
    return pd.DataFrame(rows, columns=["label", "pairs", *(f"{rival}_rank" for rival in RIVALS)])


def attributed(
    model: nn.Module,
    groups: Sequence[tuple[Batch, Tensor | None]],
    edges: pd.DataFrame,
    sequences: Sequence[int],
    told: Callable[[str], None],
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """`edges` with `direct_logit`, and the agreement of rankings; `told` hears why where a model does not allow it."""
    try:
        values = direct_logit(model, groups, edges, sequences)
    except UnsupportedFamily as error:
        told(str(error))
        values = pd.Series(np.nan, index=edges.index, dtype="float64")
    place = int(edges.columns.get_loc("alpha_b")) + 1
    columns = [*edges.columns[:place], "direct_logit", *edges.columns[place:]]
    edges = edges.assign(direct_logit=values)[columns]
    return edges, agreement(edges)
