"""From one attention call to its vectors, by the C++ operator, and to its gradients where they are asked for.

`with_gradients` follows sdpa's CPU flash backward block for block and hands over ∂L/∂q, ∂L/∂k and ∂L/∂v bit for bit;
`vectors` computes the statistics alone, from the kernel's log-sum-exp and ∂L/∂v where they are known.

Shapes: B batch, H query heads, K key/value heads, Q query positions, S key positions, D head width, V value width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ...hooks.call import AttentionCall, Flash, Gradients
from ...hooks.mask_cache import remembered
from ..law.row_sums import ROWS
from ..law.strongest import Edges
from ..law.vectors import Totals, Vectors
from . import records
from .build import library
from .counting import Counting, counting
from .records import ABSENT, Record, planes


@dataclass(frozen=True)
class EdgeRequest:
    """How many edges to keep per batch row, head and direction, and whether by the loss that removing them costs."""

    capacity: int
    by_knockout: bool = False


NONE = EdgeRequest(0)
_PLACES = {name: place for place, name in enumerate(records.SUMS)}
_DISTANCE, _FIRST_KEY, _QUERIES, _HIDDEN = (
    _PLACES[name] for name in ("distance", "first_key", "queries", "hidden_queries")
)


def with_gradients(call: AttentionCall, kernel: Flash, edges: EdgeRequest = NONE) -> tuple[Vectors, Gradients]:
    """The vectors of `call` and ∂L/∂q, ∂L/∂k, ∂L/∂v of the kernel's inputs, as its own backward gives them.

    Raises:
        UnsupportedKernel: where the operator cannot be had.
    """
    query, key, value = kernel.query, kernel.key, kernel.value
    upstream = call.upstream.transpose(1, 2).contiguous().transpose(1, 2)
    gradients = [_zeros(tensor, tensor.shape) for tensor in (query, key, value)]
    rows = counting(call.visibility, query.shape[0])
    shared = key.shape[1] != query.shape[1]  # their gradients are sums over query heads, m is not
    needs_own = shared or (not rows.whole and bool(upstream.masked_fill(rows.usable[..., None], 0.0).any()))
    own = _zeros(value, (*query.shape[:2], value.shape[2])) if needs_own else None
    results = _Results(call, rows, query.dtype, edges)
    record = results.record(
        query=planes(query),
        key=planes(key),
        value=planes(value),
        owners=key.shape[1],
        upstream=planes(upstream),
        output=planes(kernel.output),
        normalizer=planes(kernel.normalizer),
        grad_query=planes(gradients[0]),
        grad_key=planes(gradients[1]),
        grad_value=planes(gradients[2]),
        own=planes(own),
        mask=planes(mask := _plane_of(kernel.mask, query, key)),
        causal=int(kernel.causal),
        scale=kernel.scale,
        precise=1,
    )
    _run(library().advantage_probe_one_pass, record, query.dtype)
    del mask
    found = results.vectors(gradients[2] if own is None else own)
    return found, (gradients[0], gradients[1], gradients[2])


def vectors(
    call: AttentionCall,
    edges: EdgeRequest = NONE,
    normalizer: Tensor | None = None,
    value_gradient: Tensor | None = None,
) -> Vectors:
    """The vectors of any call on the CPU, beside a kernel that keeps its backward.

    Args:
        normalizer (B,H,Q): the log-sum-exp of a kernel that adds nothing to the scores but the call's mask; else computed.
        value_gradient (B,H,S,V): ∂L/∂v per query head, which is m where u is 0 in rows that do not count; else computed.

    Raises:
        UnsupportedKernel: where the operator cannot be had.
    """
    dtype = torch.float64 if call.query.dtype == torch.float64 else torch.float32
    rows = counting(call.visibility, call.query.shape[0])
    batch, heads = call.query.shape[:2]
    keys, width = call.key.shape[2], call.value.shape[3]
    given = [_matrix(part, dtype) for part in (call.query, call.key, call.value, call.upstream, call.output)]
    query, key, value, upstream, output = given
    own = query.new_zeros(batch, heads, keys, width) if value_gradient is None else None
    mask = _plane_of(_added(call.visibility.mask, dtype), query, key)
    bias = _plane_of(call.visibility.bias, query, key)
    weights = None if call.weights is None else _matrix(call.weights, dtype)
    sinks = None if call.sinks is None else call.sinks.to(dtype).contiguous()
    structure, results = call.visibility.structure, _Results(call, rows, dtype, edges)
    precise = call.output.dtype in (torch.float32, torch.float64) and weights is None and sinks is None
    record = results.record(
        query=planes(query),
        key=planes(key),
        value=planes(value),
        upstream=planes(upstream),
        output=planes(output),
        normalizer=planes(normalizer),
        own=planes(own),
        mask=planes(mask),
        bias=planes(bias),
        weights=planes(weights),
        sinks=0 if sinks is None else sinks.data_ptr(),
        causal=int(structure.causal),
        offset=structure.offset,
        window=-1 if structure.window is None else structure.window,
        scale=call.scale,
        softcap=call.softcap or 0.0,
        precise=int(precise),
    )
    _run(library().advantage_probe_sums, record, dtype)
    del given, mask, bias  # they had to live until here
    m = own if value_gradient is None else value_gradient
    assert m is not None
    return results.vectors(m)


def _matrix(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A (B,heads,rows,·) tensor whose rows BLAS can read."""
    tensor = tensor.detach().to(dtype)
    width = tensor.shape[3]
    readable = tensor.stride(3) == 1 or width == 1
    readable &= tensor.shape[2] <= 1 or width <= tensor.stride(2) < 2**31
    return tensor if readable else tensor.contiguous()


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as what is added to the scores: a boolean one as 0 and −∞."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return remembered(
        ("added", dtype), (mask,), lambda: torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    )


