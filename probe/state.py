"""Everything a watch has added up: one entry per module, use and delivery, and nothing that depends on the model object.

States of different batches, shards or ranks merge by addition; intervals, edges and token rows come along. Heads
themselves are never split over states: query shards of one sequence cannot be added.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

import torch

from ..hooks.call import AttentionCall, CallSite
from ..hooks.errors import LawViolated, MergeRefused
from ..hooks.site import Site
from .columns import INDEX
from .documents import units
from .edges import TopEdges
from .law.strongest import RankBy
from .law.vectors import Vectors
from .operator import ways
from .operator.one_pass import EdgeRequest
from .statistics import DEGREE, Sums, sequence_sums
from .tokens import Tokens, positions, token_rows
from .updates import Updates

# largest law_residual of a right reading, by the dtype in which the kernel returned its output: measured 1e-7 to 5e-6 in
# float32; the smallest fault that was tried (a scale off by 1 %) gives 5e-4
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, order=True)
class Key:
    """Module, use within the forward, and which delivery of the gradient (0: the first)."""

    site: Site
    use: int
    backward: int = 0


def label(key: Key, head: int, shared: Collection[str] = (), letter: str = "H") -> str:
    """Short name of a head, such as L3H7; prefixed by its stack and, for cross attention, by "x". Where the module's name
    has no layer, or is one of `shared`, the name itself stands for it: blocks.attention.H7. `letter`: "KV" for key/value
    heads.
    """
    dot = "." if _by_name(key, shared) else ""
    return f"{_module(key, shared)}{dot}{letter}{head}{_use(key.use)}"


def module_label(key: Key, shared: Collection[str] = ()) -> str:
    """The name of all heads of a module together: the label without its head."""
    return f"{_module(key, shared)}{_use(key.use)}"


def without_head(label: str, head: int, use: int) -> str:
    """What is left of a head's label when the head, whose numbers are known, is taken off."""
    return label.removesuffix(f"H{head}{_use(use)}").rstrip(".")


def _by_name(key: Key, shared: Collection[str]) -> bool:
    return key.site.layer < 0 or key.site.module in shared


def _module(key: Key, shared: Collection[str]) -> str:
    return (key.site.module or "?") if _by_name(key, shared) else _place(key)


def _use(use: int) -> str:
    return f"u{use}" if use else ""


def shared_modules(keys: Iterable[Key]) -> frozenset[str]:
    """The modules whose layer holds another module of the same stack and kind, so that its number names neither."""
    there: dict[str, set[str]] = {}
    for key in keys:
        there.setdefault(_place(key), set()).add(key.site.module)
    return frozenset(name for names in there.values() if len(names) > 1 for name in names)


def _place(key: Key) -> str:
    stack = f"{key.site.stack}." if key.site.stack else ""
    return f"{stack}{'x' if key.site.kind == 'cross' else ''}L{key.site.layer}"


