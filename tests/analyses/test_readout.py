"""The read-out finds what was planted, finds nothing where nothing is, and is not fooled by the clock."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import rankdata, spearmanr
from sklearn.linear_model import LinearRegression

from advantage_probe.analyses.intervals.nulls import (
    bound,
    exchanged,
    figure,
    half_samples,
    permuted_columns,
)
from advantage_probe.analyses.manifolds.report import tunnel_report, unfurling_report
from advantage_probe.analyses.vectors import readout, shapes
from advantage_probe.analyses.vectors.collecting import collect
from advantage_probe.analyses.vectors.labelled import Rows, _distinct, rows_of
from advantage_probe.analyses.vectors.pca import pca
from advantage_probe.analyses.wind_tunnels import load
from advantage_probe.analyses.wind_tunnels.tasks.registry import tunnel
from advantage_probe.analyses.wind_tunnels.truth.against_truth import batches
from advantage_probe.hooks.errors import BadInput


def planted(count: int = 120, positions: int = 6, width: int = 5, strength: float = 1.0, seed: int = 0) -> Rows:
    """Entropy that falls with the position and varies inside it; the vector's first number carries `strength` of it."""
    generator = np.random.default_rng(seed)
    inner = generator.normal(size=(count, positions))
    entropy = 10.0 - 2.0 * np.arange(positions) + inner
    vectors = 0.3 * generator.normal(size=(count, positions, width))
    vectors[..., 0] += 3 * (strength * inner + (1 - strength) * generator.normal(size=inner.shape))
    vectors[..., 1] += 2 * np.arange(positions)  # and the clock, on an axis of its own
    return rows_of(vectors, entropy)


def test_correlations_inside_positions_are_spearman_correlations_averaged_by_count() -> None:
    rows = planted()
    keep = rows.sequence + rows.position < 118  # unequal counts
    one, other, groups = rows.vectors[keep, 0], rows.entropy[keep], rows.position[keep]
    parts = [(spearmanr(one[groups == g], other[groups == g])[0], (groups == g).sum()) for g in np.unique(groups)]
    expected = sum(r * n for r, n in parts) / sum(n for _, n in parts)
    assert readout.correlation(one, other, groups) == pytest.approx(expected)
    ties = np.round(other)
    assert readout.inside(ties, groups)[groups == 0] == pytest.approx(
        (rankdata(ties[groups == 0]) - rankdata(ties[groups == 0]).mean()) / rankdata(ties[groups == 0]).std()
    )


def test_the_clock_is_not_order_by_entropy() -> None:
    rows, generator = planted(strength=0.0), np.random.default_rng(1)
    clock = rows.vectors[:, 1]
    assert abs(readout.correlation(clock, rows.entropy, np.zeros_like(rows.position))) > 0.8
    found = readout.order(clock, rows, rows.position, generator)
    assert found is not None
    assert abs(found.value) < 0.1
    assert found.p > 0.05
    assert found.low < 0 < found.high


def test_what_is_planted_is_found_with_the_smallest_p_that_the_draws_allow() -> None:
    rows, generator = planted(), np.random.default_rng(1)
    found = readout.order(rows.vectors[:, 0], rows, rows.position, generator)
    told = readout.explained(rows, rows.position, generator)
    assert found is not None
    assert told is not None
    assert found.value > 0.95
    assert told.value > 0.95
    assert found.p == told.p == pytest.approx(1 / 201)
    assert found.low <= found.value <= found.high
    nothing = readout.explained(planted(strength=0.0), rows.position, generator)
    assert nothing is not None
    assert nothing.value < 0.05


def test_where_entropy_is_a_function_of_the_group_that_is_said_and_nothing_correlated() -> None:
    distinct = tunnel("bijection-distinct") if "bijection-distinct" in _names() else tunnel("bijection")
    drawn = distinct.sample(40, torch.Generator().manual_seed(0))
    vectors = np.random.default_rng(0).normal(size=(*drawn.tokens.shape, 4))
    rows = rows_of(vectors, distinct.entropy(drawn.tokens).numpy(), drawn.tokens)
    assert readout.order(rows.vectors[:, 0], rows, rows.position, np.random.default_rng(0)) is None
    table = readout.read_out(rows, draws=20).set_index("figure")
    line = table.loc["PC1 with entropy inside positions"]
    assert np.isnan(line["value"])
    assert line["note"].startswith(readout.FUNCTION)
    assert table.loc["PC1 share", "note"] == "too few sequences for an interval"


