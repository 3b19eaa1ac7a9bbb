"""Class posteriors against enumeration of every permutation, recurrence and, for opaque tokens, relabelling."""

import itertools
import math

import pytest
import torch

from advantage_probe.analyses.wind_tunnels import ModelSelection
from advantage_probe.analyses.wind_tunnels.errors import ImpossibleObservation, MalformedTokens, TunnelError
from advantage_probe.analyses.wind_tunnels.tasks.bits import asked, total_variation
from advantage_probe.analyses.wind_tunnels.truth.calibration import held_out

FIXED_FREE = [p for p in itertools.permutations(range(6)) if all(p[i] != i for i in range(6))]
INVOLUTIONS = [p for p in FIXED_FREE if all(p[p[i]] == i for i in range(6))]
CYCLES = [p for p in FIXED_FREE if all(p[p[p[i]]] == i for i in range(6))]


def test_the_class_posterior_counts_all_permutations_that_fit():
    task = ModelSelection.permutations(6)
    tokens = task.sample(80, torch.Generator().manual_seed(0)).tokens
    belief = task.posterior(tokens).values[..., 0]
    for row, episode in enumerate(tokens.tolist()):
        for t in range(task.length):
            pairs = [(episode[i], episode[i + 1]) for i in range(0, t, 2)]
            share = [
                sum(all(p[k] == v for k, v in pairs) for p in everyone) / len(everyone)
                for everyone in (INVOLUTIONS, CYCLES)
            ]
            assert float(belief[row, t]) == pytest.approx(share[0] / sum(share), abs=1e-12)


def test_the_next_value_averages_over_all_permutations_that_fit():
    task = ModelSelection.permutations(6, asks="next")
    tokens = task.sample(15, torch.Generator().manual_seed(1)).tokens
    rows = task.predictive(tokens)
    for row, episode in enumerate(tokens.tolist()):
        for t in range(0, task.length, 2):
            pairs = [(episode[i], episode[i + 1]) for i in range(0, t, 2)]
            weight = [0.0] * 6
            for everyone in (INVOLUTIONS, CYCLES):
                for p in everyone:
                    if all(p[k] == v for k, v in pairs):
                        weight[p[episode[t]]] += 1 / len(everyone)
            assert rows[row, t].tolist() == pytest.approx([w / sum(weight) for w in weight], abs=1e-12)


def test_separate_value_tokens_and_asking_for_both_change_no_answer():
    plain = ModelSelection.permutations(6)
    both = ModelSelection.permutations(6, separate=True, asks="both", opaque=True)
    episodes = both.sample(30, torch.Generator().manual_seed(6))
    bare = episodes.tokens % 6
    assert (episodes.tokens[:, 1::2] >= 6).all()
    rows, belief = both.predictive(episodes.tokens), plain.predictive(bare)
    torch.testing.assert_close(rows[:, 1::2, 6:], belief[:, 1::2], atol=1e-15, rtol=0)
    values = ModelSelection.permutations(6, asks="next").predictive(bare)
    torch.testing.assert_close(rows[:, ::2, :6], values[:, ::2], atol=1e-15, rtol=0)
    assert (rows[:, 1::2, :6] == 0).all()
    told = both.posterior(episodes.tokens, informed=episodes.latents["relabelling"]).values
    torch.testing.assert_close(told[:, 1::2], belief[:, 1::2], atol=1e-12, rtol=0)
    with pytest.raises(MalformedTokens, match="row 3"):
        both.predictive(torch.where(torch.arange(30)[:, None] == 3, bare, episodes.tokens))
    with pytest.raises(TunnelError, match="one position"):
        ModelSelection.recurrence(17, asks="both")


def test_relabelling_leaves_a_permutation_contest_unchanged():
    task = ModelSelection.permutations(12, opaque=True)
    episodes = task.sample(50, torch.Generator().manual_seed(2))
    told = task.posterior(episodes.tokens, informed=episodes.latents["relabelling"])
    torch.testing.assert_close(task.posterior(episodes.tokens).values, told.values, atol=1e-12, rtol=0)


def test_intermediate_posteriors_exist_and_the_contradiction_rule_misses_them():
    """The trivial rival's class error: .010, .0147, .0147 for six, twelve, twenty-four symbols."""
    for symbols, error in ((6, 0.0100), (12, 0.0147), (24, 0.0147)):
        task = ModelSelection.permutations(symbols)
        tokens = held_out(task, 2_000).tokens
        truth, rule = task.predictive(tokens), task.baselines(tokens)["contradiction or half"]
        where = asked(truth)
        assert float(total_variation(truth, rule)[where].mean()) == pytest.approx(error, abs=0.0008)


def by_recurrences(modulus: int, seen: list[int]) -> tuple[float, list[float]]:
    """P(seen | recurrence) and P(seen and next | recurrence), over every a, b and first symbol."""
    total, following = 0.0, [0.0] * modulus
    for a, b in itertools.product(range(modulus), repeat=2):
        if all((a * x + b) % modulus == y for x, y in itertools.pairwise(seen)):
            total += modulus**-3
            following[(a * seen[-1] + b) % modulus] += modulus**-3
    return total, following


