#!/usr/bin/env python3
"""What is an edge worth? Predictions held against real removals: knockout.py OUT [--edges 1000] [--texts 24] [--only
NAME …]

Edges are drawn uniformly over (query, key) pairs of all heads with at least two visible keys and u ≠ 0, never chosen
by a score. Truth is the change of the sequence's summed loss when the edge alone is removed in a real forward and its
row renormalised. Rivals are −α u·(v_j − c): c = 0 (gradient × attention), the corpus mean of the head's values, the
mean of the row's visible values, and o_i (−D); α, α‖v‖ and α‖v − o‖ have no sign and are held against |ΔL|;
integrated gradients average u over five points between mean and own embeddings (tunnels only, whose inputs are embeddings).

OUT gets edges.parquet (one row an edge), figures.json and the tables as text. Runs that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from advantage_probe.analyses.heads.head import one_head
from advantage_probe.analyses.heads.masked import true_changes
from advantage_probe.analyses.inputs.objective import NEXT_TOKEN
from advantage_probe.hooks.attach import calls, edited
from advantage_probe.hooks.call import AttentionCall
from advantage_probe.probe.law.definition import law

TUNNELS = ("bijection-repeats", "bijection-distinct", "mess3", "rrxor", "hmm", "selection")
STRATA = (0.0, 0.02, 0.1, 0.3, 0.6, 0.95, 0.995, 1.0)
SIGNED = ("knockout", "minus_d", "zero", "corpus_mean", "row_mean", "integrated")
SIZES = ("attention", "attention_value", "attention_distance")
BOOTSTRAPS = 400
POINTS = (5, 20)  # along an edge's own removal


class Sampler:
    """Draws edges of every call and writes down what each rival says of them."""

    def __init__(self, per_head: int, generator: np.random.Generator) -> None:
        self.per_head, self.generator = per_head, generator
        self.rows: list[dict[str, Any]] = []
        self.first = 0  # number of the batch's first sequence

    def add(self, call: AttentionCall) -> None:
        for head in range(call.query.shape[1]):
            alone = one_head(call, head)
            terms = law(alone)
            visible = terms.visible[:, 0] & call.visibility.counted(len(call.query), call.query.device)[..., None]
            pulled = alone.upstream[:, 0].abs().sum(-1) > 0
            allowed = visible & (visible.sum(-1, keepdim=True) >= 2) & pulled[..., None]
            places = allowed.nonzero()
            if not len(places):
                continue
            take = self.generator.choice(len(places), min(self.per_head, len(places)), replace=False)
            value, output, upstream = (
                alone.value[:, 0].double(),
                alone.output[:, 0].double(),
                alone.upstream[:, 0].double(),
            )
            corpus = value.mean((0, 1))
            for row, query, key in places[take].tolist():
                u, v, alpha = upstream[row, query], value[row, key], float(terms.attention[row, 0, query, key])
                mean = value[row][visible[row, query]].mean(0)
                self.rows.append(
                    {
                        "module": call.site.module,
                        "layer": call.site.layer,
                        "use": call.use,
                        "head": head,
                        "sequence": self.first + row,
                        "query_position": query,
                        "key_position": key,
                        "attention": alpha,
                        "knockout": float(terms.knockout[row, 0, query, key]),
                        "minus_d": -float(terms.score_gradient[row, 0, query, key]),
                        "zero": -alpha * float(u @ v),
                        "corpus_mean": -alpha * float(u @ (v - corpus)),
                        "row_mean": -alpha * float(u @ (v - mean)),
                        "attention_value": alpha * float(v.norm()),
                        "attention_distance": alpha * float((v - output[row, query]).norm()),
                    }
                )


def examined(
    model: nn.Module,
    ids: Tensor,
    targets: Tensor,
    per_head: int,
    seed: int,
    *,
    integrate: bool,
    most: int | None = None,
) -> pd.DataFrame:
    """Sampled edges of all heads on sequences (n,T), with every rival and the truth."""
    sampler = Sampler(per_head, np.random.default_rng(seed))

    def backward(embeddings: Tensor | None = None) -> None:
        given = {"input_ids": ids} if embeddings is None else {"inputs_embeds": embeddings}
        NEXT_TOKEN.summed(model(**given, use_cache=False).logits, targets).backward()

    with calls(model, sampler.add, reach_all=True):
        backward()
    edges = pd.DataFrame(sampler.rows)
    if most is not None:
        edges = edges.sample(most, random_state=seed).reset_index(drop=True)
    if integrate:
        edges["integrated"] = _integrated(model, ids, backward, edges)
    edges["true"] = true_changes(model, ids, targets, edges, NEXT_TOKEN.summed)
    return edges


def _integrated(model: nn.Module, ids: Tensor, backward: Callable[[Tensor], None], edges: pd.DataFrame) -> np.ndarray:
    """−α (u̅·v_j) with u averaged over five points between mean and own embeddings."""
    with torch.no_grad():
        own = model.get_input_embeddings()(ids)  # type: ignore[operator]
        mean = own.mean((0, 1), keepdim=True).expand_as(own)
    total: dict[tuple[str, int], Tensor] = {}
    last: dict[tuple[str, int], AttentionCall] = {}

    def keep(call: AttentionCall) -> None:
        place = call.site.module, call.use
        total[place] = total.get(place, 0) + call.upstream.detach().double() / 5
        last[place] = call

    for share in (0.2, 0.4, 0.6, 0.8, 1.0):
        with calls(model, keep, reach_all=True):
            backward((mean + share * (own - mean)).requires_grad_())
    found = []
    for edge in edges.itertuples():
        call = last[edge.module, edge.use]
        value = call.value[edge.sequence, edge.head // call.group, edge.key_position].double()
        upstream = total[edge.module, edge.use][edge.sequence, edge.head, edge.query_position]
        found.append(-edge.attention * float(upstream @ value))
    return np.array(found)


def _along(model: nn.Module, ids: Tensor, targets: Tensor, edges: pd.DataFrame, points: int) -> list[float]:
    """Mean of dL/dt over the middles of `points` parts of each edge's own removal, o + t Δo with t from 0 to 1."""
    found = []
    for edge in edges.itertuples():
        slopes_ = []
        for point in range(points):
            share = torch.tensor((point + 0.5) / points, requires_grad=True)

            def moved(call: AttentionCall, edge: Any = edge, share: Tensor = share) -> Tensor:
                if (call.site.module, call.use) != (edge.module, edge.use):
                    return call.output
                output = call.output.clone()
                own = call.output[0, edge.head, edge.query_position]
                apart = own - call.value[0, edge.head // call.group, edge.key_position]
                output[0, edge.head, edge.query_position] = own + share * edge.attention / (1 - edge.attention) * apart
                return output

            place = slice(edge.sequence, edge.sequence + 1)
            with edited(model, output=moved):
                loss = NEXT_TOKEN.summed(model(input_ids=ids[place], use_cache=False).logits, targets[place])
            slopes_.append(float(torch.autograd.grad(loss, share)[0]))
        found.append(float(np.mean(slopes_)))
    return found


def _batch(name: str, seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    from advantage_probe.analyses.wind_tunnels.truth.against_truth import batches
    from advantage_probe.analyses.wind_tunnels.truth.shipped import load

    task, model, _ = load(name)
    batch = next(batches(task.sample(32, torch.Generator().manual_seed(seed + 7)), 32))
    return model.eval(), batch.ids, batch.targets


def along(name: str, edges: pd.DataFrame, count: int, seed: int = 0) -> pd.DataFrame:
    """Some of a tunnel's edges, with gradients averaged along their own removal."""
    chosen = edges.sample(min(count, len(edges)), random_state=seed)
    place = _batch(name, seed)
    return chosen.assign(**{f"along, {points} points": _along(*place, chosen, points) for points in POINTS})


def of_tunnel(name: str, count: int, seed: int = 0) -> pd.DataFrame:
    model, ids, targets = _batch(name, seed)
    heads = model.config.num_hidden_layers * model.config.num_attention_heads
    return examined(model, ids, targets, -(-count // heads), seed, integrate=True).assign(source=name)


def of_gemma(texts: int, seed: int = 0) -> pd.DataFrame:
    from advantage_probe.analyses.inputs.examples import gemma
    from advantage_probe.analyses.inputs.loading import load
    from advantage_probe.analyses.inputs.prompts import drawn

    read = load(str(gemma()))
    parts: list[pd.DataFrame] = []
    for number, (_, passage) in enumerate(drawn(count=4 * texts, seed=seed)):
        ids = torch.tensor([read.tokenizer(passage)["input_ids"][:48]])
        if ids.shape[1] < 48:
            continue
        targets = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
        chosen = examined(read.model.requires_grad_(False), ids, targets, 2, seed + number, integrate=False, most=25)
        parts.append(chosen.assign(source="gemma", text=len(parts)))
        if len(parts) == texts:
            break
    return pd.concat(parts, ignore_index=True)


def ranks(one: pd.Series, other: pd.Series) -> float:
    return float(np.corrcoef(one.rank(), other.rank())[0, 1])


def scores(edges: pd.DataFrame) -> dict[str, float]:
    """Rank and linear correlation with the truth, recall of its largest tenth, error in nats."""
    true = edges["true"]
    largest = true.abs() >= true.abs().quantile(0.9)
    found: dict[str, float] = {}
    for name in (name for name in SIGNED if name in edges and edges[name].notna().all()):
        picked = edges[name].abs().rank(ascending=False) <= largest.sum()
        found |= {
            f"{name} spearman": ranks(edges[name], true),
            f"{name} pearson": float(np.corrcoef(edges[name], true)[0, 1]),
            f"{name} recall": float((picked & largest).sum() / largest.sum()),
            f"{name} error": float((edges[name] - true).abs().mean()),
        }
    for name in SIZES:
        found[f"{name} spearman of sizes"] = ranks(edges[name], true.abs())
    for name in SIGNED:
        if f"{name} spearman" in found:
            found[f"{name} spearman of sizes"] = ranks(edges[name].abs(), true.abs())
    return found


def slopes(edges: pd.DataFrame) -> pd.DataFrame:
    """By strata of α: how many, slope of truth on the knock-out and on −D (through 0), and mean errors."""
    rows = []
    for low, high in pairwise(STRATA):
        part = edges[(edges["attention"] > low) & (edges["attention"] <= high)]
        if len(part) < 10:
            continue
        row: dict[str, Any] = {"α": f"{low}–{high}", "edges": len(part)}
        for name in ("knockout", "minus_d"):
            row[f"{name} slope"] = float((part[name] * part["true"]).sum() / (part[name] ** 2).sum())
            row[f"{name} error"] = float((part[name] - part["true"]).abs().mean())
            row[f"{name} spearman"] = ranks(part[name], part["true"])
        rows.append(row)
    return pd.DataFrame(rows)


def by_path(edges: pd.DataFrame) -> dict[str, dict[str, float]]:
    """The prediction at the start of the removal beside the mean along it, on the same edges."""
    found = {}
    for name in ("knockout", *(name for name in edges if str(name).startswith("along"))):
        error = (edges[name] - edges["true"]).abs()
        found[name] = {
            "edges": len(edges),
            "spearman": ranks(edges[name], edges["true"]),
            "pearson": float(np.corrcoef(edges[name], edges["true"])[0, 1]),
            "slope": float((edges[name] * edges["true"]).sum() / (edges[name] ** 2).sum()),
            "error": float(error.mean()),
            "largest error": float(error.max()),
        }
    return found


def gain(edges: pd.DataFrame, unit: str, rival: str, seed: int = 0) -> tuple[float, float, float]:
    """Spearman of the knock-out less that of a rival, with its 95 % interval: units (texts, sequences) resampled."""
    generator = np.random.default_rng(seed)
    groups = [part for _, part in edges.groupby(unit)]

    def difference(part: pd.DataFrame) -> float:
        return ranks(part["knockout"], part["true"]) - ranks(part[rival], part["true"])

    drawn = [
        difference(pd.concat([groups[place] for place in generator.integers(0, len(groups), len(groups))]))
        for _ in range(BOOTSTRAPS)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return difference(edges), float(low), float(high)


def main() -> None:
    """Make what is missing, then print every table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--edges", type=int, default=1000)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument(
        "--along", type=int, default=34, help="edges of each tunnel that are followed along their removal"
    )
    parser.add_argument("--only", nargs="*", default=[*TUNNELS, "gemma"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    tunnels, followed = [], []
    for name in given.only:
        path = given.out / f"{name}.parquet"
        if not path.exists():
            made = of_gemma(given.texts) if name == "gemma" else of_tunnel(name, given.edges)
            made.to_parquet(path)
        edges = pd.read_parquet(path)
        edges = edges[edges["knockout"].notna()]
        unit = "text" if name == "gemma" else "sequence"
        found[name] = {"edges": len(edges), **scores(edges)}
        for rival in ("zero", "minus_d"):
            found[name][f"gain over {rival}"] = gain(edges, unit, rival)
        print(f"\n{name}: {len(edges)} edges", flush=True)
        print(pd.Series(found[name]).to_string())
        print(slopes(edges).to_string(index=False, float_format=lambda value: f"{value:.3g}"), flush=True)
        by_layer = edges.groupby("layer").apply(
            lambda part: ranks(part["knockout"], part["true"]), include_groups=False
        )
        print("by layer:", {int(layer): round(value, 3) for layer, value in by_layer.items()}, flush=True)
        if name != "gemma":
            tunnels.append(pd.Series(scores(edges)))
            followed.append(along(name, edges, given.along))
    if tunnels:
        print("\nmean of the tunnels:\n", pd.DataFrame(tunnels).mean().to_string())
        found["mean of the tunnels"] = pd.DataFrame(tunnels).mean().to_dict()
        found["along"] = by_path(pd.concat(followed))
        print("\nalong the removal:\n", pd.DataFrame(found["along"]).T.to_string())
    (given.out / "figures.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
