"""Ablations and flags: hand-made heads, closed forms, and what must not be flagged."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
import zoo

from advantage_probe.analyses.inputs.corpus import Batch
from advantage_probe.analyses.interventions import flags
from advantage_probe.analyses.interventions.ablation import ablation, layers_of, sentences
from advantage_probe.analyses.interventions.axis_cut import cut_axis
from advantage_probe.analyses.interventions.decodable import sequence_loss
from advantage_probe.analyses.interventions.edits import Edit, ablate, intervene
from advantage_probe.analyses.vectors.collecting import collect
from advantage_probe.analyses.wind_tunnels.truth.shipped import load
from advantage_probe.hooks.errors import BadInput


@pytest.fixture(scope="module")
def subject() -> tuple[torch.nn.Module, list[Batch]]:
    """A tiny Llama whose first layer's last head writes nothing."""
    model = zoo.llama().eval().requires_grad_(False)
    attention = model.model.layers[0].self_attn
    width = attention.head_dim
    with torch.no_grad():
        attention.o_proj.weight[:, -width:] = 0.0
    ids = torch.randint(0, model.config.vocab_size, (24, 12), generator=torch.Generator().manual_seed(0))
    targets = torch.cat([ids[:, 1:], torch.full((24, 1), -100)], 1)
    return model, [Batch(ids, torch.ones_like(ids), targets)]


def ablated(subject: tuple[torch.nn.Module, list[Batch]], **settings: int) -> pd.DataFrame:
    model, batches = subject
    outputs = layers_of(collect(model, batches, "output", "all").vectors)
    return ablation(model, sequence_loss(model, batches), outputs, directions=10, draws=40, **settings)