@dataclass(eq=False)
class Entry:
    """What is known of one key: the sums and their companions, None where they were not asked for.

    `group`: query heads per key/value head. `reachable`: False when no gradient path led to the call. `singly`: the sums
    (H,C) of every sequence by its identity.
    """

    heads: int
    group: int
    sums: Sums
    reachable: bool = True
    updates: Updates | None = None
    edges: TopEdges | None = None
    tokens: Tokens | None = None
    singly: dict[int, torch.Tensor] | None = None

    def merge(self, other: Entry) -> None:
        if (self.heads, self.group) != (other.heads, other.group) and self.heads and other.heads:
            raise MergeRefused(
                f"{other.heads} heads in groups of {other.group} cannot be added to {self.heads} in groups of "
                f"{self.group}; merge only watches of the same model."
            )
        if not other.heads:
            self.reachable |= other.reachable
            return
        if not self.heads:
            self.heads, self.group, self.sums = other.heads, other.group, other.sums.copy()
        else:
            self.sums.merge(other.sums)
        self.reachable |= other.reachable
        for name in ("updates", "edges", "tokens"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours is None:
                setattr(self, name, None if theirs is None else theirs.copy())
            elif theirs is not None:
                ours.merge(theirs)
        for identity, sums in (other.singly or {}).items():
            self.keep(identity, sums)

    def keep(self, identity: int, sums: torch.Tensor) -> None:
        """Add the sums of one sequence to what is known of it."""
        self.singly = self.singly if self.singly is not None else {}
        known = self.singly.get(identity)
        self.singly[identity] = sums.clone() if known is None else known + sums

    def divide(self, weight: float) -> None:
        self.sums.divide(weight)
        if self.singly is not None:
            self.singly = {identity: sums * weight**-DEGREE for identity, sums in self.singly.items()}
        for part in (self.updates, self.edges, self.tokens):
            if part is not None:
                part.divide(weight)

    def copy(self) -> Entry:
        return Entry(
            self.heads,
            self.group,
            self.sums.copy(),
            self.reachable,
            self.updates and self.updates.copy(),
            self.edges and self.edges.copy(),
            self.tokens and self.tokens.copy(),
            None if self.singly is None else {identity: sums.clone() for identity, sums in self.singly.items()},
        )


def _unseen() -> Entry:
    """An entry of a call that was seen in the forward pass and whose heads are not known yet."""
    return Entry(0, 1, Sums.empty(0), reachable=False)


@dataclass(eq=False)
class State:
    """Entries by key, in the order in which the model made the calls.

    `sequences`: identities of the sequences that token rows and edges speak of, in the order in which they came.
    """

    entries: dict[Key, Entry] = field(default_factory=dict)
    sequences: dict[int, None] = field(default_factory=dict)

    def seen(self, call: CallSite, heads: int, group: int, reachable: bool) -> None:
        """Note a call of the forward pass, so that heads without a gradient are listed too."""
        entry = self.entries.setdefault(Key(call.site, call.use), _unseen())
        if not entry.heads:
            entry.heads, entry.group, entry.sums = heads, group, Sums.empty(heads)
        entry.reachable |= reachable

    def add(
        self,
        call: AttentionCall,
        *,
        edges: int = 0,
        rank_by: RankBy = "score_gradient",
        tokens: bool = False,
        singly: bool = False,
        scale: float = 1.0,
        rows: Vectors | None = None,
    ) -> str:
        """Add one call; returns which way it was computed, where `rows` were not given.

        Args:
            edges: how many edges per head and direction to keep, and rank_by: which; tokens: whether to keep token rows.
            singly: whether to keep the sums of every sequence.
            scale: the loss scale that u carries; it is taken out. rows: the call's vectors, where they are known.

        Raises:
            LawViolated: when the recomputed weights do not reproduce the kernel's output.
        """
        if call.hidden:  # α is known, w is not: nothing that u enters can be said
            call, edges, tokens = replace(call, upstream=torch.zeros_like(call.upstream)), 0, False
        way = ""
        if rows is None:
            rows, way = ways.vectors(call, EdgeRequest(edges, rank_by == "knockout"), tokens)
        found = units(call)
        sums = sequence_sums(call, rows, found)
        heads = call.query.shape[1]
        _check(call, sums)
        entry = self.entries.setdefault(Key(call.site, call.use, call.delivery), _unseen())
        if not entry.heads:
            entry.heads, entry.group, entry.sums = heads, call.group, Sums.empty(heads)
        elif (entry.heads, entry.group) != (heads, call.group):
            raise MergeRefused(f"{call.site.module} changed from {entry.heads} to {heads} heads within a step.")
        identities = call.sequences.identities
        entry.reachable = True
        entry.sums.imprecise = max(entry.sums.imprecise, TOLERANCE.get(call.output.dtype, 1e-4) / 10)
        units_ = identities if found is None else found.identities
        if scale != 1.0:
            sums = sums * scale**-DEGREE
        entry.sums.add(sums, units_)
        if singly:
            sound = torch.isfinite(sums).all(-1).all(0)[:, None]
            for identity, part in zip(units_, torch.where(sound, sums, 0.0), strict=True):
                entry.keep(identity, part)
        if entry.updates is None:
            entry.updates = Updates.empty(heads, call.value.shape[-1])
        if not call.hidden:
            entry.updates.add(rows, scale)
        if edges and rows.edges is not None:
            strongest = TopEdges.empty(heads, edges, rank_by)
            strongest.add(rows.edges, call.sequences, positions(call))
            strongest.divide(scale)
            entry.edges = entry.edges or TopEdges.empty(heads, edges, rank_by)
            entry.edges.merge(strongest)
        if tokens:
            shown = Tokens([token_rows(call, rows)])
            shown.divide(scale)
            entry.tokens = entry.tokens or Tokens()
            entry.tokens.merge(shown)
        if edges or tokens:  # rows name their sequence; sums do not, and a long training would fill the memory
            self.sequences.update(dict.fromkeys(identities))
        return way

    def merge(self, other: State) -> None:
        """Add a state of other sequences of the same model."""
        for key, theirs in other.entries.items():
            if key in self.entries:
                self.entries[key].merge(theirs)
            else:
                self.entries[key] = theirs.copy()
        self.sequences.update(other.sequences)

    def divide(self, weight: float) -> None:
        """Take the loss weight out of u everywhere."""
        for entry in self.entries.values():
            entry.divide(weight)

    def close_step(self) -> None:
        for entry in self.entries.values():
            entry.sums.close_step()

    def copy(self) -> State:
        return State({key: entry.copy() for key, entry in self.entries.items()}, dict(self.sequences))


def _check(call: AttentionCall, sums: torch.Tensor) -> None:
    residual, scale = sums[..., INDEX["residual"]].sum(0), sums[..., INDEX["residual_scale"]].sum(0)
    limit = TOLERANCE.get(call.output.dtype, 1e-4)
    wrong = torch.isfinite(residual) & (scale > 1e-30) & (residual > limit**2 * scale)
    if wrong.any():
        head = int(wrong.nonzero()[0])
        value = float((residual[head] / scale[head]).sqrt())
        raise LawViolated(
            f"{call.site.module}, head {head}: the weights recomputed for {call.implementation!r} do not "
            f"reproduce the head's output (law_residual {value:.1e}, at most {limit:.0e} allowed), so nothing said "
            "about it could be trusted; leave the layer out with layers=, or load the model with "
            "attn_implementation='sdpa'."
        )


@dataclass(frozen=True, eq=False)
class Step:
    """One closed step: its number and what was summed per key.

    `loss_weight` (the mean over micro-batches) and `loss_scale` (of the GradScaler): None when they were not told.
    `skipped`: the scaler left the step out because of non-finite gradients; it is no part of the pooled numbers.
    """

    number: int
    sums: dict[Key, Sums]
    loss_weight: float | None
    loss_scale: float | None
    skipped: bool
