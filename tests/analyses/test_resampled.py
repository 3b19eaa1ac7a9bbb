"""Heads are picked on one half of the sequences and estimated on the other: few false names, and no winner's luck."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from sums import table

from advantage_probe.analyses.intervals.resampled import LEVEL, Resampled, resampled

COLUMN = "routing_pressure"


def drawn(seed: int, sequences: int, heads: int = 12, sigma: float = 1.0, **strong: float) -> Resampled:
    """Heads whose slopes in a sequence are lognormal; `strong`: factors on the pressure of some."""
    rows = table(sequences, heads=heads, layers=1, seed=seed)
    slopes = np.random.default_rng(seed).lognormal(0, sigma, len(rows))
    factor = rows["label"].map(strong).fillna(1.0).to_numpy()
    found = resampled(rows.assign(score_square=slopes * factor**2))
    assert found is not None
    return found


@pytest.mark.parametrize("sequences", [12, 24])
@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_of_equal_heads_one_is_named_in_at_most_one_trial_of_twenty(sequences: int, sigma: float) -> None:
    named = [bool(drawn(seed, sequences, sigma=sigma).singled_out(COLUMN)[0]) for seed in range(200)]
    assert np.mean(named) <= 0.05


def test_the_largest_of_equal_heads_is_no_larger_than_they_are_on_the_other_half() -> None:
    trials = [drawn(seed, 40) for seed in range(200)]
    lucky, fair, inside = [], [], []
    for found in trials:
        head = int(np.argmax(found.picking.whole[COLUMN]))
        lucky.append(math.log(found.picking.times_median(COLUMN, head)[0]))
        ratio, low, high = found.estimated(COLUMN, found.labels[head])
        fair.append(math.log(ratio))
        inside.append(low <= 1 <= high)
    error = np.std(fair) / math.sqrt(len(fair))
    assert abs(np.mean(fair)) < 3 * error
    assert np.mean(lucky) > 10 * error  # where it was picked it looks larger than it is
    assert 0.90 <= np.mean(inside) <= 0.99


def test_the_estimate_of_a_head_that_is_named_is_right_on_average_and_its_interval_holds_it() -> None:
    estimates, inside = [], []
    for seed in range(150):
        found = drawn(seed, 40, sigma=0.7, L0H3=3.0)
        if "L0H3" not in found.singled_out(COLUMN)[0]:
            continue
        ratio, low, high = found.estimated(COLUMN, "L0H3")
        estimates.append(math.log(ratio / 3))
        inside.append(low <= 3 <= high)
    assert len(inside) > 100
    assert abs(np.mean(estimates)) < 3 * np.std(estimates) / math.sqrt(len(estimates))
    assert 0.90 <= np.mean(inside) <= 0.99


def test_halves_share_no_sequence_and_do_not_depend_on_the_order_of_rows() -> None:
    rows = table(25)
    found, again = resampled(rows), resampled(rows.sample(frac=1, random_state=1))
    assert found.picking.sequences + found.estimating.sequences == found.sequences == 25
    first = sorted(rows["sequence"].unique())[::2]
    sums = rows[rows["sequence"].isin(first)].groupby("label")[["score_square", "queries"]].sum()
    own = (sums["score_square"] / sums["queries"]) ** 0.5
    for one in (found, again):
        values = pd.Series(one.picking.whole[COLUMN], one.labels)
        pd.testing.assert_series_equal(values, own[one.labels], check_names=False)


def test_as_many_sequences_as_are_said_to_be_needed_do_about_name_the_head() -> None:
    needed = []
    for seed in range(40):
        labels, count = drawn(seed, 24, sigma=0.7, L0H3=2.0).singled_out(COLUMN)
        assert labels or count > 24
        needed.append(24 if labels else count)
    enough = int(np.median(needed))
    named = [bool(drawn(seed, 2 * enough, sigma=0.7, L0H3=2.0).singled_out(COLUMN)[0]) for seed in range(40)]
    assert np.mean(named) > 0.8
    scarce = [bool(drawn(seed, max(12, enough // 3), sigma=0.7, L0H3=2.0).singled_out(COLUMN)[0]) for seed in range(40)]
    assert np.mean(scarce) < 0.5


def test_the_limit_for_few_sequences_is_students() -> None:
    import scipy.stats

    sample = drawn(0, 24).picking
    expected = scipy.stats.t.ppf(0.5 + LEVEL / 2, sample.sequences - 1) * math.sqrt(12 / 11)
    assert sample.widened(float(scipy.stats.norm.ppf(0.5 + LEVEL / 2))) == pytest.approx(expected, rel=1e-6)


def test_a_head_among_heads_without_pressure_has_no_ratio() -> None:
    rows = table(24, heads=5, layers=1)
    rows.loc[rows["label"] != "L0H1", "score_square"] = 0.0
    found = resampled(rows)
    assert math.isinf(found.estimated(COLUMN, "L0H1")[0])
