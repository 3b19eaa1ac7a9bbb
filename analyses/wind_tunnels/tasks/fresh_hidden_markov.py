"""Hidden Markov models with fresh matrices for every sequence, announced in a header of numbers.

The header lists the transition rows, then the emission rows, on a grid; the truth is computed from those numbers,
never from the draw behind them, so the model has all it needs. A number's token says which entry it is (entry e of
value g is token e·(G+1) + g), which leaves attention free to look entries up by content at any distance: lengths
beyond training then need no new positions.

Shapes: n episodes, M = S² + S·X header numbers, L tokens (header, then observations), S states, X symbols, G grid
steps in one.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from ..errors import MalformedTokens, TunnelError
from .bits import entropy_bits, never_asked, uniform_like
from .filtering import check_rows, forward, windowed
from .hidden_markov import draw_chain
from .protocol import Beliefs, Episodes
from .registry import register
from .tokens import check_shape


@dataclass(frozen=True)
class FreshHiddenMarkov:
    """`stickiness`·I + (1 − stickiness)·Dirichlet(1) transitions, Dirichlet(1) emissions, on a `grid`; uniform initial
    state.
    """

    states: int = 3
    symbols: int = 3
    observations: int = 16
    stickiness: float = 0.8
    grid: float = 0.05
    asks: Literal["next", "state"] = "state"

    def __post_init__(self) -> None:
        if not math.isclose(round(1 / self.grid) * self.grid, 1.0) or not 0 <= self.stickiness < 1:
            raise TunnelError(f"the grid ({self.grid}) must divide one, the stickiness ({self.stickiness}) be below it")

    @property
    def parts(self) -> int:
        """G, grid steps in one."""
        return round(1 / self.grid)

    @property
    def header(self) -> int:
        """M, numbers in the header."""
        return self.states * (self.states + self.symbols)

    @property
    def length(self) -> int:
        return self.header + self.observations

    @property
    def vocabulary(self) -> tuple[str, ...]:
        transitions = [f"T{i}{j}" for i in range(self.states) for j in range(self.states)]
        emissions = [f"E{i}{x}" for i in range(self.states) for x in range(self.symbols)]
        numbers = [f"{entry}={g * self.grid:.2f}" for entry in transitions + emissions for g in range(self.parts + 1)]
        return (*numbers, *(f"o{x}" for x in range(self.symbols)), *self.hypotheses)

    @property
    def outcomes(self) -> tuple[int, ...]:
        start = self.header * (self.parts + 1)
        states = range(start + self.symbols, start + self.symbols + self.states)
        return tuple(range(start, start + self.symbols)) if self.asks == "next" else tuple(states)

    @property
    def hypotheses(self) -> tuple[str, ...]:
        return tuple(f"s{i}" for i in range(self.states))

    def sample(self, n: int, generator: Generator, length: int | None = None) -> Episodes:
        """n episodes of `length` tokens; observations are drawn from the header's own matrices and all supervised."""
        length = self.length if length is None else length
        steps = max(0, length - self.header)
        sticky = torch.eye(self.states, dtype=torch.float64) * self.stickiness
        transition = self._on_grid(sticky + (1 - self.stickiness) * _simplex(n, self.states, self.states, generator))
        emission = self._on_grid(_simplex(n, self.states, self.symbols, generator))
        initial = torch.full((self.states,), 1 / self.states, dtype=torch.float64)
        counts = torch.cat((transition.flatten(1), emission.flatten(1)), 1)
        numbers = counts + torch.arange(self.header) * (self.parts + 1)
        states, symbols = draw_chain(initial, transition / self.parts, emission / self.parts, n, steps + 1, generator)
        start = self.header * (self.parts + 1)
        tokens = torch.cat((numbers, symbols[:, :steps] + start), 1)[:, :length].contiguous()
        targets = torch.full(tokens.shape, -1)
        targets[:, self.header :] = symbols[:, 1:] if self.asks == "next" else states[:, :steps]
        return Episodes(tokens, targets, {"states": states[:, :steps]}, self.outcomes)

    def matrices(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Transition (n, S, S) and emission (n, S, X) as the header states them; raises naming the row at fault."""
        counts = tokens[:, : self.header] - torch.arange(min(self.header, tokens.shape[1])) * (self.parts + 1)
        misplaced = ((counts < 0) | (counts > self.parts)).any(1)
        if misplaced.any():
            raise MalformedTokens(
                f"row {int(misplaced.nonzero()[0])}: the header must list its {self.header} numbers in order"
            )
        if tokens.shape[1] < self.header:
            raise MalformedTokens(f"{tokens.shape[1]} tokens end inside the header of {self.header} numbers")
        numbers = counts.double() * self.grid
        split = self.states**2
        transition = check_rows(numbers[:, :split].unflatten(1, (self.states, self.states)), "header transition")
        emission = check_rows(numbers[:, split:].unflatten(1, (self.states, self.symbols)), "header emission")
        return transition, emission

    def filter(self, tokens: Tensor) -> Tensor:
        """P(s_t | header, o_1…o_t), (n, L − M, S)."""
        initial, transition, likelihood = self._read(tokens)
        return forward(initial, transition, likelihood)[0]

    def predictive(self, tokens: Tensor) -> Tensor:
        """(n, L, O), NaN over the header: the state posterior, or the next symbol's distribution with asks="next"."""
        return self._answer(tokens, self._beliefs(tokens))

    def posterior(self, tokens: Tensor) -> Beliefs:
        """Filtering posterior over states, NaN over the header."""
        values = never_asked(*tokens.shape, self.states)
        values[:, self.header :] = self._beliefs(tokens)
        return Beliefs(values, "hypotheses")

    def entropy(self, tokens: Tensor, of: Literal["predictive", "posterior"] = "predictive") -> Tensor:
        return entropy_bits(self.predictive(tokens) if of == "predictive" else self.posterior(tokens).values)

    def baselines(self, tokens: Tensor) -> dict[str, Tensor]:
        """Uniform (also the best constant and position, by symmetry) and filters that read the header but see the last
        1/2/3 observations.
        """
        truth = self.predictive(tokens)
        rivals = {"uniform": uniform_like(truth), "constant": uniform_like(truth), "position": uniform_like(truth)}
        for window in (1, 2, 3):
            beliefs = self._beliefs(tokens)
            if tokens.shape[1] > self.header:
                beliefs = windowed(*self._read(tokens), window)
            rivals[f"last {window} observations"] = self._answer(tokens, beliefs)
        return rivals

    def _beliefs(self, tokens: Tensor) -> Tensor:
        check_shape(tokens)
        if tokens.shape[1] <= self.header:
            return torch.empty(len(tokens), 0, self.states, dtype=torch.float64)
        return self.filter(tokens)

    def _answer(self, tokens: Tensor, beliefs: Tensor) -> Tensor:
        table = never_asked(*tokens.shape, self.states if self.asks == "state" else self.symbols)
        if tokens.shape[1] > self.header:
            if self.asks == "next":
                transition, emission = self.matrices(tokens)
                beliefs = beliefs @ transition @ emission
            table[:, self.header :] = beliefs
        return table

    def _read(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Initial (n, S), transition (n, S, S), likelihood (n, L − M, S)."""
        transition, emission = self.matrices(tokens)
        observed = tokens[:, self.header :] - self.header * (self.parts + 1)
        outside = ((observed < 0) | (observed >= self.symbols)).any(1)
        if outside.any():
            raise MalformedTokens(f"row {int(outside.nonzero()[0])}: only observations may follow the header")
        index = observed[:, None].expand(-1, self.states, -1)
        likelihood = emission.gather(2, index).transpose(1, 2)
        initial = torch.full((len(tokens), self.states), 1 / self.states, dtype=torch.float64)
        return initial, transition, likelihood

    def _on_grid(self, rows: Tensor) -> Tensor:
        """Grid counts (…, X) that sum to G exactly: floors, and the missing steps to the largest remainders."""
        scaled = rows * self.parts
        counts = (scaled + 1e-9).floor()
        missing = (self.parts - counts.sum(-1, keepdim=True)).round()
        rank = (scaled - counts).argsort(-1, descending=True).argsort(-1)
        return (counts + (rank < missing)).long()


def _simplex(n: int, rows: int, columns: int, generator: Generator) -> Tensor:
    """(n, rows, columns) rows from Dirichlet(1)."""
    exponential = -torch.rand(n, rows, columns, generator=generator, dtype=torch.float64).clamp(min=1e-300).log()
    return exponential / exponential.sum(-1, keepdim=True)


@register("hmm")
def hmm() -> FreshHiddenMarkov:
    return FreshHiddenMarkov()


@register("hmm-next")
def hmm_next() -> FreshHiddenMarkov:
    return FreshHiddenMarkov(asks="next")
