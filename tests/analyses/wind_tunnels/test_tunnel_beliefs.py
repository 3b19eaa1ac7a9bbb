"""Belief probes against scikit-learn, against known rivals, and against leaks between the two sides."""

import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from sklearn.model_selection import LeaveOneGroupOut, cross_val_predict

from advantage_probe.analyses.pictures.figures import PAGE
from advantage_probe.analyses.wind_tunnels import BeliefProcess, Bijection, ConjugateCounts, NoisyChain
from advantage_probe.analyses.wind_tunnels.errors import TunnelError
from advantage_probe.analyses.wind_tunnels.training.models import Shape, build
from advantage_probe.analyses.wind_tunnels.truth.beliefs import (
    affine_fit,
    held_out_reading,
    one_hot_window,
    prefix_folds,
    probe_beliefs,
    residual_streams,
    simplex_picture,
)

MESS3 = BeliefProcess.mess3()


@pytest.fixture(scope="module")
def probe():
    networks = [build(Shape("gpt2", 2, 2, 32), MESS3, seed) for seed in (0, 1)]
    return probe_beliefs(MESS3, networks[0], networks[1], sequences=2_000, subspaces=20)


def test_sequences_that_share_a_prefix_lie_in_one_fold():
    tokens = MESS3.sample(3_000, torch.Generator().manual_seed(0)).tokens
    fold = prefix_folds(tokens, torch.Generator().manual_seed(1))
    for index in range(8):
        train = {tuple(row) for row in tokens[fold != index, :6].tolist()}
        held_out = {tuple(row) for row in tokens[fold == index, :6].tolist()}
        assert held_out
        assert train.isdisjoint(held_out)


def test_splitting_by_sequence_would_leak_most_prefixes():
    tokens = MESS3.sample(3_000, torch.Generator().manual_seed(0)).tokens
    train = {tuple(row) for row in tokens[:1_500, :6].tolist()}
    leaked = sum(tuple(row) in train for row in tokens[1_500:, :6].tolist()) / 1_500
    assert leaked > 0.8


def test_the_affine_fit_is_that_of_least_squares():
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(400, 5, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 10.0, 0.1, 3.0, 1.0])
    beliefs = features @ torch.randn(5, 3, generator=generator, dtype=torch.float64)
    beliefs = beliefs + torch.randn(400, 3, generator=generator, dtype=torch.float64) + 2
    side = torch.arange(400) < 250
    reading = affine_fit(features, beliefs, side, ridge=0.0)
    other = LinearRegression().fit(features[side].numpy(), beliefs[side].numpy()).predict(features[~side].numpy())
    torch.testing.assert_close(reading, torch.tensor(other), atol=1e-9, rtol=0)


def test_every_row_is_read_by_a_probe_that_never_saw_its_fold():
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(90, 4, generator=generator, dtype=torch.float64)
    beliefs = features[:, :2] + torch.randn(90, 2, generator=generator, dtype=torch.float64)
    fold = torch.arange(90) % 3
    reading, scores = held_out_reading(features, beliefs, fold)
    other = cross_val_predict(
        LinearRegression(), features.numpy(), beliefs.numpy(), groups=fold.numpy(), cv=LeaveOneGroupOut()
    )
    torch.testing.assert_close(reading, torch.tensor(other), atol=1e-5, rtol=0)
    expected = r2_score(beliefs.numpy(), other, multioutput="variance_weighted")
    assert scores["r2"] == pytest.approx(expected, abs=1e-5)


def test_trivial_rivals_score_what_is_known_of_them_on_mess3(probe):
    """Belief is affine in the next-token predictive; windows of two, three, five tokens reach .940, .961, .965."""
    scores = probe.scores["r2"]
    assert scores["exact next-token predictive"] == pytest.approx(1.0, abs=1e-6)
    for window, known in ((2, 0.940), (3, 0.961), (5, 0.965)):
        assert scores[f"one-hot of the last {window} tokens"] == pytest.approx(known, abs=0.015)
    assert scores["untrained, all layers"] > 0.9
    assert abs(scores["trained, all layers, shuffled beliefs"]) < 0.1


def test_every_control_stands_beside_the_trained_network(probe):
    sources = set(probe.scores.index)
    for layer in ("layer 1", "layer 2", "all layers"):
        assert {f"trained, {layer}", f"untrained, {layer}"} <= sources
    assert len(probe.subspaces) == 20
    assert probe.scores["r2"]["20 random subspaces of 2 dimensions, best"] == pytest.approx(
        float(probe.subspaces.max())
    )


def test_streams_are_those_of_the_blocks_and_the_last_feeds_the_unembedding():
    model = build(Shape("gpt2", 3, 2, 16), MESS3, 0).eval()
    tokens = MESS3.sample(4, torch.Generator().manual_seed(3)).tokens
    streams = residual_streams(model, tokens)
    assert len(streams) == 3
    torch.testing.assert_close(model.lm_head(streams[-1].float()), model(input_ids=tokens).logits)
    caught = []
    handle = model.transformer.h[0].register_forward_hook(lambda _, __, output: caught.append(output))
    model(input_ids=tokens)
    handle.remove()
    first = caught[0][0] if isinstance(caught[0], tuple) else caught[0]
    torch.testing.assert_close(streams[0].float(), first)


@pytest.mark.parametrize("task", [Bijection(6, 6, 0.5), NoisyChain(symbols=3, dimensions=4, length=9)])
def test_positions_where_nothing_is_asked_and_embedded_tokens_are_probed_too(task):
    networks = [build(Shape("gpt2", 1, 2, 16), task, seed) for seed in (0, 1)]
    found = probe_beliefs(task, networks[0], networks[1], sequences=300, subspaces=0)
    asked_after_the_prefix = 3  # keys 7, 9, 11 of the bijection; inputs 7, 8, 9 of the chain
    assert len(found.truth) == 300 * asked_after_the_prefix
    assert found.scores.notna().all().all()


def test_windows_hold_the_last_tokens_and_nothing_before_the_start():
    hot = one_hot_window(torch.tensor([[2, 0, 1]]), window=2, vocabulary=3)
    assert hot[0].tolist() == [[0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 1], [0, 1, 0, 1, 0, 0]]


def test_a_picture_shows_both_simplices(probe):
    figure = simplex_picture(probe)
    assert len(figure.axes) == 2
    assert figure.get_figwidth() == PAGE
    corner = figure.axes[0].collections[0].get_offsets()
    expected = probe.truth[0, 1] + probe.truth[0, 2] / 2
    assert float(corner[0, 0]) == pytest.approx(float(expected), abs=1e-9)


def test_sequences_no_longer_than_the_prefix_are_refused():
    coin = ConjugateCounts.coin(length=6)
    with pytest.raises(TunnelError, match="nothing to report"):
        prefix_folds(coin.sample(20, torch.Generator()).tokens, torch.Generator())