def _names() -> tuple[str, ...]:
    from advantage_probe.analyses.wind_tunnels.tasks.registry import tunnel_names

    return tuple(tunnel_names())


def test_distinct_tokens_are_counted_before_each_position() -> None:
    tokens = torch.tensor([[3, 5, 3, 3, 7], [1, 1, 1, 2, 1]])
    assert _distinct(tokens).tolist() == [[0, 1, 2, 2, 2], [0, 1, 1, 1, 2]]


def test_held_out_share_is_that_of_a_regression_on_other_sequences() -> None:
    rows = planted(strength=0.6)
    found = readout.explained(rows, rows.position, np.random.default_rng(3))
    assert found is not None
    halves = np.random.default_rng(3).permutation(rows.sequences) % 2
    means = np.array([rows.vectors[rows.position == p].mean(0) for p in range(6)])[rows.position]
    inputs = rows.vectors - means
    goal = rows.entropy - np.array([rows.entropy[rows.position == p].mean() for p in range(6)])[rows.position]
    # the generator of `explained` draws its permutations first, so any halves will do for the size
    guess = np.empty_like(goal)
    for half in (0, 1):
        fit = halves[rows.sequence] != half
        guess[~fit] = LinearRegression(fit_intercept=False).fit(inputs[fit], goal[fit]).predict(inputs[~fit])
    expected = 1 - ((goal - guess) ** 2).sum() / (goal**2).sum()
    assert found.value == pytest.approx(expected, abs=0.02)


def test_shares_stand_beside_parallel_analysis() -> None:
    generator = np.random.default_rng(0)
    line = np.outer(generator.normal(size=300), np.ones(6)) + 0.1 * generator.normal(size=(300, 6))
    zeros = np.zeros(300, dtype=np.int64)
    rows = Rows(line, zeros + 0.0, zeros, np.arange(300), zeros)
    found = shapes.shape(rows, generator)
    expected = pca(line)
    assert found["PC1 share"].value == pytest.approx(expected.explained[0])
    assert found["participation ratio"].value == pytest.approx(expected.participation_ratio)
    assert found["PC1 share"].p == pytest.approx(1 / 201)
    assert found["participation ratio"].p == pytest.approx(1 / 201)
    assert found["PC1 share"].null == pytest.approx(1 / 6, abs=0.05)
    noise = Rows(generator.normal(size=(300, 6)), zeros + 0.0, zeros, np.arange(300), zeros)
    assert shapes.shape(noise, generator)["PC1 share"].p > 0.01


@pytest.mark.parametrize("dimension", [1, 2, 4])
def test_two_neighbours_know_the_dimension_of_a_cube_in_a_larger_space(dimension: int) -> None:
    generator = np.random.default_rng(dimension)
    cube = generator.random((1500, dimension)) @ np.linalg.qr(generator.normal(size=(9, 9)))[0][:dimension]
    found = shapes.two_nearest(cube)
    assert found == pytest.approx(dimension, rel=0.12)
    assert shapes.two_nearest(np.concatenate([cube, cube])) == pytest.approx(found)
    assert np.isnan(shapes.two_nearest(np.ones((50, 3))))


def test_a_cubic_curve_leaves_no_residual_and_a_cloud_leaves_all() -> None:
    generator = np.random.default_rng(0)
    t = generator.uniform(-1, 1, 400)
    curve = np.stack([3 * t, t**2, t**3 - t, 0 * t], 1) + 0.01 * generator.normal(size=(400, 4))
    zeros = np.zeros(400, dtype=np.int64)
    found = shapes.curve(Rows(curve, t + 2, zeros, np.arange(400), zeros), generator)
    cloud = shapes.curve(Rows(generator.normal(size=(400, 4)), t + 2, zeros, np.arange(400), zeros), generator)
    assert found is not None
    assert cloud is not None
    assert found.value < 0.01
    assert found.p == pytest.approx(1 / 201)
    assert cloud.value > 0.95
    assert shapes.curve(Rows(curve, zeros + 1.0, zeros, np.arange(400), zeros), generator) is None


