"""What is kept of every call: sums, and nothing else.

A column of the heads table is a function of sums over sequences, so batches, shards and ranks that hold different
sequences or heads add up. Each sum has a degree in u: dividing u by w divides the sum by w^degree, which is how
loss weight and loss scale, known only at the end of a step, are taken out. States hold float64 on the CPU.

Shapes: B batch, H query heads, K key/value heads, S key positions, V value width, C number of sums, R replicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from ..hooks.call import AttentionCall
from ..hooks.errors import MergeRefused
from . import bootstrap
from .columns import COLUMNS, HEADS, SUMS, SUMS_OF_ROWS, Array, columns
from .documents import Units, split
from .law.vectors import Vectors

DEGREE = torch.tensor(list(SUMS.values()), dtype=torch.float64)


def sequence_sums(call: AttentionCall, rows: Vectors, found: Units | None = None) -> Tensor:
    """(B,H,C) float64 on the CPU: the sums of every sequence and head of one call; of every unit with `found`."""
    if found is None and rows.totals is not None:
        return rows.totals.sums
    value = call.value
    if found is not None:
        value, rows = split(call, rows, found)
    m, counted = rows.value_gradient, rows.counted
    batch, heads, keys, _ = m.shape
    value = value.to(m.dtype)
    used = (rows.uniform > 0).expand(batch, -1, keys)
    queries = counted.sum(-1)
    norm = m.norm(dim=-1)
    square = norm.square().sum(-1)
    if call.group > 1:
        grouped = m.view(batch, heads // call.group, call.group, keys, -1)
        sound = torch.isfinite(square).view(*grouped.shape[:3], 1, 1)  # a broken head spares its group
        group_square = torch.where(sound, grouped, 0.0).sum(2).square().sum((-1, -2)).repeat_interleave(call.group, 1)
        along = (grouped * value[:, :, None]).sum(-1).view_as(norm)
    else:
        group_square, along = square, (m * value).sum(-1)
    value_norm = value.norm(dim=-1).repeat_interleave(call.group, 1)
    turned = (norm > 0) & (value_norm > 0) & (rows.usage > 0)
    cosine = torch.where(turned, -along / torch.where(turned, norm * value_norm, 1.0), 0.0)
    of_rows = torch.stack([getattr(rows, name).to(m.dtype) for name in SUMS_OF_ROWS]).sum(-1)
    sums = {
        **dict(zip(SUMS_OF_ROWS, of_rows, strict=True)),
        "queries": queries,
        "hidden_queries": queries if call.hidden else torch.zeros_like(queries),
        "blind_queries": rows.blind,
        "first_key": rows.first_key,
        "distance": rows.distance,
        "value_gradient_square": square,
        "group_gradient_square": group_square,
        "value_square": torch.where(used, value_norm, 0.0).square().sum(-1),
        "keys": used.sum(-1).expand(batch, heads),
        "usage_entropy": _entropy(rows.usage) * queries,
        "uniform_entropy": _entropy(rows.uniform) * queries,
        "coherence_sum": norm.sum(-1),
        "coherence_bound": rows.user_norm.sum(-1),
        "cosine_sum": (cosine * rows.usage).sum(-1),
        "cosine_bound": torch.where(turned, rows.usage, 0.0).sum(-1),
    }
    return torch.stack([sums[name].to(m.dtype).expand(batch, heads) for name in SUMS], -1).cpu().double()


def _entropy(usage: Tensor) -> Tensor:
    """Entropy in nats of the share of each key, over the last axis."""
    usage = usage.double()
    share = usage / usage.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return -torch.xlogy(share, share).sum(-1)


@dataclass(eq=False)
class Sums:
    """The sums of one module, use and delivery: (H,C), with R bootstrap replicates (R,H,C) unless `replicates` is None.

    `bad_steps` (H,): in how many steps a head had non-finite numbers, which were left out. `imprecise`: law_residual above
    which a head's status says so, by the precision of the kernel's output. `sequences`: identities of the sequences that
    were summed, up to `bootstrap.MANY` of them.
    """

    total: Tensor
    replicates: Tensor | None
    bad_steps: Tensor
    imprecise: float = 1e-5
    sequences: frozenset[int] = frozenset()
    bad_now: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.bad_now = torch.zeros_like(self.bad_steps, dtype=torch.bool)

    @classmethod
    def empty(cls, heads: int, *, replicated: bool = True) -> Sums:
        zeros = torch.zeros(heads, len(SUMS), dtype=torch.float64)
        replicates = torch.zeros(bootstrap.REPLICATES, heads, len(SUMS), dtype=torch.float64) if replicated else None
        return cls(zeros, replicates, torch.zeros(heads, dtype=torch.long))

    def add(self, sums: Tensor, identities: Sequence[int]) -> None:
        """Add one call.

        Args:
            sums: (B,H,C) of `sequence_sums`; heads with a non-finite number are flagged and left out.
            identities: of the B sequences.
        """
        self._note(identities)
        bad = ~torch.isfinite(sums).all(-1).all(0)
        if bad.any():
            sums = sums.masked_fill(bad[None, :, None], 0.0)
            self.bad_now |= bad
        self.total += sums.sum(0)
        if self.replicates is not None:
            self.replicates += (bootstrap.weights(identities) @ sums.flatten(1)).view_as(self.replicates)

    def _note(self, identities: Iterable[int]) -> None:
        if len(self.sequences) < bootstrap.MANY:
            self.sequences = frozenset(islice(self.sequences.union(identities), bootstrap.MANY))

    def close_step(self) -> None:
        self.bad_steps += self.bad_now
        self.bad_now.zero_()

    def divide(self, weight: float) -> None:
        """Take a factor out of u: every sum is divided by weight^degree."""
        factor = weight**-DEGREE
        self.total *= factor
        if self.replicates is not None:
            self.replicates *= factor

    def merge(self, other: Sums) -> None:
        """Add the sums of other sequences.

        Raises:
            MergeRefused: when the two have different numbers of heads.
        """
        if self.total.shape != other.total.shape:
            raise MergeRefused(
                f"Sums of {other.total.shape[0]} heads cannot be added to sums of {self.total.shape[0]} heads; "
                "merge only watches of the same model."
            )
        self.total += other.total
        self.bad_steps += other.bad_steps + other.bad_now
        self.imprecise = max(self.imprecise, other.imprecise)
        self._note(other.sequences)
        if self.replicates is not None and other.replicates is not None:
            self.replicates += other.replicates

    def copy(self, *, replicated: bool = True) -> Sums:
        replicates = self.replicates.clone() if replicated and self.replicates is not None else None
        return Sums(self.total.clone(), replicates, self.bad_steps + self.bad_now, self.imprecise, self.sequences)

    def columns(self) -> dict[str, Array]:
        """Every column of the heads table, (H,) each."""
        return columns(self.total.numpy())

    def intervals(self) -> dict[str, tuple[Array, Array]]:
        """Lower and upper end of the 95 % interval of every column, (H,) each; NaN below `bootstrap.FEWEST` sequences."""
        assert self.replicates is not None
        return intervals(self.total.numpy(), self.replicates.numpy(), len(self.sequences))


def intervals(
    total: Array, replicates: Array, sequences: int, names: Sequence[str] = HEADS
) -> dict[str, tuple[Array, Array]]:
    """Ends of the 95 % interval of columns, from the sums (H,C) of so many sequences and their replicates (R,H,C)."""
    values, drawn = columns(total, names), columns(replicates, names)
    return {name: bootstrap.interval(values[name], drawn[name], sequences, scale=COLUMNS[name].scale) for name in names}