def test_costs_are_those_of_a_forward_pass_with_the_projection_edited(
    subject: tuple[torch.nn.Module, list[Batch]],
) -> None:
    """Mean ablation of a head is a bias after W_O: computed here without any hook of ours."""
    model, batches = subject
    table = ablated(subject, seed=3)
    order = np.random.default_rng(3).permutation(24)
    estimate = np.sort(order[12:])
    attention = model.model.layers[1].self_attn
    width, seen = attention.head_dim, []
    handle = attention.o_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    before = sequence_loss(model, batches)()
    handle.remove()
    mean = seen[0][..., :width].flatten(0, 1).mean(0)

    def at_its_mean(_: torch.nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        changed = given[0].clone()
        changed[..., :width] = mean
        return (changed,)

    handle = attention.o_proj.register_forward_pre_hook(at_its_mean)
    after = sequence_loss(model, batches)()
    handle.remove()
    row = table[(table["layer"] == 1) & (table["head"] == 0)].iloc[0]
    assert row["cost"] == pytest.approx((after - before)[estimate].mean(), abs=1e-7)
    assert row["picked"] == pytest.approx((after - before)[order[:12]].mean(), abs=1e-7)


def test_controls_stand_by_layers_and_by_the_heads_picked_on_the_other_half(
    subject: tuple[torch.nn.Module, list[Batch]],
) -> None:
    table = ablated(subject, top=2)
    heads = table[table["what"] == "head"]
    strongest = heads.sort_values("picked", ascending=False).index[:2]
    assert set(heads.index[heads["p"].notna()]) == set(strongest)
    assert table.loc[table["what"] == "layer", "p"].notna().all()
    assert (table["p"].dropna() >= 1 / 11 - 1e-12).all()
    assert len(sentences(table)) == 2 + (table["what"] == "layer").sum()


def test_a_head_that_writes_nothing_is_dead_and_the_others_are_said_to_be_only_if_they_cost_nothing(
    subject: tuple[torch.nn.Module, list[Batch]],
) -> None:
    table = ablated(subject)
    silent = table[(table["layer"] == 0) & (table["what"] == "head")].iloc[-1]
    assert silent["cost"] == 0.0
    loss = float(sequence_loss(*subject)().mean())
    told = flags.dead(table, loss)
    assert f"L0H{silent['head']} is dead here" in told[0]
    edge = 1e-3 * loss
    heads = table[table["what"] == "head"]
    alive = heads[(heads["high"] > edge) | (heads["low"] < -edge)]
    assert len(told) == len(heads) - len(alive)


def test_too_few_sequences_are_refused(subject: tuple[torch.nn.Module, list[Batch]]) -> None:
    model, (batch,) = subject
    few = [Batch(batch.ids[:11], batch.mask[:11], batch.targets[:11])]
    outputs = layers_of(collect(model, few, "output", "all").vectors)
    with pytest.raises(BadInput, match="11 sequences of 12"):
        ablation(model, sequence_loss(model, few), outputs)


def test_planted_maps_are_flagged_and_others_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    visible = torch.ones(20, 20).tril()
    even = visible / visible.sum(1, keepdim=True)
    sink = 0.8 * torch.nn.functional.one_hot(torch.zeros(20, dtype=torch.long), 20) + 0.2 * even
    before = torch.nn.functional.one_hot((torch.arange(20) - 1).clamp(min=0), 20).float()
    random = (torch.rand(6, 20, 20, generator=generator) ** 6 * visible).clamp(min=1e-9) * visible
    random = random / random.sum(-1, keepdim=True)
    other = (torch.rand(6, 20, 20, generator=generator) ** 6 * visible).clamp(min=1e-9) * visible
    other = other / other.sum(-1, keepdim=True)
    same = [part.expand(6, -1, -1) for part in (even, sink, before)]
    maps = {0: torch.stack([*same, random, random, other, same[2]], 1)}
    told = flags.sinks(maps)
    assert len(told) == 1
    assert told[0].startswith("L0H1 is a sink: 0.81")
    twins = flags.alike(maps)
    assert len(twins) == 2
    assert twins[0].startswith("L0H2 and L0H6 are alike by position alone")
    assert twins[1].startswith("L0H3 and L0H4 are alike in what they read")


def test_maps_are_the_models_own() -> None:
    model = zoo.llama().eval()
    ids = torch.randint(0, model.config.vocab_size, (3, 9), generator=torch.Generator().manual_seed(1))
    found = flags.attention_maps(model, [Batch(ids, torch.ones_like(ids), ids)])
    model.set_attn_implementation("eager")
    eager = model(input_ids=ids, output_attentions=True).attentions
    for layer, maps in enumerate(eager):
        assert (found[layer] - maps).abs().max() < 1e-6


def test_a_pressure_has_died_down_where_it_alone_has() -> None:
    steps = np.repeat(np.arange(20), 3)
    fading = np.where(steps < 10, 1.0, 0.01)
    pressure = np.where(np.tile([True, False, False], 20), fading, 1.0)
    history = pd.DataFrame({"step": steps, "head": ["L0H0", "L0H1", "L1H0"] * 20, "routing_pressure": pressure})
    told = flags.died_down(history)
    assert len(told) == 1
    assert told[0].startswith("L0H0's routing pressure has died down: 1.0%")
    assert not flags.died_down(history.assign(routing_pressure=fading))  # all of them: the loss fell
    assert not flags.died_down(history[history["step"] < 5])


def test_cutting_an_axis_is_the_edit_and_its_rivals_vary_as_much() -> None:
    task, model, _ = load("bijection-repeats")
    drawn = task.sample(24, torch.Generator().manual_seed(0))
    from advantage_probe.analyses.wind_tunnels.truth.against_truth import batches

    seen = collect(model, batches(drawn, 24), "value", "all").by("layer")["L1"]
    rows = seen[:12].reshape(-1, seen.shape[-1])
    axis = np.linalg.svd(rows - rows.mean(0), full_matrices=False)[2][0]
    held = np.arange(12, 24)
    found = cut_axis(model, drawn, held, rows, axis, 1, axes=10)
    part = list(batches(type(drawn)(drawn.tokens[12:], drawn.targets[12:], {}, drawn.outcomes), 12))
    measure = sequence_loss(model, part)
    before = measure()
    centre = torch.as_tensor(rows.mean(0))

    def change(values: torch.Tensor) -> torch.Tensor:
        unit = torch.as_tensor(axis).float()
        return values - ((values - centre.float()) @ unit)[..., None] * unit

    with intervene(model, Edit(1, change, "value")):
        by_hand = measure() - before
    assert found.cost == pytest.approx(by_hand.mean(), abs=1e-6)
    assert found.share > found.random_share
    with intervene(model, Edit(1, ablate(), "value")):
        assert measure().mean() - before.mean() > abs(found.cost)
