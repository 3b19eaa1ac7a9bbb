"""Belief-state processes: Mess3 and RRXOR, whose exact beliefs draw known pictures in the simplex.

A process is a set of symbol-labelled matrices T[x][i, j] = P(emit x, go to j | state i). Its mixed-state presentation
is the chain of beliefs η → η T[x] / (η T[x] 1); a transformer trained on next symbols is expected to hold η (Shai et
al. 2024, arXiv 2405.15943).

Shapes: n episodes, L tokens, S states, X symbols.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Generator, Tensor

from ..errors import BadMatrix, ImpossibleObservation
from .bits import constant_like, entropy_bits, uniform_like
from .filtering import Rows, check_reachable, check_rows, draw
from .protocol import Beliefs, Episodes
from .registry import register
from .tokens import check_symbols


@dataclass(frozen=True)
class BeliefProcess:
    """`labelled` (X, S, S): P(emit x, go to column | row). Episodes start from the stationary distribution unless
    `initial` (S) is given.
    """

    labelled: Tensor
    states: tuple[str, ...] = ()
    length: int = 10
    initial: Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        labelled = torch.as_tensor(self.labelled, dtype=torch.float64)
        if labelled.dim() != 3 or labelled.shape[1] != labelled.shape[2]:
            raise BadMatrix(f"labelled must be (symbols, states, states), not {tuple(labelled.shape)}")
        symbols, count, _ = labelled.shape
        rows = check_rows(labelled.permute(1, 0, 2).reshape(count, -1), "labelled")
        labelled = rows.reshape(count, symbols, count).permute(1, 0, 2)
        initial = torch.as_tensor(self.initial, dtype=torch.float64)
        initial = check_rows(initial[None], "initial")[0] if initial.numel() else stationary(labelled.sum(0))
        check_reachable(initial, labelled.sum(0))
        object.__setattr__(self, "labelled", labelled)
        object.__setattr__(self, "initial", initial)
        object.__setattr__(self, "states", self.states or tuple(f"s{i}" for i in range(count)))

    @classmethod
    def mess3(cls, clarity: float = 0.85, exchange: float = 0.05, length: int = 10) -> "BeliefProcess":
        """Three states; state i shows symbol i with probability `clarity` and moves to each other state with
        probability `exchange`.

        With the defaults the entries are .765, .0425, .00375 and .0675 (Shai et al. 2024, appendix on Mess3).
        """
        show = torch.full((3, 3), (1 - clarity) / 2, dtype=torch.float64).fill_diagonal_(clarity)
        move = torch.full((3, 3), exchange, dtype=torch.float64).fill_diagonal_(1 - 2 * exchange)
        # The symbol is that of the state arrived in: T[x][i, j] = move[i, j] · show[j, x].
        return cls(torch.einsum("ij,jx->xij", move, show), ("A", "B", "C"), length)

    @classmethod
    def rrxor(cls, length: int = 10) -> "BeliefProcess":
        """Two random bits, then their exclusive or, again and again; five states: start, after 0, after 1, one due,
        nought due.
        """
        labelled = torch.zeros(2, 5, 5, dtype=torch.float64)
        start, zero, one, due_one, due_zero = range(5)
        labelled[0, start, zero] = labelled[1, start, one] = 0.5
        labelled[0, zero, due_zero] = labelled[1, zero, due_one] = 0.5
        labelled[0, one, due_one] = labelled[1, one, due_zero] = 0.5
        labelled[1, due_one, start] = labelled[0, due_zero, start] = 1.0
        return cls(labelled, ("start", "after 0", "after 1", "one due", "nought due"), length)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return tuple(str(x) for x in range(len(self.labelled)))

    @property
    def outcomes(self) -> tuple[int, ...]:
        return tuple(range(len(self.labelled)))

    @property
    def hypotheses(self) -> tuple[str, ...]:
        return self.states

    def sample(self, n: int, generator: Generator, length: int | None = None) -> Episodes:
        """n episodes; every position is supervised with the next symbol."""
        length = self.length if length is None else length
        symbols, count, _ = self.labelled.shape
        state = draw(self.initial.expand(n, count), generator)
        flat = self.labelled.permute(1, 0, 2).reshape(count, symbols * count)
        emitted, visited = [], [state]
        for _ in range(length + 1):
            choice = draw(flat[state], generator)
            emitted.append(choice // count)
            state = choice % count
            visited.append(state)
        stream = torch.stack(emitted, 1)
        latents = {"states": torch.stack(visited[1:-1], 1)}
        return Episodes(stream[:, :-1].contiguous(), stream[:, 1:].contiguous(), latents, self.outcomes)

    def beliefs(self, tokens: Tensor) -> Tensor:
        """η after each token, (n, L, S); raises `ImpossibleObservation` naming the row."""
        return self._walk(self.initial.expand(len(tokens), -1), tokens)

    def predictive(self, tokens: Tensor) -> Tensor:
        """(n, L, X): P(x | η) = η T[x] 1."""
        return self.beliefs(tokens) @ self.labelled.sum(-1).T

    def posterior(self, tokens: Tensor) -> Beliefs:
        return Beliefs(self.beliefs(tokens), "hypotheses")

    def entropy(self, tokens: Tensor, of: Literal["predictive", "posterior"] = "predictive") -> Tensor:
        return entropy_bits(self.predictive(tokens) if of == "predictive" else self.beliefs(tokens))

    def presentation(self, depth: int, decimals: int = 9) -> Tensor:
        """The distinct beliefs reachable in at most `depth` symbols, (M, S): vertices of the mixed-state presentation.

        Beliefs equal to `decimals` places count as one.
        """
        known: dict[tuple[float, ...], Tensor] = {}
        layer = self.initial[None]
        for step in range(depth + 1):
            if step:
                joint = torch.einsum("ms,xst->mxt", layer, self.labelled).flatten(0, 1)
                mass = joint.sum(-1, keepdim=True)
                layer = joint[mass[:, 0] > 0] / mass[mass[:, 0] > 0]
            places = (layer.round(decimals=decimals) + 0.0).tolist()
            fresh = {
                tuple(place): belief for place, belief in zip(places, layer, strict=True) if tuple(place) not in known
            }
            if not fresh:
                break
            known |= fresh
            layer = torch.stack(list(fresh.values()))
        return torch.stack(list(known.values()))

    def baselines(self, tokens: Tensor) -> dict[str, Tensor]:
        """Uniform, the stationary symbol frequencies, the marginal per position, and filters that see the last 1/2/3
        symbols.
        """
        truth = self.predictive(tokens)
        emission = self.labelled.sum(-1).T
        start = [self.initial]
        for _ in range(tokens.shape[1]):
            start.append(start[-1] @ self.labelled.sum(0))
        by_position = torch.stack(start[1:]) @ emission
        rivals = {
            "uniform": uniform_like(truth),
            "constant": constant_like(truth, by_position.mean(0)),
            "position": constant_like(truth, by_position),
        }
        for window in (1, 2, 3):
            rows = []
            for t in range(tokens.shape[1]):
                first = max(0, t - window + 1)
                rows.append(
                    self._walk(start[first].expand(len(tokens), -1), tokens[:, first : t + 1])[:, -1] @ emission
                )
            rivals[f"last {window} symbols"] = torch.stack(rows, 1)
        return rivals

    def _walk(self, belief: Tensor, tokens: Tensor) -> Tensor:
        check_symbols(tokens, len(self.labelled))
        walked = []
        for t in range(tokens.shape[1]):
            joint = torch.bmm(belief[:, None], self.labelled[tokens[:, t]])[:, 0]
            mass = joint.sum(-1, keepdim=True)
            if not bool((mass > 0).all()):
                row = int((mass[:, 0] <= 0).nonzero()[0])
                raise ImpossibleObservation(f"row {row}: symbol {int(tokens[row, t])} at step {t} has probability zero")
            belief = joint / mass
            walked.append(belief)
        return torch.stack(walked, 1)


def stationary(transition: Rows) -> Tensor:
    """The stationary distribution (S) of an ergodic chain (S, S), periodic or not; raises `BadMatrix` where it is not
    unique.
    """
    transition = check_rows(transition, "transition")
    count = len(transition)
    system = torch.cat(
        (transition.T - torch.eye(count, dtype=torch.float64), torch.ones(1, count, dtype=torch.float64))
    )
    if torch.linalg.matrix_rank(system) < count:
        raise BadMatrix("several stationary distributions exist: give `initial`")
    right = torch.zeros(count + 1, 1, dtype=torch.float64)
    right[-1] = 1.0
    solution = torch.linalg.lstsq(system, right).solution[:, 0]
    return torch.where(solution.abs() < math.ulp(1.0) * count, 0.0, solution).clamp(min=0)


@register("mess3")
def mess3() -> BeliefProcess:
    return BeliefProcess.mess3()


@register("rrxor")
def rrxor() -> BeliefProcess:
    return BeliefProcess.rrxor()
