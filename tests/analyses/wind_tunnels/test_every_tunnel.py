"""One suite over every registered tunnel: what a task must be before any model's number in it means something."""

import math

import pytest
import torch

from advantage_probe.analyses.wind_tunnels.errors import MalformedTokens
from advantage_probe.analyses.wind_tunnels.tasks.bits import asked, entropy_bits
from advantage_probe.analyses.wind_tunnels.tasks.protocol import Episodes, Tunnel
from advantage_probe.analyses.wind_tunnels.tasks.registry import tunnel, tunnel_names

NAMES = tunnel_names()
MANY = 2_000


def drawn(task: Tunnel, n: int, seed: int = 0, length: int | None = None) -> Episodes:
    return task.sample(n, torch.Generator().manual_seed(seed), length)


def answers_equal(left: torch.Tensor, right: torch.Tensor, within: float = 1e-12) -> bool:
    return left.shape == right.shape and torch.allclose(left, right, rtol=0, atol=within, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_is_a_distribution_wherever_something_is_asked(name):
    task = tunnel(name)
    assert isinstance(task, Tunnel)
    tokens = drawn(task, 50).tokens
    rows = task.predictive(tokens)
    assert rows.shape == (50, task.length, len(task.outcomes))
    assert rows.dtype == torch.float64
    where = asked(rows)
    assert where.any()
    assert rows[~where].isnan().all()
    assert (rows[where] >= 0).all()
    assert (rows[where].sum(-1) - 1).abs().max() < 1e-12
    for who, rival in task.baselines(tokens).items():
        assert torch.equal(asked(rival), where), who
        assert (rival[where].sum(-1) - 1).abs().max() < 1e-9, who


@pytest.mark.parametrize("name", NAMES)
def test_targets_are_outcomes_and_stand_where_something_is_asked(name):
    task = tunnel(name)
    episodes = drawn(task, 50)
    supervised = episodes.targets >= 0
    assert torch.equal(supervised, asked(task.predictive(episodes.tokens)))
    assert episodes.targets.max() < len(task.outcomes)
    assert episodes.outcomes == task.outcomes
    if episodes.tokens.dim() == 2:
        assert episodes.tokens.min() >= 0
        assert episodes.tokens.max() < len(task.vocabulary)


@pytest.mark.parametrize("name", NAMES)
def test_changing_future_tokens_changes_no_earlier_answer(name):
    task = tunnel(name)
    first, second = drawn(task, 40, seed=1).tokens, drawn(task, 40, seed=2).tokens
    whole = task.predictive(first)
    compared = 0
    for cut in {task.length // 2, task.length - 2, task.length - 1}:
        mixed = torch.cat((first[:, :cut], second[:, cut:]), 1)
        possible = [row for row in range(len(mixed)) if accepts(task, mixed[row : row + 1])]
        if possible:
            assert answers_equal(task.predictive(mixed[possible])[:, :cut], whole[possible, :cut])
        compared += len(possible)
    assert compared, "no spliced episode was possible: nothing was compared"


def accepts(task: Tunnel, tokens: torch.Tensor) -> bool:
    """Whether a spliced episode is possible at all: it may give one key two values."""
    try:
        task.predictive(tokens)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_every_prefix_has_the_answer_of_the_whole(name):
    task = tunnel(name)
    tokens = drawn(task, 10, seed=3).tokens
    whole, belief, rivals = task.predictive(tokens), task.posterior(tokens).values, task.baselines(tokens)
    header = getattr(task, "header", 0)
    for cut in {header + 1, header + 2, header + 5, task.length - 1, task.length}:
        assert answers_equal(task.predictive(tokens[:, :cut]), whole[:, :cut])
        assert answers_equal(task.posterior(tokens[:, :cut]).values, belief[:, :cut])
        for who, rival in task.baselines(tokens[:, :cut]).items():
            if who != "constant":  # the best constant of a shorter episode is another constant
                assert answers_equal(rival, rivals[who][:, :cut]), who


@pytest.mark.parametrize("name", NAMES)
def test_the_exact_loss_equals_its_entropy_and_no_rival_beats_it(name):
    """Within four standard errors over sequences; a wrong posterior pays more than its entropy or claims less."""
    task = tunnel(name)
    episodes = drawn(task, MANY, seed=4)
    where = episodes.targets >= 0
    index = episodes.targets.clamp(min=0)[..., None]

    def losses(rows: torch.Tensor) -> torch.Tensor:
        paid = -rows.gather(2, index)[..., 0].log2()
        return torch.where(where, paid, math.nan).nanmean(1)

    rows = task.predictive(episodes.tokens)
    exact = losses(rows)
    surprise = exact - torch.where(where, task.entropy(episodes.tokens), math.nan).nanmean(1)
    assert abs(surprise.mean()) <= 4 * surprise.std() / MANY**0.5 + 1e-12
    for who, rival in task.baselines(episodes.tokens).items():
        gain = exact - losses(rival)
        if gain.isinf().any():
            assert (gain[gain.isinf()] < 0).all(), who
            continue
        assert gain.mean() <= 4 * gain.std() / MANY**0.5 + 1e-12, who


@pytest.mark.parametrize("name", NAMES)
def test_entropies_are_those_of_the_tables(name):
    task = tunnel(name)
    tokens = drawn(task, 20, seed=5).tokens
    assert answers_equal(task.entropy(tokens), entropy_bits(task.predictive(tokens)))
    beliefs = task.posterior(tokens)
    if beliefs.kind == "hypotheses":
        assert task.hypotheses is not None
        assert beliefs.values.shape[-1] == len(task.hypotheses)
        assert answers_equal(task.entropy(tokens, of="posterior"), entropy_bits(beliefs.values))
    if beliefs.kind == "marginals":
        assert (beliefs.values.sum(-1) - 1).abs().max() < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_of_the_truth_scores_the_bayes_loss_and_a_shifted_copy_does_not(name):
    task = tunnel(name)
    episodes = drawn(task, 400, seed=6)
    exact = task.predictive(episodes.tokens)
    logits = torch.full((*exact.shape[:2], max(task.outcomes) + 1), -math.inf, dtype=torch.float64)
    logits[..., list(task.outcomes)] = exact.clamp(min=1e-30).log()
    logits[~asked(exact)] = 0.0
    where = episodes.targets >= 0
    bayes = -exact[where].gather(1, episodes.targets[where][:, None]).log().mean()
    assert abs(float(episodes.loss(logits)) - float(bayes)) < 1e-9
    if (episodes.targets.where(where, -1).amax(1) != episodes.targets.where(where, 99).amin(1)).any():
        # Shifting back asks the past, shifting on reads the answer; a class is the same at every position.
        shifted = [float(episodes.loss(logits.roll(by, dims=1))) for by in (1, -1)]
        assert max(abs(loss - float(bayes)) for loss in shifted) > 0.005


@pytest.mark.parametrize("name", NAMES)
def test_latents_are_never_read(name):
    task = tunnel(name)
    episodes = drawn(task, 30, seed=7)
    expected = task.predictive(episodes.tokens)
    for latent in episodes.latents.values():
        latent.zero_()
    assert answers_equal(task.predictive(episodes.tokens), expected, within=0)


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_gives_one_sample_and_a_shorter_length_is_honoured(name):
    task = tunnel(name)
    assert torch.equal(drawn(task, 5, seed=8).tokens, drawn(task, 5, seed=8).tokens)
    length = task.length - 3
    episodes = drawn(task, 5, seed=8, length=length)
    assert episodes.tokens.shape[:2] == episodes.targets.shape == (5, length)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "noisy-chain"])
def test_tokens_of_another_shape_or_type_are_refused(name):
    task = tunnel(name)
    tokens = drawn(task, 2).tokens
    for wrong in (tokens[0], tokens[None], tokens.double()):
        with pytest.raises(MalformedTokens, match="integers of shape"):
            task.predictive(wrong)
    beyond = tokens.clone()
    beyond[1, 0] = len(task.vocabulary) + 1
    with pytest.raises(MalformedTokens, match="row 1"):
        task.predictive(beyond)
