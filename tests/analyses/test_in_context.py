"""In-context evidence: the numbers of the protocol, a reader that is perfect, and readers that are not."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from zoo import Words

from advantage_probe.analyses.pretrained import evidence, in_context, trials
from advantage_probe.hooks.errors import BadInput


def by_brute_force(shots: int) -> tuple[float, float]:
    """Expected entropies of label predictive and latent posterior, from every sequence of labels and Bayes' rule."""

    def bits(p: float) -> float:
        return -sum(q * np.log2(q) for q in (p, 1 - p) if q > 0)

    label = latent = 0.0
    for sequence in itertools.product((0, 1), repeat=shots):
        joint = [0.5 * np.prod([0.9 if shown == hidden else 0.1 for shown in sequence]) for hidden in (0, 1)]
        p = joint[0] / sum(joint)
        label += sum(joint) * bits(0.9 * p + 0.1 * (1 - p))
        latent += sum(joint) * bits(p)
    return label, latent


def test_expected_entropies_are_those_of_every_sequence_of_labels() -> None:
    found = [evidence.expected_entropy(shots) for shots in evidence.SHOTS]
    assert [round(bits, 4) for bits in found] == [1, 0.6801, 0.5893, 0.5040, 0.4725]
    latent = [evidence.expected_entropy(shots, "latent") for shots in evidence.SHOTS]
    assert [round(bits, 4) for bits in latent] == [1, 0.4690, 0.2579, 0.0781, 0.0081]
    for shots, one, other in zip(evidence.SHOTS, found, latent):
        assert by_brute_force(shots) == pytest.approx((one, other))
    assert round(evidence.perfect_against_latent(), 3) == 0.287
    assert round(evidence.constant_against_latent(False), 3) == 0.328
    assert round(evidence.constant_against_latent(True), 3) == 0.049
    assert evidence.chances(8).sum() == pytest.approx(1)
    assert evidence.beta_bernoulli(3, 1) == pytest.approx(4 / 6)
    assert evidence.predictive(1, 0) == pytest.approx(0.82)


def drawn(control: trials.Control = "main", per: int = 60) -> trials.Trials:
    return trials.trials(Words(), ("foo", "bar"), control, per)


def odds_of(p: np.ndarray) -> np.ndarray:
    return np.log(p) - np.log1p(-p)


def test_prompts_show_the_labels_that_were_drawn() -> None:
    found = drawn()
    assert np.bincount(found.shots)[list(evidence.SHOTS)].tolist() == [60] * 5
    ids = np.array(found.labels)
    for row, shots, first, last in zip(found.ids, found.shots, found.first, found.last):
        shown = [number for number in row if number in ids]
        assert shown.count(ids[0]) >= first
        if shots:
            assert last in (0, 1)
    match = [abs(first - (shots - first)) for shots, first in zip(found.shots, found.first) if shots == 8]
    assert np.mean(match) == pytest.approx(8 * 0.8, rel=0.08)
    assert np.array_equal(found.truth(), evidence.predictive(found.first, found.second))
    same = drawn("ablated")
    assert np.array_equal(same.first, found.first)
    assert set(same.truth()) == {0.5}
    shuffled = drawn("shuffled")
    apart = [abs(2 * first - shots) for shots, first in zip(shuffled.shots, shuffled.first) if shots == 8]
    assert np.mean(apart) < 3.2


def test_a_perfect_bayesian_is_perfect_and_every_rival_is_worse() -> None:
    found = drawn()
    table = in_context.scored(found, odds_of(found.truth())).set_index("source")
    assert table.at["model", "kl"] == pytest.approx(0, abs=1e-12)
    assert table.at["model", "entropy_error"] == pytest.approx(0, abs=1e-12)
    assert table.at["model", "latent_error"] == pytest.approx(0.287, abs=0.02)
    assert table.at["model", "kl_p"] == pytest.approx(1 / 201)
    for rival in ("best constant", "best constant per k", "copy the last label", "Beta–Bernoulli predictive"):
        assert table.at[rival, "kl"] > 0.02
    assert table.at["best constant per k", "entropy_error"] < table.at["best constant", "entropy_error"]
    line = in_context.slope(found, odds_of(found.truth())).set_index("figure")
    assert line.at["slope", "value"] == pytest.approx(1)
    assert line.at["intercept", "value"] == pytest.approx(0, abs=1e-9)
    assert abs(line.at["slope", "null_mean"]) < 0.2
    shots = in_context.by_shots(found, odds_of(found.truth()))
    assert shots["model"].tolist() == pytest.approx(shots["label_predictive"].tolist())
    bins = in_context.reliability(found, odds_of(found.truth()))
    assert bins["model"].tolist() == pytest.approx(bins["right"].tolist())
    assert bins["prompts"].sum() == 300


def test_a_reader_of_the_latent_posterior_is_not_called_perfect() -> None:
    found = drawn()
    latent = in_context.scored(found, odds_of(evidence.posterior(found.first, found.second))).set_index("source")
    assert latent.at["model", "latent_error"] == pytest.approx(0, abs=1e-9)
    assert latent.at["model", "entropy_error"] > 0.25
    assert latent.at["model", "kl"] > 0.1
    line = in_context.slope(found, odds_of(evidence.posterior(found.first, found.second)))
    assert line["value"].iloc[0] > 2
    liking = in_context.slope(found, odds_of(found.truth()) + 2.0)
    assert liking["value"].tolist() == pytest.approx([1, 2])


def test_divergence_is_relative_entropy_in_bits() -> None:
    truth, guess = np.array([0.3, 0.0, 1.0]), np.array([0.6, 0.5, 0.25])
    expected = [0.3 * np.log2(0.5) + 0.7 * np.log2(0.7 / 0.4), 1.0, 2.0]
    assert in_context.divergence(truth, guess) == pytest.approx(expected)


class Counter(nn.Module):
    """A language model whose next-token logits are the label predictive of the labels it was shown."""

    def __init__(self, labels: tuple[int, int]) -> None:
        super().__init__()
        self.labels = labels
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool) -> SimpleNamespace:
        counts = [(input_ids == label).sum(1).numpy() for label in self.labels]
        p = torch.tensor(evidence.predictive(*counts))
        logits = torch.full((*input_ids.shape, 31), -5.0, dtype=torch.float64)
        logits[:, -1, self.labels[0]], logits[:, -1, self.labels[1]] = p.log(), (1 - p).log()
        return SimpleNamespace(logits=logits)


def test_the_models_label_distribution_is_read_at_the_last_token() -> None:
    found = drawn()
    clean = [row for row in range(len(found.ids)) if sum(n in found.labels for n in found.ids[row]) == found.shots[row]]
    odds, mass = in_context.label_odds(Counter(found.labels), found)
    assert len(clean) > 30
    assert np.allclose(odds[clean], odds_of(found.truth())[clean])
    assert ((mass > 0.8) & (mass < 1)).all()


def test_labels_must_be_two_different_single_tokens() -> None:
    assert trials.label_pairs(Words())[0] == ("foo", "bar")
    assert trials.label_pairs(Words(), ("yes", "no"))[0] == ("yes", "no")
    with pytest.raises(BadInput, match="single tokens"):
        trials.label_pairs(Words(), ("two words", "no"))
    with pytest.raises(BadInput, match="Two different labels"):
        trials.label_pairs(Words(), ("yes", "yes"))
    with pytest.raises(BadInput, match="Two different labels"):
        trials.label_pairs(Words(), ("yes",))
    with pytest.raises(BadInput, match="At least 2 prompts"):
        trials.trials(Words(), ("foo", "bar"), per=1)
