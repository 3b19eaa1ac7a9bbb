"""The arms of the EM experiment, all through one fused attention call with seeds in the batch dimension.

Widths are padded to 16, where the CPU kernel is fast, and one padding channel of the values is put to use: its values
are zero and its upstream gradient is one, so the backward that gives m_j = Σ_i α_ij u_i gives N_j = Σ_i α_ij beside it,
and no T × T tensor is ever made.

An arm is one row of `ARMS`. Steps are counted in iterations and in passes (forward and backward); a closed form needs two
passes an iteration, because responsibilities are recomputed after routing has moved.

Shapes: S seeds, T positions, d input width, V value width, C symbols.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .chain import KEYS, VALUES, Sequences, Weights, figures, first_weights
from .m_step import curvature, matrix_step

PADDED = 16
RATE = 0.01
CURVE = 100  # held-out losses and value matrices kept per run


@dataclass(frozen=True)
class Arm:
    """One way of training. `rates` multiply .01 on W_Q, W_K, W_V, W_O; `rule` says what else happens.

    Rules: "gradient"; "length" (the plain gradient of all matrices, every step as long as that step of arm `follows` on
    the same seed); "closed" (routing and output by gradient, then the M-step); "closed_length" (the same, W_V along its
    plain gradient as far as the M-step would go from there); "adam" (`rates` is the learning rate of all).
    """

    name: str
    rule: str
    rates: tuple[float, float, float, float]
    says: str
    follows: str | None = None

    @property
    def passes(self) -> int:
        return 2 if self.rule in ("closed", "closed_length") else 1


ARMS = (
    Arm("sgd", "gradient", (1, 1, 1, 1), "SGD, .01 everywhere"),
    Arm("values_x10", "gradient", (1, 1, 10, 1), 'values × 10 (released "EM-like")'),
    Arm("closed_form", "closed", (1, 1, 0, 1), "M-step in closed form"),
    Arm("closed_form_length", "closed_length", (1, 1, 0, 1), "its step length, plain gradient on W_V"),
    Arm("output_x10", "gradient", (1, 1, 1, 10), "output × 10"),
    Arm("all_x10", "gradient", (10, 10, 10, 10), "all × 10"),
    Arm("matched_length", "length", (1, 1, 1, 1), "step length of values × 10, all matrices", "values_x10"),
    Arm("routing_frozen", "gradient", (0, 0, 10, 10), "values and output × 10, routing frozen"),
)
ADAM = tuple(Arm("adam", "adam", (rate,) * 4, f"Adam {rate:g}") for rate in (1e-3, 3e-3, 1e-2))


@dataclass(frozen=True)
class Trained:
    """What one arm left, per seed.

    Attributes:
        train, held_out: figures after the last step, each (S,).
        losses (S, steps + 1): training loss after 0, 1, … steps, nats; `lengths` alike: cumulative length of all steps.
        held_out_steps, held_out_losses (S, points): the held-out loss on the way.
        values (points, S, d, V): W_V at the same steps.
    """

    arm: Arm
    train: dict[str, Tensor]
    held_out: dict[str, Tensor]
    losses: Tensor
    lengths: Tensor
    held_out_steps: list[int]
    held_out_losses: Tensor
    values: Tensor


def forward(weights: Weights, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (S,T,C), the head's output o (S,T,16) and the values (S,T,16); channels from V on are padding."""
    query, key = (functional.pad(matrix, (0, PADDED - KEYS)) for matrix in (weights.query, weights.key))
    value = inputs @ functional.pad(weights.value, (0, PADDED - VALUES))
    if not value.requires_grad:
        value = value.requires_grad_(torch.is_grad_enabled())
    read = functional.scaled_dot_product_attention(
        (inputs @ query)[:, None], (inputs @ key)[:, None], value[:, None], is_causal=True, scale=KEYS**-0.5
    )[:, 0]
    return read[..., :VALUES] @ weights.output, read, value


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """(S,) mean cross-entropy of each seed's sequence, nats."""
    rows = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return rows.unflatten(0, targets.shape).mean(-1)


