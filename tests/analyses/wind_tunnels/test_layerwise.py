"""Keys, queries and read-out of a tunnel's model by layer, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from advantage_probe.analyses.manifolds import layerwise
from advantage_probe.analyses.wind_tunnels.truth.calibration import calibrate, held_out
from advantage_probe.analyses.wind_tunnels.truth.shipped import load, untrained_like
from advantage_probe.hooks.attach import calls


@pytest.fixture(scope="module")
def repeats() -> tuple:
    task, model, card = load("bijection-repeats")
    return task, model, untrained_like(card).eval()


def test_first_layer_keys_are_the_projection_of_normed_embeddings(repeats: tuple) -> None:
    task, model, untrained = repeats
    block = model.model.layers[0]
    with torch.no_grad():
        made = block.self_attn.k_proj(block.input_layernorm(model.model.embed_tokens.weight))
    by_head = made.unflatten(1, (4, 24)).double().numpy()
    found = layerwise.token_keys(model, 24)
    for head in range(4):
        assert np.abs(found[f"L0H{head}"] - by_head[:, head]).max() < 1e-5
    table = layerwise.orthogonality(task, model, untrained, 20)
    keys = by_head[:12, 3]
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    cosines = [abs(unit[i] @ unit[j]) for i in range(12) for j in range(12) if i != j]
    row = table[(table["head"] == "L0H3") & (table["tokens"] == "keys")].iloc[0]
    assert row["orthogonality"] == pytest.approx(np.mean(cosines), abs=1e-5)
    assert row["orthogonality"] > 0.85  # the head that carries the load is the least orthogonal one
    assert set(table["tokens"]) == {"keys", "values"}


def test_the_last_layers_read_out_is_the_model_and_earlier_ones_are_not(repeats: tuple) -> None:
    task, model, untrained = repeats
    episodes = held_out(task, 64)
    table = layerwise.read_out(task, {"trained": model, "untrained": untrained}, episodes, 20)
    own = calibrate(task, {"model": model}, 64).loc["model", "kl"]
    trained = table[table["network"] == "trained"].set_index("layer")
    assert trained.loc[1, "kl"] == pytest.approx(own, rel=1e-4)
    assert trained.loc[0, "kl"] > 100 * trained.loc[1, "kl"]
    assert table.loc[table["network"] == "untrained", "kl"].min() > 0.9 * table["uniform"].iloc[0]


def test_alignment_is_that_of_a_loop_over_rows(repeats: tuple) -> None:
    task, model, _ = repeats
    episodes = task.sample(12, torch.Generator().manual_seed(5))
    table = layerwise.alignment(model, episodes, 10)
    seen = []
    with torch.no_grad(), calls(model, seen.append, forward=True):
        model(input_ids=episodes.tokens)
    query, key = (torch.nn.functional.normalize(part[:, 2].double(), dim=-1) for part in (seen[1].query, seen[1].key))
    cosines = query @ key.mT
    differences = []
    for row, tokens in enumerate(episodes.tokens.tolist()):
        at, others = [], []
        for i in range(0, len(tokens), 2):
            places = [j + 1 for j in range(i) if tokens[j] == tokens[i] and j + 1 < i]
            if places:
                at += [float(cosines[row, i, j]) for j in places]
                others += [float(cosines[row, i, j]) for j in range(i) if j not in places]
        if at:
            differences.append(np.mean(at) - np.mean(others))
    found = table[(table["layer"] == 1) & (table["head"] == 2) & (table["where"] == "token after it")].iloc[0]
    assert found["difference"] == pytest.approx(np.mean(differences), abs=1e-6)
    assert found["difference"] > 0.3


def test_a_task_without_keys_has_one_role(repeats: tuple) -> None:
    task, _, _ = load("mess3")
    assert list(layerwise.roles(task)) == ["all"]
