"""The statistics of a block in registers: Triton kernels for a GPU, for the calls that have no mask tensor.

Two kernels, as in a flash backward. One takes a block of queries past the keys twice: first for the normaliser and E, then,
with both known, for everything that a row has. The other takes a block of keys past the queries for usage and value
gradients. Nothing of size Q × S is written. Sums are float32 whatever the inputs; `blocks.py` is the definition.

Shapes: B batch, H query heads, K key/value heads, Q query positions, S key positions, D head width, V value width.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from ...hooks.call import AttentionCall

ROWS = (
    "normaliser",
    "expected",
    "entropy",
    "advantage_square",
    "missed",
    "score_square",
    "spread",
    "less_sum",
    "less_square",
    "less_mean",
    "variation",
    "reach",
)
HIDDEN = tl.constexpr(-1e30)
QUERIES, KEYS = 64, 64  # a block; 32 where heads are wide, so that its parts fit in shared memory


def fits(call: AttentionCall) -> bool:
    """True for the calls that the kernels know: causal or whole, with or without a window, plain softmax."""
    visibility = call.visibility
    unmasked = visibility.mask is None and visibility.bias is None and not visibility.added
    narrow = max(call.query.shape[-1], call.value.shape[-1]) <= 256
    return call.plain and unmasked and narrow and call.query.dtype in (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _visible(
    rows, columns, queries, keys, offset, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr
):  # (rows, columns)
    seen = (rows[:, None] < queries) & (columns[None, :] < keys)
    if CAUSAL:
        seen = seen & (columns[None, :] <= rows[:, None] + offset)
    if WINDOWED:
        seen = seen & (columns[None, :] > rows[:, None] + offset - window)
    return seen


@triton.jit
def _load(base, lines, line_stride, count, column_stride, width, WIDE: tl.constexpr, WIDEN: tl.constexpr):
    """(lines, WIDE) of a matrix, 0 outside."""
    across = tl.arange(0, WIDE)
    inside = (lines[:, None] < count) & (across[None, :] < width)
    found = tl.load(base + lines[:, None] * line_stride + across[None, :] * column_stride, mask=inside, other=0.0)
    if WIDEN:  # the interpreter multiplies the bits of bfloat16
        found = found.to(tl.float32)
    return found


@triton.jit
def _rows(
    query, key, value, upstream, live, counts, out,
    q0, q1, q2, q3, k0, k1, k2, k3, v0, v1, v2, v3, u0, u1, u2, u3,
    scale, heads, group, queries, keys, width, value_width, offset, position, window, plane,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    block, sequence = tl.program_id(0), tl.program_id(1)
    batch, head = sequence // heads, sequence % heads
    owner = head // group
    rows = block * BM + tl.arange(0, BM)
    within = rows < queries
    alive = tl.load(live + batch * queries + rows, mask=within, other=0) != 0
    n = tl.load(counts + rows, mask=within, other=1)
    n = tl.maximum(n, 1).to(tl.float32)
    q = _load(query + batch * q0 + head * q1, rows, q2, queries, q3, width, BD, WIDEN)
    u = _load(upstream + batch * u0 + head * u1, rows, u2, queries, u3, value_width, BV, WIDEN)
    u = tl.where(alive[:, None], u, 0.0).to(u.dtype)
    key_base, value_base = key + batch * k0 + owner * k1, value + batch * v0 + owner * v1

    low, high = 0, keys
    if CAUSAL:
        high = tl.minimum(keys, block * BM + BM + offset)
    if WINDOWED:
        low = tl.maximum(0, block * BM + offset - window + 1) // BN * BN

    largest = tl.full((BM,), HIDDEN, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    with_b = tl.zeros((BM,), tl.float32)
    with_s = tl.zeros((BM,), tl.float32)
    for start in range(low, high, BN):
        columns = start + tl.arange(0, BN)
        k = _load(key_base, columns, k2, keys, k3, width, BD, WIDEN)
        v = _load(value_base, columns, v2, keys, v3, value_width, BV, WIDEN)
        seen = _visible(rows, columns, queries, keys, offset, window, CAUSAL, WINDOWED)
        score = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, HIDDEN)
        b = tl.dot(u, tl.trans(v), input_precision="ieee")
        larger = tl.maximum(largest, tl.max(score, 1))
        shrink = tl.exp(largest - larger)
        part = tl.where(seen, tl.exp(score - larger[:, None]), 0.0)
        total = total * shrink + tl.sum(part, 1)
        with_b = with_b * shrink + tl.sum(part * b, 1)
        with_s = with_s * shrink + tl.sum(part * score, 1)
        largest = larger
    total = tl.where(total > 0, total, 1.0)
    normaliser = largest + tl.log(total)
    expected = with_b / total
    entropy = normaliser - with_s / total

    advantage_square = tl.zeros((BM,), tl.float32)
    missed = tl.full((BM,), -float("inf"), tl.float32)
    score_square = tl.zeros((BM,), tl.float32)
    spread = tl.zeros((BM,), tl.float32)
    less_sum = tl.zeros((BM,), tl.float32)
    less_square = tl.zeros((BM,), tl.float32)
    less_mean = tl.zeros((BM,), tl.float32)
    variation = tl.zeros((BM,), tl.float32)
    reach = tl.zeros((BM,), tl.float32)
    for start in range(low, high, BN):
        columns = start + tl.arange(0, BN)
        k = _load(key_base, columns, k2, keys, k3, width, BD, WIDEN)
        v = _load(value_base, columns, v2, keys, v3, value_width, BV, WIDEN)
        seen = _visible(rows, columns, queries, keys, offset, window, CAUSAL, WINDOWED)
        score = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, HIDDEN)
        attention = tl.where(seen, tl.exp(score - normaliser[:, None]), 0.0)
        less = tl.where(seen, tl.dot(u, tl.trans(v), input_precision="ieee") - expected[:, None], 0.0)
        gradient = attention * less
        apart = tl.abs((rows + position)[:, None] - columns[None, :]).to(tl.float32)
        varied = tl.where(seen, attention - (1.0 / n)[:, None], 0.0)
        advantage_square += tl.sum(gradient * less, 1)
        missed = tl.maximum(missed, tl.max(tl.where(seen, -less, -float("inf")), 1))
        score_square += tl.sum(gradient * gradient, 1)
        spread += tl.sum(tl.abs(gradient), 1)
        less_sum += tl.sum(less, 1)
        less_square += tl.sum(less * less, 1)
        less_mean += tl.sum(gradient, 1)
        variation += tl.sum(varied * varied, 1)
        reach += tl.sum(attention * apart, 1)

    place = out + sequence * queries + rows
    tl.store(place, normaliser, mask=within)
    tl.store(place + plane, expected, mask=within)
    tl.store(place + 2 * plane, entropy, mask=within)
    tl.store(place + 3 * plane, advantage_square, mask=within)
    tl.store(place + 4 * plane, missed, mask=within)
    tl.store(place + 5 * plane, score_square, mask=within)
    tl.store(place + 6 * plane, spread, mask=within)
    tl.store(place + 7 * plane, less_sum, mask=within)
    tl.store(place + 8 * plane, less_square, mask=within)
    tl.store(place + 9 * plane, less_mean, mask=within)
    tl.store(place + 10 * plane, variation, mask=within)
    tl.store(place + 11 * plane, reach, mask=within)


@triton.jit
def _keys(
    query, key, upstream, live, normaliser, norms, out, moments,
    q0, q1, q2, q3, k0, k1, k2, k3, u0, u1, u2, u3,
    scale, heads, group, queries, keys, width, value_width, offset, window, plane,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    block, sequence = tl.program_id(0), tl.program_id(1)
    batch, head = sequence // heads, sequence % heads
    columns = block * BN + tl.arange(0, BN)
    k = _load(key + batch * k0 + head // group * k1, columns, k2, keys, k3, width, BD, WIDEN)
    low, high = 0, queries
    if CAUSAL:
        low = tl.maximum(0, block * BN - offset) // BM * BM
    if WINDOWED:
        high = tl.maximum(0, tl.minimum(queries, block * BN + BN - offset + window))
    usage = tl.zeros((BN,), tl.float32)
    user = tl.zeros((BN,), tl.float32)
    moment = tl.zeros((BN, BV), tl.float32)
    for start in range(low, high, BM):
        rows = start + tl.arange(0, BM)
        within = rows < queries
        alive = tl.load(live + batch * queries + rows, mask=within, other=0) != 0
        q = _load(query + batch * q0 + head * q1, rows, q2, queries, q3, width, BD, WIDEN)
        u = _load(upstream + batch * u0 + head * u1, rows, u2, queries, u3, value_width, BV, WIDEN)
        u = tl.where(alive[:, None], u, 0.0).to(tl.float32)
        log_sum = tl.load(normaliser + sequence * queries + rows, mask=within, other=0.0)
        norm = tl.load(norms + sequence * queries + rows, mask=within, other=0.0)
        seen = _visible(rows, columns, queries, keys, offset, window, CAUSAL, WINDOWED) & alive[:, None]
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        attention = tl.where(seen, tl.exp(tl.where(seen, score - log_sum[:, None], 0.0)), 0.0)
        usage += tl.sum(attention, 0)
        user += tl.sum(attention * norm[:, None], 0)
        moment += tl.dot(tl.trans(attention), u, input_precision="ieee")
    inside = columns < keys
    place = out + sequence * keys + columns
    tl.store(place, usage, mask=inside)
    tl.store(place + plane, user, mask=inside)
    across = tl.arange(0, BV)
    target = moments + (sequence * keys + columns)[:, None] * value_width + across[None, :]
    tl.store(target, moment, mask=inside[:, None] & (across[None, :] < value_width))


def sums(call: AttentionCall, live: Tensor, counts: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the kernels add up.

    Args:
        live (B,Q): rows that count and see a key. counts (Q,): how many keys each row sees.

    Returns:
        per row, (B,H,Q) float32 under the names of `ROWS`, of which live ones mean something; per key, (B,H,S) usage and
        user_norm, (B,H,S,V) value_gradient.
    """
    query, key, value, upstream = call.query, call.key, call.value, call.upstream
    batch, heads, queries, width = query.shape
    keys, value_width = key.shape[2], value.shape[3]
    structure = call.visibility.structure
    causal, windowed = structure.causal, structure.window is not None
    offset, window = structure.offset if causal or windowed else 0, structure.window or 0
    position = call.visibility.first_position
    of_rows = torch.empty(len(ROWS), batch, heads, queries, dtype=torch.float32, device=query.device)
    of_keys = torch.empty(2, batch, heads, keys, dtype=torch.float32, device=query.device)
    moments = torch.empty(batch, heads, keys, value_width, dtype=torch.float32, device=query.device)
    wide = max(16, triton.next_power_of_2(width)), max(16, triton.next_power_of_2(value_width))
    side = 32 if max(wide) > 128 else QUERIES
    sizes = {"BM": side, "BN": min(side, KEYS), "BD": wide[0], "BV": wide[1], "CAUSAL": causal, "WINDOWED": windowed}
    sizes["WIDEN"] = bool(triton.knobs.runtime.interpret) and query.dtype == torch.bfloat16
    live = live.to(torch.uint8).contiguous()
    norms = upstream.float().norm(dim=-1).contiguous()
    shape = (call.scale, heads, call.group, queries, keys, width, value_width, offset)
    _rows[(triton.cdiv(queries, sizes["BM"]), batch * heads)](
        query, key, value, upstream, live, counts.to(torch.int32).contiguous(), of_rows,
        *query.stride(), *key.stride(), *value.stride(), *upstream.stride(),
        *shape, position, window, of_rows[0].numel(), **sizes,
    )  # fmt: skip
    _keys[(triton.cdiv(keys, sizes["BN"]), batch * heads)](
        query, key, upstream, live, of_rows[0], norms, of_keys, moments,
        *query.stride(), *key.stride(), *upstream.stride(),
        *shape, window, of_keys[0].numel(), **sizes,
    )  # fmt: skip
    by_key = {"usage": of_keys[0], "user_norm": of_keys[1], "value_gradient": moments}
    return dict(zip(ROWS, of_rows)), by_key
