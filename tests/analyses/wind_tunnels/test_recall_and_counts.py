"""Associative recall against every table of values, and conjugate counts against closed forms and integration."""

import itertools
import math

import pytest
import torch
from scipy import integrate, stats

from advantage_probe.analyses.wind_tunnels import AssociativeRecall, ConjugateCounts
from advantage_probe.analyses.wind_tunnels.errors import ImpossibleObservation, MalformedTokens, TunnelError

SMALL = AssociativeRecall(keys=3, values=3, pairs=4, questions=2, flip=0.2)


def test_the_posterior_weighs_every_table_of_values():
    tokens = SMALL.sample(20, torch.Generator().manual_seed(0)).tokens
    rows, marginals = SMALL.predictive(tokens), SMALL.posterior(tokens).values
    for row, episode in enumerate(tokens.tolist()):
        for t in range(SMALL.length):
            pairs = [(episode[i], episode[i + 1] - 3) for i in range(0, min(t, 8), 2) if i + 1 <= t]
            weight = torch.zeros(3, 3, dtype=torch.float64)
            for table in itertools.product(range(3), repeat=3):
                p = math.prod(0.8 if table[k] == v else 0.1 for k, v in pairs)
                for key in range(3):
                    weight[key, table[key]] += p
            weight /= weight.sum(-1, keepdim=True)
            torch.testing.assert_close(marginals[row, t], weight, atol=1e-12, rtol=0)
            if t >= 8:
                torch.testing.assert_close(rows[row, t], weight[episode[t]], atol=1e-12, rtol=0)


def test_a_key_shown_once_again_or_never_has_its_hand_value():
    task = AssociativeRecall(keys=4, values=3, pairs=3, questions=3, flip=0.1)
    rows = task.predictive(torch.tensor([[0, 4, 0, 4, 1, 5, 0, 1, 2]]))[0, 6:]
    again = [0.81, 0.0025, 0.0025]
    assert rows[0].tolist() == pytest.approx([a / sum(again) for a in again], abs=1e-15)
    assert rows[1].tolist() == pytest.approx([0.05, 0.9, 0.05], abs=1e-15)
    assert rows[2].tolist() == pytest.approx([1 / 3] * 3, abs=1e-15)


def test_absent_keys_are_asked_for_with_the_stated_probability():
    task = AssociativeRecall(keys=16, values=8, pairs=8, questions=4, absent=0.25)
    tokens = task.sample(3_000, torch.Generator().manual_seed(1)).tokens
    present = (tokens[:, 16:, None] == tokens[:, None, 0:16:2]).any(-1)
    assert abs(float((~present).double().mean()) - 0.25) < 4 * (0.25 * 0.75 / 12_000) ** 0.5


def test_without_flips_two_values_of_a_key_are_refused_by_row():
    task = AssociativeRecall(keys=3, values=3, pairs=2, questions=1, flip=0.0)
    with pytest.raises(ImpossibleObservation, match="row 1"):
        task.predictive(torch.tensor([[0, 3, 0, 3, 0], [0, 3, 0, 4, 0]]))
    with pytest.raises(MalformedTokens, match="row 0"):
        task.predictive(torch.tensor([[0, 1, 0, 3, 0]]))


def test_a_coin_follows_laplace():
    coin = ConjugateCounts.coin()
    rows = coin.predictive(torch.tensor([[0, 0, 1, 0]]))[0]
    assert rows[:, 0].tolist() == pytest.approx([2 / 3, 3 / 4, 3 / 5, 4 / 6], abs=1e-15)


def test_the_predictive_integrates_over_every_bias():
    coin = ConjugateCounts.coin(0.7, 2.0)
    throws = [1, 0, 1, 1]
    prior = stats.beta(0.7, 2.0)

    def joint(bias: float, power: int) -> float:
        chance = math.prod(bias if throw == 0 else 1 - bias for throw in throws)
        return prior.pdf(bias) * chance * bias**power

    expected = integrate.quad(joint, 0, 1, args=(1,))[0] / integrate.quad(joint, 0, 1, args=(0,))[0]
    assert float(coin.predictive(torch.tensor([throws]))[0, -1, 0]) == pytest.approx(expected, abs=1e-8)


def test_posterior_parameters_and_entropy_are_those_of_the_dirichlet():
    die = ConjugateCounts((0.5, 1.0, 2.0))
    tokens = torch.tensor([[2, 0, 0, 1]])
    parameters = die.posterior(tokens)
    assert parameters.kind == "parameters"
    assert parameters.values[0].tolist() == [[0.5, 1.0, 3.0], [1.5, 1.0, 3.0], [2.5, 1.0, 3.0], [2.5, 2.0, 3.0]]
    entropy = die.entropy(tokens, of="posterior")[0]
    expected = [stats.dirichlet(row).entropy() / math.log(2) for row in parameters.values[0].tolist()]
    assert entropy.tolist() == pytest.approx(expected, abs=1e-10)


def test_concentrations_must_be_positive():
    with pytest.raises(TunnelError, match="positive"):
        ConjugateCounts((1.0, 0.0))
