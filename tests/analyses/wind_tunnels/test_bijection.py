"""Bijection against enumeration of all permutations, and against hand values."""

import itertools
import math

import pytest
import torch

from advantage_probe.analyses.wind_tunnels import Bijection
from advantage_probe.analyses.wind_tunnels.errors import ImpossibleObservation, MalformedTokens, TunnelError


def by_enumeration(task: Bijection, tokens: list[int]) -> tuple[list[list[float]], list[list[list[float]]]]:
    """Predictive at keys and V×V marginals at every position, by counting the permutations that fit."""
    symbols = task.symbols
    everyone = list(itertools.permutations(range(symbols)))
    answers, marginals = [], []
    for t, token in enumerate(tokens):
        pairs = [(tokens[i], tokens[i + 1] - symbols) for i in range(0, t, 2) if i + 1 <= t]
        fits = [p for p in everyone if all(p[key] == value for key, value in pairs)]
        marginals.append([[sum(p[k] == v for p in fits) / len(fits) for v in range(symbols)] for k in range(symbols)])
        answers.append(
            [sum(p[token] == v for p in fits) / len(fits) for v in range(symbols)]
            if t % 2 == 0
            else [math.nan] * symbols
        )
    return answers, marginals


@pytest.mark.parametrize("repeats", [0.0, 0.5])
def test_the_posterior_counts_the_permutations_that_fit(repeats):
    task = Bijection(symbols=5, pairs=5, repeats=repeats)
    tokens = task.sample(12, torch.Generator().manual_seed(0)).tokens
    predictive, marginals = task.predictive(tokens), task.posterior(tokens).values
    for row in range(len(tokens)):
        answers, tables = by_enumeration(task, tokens[row].tolist())
        torch.testing.assert_close(
            predictive[row], torch.tensor(answers, dtype=torch.float64), atol=1e-12, rtol=0, equal_nan=True
        )
        torch.testing.assert_close(marginals[row], torch.tensor(tables, dtype=torch.float64), atol=1e-12, rtol=0)


def test_after_k_distinct_pairs_an_unseen_key_has_the_entropy_of_what_is_left():
    task = Bijection(symbols=8, pairs=8)
    tokens = task.sample(3, torch.Generator().manual_seed(0)).tokens
    nats = task.entropy(tokens)[:, ::2] * math.log(2)
    hand = torch.tensor([2.0794, 1.9459, 1.7918, 1.6094, 1.3863, 1.0986, 0.6931, 0.0]).double()
    torch.testing.assert_close(nats, hand.expand(3, 8), atol=5e-5, rtol=0)


def test_a_seen_key_has_entropy_exactly_zero_without_a_sign():
    task = Bijection(symbols=4, pairs=6, repeats=0.9)
    entropy = task.entropy(torch.tensor([[2, 5, 2, 5, 0, 4, 2]]))
    asked = entropy[0, ::2]
    assert asked.tolist() == pytest.approx([2.0, 0.0, math.log2(3), 0.0], abs=1e-12)
    assert asked[1] == 0.0
    assert math.copysign(1.0, asked[1]) == 1.0


def test_two_episodes_can_differ_in_entropy_at_one_position_only_with_repeats():
    def spread(task: Bijection) -> float:
        tokens = task.sample(200, torch.Generator().manual_seed(1)).tokens
        return float(task.entropy(tokens)[:, ::2].std(0).max())

    assert spread(Bijection(symbols=12, pairs=12)) == 0.0
    assert spread(Bijection(symbols=12, pairs=18, repeats=0.5)) > 1.0


def test_with_distinct_keys_ignoring_which_key_had_which_value_costs_nothing():
    task = Bijection(symbols=6, pairs=6)
    tokens = task.sample(20, torch.Generator().manual_seed(2)).tokens
    torch.testing.assert_close(task.baselines(tokens)["no binding"], task.predictive(tokens), equal_nan=True)


def test_the_entropy_of_the_whole_permutation_is_that_of_the_values_left():
    task = Bijection(symbols=5, pairs=5)
    entropy = task.entropy(torch.tensor([[0, 5, 1, 6, 2]]), of="posterior")[0]
    hand = [math.log2(math.factorial(left)) for left in (5, 4, 4, 3, 3)]
    assert entropy.tolist() == pytest.approx(hand, abs=1e-12)


def test_repeated_keys_come_with_the_stated_probability():
    task = Bijection(symbols=12, pairs=6, repeats=0.5)
    keys = task.sample(4_000, torch.Generator().manual_seed(3)).tokens[:, ::2]
    again = torch.stack([(keys[:, j, None] == keys[:, :j]).any(1) for j in range(1, 6)], 1).double()
    assert abs(again.mean() - 0.5) < 4 * 0.5 / (4_000 * 5) ** 0.5


def test_pairs_of_no_permutation_are_refused_with_their_row():
    task = Bijection(symbols=4, pairs=4, repeats=0.5)
    fine = [0, 4, 1, 5, 0]
    with pytest.raises(ImpossibleObservation, match="row 1"):
        task.predictive(torch.tensor([fine, [0, 4, 0, 5, 1]]))
    with pytest.raises(ImpossibleObservation, match="row 2"):
        task.posterior(torch.tensor([fine, fine, [0, 4, 1, 4, 2]]))
    with pytest.raises(MalformedTokens, match="row 1"):
        task.entropy(torch.tensor([fine, [0, 1, 4, 5, 2]]))


def test_more_distinct_keys_than_symbols_are_refused():
    with pytest.raises(TunnelError, match="5 distinct keys"):
        Bijection(symbols=4, pairs=5)
    with pytest.raises(TunnelError, match="distinct keys"):
        Bijection(symbols=4, pairs=4).sample(1, torch.Generator(), length=9)
