"""The sticky chain seen through noise: x_t = μ(y_{t−1}) + N(0, I), predict y_t.

This is the embedded task of the papers' gradient-dynamics experiment: eight symbols on a circle, transitions falling
with circular distance, twenty-dimensional inputs. As released, the self term enters the normaliser first, so that the
chain stays with probability .3498 and not the nominal .3; the row below repeats that. The exact reader is a hidden
Markov filter with Gaussian emissions.

Shapes: n episodes, L positions, d input dimensions, X symbols.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from ..errors import MalformedTokens, TunnelError
from .bits import entropy_bits, uniform_like
from .filtering import draw, forward, windowed
from .protocol import Beliefs, Episodes
from .registry import register


@dataclass(frozen=True)
class NoisyChain:
    """`symbols` on a circle, `dimensions` of the embedding μ ~ N(0, I) drawn from `seed`."""

    symbols: int = 8
    dimensions: int = 20
    length: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.symbols < 2 or self.dimensions < 1:
            raise TunnelError("a noisy chain needs two symbols or more and at least one dimension")

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return tuple(str(i) for i in range(self.symbols))

    @property
    def outcomes(self) -> tuple[int, ...]:
        return tuple(range(self.symbols))

    @property
    def hypotheses(self) -> tuple[str, ...]:
        """Symbols y_{t−1}, of which x_t is the noisy picture."""
        return self.vocabulary

    @property
    def transition(self) -> Tensor:
        """(X, X) float64: nominal .3 on the diagonal before normalisation, the rest ∝ 1 / circular distance."""
        place = torch.arange(self.symbols)
        distance = (place[:, None] - place).abs()
        distance = torch.minimum(distance, self.symbols - distance).double()
        far = torch.where(distance > 0, 1 / distance.clamp(min=1), 0.0)
        row = far * 0.7 / (0.3 + far.sum(-1, keepdim=True))
        return row + torch.eye(self.symbols, dtype=torch.float64) * (1 - row.sum(-1, keepdim=True))

    @property
    def embedding(self) -> Tensor:
        """(X, d) float32."""
        return torch.randn(self.symbols, self.dimensions, generator=Generator().manual_seed(self.seed))

    def sample(self, n: int, generator: Generator, length: int | None = None) -> Episodes:
        """n episodes of noisy inputs (n, L, d); every position is supervised with y_t."""
        length = self.length if length is None else length
        symbols = [torch.randint(self.symbols, (n,), generator=generator)]
        for _ in range(length):
            symbols.append(draw(self.transition[symbols[-1]], generator))
        stream = torch.stack(symbols, 1)
        noise = torch.randn(n, length, self.dimensions, generator=generator)
        return Episodes(
            self.embedding[stream[:, :-1]] + noise, stream[:, 1:].contiguous(), {"symbols": stream}, self.outcomes
        )

    def posterior(self, tokens: Tensor) -> Beliefs:
        """P(y_{t−1} | x_1…x_t), (n, L, X)."""
        return Beliefs(forward(self._initial(), self.transition, self._likelihood(tokens))[0], "hypotheses")

    def predictive(self, tokens: Tensor) -> Tensor:
        """P(y_t | x_1…x_t), (n, L, X)."""
        return self.posterior(tokens).values @ self.transition

    def entropy(self, tokens: Tensor, of: Literal["predictive", "posterior"] = "predictive") -> Tensor:
        return entropy_bits(self.predictive(tokens) if of == "predictive" else self.posterior(tokens).values)

    def baselines(self, tokens: Tensor) -> dict[str, Tensor]:
        """Uniform (stationary, so also the best constant and position), and filters that see the last 1/2/3 inputs."""
        likelihood = self._likelihood(tokens)
        truth = self.predictive(tokens)
        rivals = {"uniform": uniform_like(truth), "constant": uniform_like(truth), "position": uniform_like(truth)}
        for window in (1, 2, 3):
            seen = windowed(self._initial(), self.transition, likelihood, window)
            rivals[f"last {window} inputs"] = seen @ self.transition
        return rivals

    def _initial(self) -> Tensor:
        return torch.full((self.symbols,), 1 / self.symbols, dtype=torch.float64)

    def _likelihood(self, tokens: Tensor) -> Tensor:
        """(n, L, X) ∝ N(x_t; μ, I), scaled so that the best symbol of each position has one."""
        if tokens.dim() != 3 or tokens.shape[-1] != self.dimensions:
            raise MalformedTokens(f"inputs must be (episodes, positions, {self.dimensions}), not {tuple(tokens.shape)}")
        broken = ~tokens.isfinite().all(-1).all(-1)
        if broken.any():
            raise MalformedTokens(f"row {int(broken.nonzero()[0])} holds numbers that are not finite")
        inputs, centres = tokens.double(), self.embedding.double()
        exponent = inputs @ centres.T - (centres**2).sum(-1) / 2
        return (exponent - exponent.amax(-1, keepdim=True)).exp()


@register("noisy-chain")
def noisy_chain() -> NoisyChain:
    return NoisyChain()