def responsibilities(weights: Weights, data: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    """Loss (S,) mean; m_j (S,T,V) of the summed loss, N_j (S,T): the padding channel carries the second."""
    with torch.enable_grad():
        logits, read, value = forward(weights, data.inputs)
        loss = losses(logits, data.targets)
        positions = data.targets.shape[-1]
        (gradient,) = torch.autograd.grad(positions * loss.sum() + read[..., VALUES].sum(), value)
    return loss.detach(), gradient[..., :VALUES], gradient[..., VALUES]


def train(
    arm: Arm,
    seeds: tuple[int, ...],
    data: Sequences,
    fresh: Sequences,
    steps: int,
    *,
    damping: float = 1.0,
    lengths: Tensor | None = None,
    turned: float | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Trained:
    """Run one arm from the first weights of `seeds` for `steps` iterations, every seed at once.

    Args:
        data, fresh: training and held-out sequences of the same seeds.
        damping: τ in (0, 1], the part of each M-step that is taken.
        lengths (S, steps + 1): cumulative step lengths to keep to, for an arm that follows another.
        turned: stop early, once the mean held-out loss is this far (nats) above its minimum.
        tick: called after every iteration.
    """
    weights = [matrix.requires_grad_() for matrix in first_weights(seeds).all]
    adam = torch.optim.Adam(weights, lr=arm.rates[0]) if arm.rule == "adam" else None
    marks = sorted({round(point * steps / CURVE) for point in range(CURVE + 1)})
    allowed = None if lengths is None else lengths.diff(dim=1)
    curve, gone, along, kept = [], [torch.zeros(len(seeds))], [], []
    for step in range(steps + 1):
        if step in marks:
            with torch.no_grad():
                along.append(losses(forward(Weights(*weights), fresh.inputs)[0], fresh.targets))
            kept.append(weights[2].detach().clone())
        loss = losses(forward(Weights(*weights), data.inputs)[0], data.targets)
        curve.append(loss.detach())
        if step == steps or (turned is not None and _has_turned(along, turned)):
            break
        gradients = torch.autograd.grad(loss.sum(), weights)
        before = [matrix.detach().clone() for matrix in weights]
        with torch.no_grad():
            _move(arm, weights, gradients, adam, data, damping, None if allowed is None else allowed[:, step])
            moved = sum(((after - old) ** 2).sum((-2, -1)) for after, old in zip(weights, before, strict=True))
        gone.append(gone[-1] + torch.as_tensor(moved).sqrt())
        tick()
    with torch.no_grad():
        ends = [figures(forward(Weights(*weights), part.inputs)[0], part) for part in (data, fresh)]
    return Trained(
        arm,
        ends[0],
        ends[1],
        torch.stack(curve, 1),
        torch.stack(gone, 1),
        marks[: len(along)],
        torch.stack(along, 1),
        torch.stack(kept),
    )


def _move(
    arm: Arm,
    weights: list[Tensor],
    gradients: tuple[Tensor, ...],
    adam: torch.optim.Adam | None,
    data: Sequences,
    damping: float,
    allowed: Tensor | None,
) -> None:
    """One iteration, in place."""
    if adam is not None:
        for matrix, gradient in zip(weights, gradients, strict=True):
            matrix.grad = gradient
        adam.step()
        return
    changes = [-RATE * rate * gradient for rate, gradient in zip(arm.rates, gradients, strict=True)]
    if allowed is not None:
        factor = allowed / _length(changes)
        changes = [factor[:, None, None] * change for change in changes]
    for matrix, change in zip(weights, changes, strict=True):
        matrix += change
    if arm.rule in ("closed", "closed_length"):
        _, gradient, usage = responsibilities(Weights(*weights), data)
        change = damping * matrix_step(data.inputs, gradient, usage, curvature(weights[3]))
        if arm.rule == "closed_length":
            plain_step = -(data.inputs.mT @ gradient)
            change = plain_step * (_length([change]) / _length([plain_step]))[:, None, None]
        weights[2] += change.to(weights[2].dtype)


def _has_turned(along: list[Tensor], by: float) -> bool:
    means = torch.stack(along).mean(1)
    return bool(means[-1] > means.min() + by)


def _length(changes: list[Tensor]) -> Tensor:
    """(S,) Frobenius norm of all matrices together."""
    return torch.stack([(change**2).sum((-2, -1)) for change in changes]).sum(0).sqrt()
