"""Exact filtering of hidden Markov states, vectorised over episodes and rescaled at every step.

Rescaling (each step's belief is divided by its sum, whose logarithm is the step's log-likelihood) stays exact with
zero transitions and over thousands of steps, where products of probabilities vanish. Rows of every matrix are the
conditioning state.

Shapes: n episodes, L steps, S states, X symbols.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import BadMatrix, ImpossibleObservation

TOLERANCE = 1e-6
Rows = Tensor | Sequence[float] | Sequence[Sequence[float]]


def check_rows(matrix: Rows, name: str) -> Tensor:
    """`matrix` (..., S, X) in float64, rows divided by sums within 1e-6 of one; raises `BadMatrix` naming the first
    other row.
    """
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
    """Beliefs P(s_t | o_1…o_t), (n, L, S), and P(o_t | o_1…o_{t−1}), (n, L).

    `initial` (S) or (n, S) holds P(s_1), `transition` (S, S) or (n, S, S) holds P(s' | s) in row s, `likelihood` (n,
    L, S) holds P(o_t | s_t). The first step meets its observation without a transition (Rabiner 1989, eqs. 19–20,
    rescaled). Raises `ImpossibleObservation` with row and step.
    """
    n, length, states = likelihood.shape
    by_step = likelihood.permute(1, 2, 0)
    return _walk(initial, transition, by_step.__getitem__, (length, states, n))


def forward_symbols(
    initial: Tensor, transition: Tensor, emission: Tensor, observations: Tensor
) -> tuple[Tensor, Tensor]:
    """`forward` for symbols (n, L) under one `emission` (S, X), looked up a step at a time."""
    by_step = observations.T.contiguous()
    shape = (len(by_step), len(emission), len(observations))
    return _walk(initial, transition, lambda t: emission.gather(1, by_step[t].expand(len(emission), -1)), shape)


def _walk(
    initial: Tensor, transition: Tensor, likelihood: Callable[[int], Tensor], shape: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """States lead and episodes run along memory, so that a step is one small matrix times one long row per state."""
    length, states, n = shape
    beliefs = torch.empty(length, states, n, dtype=torch.float64)
    scales = torch.empty(length, n, dtype=torch.float64)
    shared, turned = transition.dim() == 2, transition.mT.contiguous()
    for t in range(length):
        belief = beliefs[t]
        if t == 0:
            belief.copy_(initial[:, None] if initial.dim() == 1 else initial.T)
        elif shared:
            torch.mm(turned, beliefs[t - 1], out=belief)
        else:
            belief.copy_(torch.bmm(turned, beliefs[t - 1].T[..., None])[..., 0].T)
        belief.mul_(likelihood(t))
        torch.sum(belief, 0, out=scales[t])
        belief.div_(scales[t])
    if not float(scales.min()) > 0:
        row, step = (int(i) for i in (~(scales > 0)).t().nonzero()[0])
        raise ImpossibleObservation(
            f"row {row}: the observation at step {step} has probability zero after those before it"
        )
    return beliefs.permute(2, 0, 1), scales.t()


def marginals(initial: Tensor, transition: Tensor, length: int) -> Tensor:
    """State marginals P(s_t) without observations, (L, S) or (n, L, S)."""
    rows = [initial]
    for _ in range(length - 1):
        rows.append((rows[-1][..., None, :] @ transition)[..., 0, :])
    return torch.stack(rows, -2)


def windowed(initial: Tensor, transition: Tensor, likelihood: Tensor, window: int) -> Tensor:
    """Beliefs (n, L, S) of a filter that starts from the state marginal and sees the last `window` observations."""
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
