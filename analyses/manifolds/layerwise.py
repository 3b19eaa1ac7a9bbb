"""A tunnel's model layer by layer: the frame of its keys, where its queries look, and how early the answer is there.

Three claims are made of such models: the first layer's keys become orthogonal, queries align with the keys that matter as
depth grows, and the posterior is refined layer by layer. Each is a number here, beside its nulls.

Shapes: n episodes, L positions, O outcomes, H heads, K key/value heads, D head width, V tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...hooks.attach import calls
from ...hooks.call import AttentionCall
from ..inputs.corpus import Batch
from ..intervals.nulls import DRAWS, bound, half_samples
from ..vectors.collecting import collect
from ..weights.keys import gaussian, off_diagonal
from ..weights.projections import unembedding
from ..wind_tunnels.tasks.bijection import Bijection
from ..wind_tunnels.tasks.bits import asked, kl_bits
from ..wind_tunnels.tasks.protocol import Episodes, Tunnel
from ..wind_tunnels.truth.against_truth import batches as episode_batches

Array = NDArray[np.float64]

WHERE = ("same token", "token after it")


# -- the frame of keys --------------------------------------------------------------------------------------------------


def token_keys(model: nn.Module, tokens: int) -> dict[str, Array]:
    """Per head of the first layer the keys (V,D) of every token standing alone, where rotary positions turn nothing."""
    ids = torch.arange(tokens)[:, None]
    seen = collect(model, [Batch(ids, torch.ones_like(ids), torch.full_like(ids, -100))], "key")
    first = next(iter(seen.vectors))
    return {name: seen.vectors[first][:, 0, place] for place, name in enumerate(seen.names[first])}


def roles(tunnel: Tunnel) -> dict[str, list[int]]:
    """Token ids by what they are: keys and values of a bijection, all tokens of any other task."""
    count = len(tunnel.vocabulary)
    if isinstance(tunnel, Bijection):
        return {"keys": list(range(tunnel.symbols)), "values": list(range(tunnel.symbols, count))}
    return {"all": list(range(count))}


def orthogonality(
    tunnel: Tunnel, model: nn.Module, untrained: nn.Module, draws: int = DRAWS, seed: int = 0
) -> pd.DataFrame:
    """Mean |cos| of two different tokens' keys in every head of the first layer; smaller is more orthogonal.

    Returns:
        `head`, `tokens` (which: `roles`), `orthogonality`, `low`, `high` (95 %, half samples of tokens), `untrained`,
        `gaussian` (expected of random vectors of that width), `shuffled` and `shuffled_edge` (mean and 2.5 % point with the
        entries of all keys in random places), `p` (upper bound for shuffled keys as orthogonal as these), `count`.
    """
    generator = np.random.default_rng(seed)
    whole = len(tunnel.vocabulary)
    started, ended = token_keys(untrained, whole), token_keys(model, whole)
    rows = []
    for role, ids in roles(tunnel).items():
        for head, every in ended.items():
            keys = every[ids]
            square = _cosines(keys)

            def again(chosen: NDArray[np.int64], square: Array = square) -> float:
                return off_diagonal(square[np.ix_(chosen, chosen)])

            low, high = half_samples(again, len(square), generator, draws, (0.0, 1.0))
            flat = keys.reshape(-1)
            null = np.array(
                [off_diagonal(_cosines(generator.permutation(flat).reshape(keys.shape))) for _ in range(draws)]
            )
            value = off_diagonal(square)
            row: dict[str, Any] = {"head": head, "tokens": role, "orthogonality": value, "low": low, "high": high}
            row |= {"untrained": off_diagonal(_cosines(started[head][ids])), "gaussian": gaussian(keys.shape[1])}
            row |= {"shuffled": float(null.mean()), "shuffled_edge": float(np.quantile(null, 0.025))}
            rows.append(row | {"p": bound(value, null, "small"), "count": len(ids)})
    return pd.DataFrame(rows)


def _cosines(keys: Array) -> Array:
    size = np.linalg.norm(keys, axis=1)
    unit = keys / np.where(size > 0, size, 1.0)[:, None]
    return np.abs(unit @ unit.T)


# -- where queries look -------------------------------------------------------------------------------------------------


def alignment(model: nn.Module, episodes: Episodes, draws: int = DRAWS, seed: int = 0) -> pd.DataFrame:
    """How far queries turn to earlier places that hold the row's own token, and to the places just after these.

    Returns:
        `layer`, `head`, `where`, `cosine` (mean over asked rows with such a place), `others` (the same rows' other visible
        places), `difference` with `low`, `high` (95 %, half samples of episodes), `null_edge` (97.5 % point of |difference|
        with the places of another episode's rows) and `p`, `episodes`.
    """
    generator = np.random.default_rng(seed)
    found: dict[int, list[Tensor]] = {}

    def keep(call: AttentionCall) -> None:
        key = call.key.repeat_interleave(call.group, 1).double()
        query = nn.functional.normalize(call.query.double(), dim=-1)
        cosines = query @ nn.functional.normalize(key, dim=-1).transpose(2, 3)
        layer = call.site.layer
        found.setdefault(-1 if layer is None else layer, []).append(cosines.cpu())

    with torch.no_grad(), calls(model, keep, forward=True):
        for batch in episode_batches(episodes, 32):
            model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
    tokens = episodes.tokens
    rows = (episodes.targets >= 0)[:, :, None]
    before = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril(-1)
    same = (tokens[:, :, None] == tokens[:, None]) & before & rows
    after = torch.zeros_like(same)
    after[:, :, 1:] = same[:, :, :-1]
    after &= before
    lines = []
    for layer, parts in sorted(found.items()):
        cosines = torch.cat(parts)
        for where, places in zip(WHERE, (same, after)):
            usable = places.any(2, keepdim=True)
            orders = [torch.as_tensor(generator.permutation(len(tokens))) for _ in range(draws)]
            for head in range(cosines.shape[1]):
                here = cosines[:, head]
                at, others = _masked(here, places & usable), _masked(here, before & usable & ~places)
                difference = _per_episode(at, others)
                kept = np.flatnonzero(np.isfinite(difference))
                if not len(kept):
                    continue
                held = difference[kept]
                null = []
                for order in orders:
                    moved = places[order]
                    can = moved.any(2, keepdim=True)
                    apart = _per_episode(_masked(here, moved & can), _masked(here, before & can & ~moved))
                    null.append(abs(float(np.nanmean(apart))))
                low, high = half_samples(lambda chosen: float(held[chosen].mean()), len(held), generator, draws)  # noqa: B023
                value = float(held.mean())
                row: dict[str, Any] = {"layer": layer, "head": head, "where": where}
                row |= {"cosine": float(np.nanmean(_mean(at))), "others": float(np.nanmean(_mean(others)))}
                row |= {"difference": value, "low": low, "high": high}
                row |= {"null_edge": float(np.quantile(null, 0.975)), "p": bound(abs(value), np.array(null), "large")}
                lines.append(row | {"episodes": len(held)})
    return pd.DataFrame(lines)


Sums = tuple[Tensor, Tensor]


def _masked(numbers: Tensor, places: Tensor) -> Sums:
    return torch.where(places, numbers, 0.0).sum((1, 2)), places.sum((1, 2))


def _mean(sums: Sums) -> Array:
    return np.asarray((sums[0] / sums[1].clamp(min=1)).where(sums[1] > 0, float("nan")).numpy())


def _per_episode(one: Sums, other: Sums) -> Array:
    return _mean(one) - _mean(other)


# -- how early the answer is there --------------------------------------------------------------------------------------


@torch.no_grad()
def read_out(
    task: Tunnel, models: dict[str, nn.Module], episodes: Episodes, draws: int = DRAWS, seed: int = 0
) -> pd.DataFrame:
    """The exact posterior against what the model's own last norm and unembedding read off each layer's stream.

    Returns:
        `network`, `layer` (−1: the embeddings), `kl` (bits, renormalised over outcomes, mean over asked positions) with
        `low`, `high` (95 %, half samples of episodes), `uniform` (the KL of an even guess). The last layer is the model.
    """
    truth = task.predictive(episodes.tokens)
    where = asked(truth)
    even = float(kl_bits(truth, torch.full_like(truth, 1 / truth.shape[-1]))[where].mean())
    lines = []
    for who, model in models.items():
        last = unembedding(model)
        norm = nn.Identity() if last.norm is None else model.get_submodule(last.norm)
        streams: list[list[Tensor]] = []
        for batch in episode_batches(episodes, 64):
            result = model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False, output_hidden_states=True)
            *hidden, _ = result.hidden_states
            read = [norm(state) @ last.weight.T for state in hidden] + [result.logits]
            streams.append([logits[..., list(task.outcomes)].double().softmax(-1) for logits in read])
        generator = np.random.default_rng(seed)
        for place, parts in enumerate(zip(*streams)):
            each = kl_bits(truth, torch.cat(parts)).where(where, float("nan")).nanmean(1).numpy()
            each = each[np.isfinite(each)]
            low, high = half_samples(lambda chosen: float(each[chosen].mean()), len(each), generator, draws)  # noqa: B023
            row = {"network": who, "layer": place - 1, "kl": float(each.mean()), "low": low, "high": high}
            lines.append(row | {"uniform": even, "episodes": len(each)})
    return pd.DataFrame(lines)
