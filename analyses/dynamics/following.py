"""Does a real optimizer step follow the law? Between a ceiling and a null, per head.

The correlation of advantage with the realised Δα is near zero even where the law holds exactly, because a free score step
moves α_ij by Δα*_ij = α_ij (α_ij A_ij − Σ_k α_ik² A_ik). So, per head, ρ is the within-row correlation of Δα* with the
realised Δα over visible keys, averaged over rows; the ceiling is ρ for an infinitesimal plain gradient step of the same
model, whose shared W_Q and W_K permit no more; the null takes u from targets permuted across sequences, which keeps α,
distance and row length:

    following = (ρ − ρ_null) / (ρ_ceiling − ρ_null)

In a whole model a plain gradient step moves α mostly through what the head reads, hardly through its own scores: the
ceiling can sink to the null, and then there is no score. So `ceiling_routing`, of a step on W_Q and W_K alone, and the
score under it, `following_routing`, stand beside them.

Values: cos(Δv_j, −m_j) less its mean over permuted tokens (the m_j share a direction), and cos(Δv_j, −Σ_k (x_j·x_k) m_k),
which a plain gradient step on W_V makes 1.

Shapes: B batch, H query heads, K key/value heads, T positions, V value width, W input width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor, nn

from .attention_calls import Loss, gradients, heads, moved
from .roles import ROUTING, parts

FEWEST = 8  # visible keys, below which a row has no correlation worth the name
NARROW = 0.05  # a ceiling less than this above the null leaves nothing to be followed
TINY = 3e-4  # of the largest parameter: small, yet above the float32 noise of norms that cast down; central differences


def law_change(attention: Tensor, advantage: Tensor) -> Tensor:
    """Δα* per unit of learning rate: what a gradient step on free scores does to α, (…,T,T)."""
    square = attention**2 * advantage
    return attention * (attention * advantage - square.sum(-1, keepdim=True))


def centred(tensor: Tensor, visible: Tensor) -> Tensor:
    """(…,T,T) less the mean of its row over the visible keys, 0 elsewhere."""
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    kept = torch.where(visible, tensor, 0.0)
    return torch.where(visible, kept - kept.sum(-1, keepdim=True) / count, 0.0)


def row_correlation(one: Tensor, other: Tensor, visible: Tensor, fewest: int = FEWEST) -> Tensor:
    """Mean over rows of the correlation over visible keys, (B,H,T,T) → (H,); NaN where no row can be used.

    Rows count that see `fewest` keys or more and in which both vary.
    """
    visible = visible.expand_as(one)
    count = visible.sum(-1, keepdim=True)
    a, b = centred(one, visible), centred(other, visible)
    norms = a.norm(dim=-1) * b.norm(dim=-1)
    floor = 1e-12 * one.abs().amax() * other.abs().amax()
    usable = (count[..., 0] >= fewest) & (norms > floor)
    correlation = torch.where(usable, (a * b).sum(-1) / torch.where(usable, norms, 1.0), 0.0)
    return correlation.sum((0, 2)) / usable.sum((0, 2))


def score(rho: float, ceiling: float, null: float) -> float:
    """(ρ − ρ_null) / (ρ_ceiling − ρ_null); NaN where the ceiling is not clearly above the null."""
    room = ceiling - null
    return (rho - null) / room if room > NARROW else float("nan")


def value_cosine(change: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cos(Δv_j, −m_j) over tokens, and its exact mean over permutations of the tokens; (B,K,T,V) → (K,), (K,)."""
    one, other = (_unit(tensor).transpose(0, 1).flatten(1, 2) for tensor in (change, -gradient))
    return (one * other).sum(-1).mean(1), (one.mean(1) * other.mean(1)).sum(-1)


def shared_direction(inputs: Tensor, gradient: Tensor, bias: bool = False) -> Tensor:
    """−Σ_k (x_j·x_k) m_k over the tokens of the whole batch, (B,K,T,V): Δv of a gradient step on W_V.

    Args:
        inputs (B,T,W): x. gradient (B,K,T,V): m. bias: the projection has one, which adds 1 to every product.
    """
    kernel = torch.einsum("btw,bkto->kwo", inputs, gradient)
    change = -torch.einsum("btw,kwo->bkto", inputs, kernel)
    return change - gradient.sum((0, 2), keepdim=True) if bias else change


def _unit(tensor: Tensor) -> Tensor:
    norm = tensor.norm(dim=-1, keepdim=True)
    return tensor / torch.where(norm > 0, norm, 1.0)


