"""Who sees whom, and which query rows count.

Everything that needs the set V_i of visible keys of a query row asks here: the law, the block pass, verification and
the token tables. Structure that is known in closed form (causal order, a window) is never expanded to Q × S; explicit
masks are read one block at a time.

Shapes: B batch, H query heads, Q query positions, S key positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .mask_cache import remembered


def shows(mask: Tensor) -> Tensor:
    """Where a float mask, which is added to the scores, leaves a key visible.

    Masks hide with -inf, with the minimum of some dtype, or with fills such as -1e9 and -1e4; a learned bias may have been
    added to any of them.
    """
    return mask > max(torch.finfo(mask.dtype).min / 2, -9e3)


HIDDEN = -1e30  # finite, so that 0 · HIDDEN is 0 and not NaN


@dataclass(frozen=True)
class Structure:
    """The part of visibility that is known without a tensor.

    Query i sees key j only if `j <= i + offset` (when `causal`) and `j > i + offset - window` (when a window is set).
    """

    causal: bool = False
    offset: int = 0
    window: int | None = None

    def span(self, start: int, stop: int, keys: int) -> tuple[int, int]:
        """Range of keys that queries start … stop-1 can see at most."""
        low, high = 0, keys
        if self.causal:
            high = max(0, min(keys, stop + self.offset))
        if self.window is not None:
            low = max(0, min(keys, start + self.offset - self.window + 1))
        return low, max(low, high)

    def full(self, start: int, stop: int, low: int, high: int) -> bool:
        """True when every query of the block sees every key of low … high-1."""
        above = self.causal and high - 1 > start + self.offset
        below = self.window is not None and low <= stop - 1 + self.offset - self.window
        return not (above or below)

    def visible(self, start: int, stop: int, low: int, high: int, device: torch.device) -> Tensor:
        """(rows, keys) bool."""
        row = torch.arange(start, stop, device=device)[:, None] + self.offset
        column = torch.arange(low, high, device=device)[None, :]
        seen = torch.ones(stop - start, high - low, dtype=torch.bool, device=device)
        if self.causal:
            seen &= column <= row
        if self.window is not None:
            seen &= column > row - self.window
        return seen


@dataclass(frozen=True)
class Visibility:
    """Visible keys and additive biases of one call.

    Attributes:
        structure: causal order and window.
        queries, keys: Q and S.
        mask: None, or broadcastable to (B, H, Q, S): bool (True is visible) or float (added to the score; entries
            at or below half of the dtype's minimum hide the key, whatever bias was added to them).
        bias: None, or a float tensor broadcastable to (B, H, Q, S) that is added to the score and hides nothing.
        rows: None, or (B, Q) bool: the query rows that count, from the padding mask the model was given.
        added: how many of the last keys are no tokens (learned or zero columns): they have no position.
        paired: True where queries and keys are the same sequence, False in cross-attention.
    """

    structure: Structure
    queries: int
    keys: int
    mask: Tensor | None = None
    bias: Tensor | None = None
    rows: Tensor | None = None
    added: int = 0
    paired: bool = True

    def shared(self, start: int, low: int, high: int) -> int:
        """How many of the keys low … high-1, from the left, every query from `start` on is known to see, unbiased."""
        if self.mask is not None or self.bias is not None or self.structure.window is not None:
            return 0
        return max(0, min(high, start + self.structure.offset + 1) - low) if self.structure.causal else high - low

    def block(
        self, batch: slice, heads: slice, start: int, stop: int, low: int, high: int, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        """What the queries start … stop-1 see of the keys low … high-1.

        Returns:
            seen: None when everything is visible, else bool broadcastable to (b, h, rows, keys).
            bias: None, or float broadcastable to the same shape; 0 where hidden.
        """
        seen: Tensor | None = None
        bias: Tensor | None = None
        if not self.structure.full(start, stop, low, high):
            seen = self.structure.visible(start, stop, low, high, device)[None, None]
        if self.mask is not None:
            part = _cut(self.mask, batch, heads, start, stop, low, high)
            if part.dtype == torch.bool:
                shown = part
            else:
                shown = shows(part)
                bias = torch.where(shown, part, torch.zeros((), dtype=part.dtype, device=part.device))
            seen = shown if seen is None else seen & shown
        if self.bias is not None:
            part = _cut(self.bias, batch, heads, start, stop, low, high)
            bias = part if bias is None else bias + part
        return seen, bias

    def dense(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """The whole (B, 1 or H, Q, S) map at once, and the bias: for the reference law and for heat maps."""
        everything = slice(None)
        seen, bias = self.block(everything, everything, 0, self.queries, 0, self.keys, device)
        if seen is None:
            seen = torch.ones(1, 1, self.queries, self.keys, dtype=torch.bool, device=device)
        return seen.expand(batch, seen.shape[1], self.queries, self.keys), bias

    def counted(self, batch: int, device: torch.device) -> Tensor:
        """(B, Q) bool: the query rows R that enter the statistics.

        The padding mask decides where one was given; else, for as many queries as keys, a row counts when it may see
        its own key, or when another query sees that key; else when it sees any key.
        """
        if self.rows is not None:
            return self.rows.to(device)
        if self.mask is None:
            return _everyone(batch, self.queries, device)
        return remembered(("counted", self._shape, batch), (self.mask,), lambda: self._counted(batch, device))

    @property
    def _shape(self) -> tuple[object, ...]:
        return self.structure, self.queries, self.keys, self.added, self.paired

    def _counted(self, batch: int, device: torch.device) -> Tensor:
        own = torch.ones(batch, self.queries, dtype=torch.bool, device=device)
        mask = self.mask
        assert mask is not None
        if self.paired and self.queries == self.keys - self.added and mask.shape[-1] == self.keys:
            own_entry = mask[..., 0, : self.queries] if mask.shape[-2] == 1 else mask.diagonal(dim1=-2, dim2=-1)
            shown = own_entry if mask.dtype == torch.bool else shows(own_entry)
            shown = shown.any(dim=1).expand(batch, -1)
            if bool(shown.all()):
                return own
            # a hidden own key is padding where nobody sees it; a mask may also hide a key from its own query only
            return shown | (self._met(batch, device)[:, : self.queries] & self._seeing(batch, device))
        return self._seeing(batch, device)

    def _rows(self, device: torch.device) -> Iterator[tuple[slice, Tensor | None]]:
        """What the queries see, some rows at a time: (b, h, rows, S), or None for everything."""
        for start in range(0, self.queries, 256):
            stop = min(start + 256, self.queries)
            yield slice(start, stop), self.block(slice(None), slice(None), start, stop, 0, self.keys, device)[0]

    def _seeing(self, batch: int, device: torch.device) -> Tensor:
        """(B, Q): rows that see any key."""
        some = torch.ones(batch, self.queries, dtype=torch.bool, device=device)
        for span, seen in self._rows(device):
            if seen is not None:
                some[:, span] &= seen.any(dim=-1).any(dim=1).expand(batch, -1)
        return some

    def _met(self, batch: int, device: torch.device, rows: Tensor | None = None) -> Tensor:
        """(B, S): keys that any query sees, or any of `rows` (B, Q)."""
        met = torch.zeros(batch, self.keys, dtype=torch.bool, device=device)
        for span, seen in self._rows(device):
            if seen is None:
                met |= torch.ones_like(met)
                continue
            if rows is not None:
                seen = seen & rows[:, None, span, None]
            met |= seen.flatten(1, 2).any(1).expand(batch, self.keys)
        return met

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Positions of the queries (Q,) and keys (S,) on one axis; cached keys come before the first query."""
        own = torch.arange(self.queries, device=device) + self.first_position
        return own, torch.arange(self.keys, device=device)

    @property
    def first_position(self) -> int:
        """Position of query 0: by the order, else by the mask, else as if the queries were the last tokens."""
        if not self.paired:
            return 0  # queries and keys of different sequences each count from 0
        if self.structure.causal:
            return self.structure.offset
        last = self.keys - self.added - self.queries
        if last <= 0 or self.mask is None or self.mask.shape[-2] != self.queries or self.mask.shape[-1] != self.keys:
            return last
        return remembered(("first position", self._shape), (self.mask,), lambda: self._by_mask(last))

    def _by_mask(self, last: int) -> int:
        """Position of query 0 in a buffer with room behind it, as static caches have: the last key that a query sees is its
        own where the next query's last one lies one further; `last` where no two queries show it.
        """
        assert self.mask is not None
        tokens = self.keys - self.added
        shown = (self.mask if self.mask.dtype == torch.bool else shows(self.mask))[..., :tokens]
        shown = shown.reshape(-1, self.queries, tokens).any(0)
        rows = shown.any(-1).nonzero()[:2, 0].tolist()
        if len(rows) < min(2, self.queries):
            return last
        furthest = [int(shown[row].nonzero()[-1]) - row for row in rows]
        return furthest[0] if len(set(furthest)) == 1 else last

    def first_key(self, key_rows: Tensor | None, batch: int, device: torch.device) -> Tensor:
        """(B,) position of the first key of each sequence that is not padding: by the padding mask where there is one,
        else the first that a query which counts can see.
        """
        if key_rows is None:
            if self.mask is None:
                return torch.zeros(batch, dtype=torch.long, device=device)
            return remembered(("first key", self._shape, batch), (self.mask,), lambda: self._first(batch, device))
        return key_rows.to(device).to(torch.uint8).argmax(dim=1).expand(batch)

    def _first(self, batch: int, device: torch.device) -> Tensor:
        met = self._met(batch, device, self.counted(batch, device))
        return met[:, : self.keys - self.added].to(torch.uint8).argmax(dim=1)

    def one_sided(self) -> bool:
        """True when no query sees a key that comes after it, and every key has a position."""
        if self.added:
            return False
        return self.structure.causal or self.ordered()

    def ordered(self) -> bool:
        """True when the mask hides from every query the tokens that come after it."""
        if self.mask is None or self.mask.shape[-2] != self.queries or self.queries == 1:
            return False
        return remembered(("ordered", self._shape), (self.mask,), self._ordered)

    def _ordered(self) -> bool:
        assert self.mask is not None
        own, other = self.positions(self.mask.device)
        shown = self.mask if self.mask.dtype == torch.bool else shows(self.mask)
        tokens = self.keys - self.added
        return not bool((shown[..., :tokens] & (other[None, :tokens] > own[:, None])).any())

    def counts(self, batch: int, counted: Tensor) -> tuple[Tensor, Tensor]:
        """How many keys each query sees, and how often each key would be used if attention were even.

        Args:
            counted: (B, Q) bool, the rows that enter the second result.

        Returns:
            seen (B, 1 or H, Q): n_i. uniform (B, 1 or H, S) float64: Σ over counted rows i that see key j of 1/n_i.
        """
        device = counted.device
        structure = self.structure
        if self.mask is None and structure.window is None:
            if self.rows is None:
                return _unmasked(structure, batch, self.queries, self.keys, device)
            return _by_order(structure, counted, self.keys)
        return remembered(
            ("counts", self._shape, batch), (self.mask, counted), lambda: self._counts(batch, counted, device)
        )

    def _counts(self, batch: int, counted: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        structure = self.structure
        heads = self.mask.shape[1] if self.mask is not None else 1
        seen = torch.zeros(batch, heads, self.queries, dtype=torch.long, device=device)
        uniform = torch.zeros(batch, heads, self.keys, dtype=torch.float64, device=device)
        everything = slice(None)
        step = max(1, 2**20 // max(1, self.keys * heads))
        for start in range(0, self.queries, step):
            stop = min(start + step, self.queries)
            low, high = structure.span(start, stop, self.keys)
            shown, _ = self.block(everything, everything, start, stop, low, high, device)
            if shown is None:
                shown = torch.ones(1, 1, stop - start, high - low, dtype=torch.bool, device=device)
            shown = shown.expand(batch, heads, stop - start, high - low)
            part = shown.sum(-1)
            seen[:, :, start:stop] = part
            share = counted[:, None, start:stop] / part.clamp(min=1).to(torch.float64)
            uniform[..., low:high] += torch.einsum("bhq,bhqs->bhs", share, shown.to(torch.float64))
        return seen, uniform


@lru_cache(maxsize=4)
def _everyone(batch: int, queries: int, device: torch.device) -> Tensor:
    """(B, Q) True; every layer of a model is handed the same, not to be written to."""
    return torch.ones(batch, queries, dtype=torch.bool, device=device)


def _by_order(structure: Structure, counted: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """`Visibility.counts` where order alone decides."""
    batch, queries = counted.shape
    if structure.causal:
        seen = (torch.arange(queries, device=counted.device) + structure.offset + 1).clamp(0, keys)
    else:
        seen = torch.full((queries,), keys, device=counted.device)
    share = counted / seen.clamp(min=1).double()  # (B, Q): what each row gives to each key it sees
    total = torch.zeros(batch, keys + 1, dtype=torch.float64, device=counted.device)
    total.index_add_(1, seen, share)  # row i reaches keys 0 … n_i − 1
    uniform = total.flip(1).cumsum(1).flip(1)[:, 1:]
    return seen[None, None].expand(batch, 1, -1), uniform[:, None]


@lru_cache(maxsize=4)
def _unmasked(structure: Structure, batch: int, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`_by_order` where every row counts, once for all layers; not to be written to."""
    return _by_order(structure, _everyone(batch, queries, device), keys)


def _cut(tensor: Tensor, batch: slice, heads: slice, start: int, stop: int, low: int, high: int) -> Tensor:
    """The block of a tensor that broadcasts to (B, H, Q, S): axes of length 1 stay whole."""
    index = (batch, heads, slice(start, stop), slice(low, high))
    return tensor[tuple(slice(None) if size == 1 else part for size, part in zip(tensor.shape, index))]
