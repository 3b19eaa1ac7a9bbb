"""Heads of tunnel models against the exact posterior: planted relations are found, absent ones are not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from advantage_probe.analyses.wind_tunnels import load
from advantage_probe.analyses.wind_tunnels.truth import against_truth
from advantage_probe.analyses.wind_tunnels.truth.against_truth import Names, analyze_tunnel, batches


def clock_and_noise(seed: int, episodes: int = 64, length: int = 12) -> tuple[np.ndarray, np.random.Generator]:
    """H that moves with the position and varies inside it."""
    generator = np.random.default_rng(seed)
    return np.arange(length)[None, :] + generator.normal(size=(episodes, length)), generator


def test_the_clock_alone_is_no_correlation() -> None:
    truth, generator = clock_and_noise(0)
    seen = np.broadcast_to(np.arange(12.0), truth.shape) + generator.normal(size=truth.shape)
    assert np.corrcoef(seen.ravel(), truth.ravel())[0, 1] > 0.8
    found, chance = against_truth._tested(seen, truth, generator)
    assert abs(found) < 0.15
    assert chance > 0.05


def test_a_planted_correlation_is_found_with_the_smallest_p() -> None:
    truth, generator = clock_and_noise(1)
    found, chance = against_truth._tested(2 * truth + 0.1 * generator.normal(size=truth.shape), truth, generator)
    assert found == pytest.approx(1.0, abs=0.02)
    assert chance == pytest.approx(1 / 201)


def test_values_that_carry_h_explain_it_on_other_episodes_and_noise_does_not() -> None:
    truth, generator = clock_and_noise(2, episodes=200)
    noise = generator.normal(size=(*truth.shape, 5))
    assert against_truth._explained(noise, truth, generator)[0] < 0.02
    carrying = noise.copy()
    carrying[..., 3] = 3 * truth
    found, chance = against_truth._explained(carrying, truth, generator)
    assert found > 0.9
    assert chance == pytest.approx(1 / 201)


def test_targets_are_token_ids_and_nothing_is_asked_elsewhere() -> None:
    tunnel, _, _ = load("bijection-repeats")
    drawn = tunnel.sample(5, torch.Generator().manual_seed(0))
    joined = torch.cat([batch.targets for batch in batches(drawn, 2)])
    assert torch.equal(joined >= 0, drawn.targets >= 0)
    asked = drawn.targets >= 0
    assert torch.equal(joined[asked], torch.tensor(drawn.outcomes)[drawn.targets[asked]])
    logits = torch.randn(*drawn.tokens.shape, len(tunnel.vocabulary))
    ours = torch.nn.functional.cross_entropy(logits.flatten(0, 1), joined.flatten())
    assert torch.allclose(ours, drawn.loss(logits))


def test_every_head_of_a_shipped_model_is_compared() -> None:
    found = analyze_tunnel("bijection-repeats", episodes=32)
    assert (found.run.heads["status"] == "ok").all()
    assert found.truth["head"].tolist() == found.run.heads["label"].tolist()
    assert found.truth.notna().all().all()
    assert set(found.run.tokens["token"].dropna()) <= set(Names(load("bijection-repeats")[0].vocabulary).vocabulary)
