"""Belief processes against sums over state paths, and against what is known of Mess3 and RRXOR."""

import itertools
import math

import pytest
import torch

from advantage_probe.analyses.wind_tunnels import BeliefProcess
from advantage_probe.analyses.wind_tunnels.errors import BadMatrix, ImpossibleObservation
from advantage_probe.analyses.wind_tunnels.tasks.belief_process import stationary


def by_paths(process: BeliefProcess, tokens: list[int]) -> list[float]:
    labelled, initial = process.labelled.tolist(), process.initial.tolist()
    weight = [0.0] * len(initial)
    for path in itertools.product(range(len(initial)), repeat=len(tokens) + 1):
        p = initial[path[0]]
        for token, before, after in zip(tokens, path, path[1:], strict=False):
            p *= labelled[token][before][after]
        weight[path[-1]] += p
    return [w / math.fsum(weight) for w in weight]


@pytest.mark.parametrize("process", [BeliefProcess.mess3(), BeliefProcess.rrxor()])
def test_beliefs_sum_over_all_paths(process):
    tokens = process.sample(6, torch.Generator().manual_seed(0), length=4).tokens
    beliefs = process.beliefs(tokens)
    for row in range(6):
        for t in range(4):
            expected = by_paths(process, tokens[row, : t + 1].tolist())
            assert beliefs[row, t].tolist() == pytest.approx(expected, abs=1e-12)


def test_mess3_has_its_published_entries():
    entries = sorted({round(x, 6) for x in BeliefProcess.mess3().labelled.flatten().tolist()})
    assert entries == [0.00375, 0.0425, 0.0675, 0.765]


def test_rrxor_shows_the_exclusive_or_of_two_bits_every_third_symbol():
    process = BeliefProcess.rrxor()
    episodes = process.sample(500, torch.Generator().manual_seed(1), length=12)
    fits = torch.stack(
        [
            (
                episodes.tokens[:, phase : 9 + phase : 3] ^ episodes.tokens[:, phase + 1 : 9 + phase : 3]
                == episodes.tokens[:, phase + 2 : 9 + phase : 3]
            ).all(1)
            for phase in range(3)
        ]
    )
    assert fits.any(0).all()
    # Two bits and their xor carry two bits in three symbols.
    long = process.sample(300, torch.Generator().manual_seed(2), length=60)
    assert float(process.entropy(long.tokens)[:, 45:].mean()) == pytest.approx(2 / 3, abs=0.03)


def test_the_mixed_state_presentation_of_rrxor_is_finite_and_that_of_mess3_is_not():
    rrxor, mess3 = BeliefProcess.rrxor(), BeliefProcess.mess3()
    assert len(rrxor.presentation(14)) == len(rrxor.presentation(20)) == 36
    assert len(mess3.presentation(5)) == (3**6 - 1) // 2


def test_every_belief_met_in_sequences_is_in_the_presentation():
    process = BeliefProcess.rrxor()
    vertices = process.presentation(10)
    met = process.beliefs(process.sample(200, torch.Generator().manual_seed(3)).tokens).flatten(0, 1)
    assert float((met[:, None] - vertices).abs().amax(-1).amin(1).max()) < 1e-9


def test_an_impossible_symbol_is_refused_with_row_and_step():
    # 1 1 must be followed by 0: five ones contradict the third phase too; noughts contradict none.
    with pytest.raises(ImpossibleObservation, match="row 1: symbol 1 at step 4"):
        BeliefProcess.rrxor().beliefs(torch.tensor([[0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]))


def test_matrices_that_are_no_process_are_refused():
    with pytest.raises(BadMatrix, match="row 1"):
        BeliefProcess(torch.tensor([[[0.5, 0.0], [0.0, 0.5]], [[0.0, 0.5], [0.4, 0.0]]]))
    with pytest.raises(BadMatrix, match="several stationary"):
        stationary([[1.0, 0.0], [0.0, 1.0]])
