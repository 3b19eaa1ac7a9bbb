"""Direct logit attribution against a difference of logits, and rankings against scipy."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
import zoo
from torch import Tensor, nn

import advantage_probe as ap
from advantage_probe.analyses.inputs.corpus import Window, batches
from advantage_probe.analyses.weights.attribution import FEWEST, agreement, attributed, direct_logit
from advantage_probe.analyses.weights.frozen_norm import frozen
from advantage_probe.analyses.weights.projections import output_maps
from advantage_probe.hooks.errors import UnsupportedFamily


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
    from advantage_probe.analyses.vectors.collecting import collect

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


def normed(family: str) -> nn.Module:
    """A family that norms the attention block's output, with norms that are no multiple of one another."""
    model = (
        zoo.FAMILIES[family].build() if family in zoo.FAMILIES else zoo._causal("Olmo2", **zoo._SIZES, **zoo._HEADS)()
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 4)
    return model


def written_out(module: nn.Module, rows: Tensor, y: Tensor) -> Tensor:
    """The families' RMS norm of `rows` with the scale that belongs to `y`, from the published formula."""
    gain = module.weight if "Olmo" in type(module).__name__ else 1 + module.weight
    eps = getattr(module, "eps", None) or module.variance_epsilon
    return gain * rows / (y.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "olmo2"])
def test_heads_behind_a_norm_add_up_to_what_the_block_wrote(family: str) -> None:
    model = normed(family)
    batch, _, _ = watched(model)
    kept: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for layer, block in enumerate(model.model.layers):
        norm, linear = block.post_attention_layernorm, block.self_attn.o_proj
        linear.register_forward_hook(lambda _, given, made, place=layer: kept.update({f"o{place}": (given[0], made)}))
        norm.register_forward_hook(lambda _, given, made, place=layer: kept.update({f"n{place}": (given[0], made)}))
    with torch.no_grad():
        model(input_ids=batch.ids, use_cache=False)
    maps = {entry.site.layer: entry for entry in output_maps(model)}
    for layer, block in enumerate(model.model.layers):
        entry = maps[layer]
        assert dict(model.named_modules())[entry.norm] is block.post_attention_layernorm
        (outputs, made), (given, written) = kept[f"o{layer}"], kept[f"n{layer}"]
        assert torch.equal(made, given)
        at = frozen(block.post_attention_layernorm, entry.norm, given[0])
        heads = outputs[0].unflatten(-1, (4, -1))  # (T,H,V)
        parts = [at.apply(heads[:, head] @ entry.weight[head]) for head in range(4)]
        torch.testing.assert_close(sum(parts), written[0], rtol=1e-4, atol=1e-5)
        own = heads[:, 1] @ entry.weight[1]
        expected = written_out(block.post_attention_layernorm, own, given[0])
        torch.testing.assert_close(parts[1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "olmo2"])
def test_behind_a_norm_it_is_the_change_of_the_targets_logit_under_the_frozen_norm(family: str) -> None:
    model = normed(family)
    batch, edges, order = watched(model)
    found = direct_logit(model, [(batch, None)], edges, order)
    last = (batch.mask.sum(1) - 1).numpy()
    ends = edges["query_position"].to_numpy(dtype=int) == last[edges["sequence"].to_numpy(dtype=int)]
    assert found[~ends].notna().all()
    kept: dict[str, Tensor] = {}
    for layer, block in enumerate(model.model.layers):
        block.self_attn.v_proj.register_forward_hook(lambda _, g, made, place=layer: kept.update({f"v{place}": made}))
        block.post_attention_layernorm.register_forward_pre_hook(lambda _, g, p=layer: kept.update({f"y{p}": g[0]}))
    model.lm_head.register_forward_hook(lambda _, g, made: kept.update(logits=made))  # before a final cap

    def logits(norm: nn.Module, row: int, query: int, push: Tensor) -> Tensor:
        def add(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            changed = given[0].clone()
            changed[row, query] += push
            return (changed, *given[1:])

        handle = norm.register_forward_pre_hook(add)
        with torch.no_grad():
            model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
        handle.remove()
        return kept["logits"][row, query].double()

    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    for place in np.flatnonzero(~ends)[::61]:
        edge = edges.iloc[place]
        row, query, key, head, layer = (
            int(edge[name]) for name in ("sequence", "query_position", "key_position", "head", "layer")
        )
        logits(model.model.norm, row, query, torch.zeros(32))
        block = model.model.layers[layer]
        value = kept[f"v{layer}"][row, key].unflatten(-1, (-1, 8))[head // groups]
        way = block.self_attn.o_proj.weight[:, 8 * head : 8 * (head + 1)]
        norm, y = block.post_attention_layernorm, kept[f"y{layer}"][row, query]
        push = 0.05 * written_out(norm, edge["attention"] * value @ way.T, y).detach()
        ahead, behind = (logits(model.model.norm, row, query, sign * push) for sign in (1, -1))
        moved = (ahead - behind) / 0.1
        expected = float(moved[batch.targets[row, query]] - moved.mean())
        assert found.iloc[place] == pytest.approx(expected, rel=5e-3, abs=2e-4)


def test_a_norm_is_recognised_by_its_numbers_and_refused_where_it_has_no_scale_to_freeze() -> None:
    rows = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
    layer = nn.LayerNorm(9).double()
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    at = frozen(layer, "norm", rows)
    assert at.centred
    parts = torch.randn(3, 6, 9, dtype=torch.float64)
    parts[2] = rows - parts[:2].sum(0)
    whole = sum(at.apply(part) for part in parts) + layer.bias
    torch.testing.assert_close(whole, layer(rows), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close((at.pull(parts[0]) * parts[1]).sum(-1), (parts[0] * at.apply(parts[1])).sum(-1))
    assert not frozen(nn.RMSNorm(9).double(), "norm", rows).centred
    # rows of mean 0 look the same to both, and parts of them do not
    layer, level = nn.LayerNorm(64).bfloat16(), torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    assert frozen(layer, "norm", (level - level.mean(-1, keepdim=True)).bfloat16()).centred
    with pytest.raises(UnsupportedFamily, match="post_norm lies between heads"):
        frozen(nn.Sequential(nn.LayerNorm(9), nn.Tanh()).double(), "post_norm", rows)


def test_what_cannot_be_attributed_is_said_and_the_rest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.FAMILIES["gemma2"].build()
    batch, edges, order = watched(model)
    norm = type(model.model.layers[0].post_attention_layernorm)
    plain = norm.forward
    monkeypatch.setattr(norm, "forward", lambda self, x: plain(self, x).tanh())
    told: list[str] = []
    table, ranks = attributed(model, [(batch, None)], edges, order, told.append)
    assert "no scale to freeze" in told[0]
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
