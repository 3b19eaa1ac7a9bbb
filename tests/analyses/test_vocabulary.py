"""Update directions in the vocabulary: what the model's own logits do when a head's output moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zoo
from torch import Tensor, nn
from zoo import Words

from advantage_probe.analyses.inputs.corpus import Batch
from advantage_probe.analyses.interventions.edits import Edit, intervene
from advantage_probe.analyses.pictures import plots
from advantage_probe.analyses.vectors.collecting import collect
from advantage_probe.analyses.weights import vocabulary as room
from advantage_probe.analyses.weights.vocabulary import vocabulary
from advantage_probe.hooks.errors import BadRequest, NoGradientReached


def ids(rows: int = 3, length: int = 8) -> Tensor:
    return torch.randint(3, zoo.VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


def summed(model: nn.Module, given: Tensor) -> Tensor:
    logits = model(input_ids=given, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), given[:, 1:].flatten(), reduction="sum")


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
def test_a_norms_mean_jacobian_is_autograds(family: str) -> None:
    model = zoo.FAMILIES[family].build()
    norm = model.transformer.ln_f if family == "gpt2" else model.model.norm
    states = torch.randn(5, 32) * 3
    expected = torch.stack([torch.autograd.functional.jacobian(norm, state) for state in states]).mean(0)
    assert torch.allclose(room._jacobian(norm, states).float(), expected, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_tokens_move_as_the_models_logits_do(family: str) -> None:
    """With the last block's feed-forward silent, a shift of a head's output reaches the logits by the way that is read."""
    model = zoo.FAMILIES[family].build().requires_grad_(False)
    layers = len(model.transformer.h) if family == "gpt2" else len(model.model.layers)
    block = model.transformer.h[-1] if family == "gpt2" else model.model.layers[-1]
    for weight in block.mlp.parameters():
        weight.zero_()
    given = ids(1, 1).repeat(4, 1)[:1]  # one state, so that mean Jacobians are that state's
    given = torch.cat([given, given], 1)
    last = layers - 1
    read = vocabulary(model, [lambda: summed(model, given)], Words(), layers=[last], top=31, keys=0).tokens
    head = read[(read["head"] == f"L{last}H1") & (read["pushed"] == "promote")].copy()
    head["place"] = [int(token[1:]) for token in head["token"]]
    told = head.sort_values("place")["logit"].to_numpy()

    targets = torch.tensor([[int(given[0, 1]), -100]])
    batch = Batch(given, torch.ones_like(given), targets)
    update = collect(model, [batch], "update", "all").vectors[f"L{last}"][0, :, 1].mean(0)
    step = 1e-2 / np.linalg.norm(update)
    with torch.no_grad():
        plain = model(input_ids=given, use_cache=False).logits[0, -1].double()
        with intervene(model, Edit(last, lambda rows: rows + step * torch.tensor(update).float(), "output", (1,))):
            moved = model(input_ids=given, use_cache=False).logits[0, -1].double()
    change = ((moved - plain) / step).numpy()
    change = change - change.mean()
    # both positions hold the same token without positions between them, or nearly: states differ little
    assert np.corrcoef(change, told)[0, 1] > (0.999 if family != "gpt2" else 0.9)
    if family != "gpt2":
        assert np.allclose(change, told, atol=0.05 * np.abs(told).max())


def test_random_directions_stand_beside_every_token() -> None:
    model = zoo.llama()
    found = vocabulary(model, [lambda: summed(model, ids())], Words(), top=3, keys=2)
    table = found.tokens
    assert set(table["head"]) == {f"L{layer}H{head}" for layer in range(2) for head in range(4)}
    assert len(table) == 8 * 3 * 2 * 3
    assert table["p"].between(1 / 201, 1).all()
    assert (table.loc[table["pushed"] == "promote", "logit"] > table["logit"].min()).all()
    far = table["logit"].abs() > table["random_edge"]
    assert (table.loc[far, "p"] <= 0.06).all()
    assert (table.loc[~far, "p"] >= 0.04).all()
    assert found.norms == ("model.norm",)
    drawn = plots.vocabulary(table, "L0H1")
    part = table[(table["head"] == "L0H1") & (table["key"] == "")].sort_values("logit")
    assert [bar.get_width() for bar in drawn.patches] == pytest.approx(part["logit"].tolist())
    edges = [line.get_xdata()[0] for line in drawn.lines]
    assert edges == pytest.approx([-part["random_edge"].iloc[0], part["random_edge"].iloc[0]])
    with pytest.raises(BadRequest, match="no head 'L9H9'"):
        plots.vocabulary(table, "L9H9")


def test_an_update_of_a_known_direction_promotes_the_token_it_points_at() -> None:
    model = zoo.llama(num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()
    given = ids(4, 6)
    wanted = 17

    def loss() -> Tensor:
        logits = model(input_ids=given, use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), torch.full((24,), wanted), reduction="sum")

    table = vocabulary(model, [loss], Words(), top=1, keys=0).tokens
    promoted = table[table["pushed"] == "promote"]
    assert promoted["token"].tolist() == [f"w{wanted}"] * 4


def test_nothing_is_read_where_nothing_came_back() -> None:
    model = zoo.llama()
    with pytest.raises(NoGradientReached):
        vocabulary(model, [], Words())
    with pytest.raises(NoGradientReached):
        vocabulary(model, [lambda: torch.zeros(1, requires_grad=True).sum()], Words())
