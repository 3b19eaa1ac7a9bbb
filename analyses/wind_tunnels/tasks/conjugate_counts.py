"""Conjugate counts: a die of unknown bias, the one tunnel whose hypotheses are continuous.

The bias is Dirichlet(concentration); after counts c the posterior is Dirichlet(concentration + c), the next throw
falls on face k with probability (concentration_k + c_k) / Σ. A coin is K = 2.

Shapes: n episodes, L throws, K faces.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from ..errors import TunnelError
from .bits import LN2, constant_like, entropy_bits, uniform_like
from .filtering import draw
from .protocol import Beliefs, Episodes
from .registry import register
from .tokens import check_symbols


@dataclass(frozen=True)
class ConjugateCounts:
    """`concentration`, one positive number per face."""

    concentration: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    length: int = 32

    def __post_init__(self) -> None:
        if not self.concentration or not all(c > 0 for c in self.concentration):
            raise TunnelError(f"concentrations must be positive, not {self.concentration}")

    @classmethod
    def coin(cls, heads: float = 1.0, tails: float = 1.0, length: int = 32) -> "ConjugateCounts":
        """Beta(heads, tails): faces 0 (heads) and 1 (tails)."""
        return cls((heads, tails), length)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return tuple(str(i) for i in range(len(self.concentration)))

    @property
    def outcomes(self) -> tuple[int, ...]:
        return tuple(range(len(self.concentration)))

    @property
    def hypotheses(self) -> None:
        """A continuum; `posterior` gives the Dirichlet parameters."""
        return None

    def sample(self, n: int, generator: Generator, length: int | None = None) -> Episodes:
        """n episodes; every position is supervised with the next throw."""
        length = self.length if length is None else length
        prior = torch.tensor(self.concentration, dtype=torch.float64).expand(n, -1)
        # Pólya's urn: throws drawn from the predictive itself have the same law, and need no gamma sampler.
        counts, throws = prior.clone(), []
        for _ in range(length + 1):
            throw = draw(counts / counts.sum(-1, keepdim=True), generator)
            counts = counts + one_hot(throw, len(self.concentration))
            throws.append(throw)
        stream = torch.stack(throws, 1)
        return Episodes(stream[:, :-1].contiguous(), stream[:, 1:].contiguous(), {}, self.outcomes)

    def posterior(self, tokens: Tensor) -> Beliefs:
        """Dirichlet parameters after each throw, (n, L, K)."""
        return Beliefs(self._parameters(tokens, None), "parameters")

    def predictive(self, tokens: Tensor) -> Tensor:
        """(n, L, K): the posterior mean."""
        return _mean(self._parameters(tokens, None))

    def entropy(self, tokens: Tensor, of: Literal["predictive", "posterior"] = "predictive") -> Tensor:
        """(n, L) bits; of="posterior": the differential entropy of the Dirichlet density, which can be negative."""
        if of == "predictive":
            return entropy_bits(self.predictive(tokens))
        parameters = self._parameters(tokens, None)
        total, faces = parameters.sum(-1), parameters.shape[-1]
        log_beta = torch.lgamma(parameters).sum(-1) - torch.lgamma(total)
        spread = (total - faces) * torch.digamma(total)
        return (log_beta + spread - ((parameters - 1) * torch.digamma(parameters)).sum(-1)) / LN2

    def baselines(self, tokens: Tensor) -> dict[str, Tensor]:
        """Uniform, the prior mean (constant and position alike), and counts of the last 1/2/3 throws alone."""
        truth = self.predictive(tokens)
        prior = torch.tensor(self.concentration, dtype=torch.float64)
        rivals = {"uniform": uniform_like(truth)}
        rivals["constant"] = rivals["position"] = constant_like(truth, prior / prior.sum())
        for window in (1, 2, 3):
            rivals[f"last {window} throws"] = _mean(self._parameters(tokens, window))
        return rivals

    def _parameters(self, tokens: Tensor, window: int | None) -> Tensor:
        check_symbols(tokens, len(self.concentration), "faces")
        counts = one_hot(tokens, len(self.concentration)).double().cumsum(1)
        if window is not None:
            late = torch.cat((counts.new_zeros(len(tokens), window, counts.shape[-1]), counts), 1)
            counts = counts - late[:, : counts.shape[1]]
        return counts + torch.tensor(self.concentration, dtype=torch.float64)


def _mean(parameters: Tensor) -> Tensor:
    return parameters / parameters.sum(-1, keepdim=True)


@register("coin")
def coin() -> ConjugateCounts:
    return ConjugateCounts.coin()


@register("die")
def die() -> ConjugateCounts:
    return ConjugateCounts()