def test_an_arithmetic_recurrence_is_weighed_over_all_its_coefficients():
    modulus = 5
    task = ModelSelection.recurrence(modulus, length=5, asks="next")
    tokens = task.sample(40, torch.Generator().manual_seed(3)).tokens
    belief, rows = task.posterior(tokens).values, task.predictive(tokens)
    for row, episode in enumerate(tokens.tolist()):
        for t in range(5):
            likelihood, joint = by_recurrences(modulus, episode[: t + 1])
            independent = modulus ** -(t + 1)
            assert float(belief[row, t, 0]) == pytest.approx(likelihood / (likelihood + independent), abs=1e-12)
            expected = [(j + independent / modulus) / (likelihood + independent) for j in joint]
            assert rows[row, t].tolist() == pytest.approx(expected, abs=1e-12)


def test_opaque_tokens_average_over_every_relabelling():
    modulus = 5
    task = ModelSelection.recurrence(modulus, length=4, opaque=True, asks="next")
    tokens = torch.tensor([[0, 1, 2, 3], [3, 3, 3, 3], [1, 4, 1, 4], [2, 0, 0, 0], [0, 3, 4, 0]])
    belief, rows = task.posterior(tokens).values, task.predictive(tokens)
    everyone = list(itertools.permutations(range(modulus)))
    for row, episode in enumerate(tokens.tolist()):
        for t in range(4):
            likelihood, joint = 0.0, [0.0] * modulus
            for naming in everyone:
                value, following = by_recurrences(modulus, [naming[x] for x in episode[: t + 1]])
                likelihood += value / len(everyone)
                joint = [j + following[naming[x]] / len(everyone) for x, j in enumerate(joint)]
            independent = modulus ** -(t + 1)
            assert float(belief[row, t, 0]) == pytest.approx(likelihood / (likelihood + independent), abs=1e-12)
            expected = [(j + independent / modulus) / (likelihood + independent) for j in joint]
            assert rows[row, t].tolist() == pytest.approx(expected, abs=1e-12)


def test_five_distinct_symbols_say_little_when_opaque_and_almost_all_when_integers():
    opaque, integers = ModelSelection.recurrence(17, opaque=True), ModelSelection.recurrence(17)
    orbit = torch.tensor([[1, 4, 13, 6, 2]])  # x → 3x + 1
    factors = integers.bayes_factor(orbit)[0].tolist()
    assert factors == pytest.approx([1, 1, 1, 17, 289], rel=1e-12)
    assert integers.posterior(orbit).values[0, :, 0].tolist() == pytest.approx(
        [0.5, 0.5, 0.5, 17 / 18, 289 / 290], abs=1e-12
    )
    believed = opaque.posterior(orbit).values[0, :, 0]
    # 208 of 289 orbits have five distinct symbols, against 16·15·14·13/17⁴ of independent ones.
    recurrent, independent = 208 / 289, 16 * 15 * 14 * 13 / 17**4
    assert float(believed[4]) == pytest.approx(recurrent / (recurrent + independent), abs=1e-12)
    assert 0.57 < float(believed[4]) < 0.60


def test_a_reader_who_is_told_the_relabelling_has_the_integer_posterior():
    task = ModelSelection.recurrence(17, opaque=True)
    episodes = task.sample(30, torch.Generator().manual_seed(4))
    naming = episodes.latents["relabelling"]
    told = task.posterior(episodes.tokens, informed=naming).values
    integers = naming.argsort(-1).gather(1, episodes.tokens)
    torch.testing.assert_close(told, ModelSelection.recurrence(17).posterior(integers).values, atol=1e-12, rtol=0)
    assert (told - task.posterior(episodes.tokens).values).abs().max() > 0.3


def test_a_loss_horizon_supervises_the_first_questions_only_and_leaves_the_truth_alone():
    short, whole = ModelSelection.recurrence(17, horizon=5), ModelSelection.recurrence(17)
    episodes = short.sample(4, torch.Generator().manual_seed(5))
    assert ((episodes.targets >= 0).sum(1) == 5).all()
    assert (episodes.targets[:, 5:] == -1).all()
    torch.testing.assert_close(short.predictive(episodes.tokens), whole.predictive(episodes.tokens))
    pairs = ModelSelection.permutations(12, horizon=3).sample(4, torch.Generator().manual_seed(5)).targets
    assert (pairs >= 0)[0].nonzero()[:, 0].tolist() == [1, 3, 5]


def test_tokens_of_neither_class_are_refused_by_row():
    task = ModelSelection.permutations(6)
    with pytest.raises(ImpossibleObservation, match="row 1"):
        task.posterior(torch.tensor([[0, 1, 1, 0], [0, 0, 1, 2]]))
    with pytest.raises(ImpossibleObservation, match="row 0"):
        task.posterior(torch.tensor([[0, 1, 2, 1]]))
    with pytest.raises(MalformedTokens, match="row 1"):
        task.posterior(torch.tensor([[0, 1], [0, 6]]))
    with pytest.raises(TunnelError, match="multiple of six"):
        ModelSelection.permutations(10)
    with pytest.raises(TunnelError, match="prime"):
        ModelSelection.recurrence(15)


def test_repeated_pairs_add_no_evidence():
    task = ModelSelection.permutations(6)
    once, twice = task.posterior(torch.tensor([[0, 1, 2, 3]])), task.posterior(torch.tensor([[0, 1, 0, 1, 2, 3, 2, 3]]))
    torch.testing.assert_close(once.values[0, 3], twice.values[0, 7], atol=1e-15, rtol=0)
    assert not math.isclose(float(once.values[0, 3, 0]), 0.5)
