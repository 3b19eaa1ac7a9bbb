"""The thirty lines of the README: a tunnel of one's own is registered, exact, trained and judged like any other."""

from dataclasses import dataclass

import pytest
import torch

from advantage_probe.analyses.wind_tunnels import Beliefs, Episodes, Tunnel, calibrate, register, train, tunnel
from advantage_probe.analyses.wind_tunnels.tasks.bits import entropy_bits, uniform_like
from advantage_probe.analyses.wind_tunnels.training.models import Shape
from advantage_probe.analyses.wind_tunnels.training.recipes import Recipe


@register("loaded-die")
@dataclass(frozen=True)
class LoadedDie:
    """One face comes up half of the time; which?"""

    vocabulary = hypotheses = tuple("123456")
    outcomes, length = tuple(range(6)), 20

    def sample(self, n, generator, length=None):
        face = torch.randint(6, (n,), generator=generator)
        chance = torch.full((n, 6), 0.1).scatter_(1, face[:, None], 0.5)
        throws = torch.multinomial(chance, (length or self.length) + 1, replacement=True, generator=generator)
        return Episodes(throws[:, :-1], throws[:, 1:], {"face": face}, self.outcomes)

    def posterior(self, tokens):
        counts = torch.nn.functional.one_hot(tokens, 6).cumsum(1).double()
        return Beliefs((counts * torch.tensor(5.0, dtype=torch.float64).log()).softmax(-1))

    def predictive(self, tokens):
        return 0.1 + 0.4 * self.posterior(tokens).values

    def entropy(self, tokens, of="predictive"):
        return entropy_bits(self.predictive(tokens) if of == "predictive" else self.posterior(tokens).values)

    def baselines(self, tokens):
        return {"uniform": uniform_like(self.predictive(tokens))}


def test_it_is_a_tunnel_under_its_name():
    assert isinstance(tunnel("loaded-die"), Tunnel)
    assert tunnel("loaded-die") == LoadedDie()


def test_its_loss_is_its_entropy():
    task = LoadedDie()
    episodes = task.sample(2_000, torch.Generator().manual_seed(0))
    rows = task.predictive(episodes.tokens)
    surprise = -rows.gather(2, episodes.targets[..., None])[..., 0].log2() - task.entropy(episodes.tokens)
    per_sequence = surprise.mean(1)
    assert abs(per_sequence.mean()) < 4 * per_sequence.std() / 2_000**0.5
    assert rows[0, 0, episodes.tokens[0, 0]] == pytest.approx(0.1 + 0.4 * 0.5, abs=1e-12)


def test_a_model_trained_in_it_is_judged_against_it():
    model, curve = train(
        tunnel("loaded-die"), Recipe(Shape("gpt2", 1, 2, 32), steps=120, learning_rate=3e-3, warm_up=10)
    )
    figures = calibrate(tunnel("loaded-die"), {"model": model}, sequences=200)
    assert figures.index.tolist() == ["uniform", "model"]
    assert figures.loc["model", "kl"] < figures.loc["uniform", "kl"] / 2
    assert len(curve) > 1


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="exists already"):
        register("mess3")(LoadedDie)