@dataclass(frozen=True, eq=False)
class Batch:
    """A fixed batch as two losses of a model: `loss`, summed over targets, and the same with permuted targets.

    `nulls`: losses whose targets were permuted across sequences, one per draw.
    """

    loss: Loss
    nulls: tuple[Loss, ...]


def follow(
    before: nn.Module, step: Mapping[str, Tensor], trained_on: Loss, batches: Mapping[str, Batch]
) -> pd.DataFrame:
    """One row per batch and head: how a real step followed the law.

    Args:
        before: the float64 model before the step (`attention_calls.double`).
        step: what the optimizer really did, by parameter name (`attention_calls.step_of`).
        trained_on: the loss whose gradient made the step.
        batches: name → batch on which to look, such as the one that made the step and a held-out one.

    Columns: batch, module, layer, head; `rho`, `ceiling`, `ceiling_routing`, `null`, `following`, `following_routing`;
    `value_cosine`, `value_null` (permuted tokens), `value_following` (their difference) and `value_shared`.
    """
    after = moved(before, dict(step))
    before.zero_grad(set_to_none=True)
    trained_on(before).backward()
    slope = gradients(before)
    routing = {name: torch.zeros_like(gradient) for name, gradient in slope.items()}
    for part in parts(before):
        if part.role in ROUTING and part.parameter in slope:
            part.of(routing[part.parameter]).copy_(part.of(slope[part.parameter]))
    down, up = _around(before, slope)
    routed_down, routed_up = _around(before, routing)
    rows = []
    for name, batch in batches.items():
        now = heads(before, batch.loss)
        nulls = [heads(before, null) for null in batch.nulls]
        realised, below, above, routed_below, routed_above = (
            heads(model, batch.loss) for model in (after, down, up, routed_down, routed_up)
        )
        for module, head in now.items():
            expected = law_change(head.attention, head.advantage)
            change = realised[module].attention - head.attention
            plain = (below[module].attention - above[module].attention) / 2
            rho = row_correlation(expected, change, head.visible)
            ceiling = row_correlation(expected, plain, head.visible)
            routed = routed_below[module].attention - routed_above[module].attention
            ceiling_routing = row_correlation(expected, routed, head.visible)
            null = torch.stack(
                [
                    row_correlation(law_change(head.attention, other[module].advantage), change, head.visible)
                    for other in nulls
                ]
            ).mean(0)
            values = realised[module].value - head.value
            cosine, permuted = value_cosine(values, head.value_gradient)
            shared = shared_direction(head.inputs, head.value_gradient, _biased(before, module))
            along = (_unit(values) * _unit(shared)).sum(-1).mean((0, 2))
            for place in range(head.attention.shape[1]):
                group = place // head.group
                figures = [float(part[place]) for part in (rho, ceiling, null)]
                rows.append(
                    {
                        "batch": name,
                        "module": module,
                        "layer": head.layer,
                        "head": place,
                        **dict(zip(("rho", "ceiling", "null"), figures, strict=True)),
                        "ceiling_routing": float(ceiling_routing[place]),
                        "following": score(*figures),
                        "following_routing": score(figures[0], float(ceiling_routing[place]), figures[2]),
                        "value_cosine": float(cosine[group]),
                        "value_null": float(permuted[group]),
                        "value_following": float(cosine[group] - permuted[group]),
                        "value_shared": float(along[group]),
                    }
                )
    return pd.DataFrame(rows)


def pooled(table: pd.DataFrame) -> dict[str, float]:
    """All heads of a table together: means of ρ, ceilings and null, and the scores of the means."""
    names = ["rho", "ceiling", "ceiling_routing", "null", "value_following", "value_cosine", "value_shared"]
    mean = table[names].mean()
    found = {str(name): float(value) for name, value in mean.items()}
    rho, null = found["rho"], found["null"]
    return found | {
        "following": score(rho, found["ceiling"], null),
        "following_routing": score(rho, found["ceiling_routing"], null),
    }


def _around(before: nn.Module, slope: Mapping[str, Tensor]) -> tuple[nn.Module, nn.Module]:
    """The model an infinitesimal step down and one up a gradient."""
    largest = max(float(parameter.detach().abs().max()) for parameter in before.parameters())
    steepest = max(float(gradient.abs().max()) for gradient in slope.values())
    small = TINY * largest / steepest if steepest else 0.0
    return moved(before, dict(slope), -small), moved(before, dict(slope), small)


def _biased(model: nn.Module, module: str) -> bool:
    attention = model.get_submodule(module)
    projection = getattr(attention, "v_proj", None) or getattr(attention, "c_attn", None)
    return getattr(projection, "bias", None) is not None
