"""Sticky chains against the product rule, and the noisy embedding against the published experiment."""

import itertools
import math

import pytest
import torch

from advantage_probe.analyses.wind_tunnels import NoisyChain, StickyChain
from advantage_probe.analyses.wind_tunnels.errors import ImpossibleObservation, MalformedTokens


def test_the_posterior_multiplies_the_chain_out_for_every_stickiness():
    task = StickyChain(symbols=4, length=9)
    tokens = task.sample(10, torch.Generator().manual_seed(0)).tokens
    belief, rows = task.posterior(tokens).values, task.predictive(tokens)
    for row, episode in enumerate(tokens.tolist()):
        for t in range(9):
            weight = []
            for stay in task.stickiness:
                steps = itertools.pairwise(episode[: t + 1])
                weight.append(math.prod(stay if a == b else (1 - stay) / 3 for a, b in steps))
            posterior = [w / sum(weight) for w in weight]
            assert belief[row, t].tolist() == pytest.approx(posterior, abs=1e-12)
            mean = sum(p * s for p, s in zip(posterior, task.stickiness, strict=True))
            expected = [mean if x == episode[t] else (1 - mean) / 3 for x in range(4)]
            assert rows[row, t].tolist() == pytest.approx(expected, abs=1e-12)


def test_a_chain_that_always_stays_is_certain_from_its_first_symbol():
    task = StickyChain(symbols=3, length=4, stickiness=(1.0,))
    episodes = task.sample(6, torch.Generator().manual_seed(1))
    assert (episodes.targets == episodes.tokens[:, :1]).all()
    assert (task.entropy(episodes.tokens) == 0.0).all()
    with pytest.raises(ImpossibleObservation, match="row 1"):
        task.predictive(torch.tensor([[0, 0, 0], [0, 0, 1]]))


def test_the_noisy_chain_has_the_row_of_the_released_code():
    row = [0.3498, 0.1660, 0.0830, 0.0553, 0.0415, 0.0553, 0.0830, 0.1660]
    assert NoisyChain().transition[0].tolist() == pytest.approx(row, abs=5e-5)
    entropy = -(NoisyChain().transition[0] * NoisyChain().transition[0].log()).sum()
    assert float(entropy) == pytest.approx(1.8292, abs=5e-5)


def test_the_noisy_filter_sums_over_all_paths():
    task = NoisyChain(symbols=3, dimensions=2, length=4)
    episodes = task.sample(3, torch.Generator().manual_seed(2))
    rows = task.predictive(episodes.tokens)
    centres, transition = task.embedding.double(), task.transition
    for row in range(3):
        inputs = episodes.tokens[row].double()
        weight = torch.zeros(3, dtype=torch.float64)
        for path in itertools.product(range(3), repeat=5):
            p = 1 / 3
            for t in range(4):
                p *= math.exp(-float((inputs[t] - centres[path[t]]).square().sum()) / 2)
                p *= float(transition[path[t], path[t + 1]])
            weight[path[4]] += p
        torch.testing.assert_close(rows[row, 3], weight / weight.sum(), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("seed", "loss"), [(42, 1.8412), (2024, 1.8089), (1337, 1.8202), (7777, 1.8498), (9999, 1.8278)]
)
def test_the_exact_filter_pays_the_known_loss_on_the_published_sequences(seed, loss):
    """Draws in the published order; nats per symbol, computed before this code existed."""
    task = NoisyChain(length=1_999)
    transition = task.transition.float()
    torch.manual_seed(seed)
    symbols = [int(torch.randint(8, (1,)))]
    for _ in range(1_999):
        symbols.append(int(torch.multinomial(transition[symbols[-1]], 1)))
    noise = torch.randn(1_999, 20)
    stream = torch.tensor(symbols)
    rows = task.predictive((task.embedding[stream[:-1]] + noise)[None])[0]
    paid = -rows.gather(1, stream[1:, None]).log().mean()
    assert float(paid) == pytest.approx(loss, abs=2e-4)


def test_inputs_that_are_not_finite_or_of_another_width_are_refused():
    task = NoisyChain()
    broken = torch.zeros(2, 3, 20)
    broken[1, 2, 0] = math.nan
    with pytest.raises(MalformedTokens, match="row 1"):
        task.predictive(broken)
    with pytest.raises(MalformedTokens, match="20"):
        task.predictive(torch.zeros(2, 3, 19))
