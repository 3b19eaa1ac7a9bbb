"""Exact filtering of hidden Markov states, vectorised over episodes and rescaled at every step.

Rescaling (each step's belief is divided by its sum, whose logarithm is the step's log-likelihood) stays exact with zero transitions and
over thousands of steps, where products of probabilities vanish. Rows of every matrix are the conditioning state.

Shapes: n episodes, L steps, S states, X symbols.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import BadMatrix, ImpossibleObservation

TOLERANCE = 1e-6
Rows = Tensor | Sequence[float] | Sequence[Sequence[float]]


def check_rows(matrix: Rows, name: str) -> Tensor:
    """`matrix` (..., S, X) in float64, rows divided by sums within 1e-6 of one; raises `BadMatrix` naming the first other row."""
    matrix = torch.as_tensor(matrix, dtype=torch.float64)
    sums = matrix.sum(-1)
    wrong = ~((sums - 1).abs() <= TOLERANCE) | (matrix < 0).any(-1) | matrix.isnan().any(-1)
    if wrong.any():
        row = tuple(int(i) for i in wrong.nonzero()[0])
        raise BadMatrix(
            f"{name}: row {row[0] if len(row) == 1 else row} is {[round(x, 6) for x in matrix[row].tolist()]} "
            f"and sums to {float(sums[row]):.9g}; rows must be non-negative and sum to one within {TOLERANCE}"
        )
    return matrix / sums[..., None]


def check_reachable(initial: Tensor, transition: Tensor) -> None:
    """Raise `BadMatrix` naming a state of positive probability under no history: (S) and (S, S) float64."""
    reached = initial > 0
    for _ in range(len(initial)):
        reached = reached | (transition[reached] > 0).any(0)
    if not reached.all():
        state = int((~reached).nonzero()[0])
        raise BadMatrix(f"state (row) {state} is reached from no initial state: remove it or give it a way in")


def forward(initial: Tensor, transition: Tensor, likelihood: Tensor) -> tuple[Tensor, Tensor]:
    """Beliefs P(s_t | o_1…o_t), (n, L, S), and log P(o_t | o_1…o_{t−1}) in nats, (n, L).

    `initial` (S) or (n, S) holds P(s_1), `transition` (S, S) or (n, S, S) holds P(s' | s) in row s, `likelihood` (n, L, S) holds
    P(o_t | s_t). The first step meets its observation without a transition (Rabiner 1989, eqs. 19–20, rescaled). Raises
    `ImpossibleObservation` with row and step.
    """
    n, length, states = likelihood.shape
    belief = initial.expand(n, states)
    by_step = likelihood.transpose(0, 1).contiguous()
    beliefs, scales = torch.empty_like(by_step), by_step.new_empty(length, n)
    for t in range(length):
        if t:
            belief = belief @ transition if transition.dim() == 2 else torch.bmm(belief[:, None], transition)[:, 0]
        joint = belief * by_step[t]
        scale = joint.sum(-1)
        belief = joint / scale[:, None]
        beliefs[t], scales[t] = belief, scale
    if not bool((scales > 0).all()):
        row, step = (int(i) for i in (~(scales > 0)).t().nonzero()[0])
        raise ImpossibleObservation(f"row {row}: the observation at step {step} has probability zero after those before it")
    return beliefs.transpose(0, 1), scales.log().t()


def marginals(initial: Tensor, transition: Tensor, length: int) -> Tensor:
    """State marginals P(s_t) without observations, (L, S) or (n, L, S)."""
    rows = [initial]
    for _ in range(length - 1):
        rows.append((rows[-1][..., None, :] @ transition)[..., 0, :])
    return torch.stack(rows, -2)


def windowed(initial: Tensor, transition: Tensor, likelihood: Tensor, window: int) -> Tensor:
    """Beliefs (n, L, S) of a filter that starts from the state marginal and sees the last `window` observations only."""
    n, length, states = likelihood.shape
    start = marginals(initial, transition, length).expand(n, length, states)
    beliefs = []
    for t in range(length):
        first = max(0, t - window + 1)
        seen, _ = forward(start[:, first], transition, likelihood[:, first : t + 1])
        beliefs.append(seen[:, -1])
    return torch.stack(beliefs, 1)


def draw(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """One index per row of `probabilities` (n, X), by inversion in float64: (n) int64."""
    uniform = torch.rand(len(probabilities), 1, generator=generator, dtype=torch.float64)
    cumulative = probabilities.double().cumsum(-1)
    index = (uniform * cumulative[:, -1:] >= cumulative).sum(-1)
    return index.clamp(max=probabilities.shape[-1] - 1)
