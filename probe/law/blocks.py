"""The law in O(T) memory: blocks of queries against all the keys they can see, in one pass.

The same numbers as `law.vectors`, by other formulas where those are cheaper: entropy follows from the log-normaliser;
usage, coherence and the value gradient from one product αᵀ[u, ‖u‖, 1]; distances, in causal order, from usage. Masked
scores are finite, so that nothing becomes NaN on the way. Rows that do not count are left out by `where`, never by
multiplying.

Shapes: B batch, H query heads, K key/value heads, Q query positions, S key positions, D head width, V value width;
inside a block b, h, r stand for the part of B, H, Q at hand and s for the keys that its rows can see.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...hooks.call import AttentionCall
from ...hooks.errors import BadRequest, UnsupportedKernel
from ...hooks.visibility import HIDDEN
from . import triton_block
from .row_sums import ROWS, table
from .strongest import Edges, RankBy, Scored, join, of_block, strongest
from .vectors import Vectors

BLOCK_ENTRIES = 1 << 19  # scores held at once: a few buffers of this size stay in the cache


def compute_dtype(call: AttentionCall) -> torch.dtype:
    """float64 for float64 calls, else float32.

    Raises:
        UnsupportedKernel: for queries that are not floating point.
    """
    if not call.query.is_floating_point():
        raise UnsupportedKernel(f"Attention in {call.query.dtype} has no gradient; run the model in a float dtype.")
    return torch.float64 if call.query.dtype == torch.float64 else torch.float32


def block_sizes(batch: int, heads: int, queries: int, keys: int, entries: int) -> tuple[int, int, int]:
    """(b, h, r) with b·h·r·S about `entries` at most: whole batches for short sequences, few rows for long ones.

    Raises:
        BadRequest: when `entries` is not positive.
    """
    if entries < 1:
        raise BadRequest(f"The block size must be at least 1 entry, not {entries}.")
    # up to 128 rows, but at least four blocks of them where queries are few: blocks skip the keys that no row can see
    r = min(queries, max(32, min(128, entries // max(1, keys), -(-queries // 4))))
    h = max(1, min(heads, entries // max(1, r * keys)))
    if h < heads:
        return 1, h, r
    return max(1, min(batch, entries // max(1, r * keys * heads))), h, r


def vectors(
    call: AttentionCall,
    *,
    edges: int = 0,
    rank_by: RankBy = "score_gradient",
    tokens: bool = True,
    entries: int = BLOCK_ENTRIES,
) -> Vectors:
    """Both laws for every query row and every key of `call`.

    Args:
        call: one attention call.
        edges: how many of the strongest edges of either direction to keep per batch row and head. rank_by: what is strong.
        tokens: also what only token rows show, `spread`; without it that is 0.
        entries: upper bound on the scores that are held at once.

    Raises:
        BadRequest: for a block size that is not positive. UnsupportedKernel: for dtypes without a gradient.
    """
    compute_dtype(call)  # refuses what has no gradient
    if not edges and entries == BLOCK_ENTRIES and triton_block.usable(call):
        return triton_block.vectors(call, tokens=tokens)
    work = _Pass(call, edges, rank_by, tokens)
    batch, heads, queries, _ = call.query.shape
    b, h, r = block_sizes(batch, heads, queries, call.key.shape[2], entries)
    routed, anti_routed = [], []
    for first in range(0, batch, b):
        rows = slice(first, min(first + b, batch))
        parts = [work.heads(rows, slice(head, min(head + h, heads)), r) for head in range(0, heads, h)]
        found = [part for part in parts if part is not None]
        if found:
            routed.append(join([part[0] for part in found], 1))
            anti_routed.append(join([part[1] for part in found], 1))
    return work.finish((join(routed, 0), join(anti_routed, 0)) if routed else None)


@dataclass(frozen=True, eq=False)
class Block:
    """What the mathematics of a block takes, between its first product and its last.

    Attributes:
        place: the rows (b,h,r) of the call. score (b,h,r,s): capped and biased, to be overwritten; hidden keys are in it.
        visible: who sees whom among the keys from column `edge` on, (…,r,s − edge); None: everything.
        edge: every row sees the keys before this column.
        upstream, output (b,h,r,V): 0 in rows that do not count. values (b,h,s,V).
        low: position of the first key.
    """

    place: tuple[slice, slice, slice]
    score: Tensor
    visible: Tensor | None
    edge: int
    upstream: Tensor
    output: Tensor
    values: Tensor
    low: int


@dataclass(frozen=True, eq=False)
class BlockSums:
    """What the mathematics of a block gives.

    Attributes:
        attention, weights (b,h,r,s): α and w.
        users (b,h,r,V+2): [u, ‖u‖, 1 if the row counts]. rows (ROWS,b,h,r). aligned (b,h,r): where alignment is known.
        edges: where they are kept.
    """

    attention: Tensor
    weights: Tensor
    users: Tensor
    rows: Tensor
    aligned: Tensor
    edges: tuple[Edges, Edges] | None = None


def accumulate(into: Tensor, left: Tensor, right: Tensor) -> None:
    """into (b,h,·,·) += left (b,h,·,r) right (b,h,r,·), without a buffer for the product where into is one stack."""
    if into.shape[0] == 1:
        into[0].baddbmm_(left[0], right[0])
    else:
        into += torch.matmul(left, right)


class _Pass:
    """The sums of one call, filled block by block."""

    def __init__(self, call: AttentionCall, edges: int, rank_by: RankBy, tokens: bool) -> None:
        self.call, self.edges, self.rank_by, self.tokens = call, edges, rank_by, tokens
        self.dtype, device = compute_dtype(call), call.query.device
        self.batch, self.query_heads, self.queries, _ = call.query.shape
        self.keys, self.width = call.key.shape[2], call.value.shape[3]
        shape = (self.batch, self.query_heads)
        counted = call.visibility.counted(self.batch, device)
        self.seen, self.uniform = call.visibility.counts(self.batch, counted)
        self.usable = (counted[:, None] & (self.seen > 0)).expand(*shape, self.queries)
        self.blind = (counted[:, None] & (self.seen == 0)).sum(-1).expand(shape)
        self.rows = torch.zeros(len(ROWS), *shape, self.queries, dtype=self.dtype, device=device)
        self.zeros = torch.zeros((), dtype=self.dtype, device=device).expand(*shape, self.queries)
        self.ones = torch.ones((), dtype=self.dtype, device=device).expand(*shape, self.queries)
        # Σ_j α b equals u·o up to the kernel's rounding, unless the kernel rounds coarsely, drops weights or has a sink
        self.precise = (
            call.output.dtype in (torch.float32, torch.float64) and call.weights is None and call.sinks is None
        )
        self.aligned = torch.zeros(*shape, self.queries, dtype=torch.bool, device=device)
        self.all_live = bool(self.usable.all())
        # per key: m_j, Σ_i w_ij ‖u_i‖ and Σ_i w_ij
        self.moments = torch.zeros(*shape, self.width + 2, self.keys, dtype=self.dtype, device=device)
        # only where they do not follow from the moments
        dropped, two_sided = call.weights is not None, not call.visibility.one_sided()
        self.usage = torch.zeros(*shape, self.keys, dtype=self.dtype, device=device) if dropped else None
        self.reach = torch.zeros(*shape, self.queries, dtype=self.dtype, device=device) if two_sided else None

    def heads(self, batch: slice, heads: slice, r: int) -> tuple[Edges, Edges] | None:
        """All blocks of some heads of some batch rows; returns their edges."""
        keys, values = self.of_heads(self.call.key, batch, heads), self.of_heads(self.call.value, batch, heads)
        found = []
        for start in range(0, self.queries, r):
            stop = min(start + r, self.queries)
            low, high = self.call.visibility.structure.span(start, stop, self.keys)
            if high > low:
                place = (batch, heads, slice(start, stop))
                edges = self.block(place, keys[..., low:high, :], values[..., low:high, :], low)
                if edges is not None:
                    found.append(edges)
        if not found:
            return None
        return tuple(strongest([part[side] for part in found], self.edges, self.rank_by) for side in (0, 1))  # type: ignore[return-value]

    def of_heads(self, tensor: Tensor, batch: slice, heads: slice) -> Tensor:
        """What the query heads `heads` read of a (B,K,S,·) tensor: (b,h,S,·)."""
        if self.call.group == 1:
            return tensor[batch, heads].to(self.dtype).contiguous()
        owner = torch.arange(heads.start, heads.stop, device=tensor.device) // self.call.group
        return tensor[batch][:, owner].to(self.dtype)

    def counted(self, tensor: Tensor, live: Tensor) -> Tensor:
        """(…, r, ·) in the dtype of the pass, 0 in rows that do not count."""
        tensor = tensor.to(self.dtype)
        return tensor if self.all_live else torch.where(live[..., None], tensor, 0.0)

    def block(
        self, place: tuple[slice, slice, slice], keys: Tensor, values: Tensor, low: int
    ) -> tuple[Edges, Edges] | None:
        """Rows `place` against the keys (b,h,s,D) and values (b,h,s,V), which start at position `low`."""
        call, (batch, heads, span) = self.call, place
        high = low + keys.shape[-2]
        live = self.usable[place]
        query = call.query[place].to(self.dtype) * (call.scale if call.softcap is None else 1.0)
        upstream, output = self.counted(call.upstream[place], live), self.counted(call.output[place], live)
        # every row sees the keys before `edge`; only the rest has to be masked
        edge = call.visibility.shared(span.start, low, high)
        visible, bias = call.visibility.block(batch, heads, span.start, span.stop, low + edge, high, call.query.device)

        score = torch.matmul(query, keys.transpose(-1, -2))
        if call.softcap is not None:
            score.mul_(call.scale / call.softcap).tanh_().mul_(call.softcap)
        if bias is not None:
            score[..., edge:] += bias.to(self.dtype)
        found = self.between(Block(place, score, visible, edge, upstream, output, values, low))
        self.rows[:, *place], self.aligned[place] = found.rows, found.aligned

        # per key: [u, ‖u‖, 1]ᵀ w
        accumulate(self.moments[batch, heads, :, low:high], found.users.mT, found.weights)
        if self.usage is not None:
            counted = live[..., None].to(self.dtype)
            self.usage[batch, heads, low:high] += torch.matmul(found.attention.mT, counted)[..., 0]
        if self.reach is not None:
            own, other = call.visibility.positions(call.query.device)
            apart = (own[span, None] - other[None, low:high]).abs().to(self.dtype)
            apart[:, max(0, self.keys - call.visibility.added - low) :] = 0  # a column that is no token lies nowhere
            self.reach[place] = torch.where(live, (found.attention * apart).sum(-1), 0.0)
        return found.edges

    def n(self, place: tuple[slice, slice, slice]) -> Tensor:
        """(b,1 or h,r): n_i of some rows, at least 1."""
        batch, heads, span = place
        seen = self.seen[batch, heads if self.seen.shape[1] > 1 else slice(None), span]
        return seen.clamp(min=1).to(self.dtype)

    def between(self, block: Block) -> BlockSums:
        """What lies between the products, pass by pass, for every call.

        Every pass over the (b,h,r,s) entries counts: `score` and `buffer` are reused, and a sum that follows from others
        is not taken again.
        """
        call, place, score, visible, edge = self.call, block.place, block.score, block.visible, block.edge
        _, heads, span = place
        upstream, low = block.upstream, block.low
        live, n = self.usable[place], self.n(place)
        hidden = None if visible is None else ~visible
        shown = None if visible is None else visible.to(self.dtype)  # multiplying is cheaper than filling
        if shown is not None:
            score[..., edge:].add_((shown - 1) * -HIDDEN)

        # α, its normaliser and entropy
        attention = torch.softmax(score, -1)
        normaliser = score.amax(-1) - attention.amax(-1).log()  # ln Σ_j exp s_ij: the largest α is exp(max s) over it
        if call.sinks is not None:
            sinks = call.sinks[heads].to(self.dtype)[None, :, None]
            mass = torch.sigmoid(normaliser - sinks)
            sink = torch.sigmoid(sinks - normaliser)
            attention *= mass[..., None]
            normaliser = torch.logaddexp(normaliser, sinks)
        else:
            mass, sink = self.ones[place], self.zeros[place]
        buffer = torch.mul(attention, score)  # hidden: 0 · finite
        entropy = normaliser * mass - buffer.sum(-1)

        # b and its mean E under α; E is u·o where that is precise, and then D shows how well it is
        compatibility = torch.matmul(upstream, block.values.mT, out=score)
        received = (upstream * block.output).sum(-1)
        weights, reached = attention, received
        if self.precise:
            expected = received
        else:
            expected = torch.mul(attention, compatibility, out=buffer).sum(-1)
            reached = expected
        if call.weights is not None:
            weights = call.weights[place][..., low : low + score.shape[-1]].to(self.dtype)
            if hidden is not None:
                weights = weights.clone()
                weights[..., edge:].masked_fill_(hidden, 0.0)
            reached = torch.mul(weights, compatibility, out=buffer).sum(-1)
            score_gradient = buffer.addcmul(attention, reached[..., None], value=-1)  # D = w b − α (u·o)
            less = compatibility.sub_(expected[..., None])
        else:
            less = compatibility.sub_(expected[..., None])  # b − E = −A, 0 where hidden
            score_gradient = torch.mul(attention, less, out=buffer)
        if shown is not None:
            less[..., edge:].mul_(shown)
        edges = None
        if self.edges:
            alive = torch.where(live[..., None], score_gradient, 0.0)
            b = less + expected[..., None]  # hidden keys have neither attention nor weight
            scored = Scored(alive, attention, weights, -less, b, sink, span.start, low)
            edges = of_block(scored, self.edges, self.rank_by)
        # A averages to 0 under α, so the best key has A ≥ 0 and the zeros of hidden keys never win; not so with sinks
        best = less
        if hidden is not None and call.sinks is not None:
            best = less.clone()
            best[..., edge:].masked_fill_(hidden, torch.inf)
        missed = 0.0 - best.amin(-1)
        score_norm = torch.linalg.vector_norm(score_gradient, dim=-1)
        spread = torch.linalg.vector_norm(score_gradient, ord=1, dim=-1) if self.tokens else self.zeros[place]
        if call.weights is not None:
            torch.mul(attention, less, out=buffer)
        less_mean = buffer.sum(-1)  # Σ_j α (b − E): 0, up to sinks and rounding
        advantage_square = torch.mul(buffer, less, out=buffer).sum(-1)

        # alignment of α_i and A_i over V_i, and the slope towards even attention
        varied = torch.sub(attention, (mass / n)[..., None], out=buffer)
        if shown is not None:
            varied[..., edge:].mul_(shown)
        norm = torch.linalg.vector_norm(upstream, dim=-1)
        rows, aligned = table(
            live=live,
            n=n,
            mass=mass,
            sink=sink,
            entropy=entropy,
            expected=expected,
            deviation=less_mean if self.precise else reached - received,
            missed=missed,
            score_norm=score_norm,
            spread=spread,
            less_sum=less.sum(-1),
            less_square=torch.linalg.vector_norm(less, dim=-1).square(),
            less_mean=less_mean,
            advantage_square=advantage_square,
            variation=torch.linalg.vector_norm(varied, dim=-1).square(),
            upstream_norm=norm,
        )
        users = torch.cat([upstream, norm[..., None], live[..., None].to(self.dtype)], -1)
        rows = rows if self.all_live else torch.where(live, rows, 0.0)
        return BlockSums(attention, weights, users, rows, aligned, edges)

    def finish(self, edges: tuple[Edges, Edges] | None) -> Vectors:
        call, device = self.call, self.call.query.device
        usage = self.moments[..., -1, :] if self.usage is None else self.usage
        distance = None if self.reach is None else self.reach.sum(-1)
        if distance is None:  # every key lies before its query
            own, other = call.visibility.positions(device)
            mass = torch.where(self.usable, 1 - self.rows[ROWS.index("sink")], 0.0)
            distance = (mass * own.to(self.dtype)).sum(-1) - (usage * other.to(self.dtype)).sum(-1)
        first = call.visibility.first_key(call.sequences.key_rows, self.batch, device)
        return Vectors(
            counted=self.usable,
            blind=self.blind,
            aligned=self.aligned,
            distance=distance,
            reach=self.reach,
            first_key=usage.gather(-1, first[:, None, None].expand(-1, self.query_heads, 1))[..., 0],
            usage=usage,
            user_norm=self.moments[..., -2, :],
            value_gradient=self.moments[..., : self.width, :].transpose(-1, -2).contiguous(),
            uniform=self.uniform,
            edges=edges,
            **dict(zip(ROWS, self.rows)),
        )