def test_non_finite_vectors_are_left_out_and_reported_and_too_few_refused() -> None:
    rows = planted()
    vectors = rows.vectors.reshape(120, 6, 5).copy()
    vectors[0, 0, 0], vectors[3, 2, 1] = np.nan, np.inf
    found = rows_of(vectors, rows.entropy.reshape(120, 6))
    assert found.excluded == 2
    assert "2 non-finite rows left out" in readout.read_out(found, draws=20)["note"].iloc[0]
    with pytest.raises(BadInput, match="at least 3 vectors; there are 2"):
        rows_of(vectors[1:3, :1], rows.entropy.reshape(120, 6)[1:3, :1])


def test_vectors_that_do_not_vary_are_said_not_to() -> None:
    rows = planted(count=60)
    still = Rows(np.full_like(rows.vectors, 3.7), rows.entropy, rows.position, rows.sequence, rows.distinct)
    table = readout.beside(readout.read_out(still, draws=20), "other", still)
    assert table["note"].str.startswith("the vectors do not vary").all()
    assert table["value"].isna().all()


def test_the_curve_unfurls_over_checkpoints() -> None:
    steps = [(step, planted(strength=step / 2, seed=0)) for step in (0, 1, 2)]
    table = readout.unfurling(steps, draws=20)
    order = table[table["figure"] == "entropy R² inside positions"].sort_values("step")["value"].tolist()
    assert order == sorted(order)
    assert table["step"].unique().tolist() == [0, 1, 2]
    turns = table.groupby("step")["axis_turn"].first()
    assert np.isnan(turns[0])
    assert (turns[1:] > 0).all()


# -- nulls --------------------------------------------------------------------------------------------------------------


def test_p_is_never_below_one_over_the_draws_plus_one() -> None:
    assert bound(9.0, np.zeros(200)) == pytest.approx(1 / 201)
    assert bound(-9.0, np.zeros(200), "small") == pytest.approx(1 / 201)
    assert bound(0.0, np.zeros(200)) == 1
    assert bound(-2.0, np.array([1.0, 3.0, -1.0]), "both") == pytest.approx(2 / 4)
    assert np.isnan(bound(float("nan"), np.zeros(3)))
    assert "p ≤ 0.005" in str(figure(9.0, (8.0, 10.0), np.zeros(200), "nothing"))


def test_exchanging_stays_inside_groups_and_moves_things() -> None:
    generator = np.random.default_rng(0)
    groups = generator.integers(0, 4, 100)
    numbers = generator.normal(size=100)
    moved = exchanged(numbers, groups, generator)
    for group in range(4):
        assert sorted(moved[groups == group]) == sorted(numbers[groups == group])
    assert not np.array_equal(moved, numbers)
    rows = generator.normal(size=(50, 3))
    assert np.allclose(np.sort(permuted_columns(rows, generator), 0), np.sort(rows, 0))


def test_half_samples_give_the_interval_of_a_mean_and_do_not_inflate_a_share() -> None:
    generator = np.random.default_rng(0)
    numbers = generator.normal(size=400)
    low, high = half_samples(lambda chosen: float(numbers[chosen].mean()), 400, generator, 2_000)
    assert high - low == pytest.approx(2 * 1.96 * numbers.std() / 20, rel=0.1)
    rows = generator.normal(size=(60, 80))  # n < d: a bootstrap that repeats rows puts its interval above the value

    def share(chosen: np.ndarray) -> float:
        return float(pca(rows[chosen]).explained[0])

    value = share(np.arange(60))
    low, high = half_samples(share, 60, generator, 200)
    assert low <= value <= high
    assert min(share(generator.integers(0, 60, 60)) for _ in range(50)) > value


