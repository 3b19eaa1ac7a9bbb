"""Residuals of both laws against the model's own autograd, in O(T) memory.

The loaded kernel computes ∂L/∂q, ∂L/∂k and ∂L/∂v by its own backward. From α, v and u alone the laws say

    ∂L/∂q_i = scale Σ_j D_ij c'_ij k_j      ∂L/∂k_j = scale Σ_i D_ij c'_ij q_i      ∂L/∂v_j = Σ_{h in group} Σ_i w_ij u_i

(c' = 1 − (c/cap)² under a soft cap, else 1). Both are compared, row block by row block, for every row that carries
gradient: residual = max |law − autograd| / max |autograd|.

Shapes: B batch, H query heads, K key/value heads, Q query positions, S key positions, D head width, V value width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from ...hooks.attach import calls
from ...hooks.call import AttentionCall, CallSite
from ...hooks.errors import BadInput, NoAttentionSeen, NoGradientReached
from ...hooks.visibility import HIDDEN
from .blocks import BLOCK_ENTRIES, block_sizes, compute_dtype

# verdict: residual that rounding explains, by the precision of the kernel's softmax and output
LIMIT = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-2}


@dataclass(frozen=True, eq=False)
class Residuals:
    """max |law − autograd| / max |autograd| of one call: score law (query (H,), key (K,)) and value law (K,).

    `blind` (H,): rows that see no key carry gradient, whose weights are the kernel's own affair.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    blind: Tensor


@dataclass(frozen=True, eq=False)
class Gradients:
    """∂L/∂q (B,H,Q,D), ∂L/∂k (B,K,S,D) and ∂L/∂v (B,K,S,V) of the kernel's inputs, from the laws alone.

    `query_size` (H,), `key_size` (K,): the largest entry before the terms of D cancel, the scale of rounding. `blind` (H,):
    as in `Residuals`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_size: Tensor
    key_size: Tensor
    blind: Tensor


def gradients(call: AttentionCall, entries: int = BLOCK_ENTRIES) -> Gradients:
    """What both laws say about the gradients of the kernel's inputs, row block by row block."""
    compute_dtype(call)  # refuses what has no gradient
    # in double precision, so that the residual shows the kernel's rounding and not ours
    dtype = torch.float32 if call.query.device.type == "mps" else torch.float64
    batch, heads, queries, _ = call.query.shape
    keys = call.key.shape[2]
    by_query = torch.zeros(call.query.shape, dtype=dtype, device=call.query.device)
    by_key = torch.zeros(call.key.shape, dtype=dtype, device=call.key.device)
    by_value = torch.zeros(call.value.shape, dtype=dtype, device=call.value.device)
    sizes = torch.zeros(2, heads, dtype=dtype, device=call.query.device)
    blind = torch.zeros(heads, dtype=torch.bool, device=call.query.device)
    _, _, r = block_sizes(1, 1, queries, keys, entries)
    for row in range(batch):
        one = slice(row, row + 1)
        for head in range(heads):
            some, owner = slice(head, head + 1), head // call.group
            key, value = call.key[row, owner].to(dtype), call.value[row, owner].to(dtype)
            for start in range(0, queries, r):
                stop = min(start + r, queries)
                low, high = call.visibility.structure.span(start, stop, keys)
                if high <= low:
                    continue
                seen, bias = call.visibility.block(one, some, start, stop, low, high, key.device)
                visible = torch.ones((), dtype=torch.bool, device=key.device) if seen is None else seen[0, 0]
                query = call.query[row, head, start:stop].to(dtype)
                upstream = call.upstream[row, head, start:stop].to(dtype)
                score = query @ key[low:high].T * call.scale
                slope: Tensor | float = 1.0
                if call.softcap is not None:
                    score = call.softcap * torch.tanh(score / call.softcap)
                    slope = 1 - (score / call.softcap) ** 2
                if bias is not None:
                    score = score + bias[0, 0].to(dtype)
                score = torch.where(visible, score, HIDDEN)
                if call.sinks is not None:
                    sink = call.sinks[head].to(dtype).expand(stop - start, 1)
                    attention = torch.softmax(torch.cat([score, sink], -1), -1)[:, :-1]
                else:
                    attention = torch.softmax(score, -1)
                some_key = visible.expand_as(score).any(-1, keepdim=True)
                attention = torch.where(visible & some_key, attention, 0.0)
                blind[head] |= (upstream.masked_fill(some_key, 0.0) != 0).any()
                upstream = torch.where(some_key, upstream, 0.0)
                weights = attention
                if call.weights is not None:
                    weights = torch.where(visible, call.weights[row, head, start:stop, low:high].to(dtype), 0.0)
                mixed = weights * (upstream @ value[low:high].T)
                score_gradient = (mixed - attention * mixed.sum(-1, keepdim=True)) * slope * call.scale
                terms = (mixed.abs() + attention * mixed.sum(-1, keepdim=True).abs()) * abs(call.scale)
                sizes[0, head] = torch.maximum(sizes[0, head], (terms @ key[low:high].abs()).max())
                sizes[1, head] = torch.maximum(sizes[1, head], (terms.T @ query.abs()).max())
                by_query[row, head, start:stop] = score_gradient @ key[low:high]
                by_key[row, owner, low:high] += score_gradient.T @ query
                by_value[row, owner, low:high] += weights.T @ upstream
    by_owner = sizes[1].unflatten(0, (-1, call.group)).amax(1)
    return Gradients(by_query, by_key, by_value, sizes[0], by_owner, blind)


