"""Direct logit attribution against a difference of logits, and rankings against scipy."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
import zoo

import advantage_probe as ap
from advantage_probe.analyses.attribution import FEWEST, agreement, attributed, direct_logit
from advantage_probe.analyses.corpus import Window, batches
from advantage_probe.hooks.projections import output_maps
from advantage_probe.hooks.refusals import UnsupportedFamily


def watched(model):
    """A batch of two windows of unequal length, its edges, and the order of its sequences."""
    ids = torch.randint(1, zoo.VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(0)).tolist()
    items = [Window(tuple(ids[0]), "t", 0), Window(tuple(ids[1][:7]), "t", 10)]
    batch = next(batches(items, 2, 0))
    with ap.watch(model, detail="edges", edges=60) as watch:
        logits = model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum").backward()
        watch.step(loss_weight=1.0)
    return batch, watch.edges(60), list(watch.state().sequences)


@pytest.mark.parametrize(("family", "norm"), [("gpt2", "transformer.ln_f"), ("llama", "model.norm")])
def test_it_is_the_change_of_the_targets_logit_when_the_pair_is_added_to_the_stream(family: str, norm: str) -> None:
    model = getattr(zoo, family)()
    batch, edges, order = watched(model)
    found = direct_logit(model, [(batch, None)], edges, order)
    last = (batch.mask.sum(1) - 1).numpy()
    ends = edges["query_position"].to_numpy(dtype=int) == last[edges["sequence"].to_numpy(dtype=int)]
    assert found[ends].isna().all()  # nothing is asked there
    assert found[~ends].notna().all()
    maps = {entry.site.module: entry.weight for entry in output_maps(model)}
    values: dict[str, torch.Tensor] = {}
    from advantage_probe.analyses.manifolds.collecting import collect

    for row in range(2):
        one = type(batch)(
            batch.ids[row : row + 1, : last[row] + 1],
            batch.mask[row : row + 1, : last[row] + 1],
            batch.targets[row : row + 1, : last[row] + 1],
        )
        seen = collect(model, [one], "value", "all")
        for layer, rows in seen.vectors.items():
            values[f"{row}/{layer}"] = torch.tensor(rows[0])
    double = model.double()
    checked = 0
    for place in np.flatnonzero(~ends)[::37]:
        edge = edges.iloc[place]
        row, query, key = (int(edge[name]) for name in ("sequence", "query_position", "key_position"))
        head, layer = int(edge["head"]), f"L{int(edge['layer'])}"
        vectors = values[f"{row}/{layer}"]
        owner = head // (4 // vectors.shape[1])
        push = edge["attention"] * vectors[key, owner] @ maps[str(edge["module"])][head].double()

        def moved(size: float, row: int = row, query: int = query, push: torch.Tensor = push) -> float:
            def add(_, given):
                changed = given[0].clone()
                changed[row, query] += size * push
                return (changed, *given[1:])

            handle = double.get_submodule(norm).register_forward_pre_hook(add)
            with torch.no_grad():
                logits = double(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits[row, query]
            handle.remove()
            return float(logits[batch.targets[row, query]] - logits.mean())

        expected = (moved(0.1) - moved(-0.1)) / 0.2  # Llama's norm runs in float32: a smaller step drowns
        assert found.iloc[place] == pytest.approx(expected, rel=1e-3, abs=1e-6)
        checked += 1
    assert checked >= 10


def test_against_a_named_rival_it_is_the_difference_of_two_logits() -> None:
    model = zoo.llama()
    batch, edges, order = watched(model)
    rivals = torch.full_like(batch.targets, 5)
    both = direct_logit(model, [(batch, rivals)], edges, order)
    one = direct_logit(model, [(batch, None)], edges, order)
    swapped = type(batch)(batch.ids, batch.mask, torch.where(batch.targets >= 0, 5, -100))
    other = direct_logit(model, [(swapped, None)], edges, order)
    kept = both.notna()
    np.testing.assert_allclose(both[kept], (one - other)[kept], rtol=1e-4, atol=1e-6)


def test_models_that_norm_head_outputs_first_say_so_and_keep_the_rest() -> None:
    model = zoo.FAMILIES["gemma2"].build()
    batch, edges, order = watched(model)
    with pytest.raises(UnsupportedFamily, match="norms them first"):
        direct_logit(model, [(batch, None)], edges, order)
    told: list[str] = []
    table, ranks = attributed(model, [(batch, None)], edges, order, told.append)
    assert "norms them first" in told[0]
    assert table["direct_logit"].isna().all()
    assert ranks["direct_logit_rank"].isna().all()
    assert ranks["alpha_b_rank"].notna().all()


def test_rank_correlations_are_scipys_and_need_eight_pairs() -> None:
    generator = np.random.default_rng(0)
    edges = pd.DataFrame(generator.normal(size=(40, 4)), columns=["advantage", "alpha_b", "direct_logit", "attention"])
    edges["label"] = ["L0H0"] * 33 + ["L0H1"] * (FEWEST - 1)
    found = agreement(edges).set_index("label")
    own = edges[edges["label"] == "L0H0"]
    for name in ("alpha_b", "direct_logit", "attention"):
        expected = scipy.stats.spearmanr(own["advantage"], own[name]).statistic
        assert found.loc["L0H0", f"{name}_rank"] == pytest.approx(expected)
    assert found.loc["L0H1"].drop("pairs").isna().all()
