"""Hidden Markov filtering against enumeration of paths, against hmmlearn, and by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
from hmmlearn.hmm import CategoricalHMM

from advantage_probe.analyses.wind_tunnels import FreshHiddenMarkov, HiddenMarkov
from advantage_probe.analyses.wind_tunnels.errors import BadMatrix, ImpossibleObservation, MalformedTokens


def random_model(states: int, symbols: int, seed: int, zeros: bool = False) -> HiddenMarkov:
    rng = np.random.default_rng(seed)
    transition = rng.dirichlet(np.ones(states), states)
    if zeros:
        transition[np.arange(states), (np.arange(states) + 1) % states] = 0.0
        transition /= transition.sum(1, keepdims=True)
    return HiddenMarkov(
        torch.tensor(rng.dirichlet(np.ones(states))),
        torch.tensor(transition),
        torch.tensor(rng.dirichlet(np.ones(symbols), states)),
    )


def exact(numbers: list) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def by_paths(model: HiddenMarkov, observed: list[int]) -> tuple[list[float], float]:
    """P(last state | observations) and P(observations), summing over every path of states."""
    initial, transition, emission = (m.tolist() for m in (model.initial, model.transition, model.emission))
    weight = [0.0] * len(initial)
    for path in itertools.product(range(len(initial)), repeat=len(observed)):
        p = initial[path[0]] * emission[path[0]][observed[0]]
        for before, after, symbol in zip(path, path[1:], observed[1:], strict=False):
            p *= transition[before][after] * emission[after][symbol]
        weight[path[-1]] += p
    total = math.fsum(weight)
    return [w / total for w in weight], total


@pytest.mark.parametrize("zeros", [False, True])
def test_the_filter_sums_over_all_paths(zeros):
    model = random_model(3, 3, seed=1, zeros=zeros)
    observed = model.sample(4, torch.Generator().manual_seed(0), length=6).tokens
    beliefs, log_likelihood = model.filter(observed), model.log_likelihood(observed)
    for row in range(4):
        for t in range(6):
            expected, total = by_paths(model, observed[row, : t + 1].tolist())
            assert beliefs[row, t].tolist() == pytest.approx(expected, abs=1e-12)
            assert float(log_likelihood[row, t]) == pytest.approx(math.log(total), abs=1e-12)


@pytest.mark.parametrize(("states", "symbols"), [(2, 3), (5, 5), (8, 4)])
def test_the_filter_agrees_with_hmmlearn(states, symbols):
    model = random_model(states, symbols, seed=states)
    other = CategoricalHMM(states)
    other.startprob_, other.transmat_ = model.initial.numpy(), model.transition.numpy()
    other.emissionprob_ = model.emission.numpy()
    observed = model.sample(3, torch.Generator().manual_seed(1), length=25).tokens
    beliefs, log_likelihood = model.filter(observed), model.log_likelihood(observed)
    for row in range(3):
        column = observed[row].numpy()[:, None]
        for t in range(25):
            smoothed = other.predict_proba(column[: t + 1])[-1]
            np.testing.assert_allclose(beliefs[row, t].numpy(), smoothed, atol=1e-10, rtol=0)
        assert float(log_likelihood[row, -1]) == pytest.approx(other.score(column), abs=1e-10)


def test_thousands_of_steps_stay_exact():
    """Against one long double-precision product in log space, where naive products underflow."""
    model = random_model(3, 3, seed=3, zeros=True)
    observed = model.sample(2, torch.Generator().manual_seed(2), length=5_000).tokens
    beliefs, log_likelihood = model.filter(observed), model.log_likelihood(observed)
    log_transition, log_emission = model.transition.log(), model.emission.log()
    log_alpha = model.initial.log() + log_emission[:, observed[0, 0]]
    for symbol in observed[0, 1:]:
        log_alpha = torch.logsumexp(log_alpha[:, None] + log_transition, 0) + log_emission[:, symbol]
    assert float(log_likelihood[0, -1]) == pytest.approx(float(torch.logsumexp(log_alpha, 0)), rel=1e-12)
    torch.testing.assert_close(beliefs[0, -1], log_alpha.softmax(0), atol=1e-10, rtol=0)
    assert beliefs.isfinite().all()


def test_the_first_observation_is_met_without_a_transition():
    model = HiddenMarkov(exact([0.9, 0.1]), exact([[0.0, 1.0], [1.0, 0.0]]), exact([[0.5, 0.5], [0.25, 0.75]]))
    one = model.filter(torch.tensor([[0]])), model.log_likelihood(torch.tensor([[0]]))
    assert one[0][0, 0].tolist() == pytest.approx([0.45 / 0.475, 0.025 / 0.475], abs=1e-15)
    assert math.exp(one[1][0, 0]) == pytest.approx(0.475, abs=1e-15)
    two = model.filter(torch.tensor([[0, 1]])), model.log_likelihood(torch.tensor([[0, 1]]))
    # states swap at each step: 0 → 1 with .45 · .75, 1 → 0 with .025 · .5
    assert two[0][0, 1].tolist() == pytest.approx([0.0125 / 0.35, 0.3375 / 0.35], abs=1e-15)
    assert math.exp(two[1][0, 1]) == pytest.approx(0.35, abs=1e-15)
    following = model.predictive(torch.tensor([[0]]))[0, 0]
    stay = 0.45 / 0.475
    assert following.tolist() == pytest.approx(
        [stay * 0.25 + (1 - stay) * 0.5, stay * 0.75 + (1 - stay) * 0.5], abs=1e-15
    )


def test_rows_condition_on_the_present_state():
    model = HiddenMarkov(
        torch.tensor([1.0, 0.0]), torch.tensor([[0.0, 1.0], [0.5, 0.5]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    )
    assert model.predictive(torch.tensor([[0]]))[0, 0].tolist() == [0.0, 1.0]


def test_one_state_has_entropy_zero():
    model = HiddenMarkov(torch.tensor([1.0]), torch.tensor([[1.0]]), torch.tensor([[0.3, 0.7]]))
    entropy = model.entropy(torch.tensor([[0, 1, 1]]), of="posterior")
    assert entropy.tolist() == [[0.0, 0.0, 0.0]]


GOOD = [[0.5, 0.5], [0.25, 0.75]]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([0.49, 0.49], "sums to 0.98"),
        ([0.0, 0.0], "sums to 0"),
        ([1.5, -0.5], "non-negative"),
        ([math.nan, 1.0], "nan"),
    ],
)
def test_a_row_that_is_no_distribution_is_refused_by_number(row, reason):
    for matrices in (([GOOD[0], row], GOOD), (GOOD, [GOOD[0], row])):
        with pytest.raises(BadMatrix, match="row 1") as refusal:
            HiddenMarkov(torch.tensor([0.5, 0.5]), torch.tensor(matrices[0]), torch.tensor(matrices[1]))
        assert reason in str(refusal.value)


def test_rows_within_the_stated_tolerance_are_renormalised():
    model = HiddenMarkov(torch.tensor([0.5, 0.5]), torch.tensor([[0.5, 0.4999999], [0.25, 0.75]]), torch.tensor(GOOD))
    assert (model.transition.sum(-1) - 1).abs().max() < 1e-15


def test_a_state_that_nothing_reaches_is_refused_by_number():
    with pytest.raises(BadMatrix, match="row\\) 1"):
        HiddenMarkov(torch.tensor([1.0, 0.0]), torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor(GOOD))


def test_impossible_and_unknown_observations_are_refused_with_row_and_step():
    model = HiddenMarkov(torch.tensor([1.0, 0.0]), torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.eye(2))
    with pytest.raises(ImpossibleObservation, match="row 1: the observation at step 2"):
        model.predictive(torch.tensor([[0, 1, 0], [0, 1, 1]]))
    with pytest.raises(MalformedTokens, match="row 1"):
        model.predictive(torch.tensor([[0, 1], [0, 2]]))


def test_the_truth_of_a_fresh_model_comes_from_the_numbers_in_its_header():
    task = FreshHiddenMarkov(observations=6)
    tokens = task.sample(5, torch.Generator().manual_seed(4)).tokens
    numbers = [[float(task.vocabulary[i].split("=")[1]) for i in row[: task.header]] for row in tokens.tolist()]
    for row in range(5):
        transition = exact(numbers[row][:9]).reshape(3, 3)
        emission = exact(numbers[row][9:]).reshape(3, 3)
        model = HiddenMarkov(torch.full((3,), 1 / 3).double(), transition, emission)
        observed = [int(task.vocabulary[i][1:]) for i in tokens[row, task.header :].tolist()]
        for t in range(6):
            expected, _ = by_paths(model, observed[: t + 1])
            assert task.predictive(tokens)[row, task.header + t].tolist() == pytest.approx(expected, abs=1e-12)


def test_a_changed_header_number_changes_the_answer():
    task = FreshHiddenMarkov(observations=4)
    tokens = task.sample(1, torch.Generator().manual_seed(5)).tokens
    changed = tokens.clone()
    first = tokens[0, 9:12] - torch.arange(9, 12) * (task.parts + 1)
    changed[0, 9:12] = first.roll(1) + torch.arange(9, 12) * (task.parts + 1)
    assert (task.matrices(tokens)[1] - task.matrices(changed)[1]).abs().max() > 0.04


def test_fresh_matrices_have_the_stated_form():
    task = FreshHiddenMarkov(3, 3)
    transition, emission = task.matrices(task.sample(3_000, torch.Generator().manual_seed(6)).tokens)
    assert task.header == 18
    stay = transition.diagonal(dim1=1, dim2=2)
    assert float(stay.min()) >= 0.8 - 1e-9
    assert float(stay.mean()) == pytest.approx(0.8 + 0.2 / 3, abs=0.01)
    assert emission.mean((0, 1)).tolist() == pytest.approx([1 / 3] * 3, abs=0.01)
    assert float((transition / 0.05 - (transition / 0.05).round()).abs().max()) < 1e-9


def test_a_torn_header_is_refused():
    task = FreshHiddenMarkov(observations=4)
    tokens = task.sample(2, torch.Generator().manual_seed(7)).tokens
    swapped = tokens.clone()
    swapped[1, [0, 1]] = tokens[1, [1, 0]]
    with pytest.raises(MalformedTokens, match="row 1"):
        task.predictive(swapped)
    heavier = tokens.clone()
    heavier[1, 0] = 20 if int(tokens[1, 0]) != 20 else 19
    with pytest.raises(BadMatrix, match="row \\(1, 0\\)"):
        task.predictive(heavier)