def _residual(law: Tensor, autograd: Tensor, rounding: Tensor | float = 0.0) -> Tensor:
    """Per head: max |law − autograd| / max |autograd|, NaN where autograd says nothing.

    Where D cancels (a saturated head, one key only) autograd's gradient is rounding itself; it is then measured against a
    tenth of `rounding`, the size of the terms that cancel.
    """
    autograd = autograd.to(law.dtype)
    silent = torch.isnan(autograd).all(-1).all(-1).all(0)  # nobody could take this gradient
    difference = (law - autograd).abs().amax((0, 2, 3))
    size = autograd.abs().amax((0, 2, 3))
    size = torch.where(size > 0, torch.maximum(size, 0.1 * torch.as_tensor(rounding, dtype=law.dtype)), size)
    ratio = torch.where(size > 0, difference / size, torch.where(difference > 1e-30, torch.inf, torch.nan))
    sound = torch.isfinite(law).all(-1).all(-1).all(0)
    broken = ~sound | (~silent & ~torch.isfinite(size))  # NaN in the numbers is a failure, not an absence
    return torch.where(broken, torch.inf, torch.where(silent, torch.nan, ratio)).double().cpu()


def residuals(call: AttentionCall) -> Residuals:
    """Both laws against the gradients that autograd delivered with `call`."""
    assert call.query_gradient is not None
    assert call.key_gradient is not None
    assert call.value_gradient is not None
    found = gradients(call)
    return Residuals(
        _residual(found.query, call.query_gradient, found.query_size),
        _residual(found.key, call.key_gradient, found.key_size),
        _residual(found.value, call.value_gradient),
        found.blind.cpu(),
    )


class _Verdicts:
    """One row per call and head, compared as the calls come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, call: AttentionCall) -> None:
        found = residuals(call)
        limit = LIMIT.get(call.output.dtype, 1e-5)
        site = call.site
        for head in range(call.query.shape[1]):
            owner = head // call.group
            numbers = {
                "query_residual": float(found.query[head]),
                "key_residual": float(found.key[owner]),
                "value_residual": float(found.value[owner]),
            }
            if call.hidden:  # the kernel dropped weights and does not say which
                numbers = dict.fromkeys(numbers, math.nan)
            known = [number for number in numbers.values() if number == number]
            verdict = "no gradient" if not known else "ok" if max(known) <= limit else "fails"
            if verdict == "fails" and bool(found.blind.unflatten(0, (-1, call.group))[owner].any()):
                verdict = "blind rows carry gradient"
            verdict = "dropout hidden" if call.hidden else verdict
            self.rows.append(
                {
                    "module": site.module,
                    "use": call.use,
                    "head": head,
                    "layer": site.layer if site.layer >= 0 else None,
                    "kind": site.kind,
                    "kv_head": owner,
                    "implementation": call.implementation,
                    **numbers,
                    "tolerance": limit,
                    "verdict": verdict,
                }
            )

    def add_unreached(self, ran: Sequence[tuple[CallSite, int]]) -> None:
        """Heads that ran and to which no gradient came back."""
        known = {(row["module"], row["use"]) for row in self.rows}
        for call, heads in ran:
            if (call.site.module, call.use) in known:
                continue
            for head in range(heads):
                self.rows.append(
                    {
                        "module": call.site.module,
                        "use": call.use,
                        "head": head,
                        "layer": call.site.layer if call.site.layer >= 0 else None,
                        "kind": call.site.kind,
                        "implementation": call.implementation,
                        "verdict": "no gradient",
                    }
                )


_COLUMNS = ("module", "use", "head", "layer", "kind", "kv_head", "implementation")
_NUMBERS = ("query_residual", "key_residual", "value_residual", "tolerance")


def verify(model: nn.Module, batch: Mapping[str, Any], *, loss: Callable[[Any], Tensor] | None = None) -> pd.DataFrame:
    """Hold both laws against the model's own autograd, per call and head.

    Args:
        model: the model with the kernel it was loaded with; it is run forward and backward once in its present mode,
            and gradients that accumulate in its parameters are put back to what they were.
        batch: keyword arguments of the model's forward; with labels, or with `loss`.
        loss: takes the forward's result and returns a scalar (default: its `.loss`).

    Returns:
        One row per module, use and head: query_residual and key_residual (routing law), value_residual (content law),
        each max |law − autograd| / max |autograd|; the tolerance for the kernel's dtype; verdict "ok", "fails",
        "no gradient", "dropout hidden" (a fused kernel does not say which weights it dropped) or "blind rows carry
        gradient" (labels on padding: what a kernel makes of rows that see no key is its own affair).

    Raises:
        BadInput: when the batch yields no scalar loss. NoAttentionSeen, NoGradientReached, UnsupportedKernel.
    """
    verdicts = _Verdicts()
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        with calls(model, verdicts.add, inputs=True, reach_all=True) as listener, torch.enable_grad():
            for parameter, _ in before:
                parameter.grad = None
            result = model(**batch)
            listener.check()  # before a backward that the kernel may not have
            value = loss(result) if loss is not None else getattr(result, "loss", None)
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise BadInput("The batch gives no scalar loss; put labels into it, or pass loss=.")
            if not listener.ran:
                raise NoAttentionSeen(f"{type(model).__name__} made no attention call that the probe can read.")
            value.backward()
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
    if not verdicts.rows:
        raise NoGradientReached("No gradient came back to any head; the loss does not depend on attention.")
    verdicts.add_unreached(listener.ran)
    table = pd.DataFrame(verdicts.rows, columns=[*_COLUMNS, *_NUMBERS, "verdict"])
    table = table.sort_values(["layer", "module", "use", "head"], ignore_index=True)
    for name in ("use", "head", "layer", "kv_head"):
        table[name] = pd.array(table[name], dtype="Int64")
    for name in ("module", "kind", "implementation", "verdict"):
        table[name] = table[name].astype("category")
    for name in _NUMBERS:
        table[name] = table[name].astype("float64")
    return table