def _run(function: ctypes._FuncPointer, record: Record | records.Totals, dtype: torch.dtype) -> None:
    if record.batch * record.heads and function(ctypes.addressof(record), int(dtype == torch.float64)):
        raise MemoryError("The pass over an attention call found no memory for its blocks.")


def _zeros(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros in the layout in which the kernel gives its gradients: (B,T,H,D), seen as (B,H,T,D)."""
    batch, heads, length = shape[:3]
    return like.new_zeros(batch, length, heads, like.shape[3]).transpose(1, 2)


def _plane_of(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask or bias over (B,H,Q,S) in the query's dtype, with a contiguous last axis."""
    if mask is None:
        return None
    shape = (*query.shape[:3], key.shape[2])
    if mask.dtype != query.dtype or mask.shape[-1] != shape[-1] or mask.stride(-1) != 1:
        return remembered(
            ("plane", query.dtype, shape[-1]),
            (mask,),
            lambda: mask.to(query.dtype).expand(*mask.shape[:-1], shape[-1]).contiguous(),
        ).expand(shape)
    return mask.expand(shape)


class _Results:
    """The buffers that one pass fills."""

    def __init__(self, call: AttentionCall, rows: Counting, dtype: torch.dtype, edges: EdgeRequest) -> None:
        self.call, self.rows, self.edges = call, rows, edges
        batch, heads, queries, _ = call.query.shape
        self.shape = batch, heads, queries, call.key.shape[2]
        keys = self.shape[3]
        self.table = torch.empty(len(ROWS), batch, heads, queries, dtype=dtype)
        self.aligned = torch.empty(batch, heads, queries, dtype=torch.bool)
        self.by_key = torch.zeros(2, batch, heads, keys, dtype=dtype)  # nothing is written where nobody asks
        self.reach = None if call.visibility.one_sided() else torch.empty(batch, heads, queries, dtype=dtype)
        k = min(edges.capacity, queries * keys)
        self.places = torch.zeros(2, 2, batch, heads, k, dtype=torch.int64) if k else None
        self.numbers = torch.zeros(5, 2, batch, heads, k, dtype=dtype) if k else None
        self.capacity = k
        visible = call.visibility
        self.first_position = visible.first_position

    def record(self, **known: object) -> Record:
        """The record of the call, with these buffers and what else is `known` of it."""
        call, rows = self.call, self.rows
        batch, heads, queries, keys = self.shape
        everything = (batch, heads, queries)
        record = Record(
            batch=batch,
            heads=heads,
            owners=call.key.shape[1],
            queries=queries,
            keys=keys,
            width=call.query.shape[3],
            value_width=call.value.shape[3],
            usable=ABSENT if rows.whole else planes(rows.usable.expand(everything)),
            seen=planes(rows.seen.expand(everything)),
            window=-1,
            reach=int(self.reach is not None),
            first_position=self.first_position,
            tokens=keys - call.visibility.added,
            capacity=self.capacity,
            by_knockout=int(self.edges.by_knockout),
            rows=self.table.data_ptr(),
            aligned=self.aligned.data_ptr(),
            distances=0 if self.reach is None else self.reach.data_ptr(),
            usage=self.by_key[0].data_ptr(),
            user_norm=self.by_key[1].data_ptr(),
            edge_places=0 if self.places is None else self.places.data_ptr(),
            edge_numbers=0 if self.numbers is None else self.numbers.data_ptr(),
        )
        for name, value in known.items():
            setattr(record, name, value)
        return record

    def vectors(self, value_gradient: Tensor) -> Vectors:
        """What the pass found."""
        call, rows = self.call, self.rows
        batch, heads, queries, _ = self.shape
        usable, usage = rows.usable.expand(batch, heads, queries), self.by_key[0]
        first = call.visibility.first_key(call.sequences.key_rows, batch, call.query.device).contiguous()
        totals = self._totals(value_gradient, first)
        return Vectors(
            counted=usable,
            blind=rows.blind.expand(batch, heads),
            aligned=self.aligned,
            distance=totals.sums[..., _DISTANCE],
            reach=self.reach,
            first_key=totals.sums[..., _FIRST_KEY],
            usage=usage,
            user_norm=self.by_key[1],
            value_gradient=value_gradient,
            uniform=rows.uniform,
            edges=self._edges(),
            totals=totals,
            **dict(zip(ROWS, self.table.unbind())),
        )

    def _totals(self, value_gradient: Tensor, first: Tensor) -> Totals:
        call, rows = self.call, self.rows
        batch, heads, queries, keys = self.shape
        value, width = _matrix(call.value, self.table.dtype), call.value.shape[3]
        sums = torch.empty(batch, heads, len(records.SUMS), dtype=torch.float64)
        total = torch.empty(heads, width, dtype=torch.float64)
        moment = torch.empty(heads, width, width, dtype=self.table.dtype)
        blind = rows.blind.expand(batch, heads).contiguous()
        record = records.Totals(
            batch,
            heads,
            value.shape[1],
            queries,
            keys,
            width,
            planes(value_gradient),
            planes(value),
            self.table.data_ptr(),
            self.aligned.data_ptr(),
            0 if self.reach is None else self.reach.data_ptr(),
            self.by_key.data_ptr(),
            self.by_key[1].data_ptr(),
            ABSENT if rows.whole else planes(rows.usable.expand(batch, heads, queries)),
            planes(rows.used.expand(batch, heads, keys)),
            planes(rows.entropy.expand(batch, heads)),
            blind.data_ptr(),
            first.data_ptr(),
            self.first_position,
            sums.data_ptr(),
            total.data_ptr(),
            moment.data_ptr(),
        )
        _run(library().advantage_probe_totals, record, self.table.dtype)
        if call.hidden:
            sums[..., _HIDDEN] = sums[..., _QUERIES]
        counted = rows.used.expand(batch, -1, keys).sum((0, 2)).expand(heads).double()
        return Totals(sums, total, moment.double(), counted)

    def _edges(self) -> tuple[Edges, Edges] | None:
        if self.places is None or self.numbers is None:
            return None
        kept = len(fields(Edges)) - len(self.places)
        sides = [Edges(*self.places[:, side], *self.numbers[:kept, side]) for side in (0, 1)]
        return sides[0], sides[1]
