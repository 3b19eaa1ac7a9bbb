"""Geometry of small models: closed forms for the baselines, the same prompts for everybody, rules beside their nulls."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from zoo import Words

from advantage_probe.analyses.inputs import precision, prompts
from advantage_probe.analyses.pretrained import geometry
from advantage_probe.analyses.vectors.collecting import collect
from advantage_probe.analyses.weights import keys
from advantage_probe.hooks.errors import BadInput

# -- keys ---------------------------------------------------------------------------------------------------------------


def test_the_gaussian_baseline_is_that_of_the_stream_and_not_of_the_head() -> None:
    assert keys.gaussian(640) == pytest.approx(math.sqrt(2 / (math.pi * 640)), rel=1e-3)
    generator = np.random.default_rng(0)
    columns = generator.normal(size=(640, 64))
    found = keys.off_diagonal(keys.cosines(columns))
    assert found == pytest.approx(keys.gaussian(640), rel=0.03)
    assert abs(found - keys.gaussian(64)) > 0.05  # the baseline of the wrong width
    assert keys.off_diagonal(keys.cosines(np.linalg.qr(columns)[0])) < 1e-12
    assert keys.off_diagonal(keys.cosines(np.ones((9, 4)))) == pytest.approx(1)
    pairs = [
        abs(columns[:, i] @ columns[:, j]) / np.linalg.norm(columns[:, i]) / np.linalg.norm(columns[:, j])
        for i in range(64)
        for j in range(i)
    ]
    assert found == pytest.approx(np.mean(pairs))


def test_orthogonality_stands_beside_its_nulls() -> None:
    model = zoo.llama()
    with torch.no_grad():  # head 0 of layer 0 orthogonal, head 1 of layer 1 all alike
        model.model.layers[0].self_attn.k_proj.weight[:8] = torch.linalg.qr(torch.randn(32, 8))[0].T
        model.model.layers[1].self_attn.k_proj.weight[8:] = torch.randn(1, 32) + 0.01 * torch.randn(8, 32)
    table = keys.orthogonality(model, keys.fresh(model), draws=200).set_index("head")
    assert list(table.index) == ["L0KV0", "L0KV1", "L1KV0", "L1KV1"]
    assert table.at["L0KV0", "p"] == pytest.approx(1 / 201)
    assert table.at["L1KV1", "p"] == 1
    assert table.at["L1KV1", "orthogonality"] > 0.99
    assert table["initial"].between(0.08, 0.25).all()
    assert table["shuffled"].between(0.09, 0.2).all()
    assert (table["low"] <= table["orthogonality"]).all()
    assert (table["orthogonality"] <= table["high"]).all()
    assert table["columns"].eq(8).all()
    assert table["stream"].eq(32).all()


# -- prompts ------------------------------------------------------------------------------------------------------------


def test_five_genres_of_two_hundred_passages_are_shipped() -> None:
    for genre in prompts.GENRES:
        found = prompts.passages(genre)
        assert len(found) >= 200
        assert len(set(found)) == len(found)
        assert all(320 <= len(text) <= 640 for text in found)
        assert all(text[-1] == "." and text[-11:-1].replace(" ", "").islower() for text in found)
    with pytest.raises(BadInput, match="no genre 'poems'"):
        prompts.passages("poems")


def test_draws_are_the_same_for_everybody_and_even_over_genres() -> None:
    mixed = prompts.drawn()
    assert mixed == prompts.drawn(seed=0)
    assert mixed != prompts.drawn(seed=1)
    assert pd.Series([genre for genre, _ in mixed]).value_counts().tolist() == [15] * 5
    assert len({text for _, text in prompts.drawn("fiction", 75)}) == 75
    with pytest.raises(BadInput, match="passages, not 999"):
        prompts.drawn("fiction", 999)


def test_prompts_are_equally_long_and_end_alike() -> None:
    model = zoo.llama()
    found = prompts.prompts(prompts.drawn(count=20), Words(), model, 40)
    assert {len(row) for row in found.ids} == {40}
    assert set(found.last) == {4}
    assert sum(len(batch.ids) for batch in found.batches(7)) == 20
    with pytest.raises(BadInput, match="context is 64"):
        prompts.prompts(prompts.drawn(count=20), Words(), model, 65)
    with pytest.raises(BadInput, match=r"0 of 20 passages have 60 tokens"):
        prompts.prompts([("own", "too short a text.")] * 20, Words(), model, 60)


def test_ones_own_passages_come_from_a_file_that_holds_some(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("one.\n\ntwo\nlines.\n\n\nthree.\n")
    assert prompts.own_passages(file) == ["one.", "two\nlines.", "three."]
    file.write_text("a.\n\nb.\n%\nc.\n")
    assert prompts.own_passages(file) == ["a.\n\nb.", "c."]
    file.write_text(" \n")
    with pytest.raises(BadInput, match="blank"):
        prompts.own_passages(file)
    with pytest.raises(BadInput, match="does not exist"):
        prompts.own_passages(tmp_path / "none.txt")


def test_other_last_tokens_are_taken_out() -> None:
    generator = np.random.default_rng(0)
    last = [1, 2, 1, 2, 1, 3, 2, 1]
    own = {1: 10.0, 2: -5.0, 3: 0.0}
    noise = generator.normal(size=(8, 2))
    vectors = noise + np.array([own[token] for token in last])[:, None]
    left, keep, note = prompts.residualised(vectors, last)
    assert keep.tolist() == [True] * 5 + [False] + [True] * 2
    for token in (1, 2):
        here = np.array(last) == token
        assert np.allclose(left[np.array(last)[keep] == token], noise[here] - noise[here].mean(0))
    assert "3 last tokens, 1 prompts" in note
    same, keep, note = prompts.residualised(vectors, [7] * 8)
    assert same is vectors
    assert keep.all()


# -- all of it ----------------------------------------------------------------------------------------------------------


def sets() -> dict[str, prompts.Prompts]:
    return {"mixed": prompts.prompts(prompts.drawn(count=20), Words(), zoo.llama(), 24)}


def test_focusing_is_entropy_per_head_first_and_the_mean_afterwards() -> None:
    model, eager, given = zoo.llama(), zoo.llama(attn_implementation="eager"), sets()["mixed"]
    with torch.no_grad():
        for one in (model, eager):
            one.model.layers[0].self_attn.q_proj.weight.mul_(20)
    seen = collect(model, given.batches(), attention=True)
    table = geometry.focusing(seen, collect(keys.fresh(model), given.batches(), attention=True), draws=200)
    ids = torch.tensor(given.ids)
    weights = [part[:, :, -1].double() for part in eager(input_ids=ids, output_attentions=True).attentions]
    each = [(-torch.xlogy(part, part).sum(-1)).mean(1).detach().numpy() for part in weights]
    assert np.allclose(table["entropy"][:2], [part.mean() for part in each], atol=1e-5)
    assert table["entropy"].iloc[2] == pytest.approx(1 - each[1].mean() / each[0].mean(), abs=1e-5)
    late = weights[0].mean(1)  # weights averaged first: more entropy, by Jensen
    assert float(-torch.xlogy(late, late).sum(-1).mean()) > table["entropy"].iloc[0] + 0.01
    assert table["uniform"].iloc[0] == pytest.approx(math.log(24))
    assert (table["low"] <= table["entropy"]).all()


def test_rules_stand_beside_what_a_fresh_model_scores() -> None:
    model = zoo.llama()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    notes: list[str] = []
    found = geometry.geometry(model, sets(), copies=1, draws=20, progress=lambda done, whole, note: notes.append(note))
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert set(found.frames) == {"keys", "attention", "manifolds", "rules", "copies"}
    assert found.rules["says"].str.contains("null|not passed|reaches below").all()
    assert found.manifolds["initial"].notna().all()
    assert found.manifolds["p"].ge(1 / 21).all()
    assert found.record["value_layer"] == "L1"
    assert len(notes) == 5
    rule = found.rules.set_index("rule").loc["layers with mean |cos| < 0.20, ≥ half"]
    assert rule["null_passes"]
    assert rule["says"] == "nothing: its null passes too"
    assert "rules passed" in geometry.verdict(found.rules)


def test_verdicts_count_rules_and_those_that_a_null_passes() -> None:
    rules = pd.DataFrame(
        {
            "rule": [
                "PC1 > 30 %",
                "PC1+PC2 > 30 %",
                "layers with mean |cos| < 0.20, ≥ half",
                "attention entropy falls > 30 %",
            ],
            "passed": [False, True, True, True],
            "null_passes": [False, False, True, False],
        }
    )  # fmt: skip
    assert geometry.verdict(rules) == "3 of 3 rules passed (signature); of these 1 are passed by a null as well"
    rules["passed"] = [False, False, True, False]
    assert geometry.verdict(rules).startswith("1 of 3 rules passed (none)")


def test_rounding_noise_stays_on_the_grid_and_is_taken_back(tmp_path: Path) -> None:
    model = zoo.llama()
    weight = model.model.layers[0].self_attn.k_proj.weight
    kept = weight.detach().clone()
    levels = kept.reshape(-1, 32)
    expected = (levels.amax(1) - levels.amin(1)) / 15
    assert torch.allclose(precision.step(kept).reshape(-1, 32)[:, 0], expected)
    with pytest.raises(ZeroDivisionError), precision.rounding_noise(model, 0):
        moved = (weight - kept).abs() / precision.step(kept)
        assert 0.4 < float(moved.max()) <= 0.5 + 1e-3
        assert float(moved.mean()) == pytest.approx(0.25, abs=0.02)
        raise ZeroDivisionError
    assert torch.equal(weight, kept)
    assert precision.origin(tmp_path) == ""
    (tmp_path / "ORIGIN.json").write_text('{"note": "de-quantised from Q4_K_M"}')
    assert precision.origin(tmp_path) == "de-quantised from Q4_K_M"
