"""Sticky chain: how often does this sequence stay where it is?

Each sequence has its own stickiness, one of a few values with a uniform prior; at every step the symbol stays with
that probability or moves to one of the others alike. The posterior needs two counts only: stays and moves.

Shapes: n episodes, L tokens, X symbols, H stickiness values.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from ..errors import ImpossibleObservation, TunnelError
from .bits import constant_like, entropy_bits, uniform_like
from .protocol import Beliefs, Episodes
from .registry import register
from .tokens import check_symbols

NINE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class StickyChain:
    """`symbols` X ≥ 2 and the `stickiness` values, each a probability of staying."""

    symbols: int = 8
    length: int = 32
    stickiness: tuple[float, ...] = NINE

    def __post_init__(self) -> None:
        if self.symbols < 2 or not self.stickiness or not all(0 <= s <= 1 for s in self.stickiness):
            raise TunnelError("a sticky chain needs two symbols or more and probabilities of staying in 0…1")

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return tuple(str(i) for i in range(self.symbols))

    @property
    def outcomes(self) -> tuple[int, ...]:
        return tuple(range(self.symbols))

    @property
    def hypotheses(self) -> tuple[str, ...]:
        return tuple(f"stay {s:g}" for s in self.stickiness)

    def sample(self, n: int, generator: Generator, length: int | None = None) -> Episodes:
        """n episodes; every position is supervised with the next symbol."""
        length = self.length if length is None else length
        choice = torch.randint(len(self.stickiness), (n,), generator=generator)
        stay = torch.tensor(self.stickiness, dtype=torch.float64)[choice]
        stays = torch.rand(n, length, generator=generator, dtype=torch.float64) < stay[:, None]
        jumps = torch.randint(1, self.symbols, (n, length), generator=generator)
        start = torch.randint(self.symbols, (n, 1), generator=generator)
        stream = torch.cat((start, start + torch.where(stays, 0, jumps).cumsum(1)), 1) % self.symbols
        return Episodes(stream[:, :-1].contiguous(), stream[:, 1:].contiguous(), {"stickiness": choice}, self.outcomes)

    def posterior(self, tokens: Tensor) -> Beliefs:
        """(n, L, H): ∝ s^stays (1 − s)^moves after each token."""
        return Beliefs(self._belief(tokens, window=None), "hypotheses")

    def predictive(self, tokens: Tensor) -> Tensor:
        """(n, L, X): the posterior mean of s on the present symbol, the rest shared by the others."""
        return self._answer(tokens, self._belief(tokens, window=None))

    def entropy(self, tokens: Tensor, of: Literal["predictive", "posterior"] = "predictive") -> Tensor:
        return entropy_bits(self.predictive(tokens) if of == "predictive" else self.posterior(tokens).values)

    def baselines(self, tokens: Tensor) -> dict[str, Tensor]:
        """Uniform (the best constant and position, by symmetry), and readers of the last 1/2/3 symbols."""
        truth = self.predictive(tokens)
        uniform = torch.full((self.symbols,), 1 / self.symbols)
        rivals = {"uniform": uniform_like(truth)}
        rivals["constant"] = rivals["position"] = constant_like(truth, uniform)
        for window in (1, 2, 3):
            rivals[f"last {window} symbols"] = self._answer(tokens, self._belief(tokens, window - 1))
        return rivals

    def _belief(self, tokens: Tensor, window: int | None) -> Tensor:
        """Posterior from the last `window` steps (None: all)."""
        check_symbols(tokens, self.symbols)
        stay = torch.tensor(self.stickiness, dtype=torch.float64)
        stayed = (tokens[:, 1:] == tokens[:, :-1]).double()
        steps = torch.stack((stayed, 1 - stayed), -1)
        counts = torch.cat((steps.new_zeros(len(tokens), 1, 2), steps.cumsum(1)), 1)
        if window is not None:
            late = torch.cat((counts.new_zeros(len(tokens), window, 2), counts), 1)[:, : counts.shape[1]]
            counts = counts - late
        log_weight = torch.special.xlogy(counts[..., :1], stay) + torch.special.xlogy(counts[..., 1:], 1 - stay)
        impossible = log_weight.isinf().all(-1).any(1)
        if impossible.any():
            raise ImpossibleObservation(
                f"row {int(impossible.nonzero()[0])}: no stickiness value permits these symbols"
            )
        return log_weight.softmax(-1)

    def _answer(self, tokens: Tensor, belief: Tensor) -> Tensor:
        stay = belief @ torch.tensor(self.stickiness, dtype=torch.float64)
        move = (1 - stay) / (self.symbols - 1)
        here = one_hot(tokens, self.symbols).double()
        return here * stay[..., None] + (1 - here) * move[..., None]


@register("sticky-chain")
def sticky_chain() -> StickyChain:
    return StickyChain()
