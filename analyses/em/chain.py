"""The sticky chain of the EM experiment: its sequences, its first weights, and what an exact reader makes of it.

Sequences and weights come from the global generator's stream in one fixed order, because only that order reproduces the
released losses: seed, first symbol, one multinomial a step, noise; the embedding from seed 0; seed again, then W_Q, W_K,
W_V, W_O. The exact reader is the noisy chain's filter.

Shapes: S seeds, T positions, d input width, k key width, v value width, C symbols.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from ...hooks.errors import BadRequest
from ..wind_tunnels.tasks.noisy_chain import NoisyChain

SYMBOLS, WIDTH, KEYS, VALUES = 8, 20, 10, 15
SEEDS = (42, 2024, 1337, 7777, 9999)
POSITIONS = 1_999
HELD_OUT = 10_000  # added to a seed for its second, fresh sequence


@dataclass(frozen=True)
class Sequences:
    """One sequence per seed: `inputs` (S,T,d), `targets` (S,T), and `exact` (S,T,C), P(y_t | x_1…x_t) in float64."""

    inputs: Tensor
    targets: Tensor
    exact: Tensor

    @property
    def filter_loss(self) -> Tensor:
        """(S,) mean −log P(y_t | x_1…x_t) of the exact filter, nats: the floor of an honest loss on this sequence."""
        return -self.exact.gather(-1, self.targets[..., None]).log().mean((-2, -1))


@dataclass(frozen=True)
class Weights:
    """The four matrices of one head, one set per seed: (S,d,k), (S,d,k), (S,d,v), (S,v,C)."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor

    @property
    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value, self.output


def task() -> NoisyChain:
    """The chain as released; its diagonal is .3498, not the nominal .3."""
    return NoisyChain(symbols=SYMBOLS, dimensions=WIDTH, seed=0)


def oracle_entropy() -> float:
    """H(y_t | y_{t−1}) in nats, 1.8292: the entropy for a reader who knows the hidden symbol, which nobody does here."""
    return float(torch.special.entr(task().transition[0]).sum())


def draw(seeds: tuple[int, ...], positions: int = POSITIONS) -> Sequences:
    """One sequence of `positions` per seed, each from its own generator.

    Raises:
        BadRequest: for a seed below zero or no seed at all.
    """
    if not seeds or min(seeds) < 0:
        raise BadRequest(f"seeds must be one or more whole numbers, 0 or above, not {list(seeds)}.")
    chain = task()
    rows = chain.transition.float()
    inputs, targets = [], []
    for seed in seeds:
        generator = Generator().manual_seed(seed)
        symbols = [int(torch.randint(SYMBOLS, (1,), generator=generator))]
        for _ in range(positions):
            symbols.append(int(torch.multinomial(rows[symbols[-1]], 1, generator=generator)))
        stream = torch.tensor(symbols)
        noise = torch.randn(positions, WIDTH, generator=generator)
        inputs.append(chain.embedding[stream[:-1]] + noise)
        targets.append(stream[1:])
    stacked = torch.stack(inputs)
    return Sequences(stacked, torch.stack(targets), chain.predictive(stacked))


def first_weights(seeds: tuple[int, ...]) -> Weights:
    """N(0, 0.1²) for every matrix, the same for every arm."""
    drawn: list[list[Tensor]] = [[], [], [], []]
    for seed in seeds:
        generator = Generator().manual_seed(seed)
        for place, shape in enumerate(((WIDTH, KEYS), (WIDTH, KEYS), (WIDTH, VALUES), (VALUES, SYMBOLS))):
            drawn[place].append(torch.randn(*shape, generator=generator) * 0.1)
    return Weights(*(torch.stack(matrices) for matrices in drawn))


def figures(logits: Tensor, data: Sequences) -> dict[str, Tensor]:
    """Loss, predictive entropy, KL(exact ‖ model) in nats, accuracy and loss above the filter's, each (S,) float64."""
    log_rows = logits.double().log_softmax(-1)
    loss = -log_rows.gather(-1, data.targets[..., None]).mean((-2, -1))
    divergence = torch.special.xlogy(data.exact, data.exact).sum(-1) - (data.exact * log_rows).sum(-1)
    return {
        "loss": loss,
        "excess": loss - data.filter_loss,
        "entropy": torch.special.entr(log_rows.exp()).sum(-1).mean(-1),
        "accuracy": (log_rows.argmax(-1) == data.targets).double().mean(-1),
        "kl": divergence.mean(-1),
    }