def test_collected_vectors_are_those_of_the_model() -> None:
    task, model, _ = load("bijection-repeats")
    drawn = task.sample(6, torch.Generator().manual_seed(0))
    attention = model.model.layers[1].self_attn
    kept: dict[str, torch.Tensor] = {}
    handles = [
        attention.v_proj.register_forward_hook(lambda module, args, rows: kept.update(value=rows)),
        attention.o_proj.register_forward_pre_hook(lambda module, args: kept.update(output=args[0])),
    ]
    wanted = model.requires_grad_(True).train()
    values = collect(wanted, batches(drawn, 6), "value", "all", attention=True)
    for handle in handles:
        handle.remove()
    assert wanted.training
    assert all(parameter.requires_grad for parameter in wanted.parameters())
    shape = (6, drawn.tokens.shape[1], 4, 24)
    assert np.array_equal(values.vectors["L1"], kept["value"].detach().double().reshape(shape).numpy())
    assert values.by("layer")["L1"].shape == (*shape[:2], 96)
    assert values.by("model")["model"].shape == (*shape[:2], 192)
    assert list(values.by("head")) == [f"L{layer}H{head}" for layer in range(2) for head in range(4)]
    outputs = collect(wanted, batches(drawn, 6), "output", "last")
    assert np.allclose(
        outputs.vectors["L1"][:, 0], kept["output"].detach().double().reshape(shape)[:, -1].numpy(), atol=1e-6
    )
    eager = load("bijection-repeats")[1]
    eager.set_attn_implementation("eager")
    weights = eager(input_ids=drawn.tokens, output_attentions=True).attentions[1].double()
    entropy = -torch.xlogy(weights, weights).sum(-1).transpose(1, 2).detach().numpy()
    assert np.allclose(values.attention_entropy["L1"], entropy, atol=1e-5)
    streams = collect(wanted, batches(drawn, 6), "residual", "last")
    hidden = wanted.eval()(input_ids=drawn.tokens, output_hidden_states=True).hidden_states
    assert np.allclose(streams.vectors["L0"][:, 0, 0], hidden[1][:, -1].detach().numpy(), atol=1e-6)


def test_upstream_and_update_directions_are_autograds() -> None:
    task, model, _ = load("bijection-repeats")
    drawn = task.sample(3, torch.Generator().manual_seed(0))
    (batch,) = batches(drawn, 3)
    kept: dict[str, torch.Tensor] = {}

    def keep(name: str):  # type: ignore[no-untyped-def]
        def hook(module, args, rows):  # type: ignore[no-untyped-def]
            rows.requires_grad_() if not rows.requires_grad else rows.retain_grad()
            rows.retain_grad()
            kept[name] = rows

        return hook

    attention = model.requires_grad_(True).model.layers[0].self_attn
    handle = attention.v_proj.register_forward_hook(keep("value"))
    logits = model(input_ids=batch.ids).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum").backward()
    handle.remove()
    update = collect(model, batches(drawn, 3), "update", "all").vectors["L0"]
    assert np.allclose(update.reshape(3, -1, 96), -kept["value"].grad.numpy(), atol=1e-4)


def test_layers_come_in_the_order_of_their_numbers() -> None:
    import zoo

    model = zoo.llama(num_hidden_layers=11)
    ids = torch.randint(3, zoo.VOCABULARY, (2, 5))
    from advantage_probe.analyses.inputs.corpus import Batch

    found = collect(model, [Batch(ids, torch.ones_like(ids), ids)])
    assert list(found.vectors) == [f"L{layer}" for layer in range(11)]
    assert found.names["L10"] == ("L10KV0", "L10KV1")


def test_a_tunnel_report_holds_every_site_beside_an_untrained_model() -> None:
    found = tunnel_report("bijection-repeats", "value", "layer", episodes=50, exchanged=False, draws=20)
    assert found.table["site"].unique().tolist() == ["L0", "L1"]
    assert found.table["p"].dropna().ge(1 / 21).all()
    assert found.table["untrained"].notna().any()
    assert set(found.bases) == {"L0", "L1"}
    told = found.table.set_index(["site", "figure"])
    assert told.loc[("L1", "entropy R² inside positions"), "p"] == pytest.approx(1 / 21)
    assert told.loc[("L0", "entropy R² inside positions"), "p"] > 0.05  # a value of layer 0 knows its own token only


def test_reading_while_training_does_not_change_the_training() -> None:
    from advantage_probe.analyses.wind_tunnels.training.models import Shape
    from advantage_probe.analyses.wind_tunnels.training.recipes import Recipe
    from advantage_probe.analyses.wind_tunnels.training.runner import train

    task, recipe = tunnel("coin"), Recipe(Shape("gpt2", 1, 2, 16), steps=12, batch=8, warm_up=2)
    table = unfurling_report(task, recipe, (0, 6, 11), 0, "output", episodes=50, draws=20)
    assert table["step"].unique().tolist() == [0, 6, 11]
    assert table.groupby("step")["axis_turn"].first().iloc[1:].gt(0).all()
    plain, curve = train(task, recipe)
    state = torch.get_rng_state()
    unfurling_report(task, recipe, (3,), 0, episodes=50, draws=20)
    assert torch.equal(torch.get_rng_state(), state)
    again, same = train(task, recipe)
    assert curve == same
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), again.parameters()))
