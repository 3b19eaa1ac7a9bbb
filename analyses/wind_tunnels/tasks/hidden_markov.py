"""A hidden Markov model with given matrices: filtering posterior over states, predictive over the next symbol.

Rows are the conditioning state: transition[s] is P(next | s), emission[s] is P(symbol | s). The first observation is
met without a transition. Zeros are allowed anywhere but must leave every state reachable.

Shapes: n episodes, L observations, S states, X symbols.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from ..errors import BadMatrix
from .bits import constant_like, entropy_bits, uniform_like
from .filtering import check_reachable, check_rows, draw, forward_symbols, marginals, windowed
from .protocol import Beliefs, Episodes
from .registry import register
from .tokens import check_symbols


@dataclass(frozen=True)
class HiddenMarkov:
    """`initial` (S), `transition` (S, S), `emission` (S, X). `asks` for the "next" symbol or for the "state" behind
    the present one.

    Raises `BadMatrix` naming the row for rows that are negative, NaN or off one by more than 1e-6, and for unreachable
    states.
    """

    initial: Tensor
    transition: Tensor
    emission: Tensor
    length: int = 32
    asks: Literal["next", "state"] = "next"

    def __post_init__(self) -> None:
        initial = check_rows(torch.as_tensor(self.initial, dtype=torch.float64)[None], "initial")[0]
        transition, emission = check_rows(self.transition, "transition"), check_rows(self.emission, "emission")
        if transition.shape != (len(initial), len(initial)) or emission.dim() != 2 or len(emission) != len(initial):
            raise BadMatrix(
                f"initial {tuple(initial.shape)}, transition {tuple(transition.shape)} and emission "
                f"{tuple(emission.shape)} must be (S), (S, S) and (S, symbols)"
            )
        check_reachable(initial, transition)
        for name, value in (("initial", initial), ("transition", transition), ("emission", emission)):
            object.__setattr__(self, name, value)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        symbols = tuple(f"o{i}" for i in range(self.emission.shape[1]))
        return symbols + (self.hypotheses if self.asks == "state" else ())

    @property
    def outcomes(self) -> tuple[int, ...]:
        states, symbols = self.emission.shape
        return tuple(range(symbols)) if self.asks == "next" else tuple(range(symbols, symbols + states))

    @property
    def hypotheses(self) -> tuple[str, ...]:
        return tuple(f"s{i}" for i in range(len(self.initial)))

    def sample(self, n: int, generator: Generator, length: int | None = None) -> Episodes:
        """n episodes; every position is supervised."""
        length = self.length if length is None else length
        states, symbols = draw_chain(self.initial, self.transition, self.emission, n, length + 1, generator)
        targets = symbols[:, 1:] if self.asks == "next" else states[:, :-1]
        return Episodes(symbols[:, :-1].contiguous(), targets.contiguous(), {"states": states[:, :-1]}, self.outcomes)

    def filter(self, observations: Tensor) -> Tensor:
        """P(s_t | o_1…o_t), (n, L, S); raises `ImpossibleObservation` naming row and step."""
        return self._forward(observations)[0]

    def log_likelihood(self, observations: Tensor) -> Tensor:
        """log P(o_1…o_t) in nats, (n, L)."""
        return self._forward(observations)[1].T.log().cumsum(0).T

    def predictive(self, tokens: Tensor) -> Tensor:
        """(n, L, X): P(o_{t+1} | o_1…o_t), or with asks="state" (n, L, S): P(s_t | o_1…o_t)."""
        return self._answer(self.filter(tokens))

    def posterior(self, tokens: Tensor) -> Beliefs:
        return Beliefs(self.filter(tokens), "hypotheses")

    def entropy(self, tokens: Tensor, of: Literal["predictive", "posterior"] = "predictive") -> Tensor:
        return entropy_bits(self.predictive(tokens) if of == "predictive" else self.posterior(tokens).values)

    def baselines(self, tokens: Tensor) -> dict[str, Tensor]:
        """Uniform, the mean over positions, the marginal per position, and filters that see the last 1/2/3
        observations.
        """
        truth = self.predictive(tokens)
        by_position = self._answer(marginals(self.initial, self.transition, tokens.shape[1]))
        likelihood = self.emission.T[tokens]
        rivals = {
            "uniform": uniform_like(truth),
            "constant": constant_like(truth, by_position.mean(0)),
            "position": constant_like(truth, by_position),
        }
        for window in (1, 2, 3):
            seen = windowed(self.initial, self.transition, likelihood, window)
            rivals[f"last {window} observations"] = self._answer(seen)
        return rivals

    def _forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        check_symbols(observations, self.emission.shape[1], "observations")
        return forward_symbols(self.initial, self.transition, self.emission, observations)

    def _answer(self, beliefs: Tensor) -> Tensor:
        return beliefs if self.asks == "state" else beliefs @ self.transition @ self.emission


def draw_chain(
    initial: Tensor, transition: Tensor, emission: Tensor, n: int, length: int, generator: Generator
) -> tuple[Tensor, Tensor]:
    """States and symbols (n, length); matrices may carry a leading n."""
    rows = torch.arange(n)
    per_row = transition.dim() == 3
    state = draw(initial.expand(n, -1), generator)
    states, symbols = [], []
    for _ in range(length):
        states.append(state)
        symbols.append(draw(emission[rows, state] if per_row else emission[state], generator))
        state = draw(transition[rows, state] if per_row else transition[state], generator)
    return torch.stack(states, 1), torch.stack(symbols, 1)


@register("hmm-fixed")
def hmm_fixed() -> HiddenMarkov:
    """Three states, two forbidden transitions and one symbol that a state never shows."""
    return HiddenMarkov(
        torch.tensor([0.6, 0.3, 0.1]),
        torch.tensor([[0.8, 0.2, 0.0], [0.1, 0.7, 0.2], [0.3, 0.0, 0.7]]),
        torch.tensor([[0.9, 0.1, 0.0], [0.1, 0.8, 0.1], [0.25, 0.25, 0.5]]),
    )
