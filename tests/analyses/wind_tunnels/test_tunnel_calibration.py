"""Calibration figures against hand values and independent formulas."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from advantage_probe.analyses.wind_tunnels import Bijection
from advantage_probe.analyses.wind_tunnels.errors import TunnelError
from advantage_probe.analyses.wind_tunnels.tasks.bits import entropy_bits, kl_bits, total_variation
from advantage_probe.analyses.wind_tunnels.training.models import Shape, build
from advantage_probe.analyses.wind_tunnels.truth.calibration import (
    by_position,
    calibrate,
    errors,
    held_out,
    model_rows,
    summary,
    table,
)

TASK = Bijection(symbols=6, pairs=5, repeats=0.5)


def exact(numbers: list) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_entropies_and_divergences_have_their_textbook_values():
    p, q = exact([0.5, 0.25, 0.25, 0.0]), exact([0.25, 0.25, 0.25, 0.25])
    assert float(entropy_bits(p)) == 1.5
    assert float(kl_bits(p, q)) == pytest.approx(float(stats.entropy(p, q, base=2)), abs=1e-15)
    assert float(total_variation(p, q)) == 0.25
    assert float(kl_bits(q, p)) == math.inf
    assert math.copysign(1.0, float(entropy_bits(exact([1.0, 0.0])))) == 1.0
    assert entropy_bits(exact([math.nan, math.nan])).isnan()


def test_a_copy_of_the_truth_has_no_error():
    tokens = held_out(TASK, 50).tokens
    truth = TASK.predictive(tokens)
    row = summary(errors(truth, truth))
    assert row["entropy_error"] == row["kl"] == row["total_variation"] == row["entropy_error_of_means"] == 0.0


def test_signed_errors_cancel_in_the_error_of_means_only():
    """One sequence too sure, one too unsure: the means agree although neither sequence does."""
    certain, even = [1.0, 0.0], [0.5, 0.5]
    truth, rows = exact([[certain], [even]]), exact([[even], [certain]])
    row = summary(errors(rows, truth))
    assert row["entropy_error"] == 1.0
    assert row["entropy_error_of_means"] == 0.0


def test_half_widths_are_those_of_means_over_sequences():
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(40, 3, 4, generator=generator, dtype=torch.float64).softmax(-1)
    rows = torch.rand(40, 3, 4, generator=generator, dtype=torch.float64).softmax(-1)
    per_sequence = np.array(
        [[stats.entropy(t, r, base=2) for t, r in zip(*pair, strict=True)] for pair in zip(truth, rows, strict=True)]
    )
    means = per_sequence.mean(1)
    row = summary(errors(rows, truth))
    assert row["kl"] == pytest.approx(means.mean(), abs=1e-12)
    assert row["kl_ci"] == pytest.approx(stats.norm.ppf(0.975) * means.std(ddof=1) / 40**0.5, abs=1e-12)
    positions = by_position(errors(rows, truth))
    assert positions["kl"].tolist() == pytest.approx(per_sequence.mean(0).tolist(), abs=1e-12)
    half = stats.norm.ppf(0.975) * per_sequence.std(0, ddof=1) / 40**0.5
    assert positions["kl_ci"].tolist() == pytest.approx(half.tolist(), abs=1e-12)


def test_mass_outside_the_outcomes_is_reported_and_renormalised_away():
    tokens = held_out(TASK, 4).tokens
    answer = torch.full((4, 9, 12), 0.05)
    answer[..., 6:] = torch.tensor([0.1, 0.2, 0.05, 0.05, 0.1, 0.2])
    model = torch.nn.Identity()
    rows, outside = model_rows(model, tokens, TASK.outcomes, lambda _, part: answer[: len(part)].log())
    torch.testing.assert_close(outside, torch.full((4, 9), 0.3, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(rows[0, 0], exact([0.1, 0.2, 0.05, 0.05, 0.1, 0.2]) / 0.7, atol=1e-6, rtol=0)


def test_positions_where_nothing_is_asked_count_nowhere():
    tokens = held_out(TASK, 30).tokens
    truth = TASK.predictive(tokens)
    loud = truth.clone()
    loud[:, 1::2] = exact([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert summary(errors(loud, truth)) == summary(errors(truth, truth))
    assert by_position(errors(loud, truth)).index.tolist() == [0, 2, 4, 6, 8]


def test_every_table_has_the_rivals_above_the_model():
    model = build(Shape("gpt2", 1, 2, 16), TASK, seed=0)
    figures = calibrate(TASK, {"untrained": model}, sequences=64)
    rivals = list(TASK.baselines(held_out(TASK, 2).tokens))
    assert figures.index.tolist() == [*rivals, "untrained"]
    assert figures.loc["uniform", "kl"] == pytest.approx(figures.loc["uniform", "entropy_error"], abs=1e-12)
    assert figures.notna().all().all()


def test_a_restricted_table_holds_all_rows_to_the_same_positions():
    episodes = held_out(TASK, 200)
    seen = TASK.entropy(episodes.tokens) == 0
    truth = TASK.predictive(episodes.tokens)
    figures = table(TASK, {"truth": (truth, torch.zeros(truth.shape[:2]))}, episodes, keep=seen)
    assert figures.loc["uniform", "kl"] == pytest.approx(math.log2(6), abs=1e-12)
    assert figures.loc["truth", "kl"] == 0.0


def test_shapes_that_differ_are_refused():
    with pytest.raises(TunnelError, match="differ in shape"):
        errors(torch.zeros(1, 2, 3), torch.zeros(1, 3, 3))
