"""The equations, over full Q × S tensors: readable, differentiable, and the definition of every number.

One head, query i, keys j in V_i (the visible ones), after "Gradient Dynamics of Attention" (arXiv 2512.22473):

    s_ij = scale · q_i·k_j (+ bias), capped where the model caps it
    α_i  = softmax_j(s_i)          o_i = Σ_j w_ij v_j          u_i = ∂L/∂o_i          b_ij = u_i·v_j
    ∂L/∂s_ij = D_ij = w_ij b_ij − α_ij u_i·o_i     (= α_ij (b_ij − E_i) without dropout, E_i = Σ_j α_ij b_ij)
    ∂L/∂v_j  = m_j  = Σ_i w_ij u_i
    A_ij = E_i − b_ij: positive where more attention would lower the loss

w is α after attention dropout, α itself without. `blocks.py` computes the same numbers in O(T) memory; the equality
of the two and of autograd, in float64, is the test of all three.

Shapes: B batch, H query heads, K key/value heads, Q query positions, S key positions, D head width, V value width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import einsum, repeat
from torch import Tensor

from ...hooks.call import AttentionCall
from ...hooks.visibility import HIDDEN
from .knockout import knockout
from .vectors import Vectors


@dataclass(frozen=True, eq=False)
class Law:
    """The law of one call; every field is (B,H,Q,S) unless it says otherwise.

    Attributes:
        visible: bool, the keys of V_i.
        attention: α; `weights`: w, after dropout.
        compatibility: b_ij = u_i·v_j, in units of the loss.
        expected: (B,H,Q) E_i = Σ_j α_ij b_ij.
        advantage: A_ij = E_i − b_ij, 0 where hidden.
        score_gradient: D_ij = ∂L/∂s_ij of the score that enters the softmax (after cap and bias).
        raw_score_gradient: ∂L/∂ of the score before the cap, D_ij (1 − (c_ij/cap)²).
        value_gradient: (B,H,S,V) m_j of this query head alone; ∂L/∂v_j of a key/value head sums over its group.
        sink: (B,H,Q) mass on the hidden column, 1 − Σ_j α_ij.
        knockout: ΔL to first order when key j is removed from row i and the row renormalised; NaN where hidden, or where
            nothing would be left.
    """

    visible: Tensor
    attention: Tensor
    weights: Tensor
    compatibility: Tensor
    expected: Tensor
    advantage: Tensor
    score_gradient: Tensor
    raw_score_gradient: Tensor
    value_gradient: Tensor
    sink: Tensor

    @property
    def knockout(self) -> Tensor:
        compatibility = torch.where(self.visible, self.compatibility, 0.0)
        found = knockout(self.attention, self.weights, compatibility, self.sink)
        return torch.where(self.visible, found, torch.nan)


def law(call: AttentionCall, dtype: torch.dtype | None = None) -> Law:
    """Both laws for every query, key and head of `call`.

    Args:
        call: one attention call; rows that see nothing are left as zeros.
        dtype: compute in this dtype (default: float64 for float64 queries, else float32).

    Returns:
        `Law`, differentiable in query, key, value, upstream and sinks.
    """
    dtype = dtype or (torch.float64 if call.query.dtype == torch.float64 else torch.float32)
    group = call.group
    query, upstream = call.query.to(dtype), call.upstream.to(dtype)
    key = repeat(call.key.to(dtype), "b k s d -> b (k g) s d", g=group)
    value = repeat(call.value.to(dtype), "b k s v -> b (k g) s v", g=group)
    batch, heads = query.shape[:2]

    visible, bias = call.visibility.dense(batch, query.device)
    visible = visible.expand(batch, heads, *visible.shape[2:])
    score = einsum(query, key, "b h q d, b h s d -> b h q s") * call.scale
    slope = torch.ones_like(score)
    if call.softcap is not None:
        capped = call.softcap * torch.tanh(score / call.softcap)
        slope = 1 - (capped / call.softcap) ** 2
        score = capped
    if bias is not None:
        score = score + bias.to(dtype)
    score = torch.where(visible, score, HIDDEN)

    some = visible.any(-1, keepdim=True)
    if call.sinks is not None:
        hidden = call.sinks.to(dtype)[None, :, None, None].expand(batch, heads, query.shape[2], 1)
        attention, sink = torch.softmax(torch.cat([score, hidden], -1), -1).split([score.shape[-1], 1], -1)
    else:
        attention, sink = torch.softmax(score, -1), torch.zeros_like(score[..., :1])
    attention = torch.where(visible & some, attention, 0.0)
    weights = attention if call.weights is None else torch.where(visible & some, call.weights.to(dtype), 0.0)
    upstream = torch.where(some, upstream, 0.0)

    compatibility = einsum(upstream, value, "b h q v, b h s v -> b h q s")
    expected = (attention * compatibility).sum(-1)
    received = (weights * compatibility).sum(-1)  # u_i·o_i, from the weights
    score_gradient = weights * compatibility - attention * received[..., None]
    return Law(
        visible=visible,
        attention=attention,
        weights=weights,
        compatibility=compatibility,
        expected=expected,
        advantage=torch.where(visible, expected[..., None] - compatibility, 0.0),
        score_gradient=score_gradient,
        raw_score_gradient=score_gradient * slope,
        value_gradient=einsum(weights, upstream, "b h q s, b h q v -> b h s v"),
        sink=torch.where(some, sink, 0.0)[..., 0],
    )


def vectors(call: AttentionCall, dtype: torch.dtype | None = None) -> Vectors:
    """The definitions of the columns per query row and per key, written out on the full tensors of `law`."""
    terms = law(call, dtype)
    attention, advantage, visible = terms.attention, terms.advantage, terms.visible
    upstream = call.upstream.to(attention.dtype)
    batch, heads, queries, _ = attention.shape
    device = attention.device
    seen = visible.sum(-1)
    counted = call.visibility.counted(batch, device)[:, None].expand(batch, heads, queries)
    usable = counted & (seen > 0)
    upstream = torch.where(usable[..., None], upstream, 0.0)
    live = usable.to(attention.dtype)[..., None]

    def rows(tensor: Tensor) -> Tensor:
        return torch.where(usable, tensor, 0.0)

    count = seen.clamp(min=1).to(attention.dtype)
    uniform = visible / count[..., None]
    own, other = call.visibility.positions(device)
    distance = (own[:, None] - other[None, :]).abs().to(attention.dtype)
    distance[:, len(other) - call.visibility.added :] = 0  # a column that is no token lies nowhere
    first = call.visibility.first_key(call.sequences.key_rows, batch, device)
    on_first = attention.gather(-1, first[:, None, None, None].expand(batch, heads, queries, 1))[..., 0]

    def centred(tensor: Tensor) -> Tensor:
        return torch.where(visible, tensor - (tensor.sum(-1) / count)[..., None], 0.0)

    varied_attention, varied_advantage = centred(attention), centred(advantage)
    tiny = torch.finfo(attention.dtype).eps ** 0.5  # below, a correlation would be one of rounding errors
    compatible = terms.compatibility.masked_fill(~visible, 0.0)
    aligned = usable & (seen >= 3)
    aligned &= varied_attention.norm(dim=-1) > tiny * attention.norm(dim=-1)
    aligned &= varied_advantage.norm(dim=-1) > tiny * compatible.norm(dim=-1)
    product = varied_attention.norm(dim=-1) * varied_advantage.norm(dim=-1)
    correlation = (varied_attention * varied_advantage).sum(-1) / torch.where(aligned, product, 1.0)

    received = (terms.weights * terms.compatibility).sum(-1)
    returned = (upstream * torch.where(usable[..., None], call.output.to(attention.dtype), 0.0)).sum(-1)
    return Vectors(
        counted=usable,
        blind=(counted & (seen == 0)).sum(-1),
        entropy=rows(-torch.xlogy(attention, attention).sum(-1)),
        sink=rows(terms.sink),
        expected=rows(terms.expected),
        advantage_square=rows((attention * advantage.square()).sum(-1)),
        missed=rows(advantage.masked_fill(~visible, -torch.inf).amax(-1)),
        alignment=torch.where(aligned, correlation, 0.0),
        aligned=aligned,
        score_square=rows(terms.score_gradient.square().sum(-1)),
        spread=rows(0.5 * terms.score_gradient.abs().sum(-1)),
        over_uniform=rows((uniform * compatible).sum(-1) - terms.expected),
        upstream_norm=rows(upstream.norm(dim=-1)),
        residual=rows((received - returned).square()),
        residual_scale=rows((attention * compatible.square()).sum(-1)),
        distance=rows((attention * distance).sum(-1)).sum(-1),
        reach=rows((attention * distance).sum(-1)),
        first_key=rows(on_first).sum(-1),
        usage=(attention * live).sum(-2),
        user_norm=(terms.weights * live * upstream.norm(dim=-1)[..., None]).sum(-2),
        value_gradient=einsum(terms.weights * live, upstream, "b h q s, b h q v -> b h s v"),
        uniform=(uniform * live).sum(-2),
    )
