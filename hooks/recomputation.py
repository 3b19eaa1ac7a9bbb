"""Checkpointed calls that await their recomputation, and what was decided about each of them.

A recomputed call is recognised by its query, which is bit-equal, so that any number of forwards may be under way in any
order. Where it is not bit-equal (dropout without preserved random state) it belongs to the latest forward.

Shapes: B batch, H query heads, Q query positions, D head width.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .call import CallSite, Needs
from .tap import Delivery

_REMEMBERED = 256  # calls per module that may await their recomputation


@dataclass(frozen=True)
class Decision:
    """To observe a call: what it is, what is wanted of it, and whether it was given a gradient path."""

    call: CallSite
    needs: Needs
    anchored: bool


@dataclass(frozen=True, eq=False)
class Awaited:
    """A checkpointed call.

    `decision`: None when it was left alone. `delivery`: the tap that waits for its gradient, None inside reentrant
    checkpoints, where the tap is made by the recomputation.
    """

    module: nn.Module
    fingerprint: Tensor
    shape: torch.Size
    decision: Decision | None
    delivery: weakref.ref[Delivery] | None

    @property
    def alive(self) -> bool:
        if self.delivery is None:
            return True
        delivery = self.delivery()
        return delivery is not None and delivery.pending


def fingerprint(query: Tensor) -> Tensor:
    """(B, D): enough of a query (B,H,Q,D) to recognise its bit-equal recomputation."""
    with torch.no_grad():
        return query.detach()[:, 0].sum(dim=1)


class Recomputations:
    """The calls of one attachment that await their recomputation; `freed` is called when a graph was given up."""

    def __init__(self, freed: Callable[[], None]) -> None:
        self._freed = weakref.WeakMethod(freed)
        self._queues: dict[int, deque[Awaited]] = {}

    def remember(
        self, module: nn.Module, query: Tensor, decision: Decision | None, delivery: Delivery | None = None
    ) -> None:
        """Note a call inside a checkpoint."""
        reference = None if delivery is None else weakref.ref(delivery, self._gone)
        queue = self._queues.setdefault(id(module), deque(maxlen=_REMEMBERED))
        while queue and not queue[0].alive:
            queue.popleft()
        queue.append(Awaited(module, fingerprint(query), query.shape, decision, reference))

    def _gone(self, _: Any) -> None:
        freed = self._freed()
        if freed is not None:
            freed()

    def match(self, module: nn.Module | None, query: Tensor) -> Awaited | None:
        """The call that is computed again, by `module`; None where a checkpointed function runs without its module."""
        own: list[Awaited] = []
        others: list[Awaited] = []
        for key, queue in self._queues.items():
            fitting = [entry for entry in queue if entry.alive and entry.shape == query.shape]
            if key == id(module):
                own.extend(fitting)
            elif module is None:
                others.extend(fitting)
        if not own and not others:
            return None
        mark = fingerprint(query)
        equal = [entry for entry in own if torch.equal(entry.fingerprint, mark)]
        # without a module the query alone says which call it was
        equal = equal or [entry for entry in others if torch.equal(entry.fingerprint, mark)]
        if not equal and not own:
            return None
        entry = (equal or own)[-1]
        if entry.delivery is None:
            self._queues[id(entry.module)].remove(entry)
        return entry

    def pending(self) -> bool:
        """True while a tap that was made in a forward waits for its gradient."""
        return any(entry.delivery is not None and entry.alive for queue in self._queues.values() for entry in queue)

    def clear(self) -> None:
        self._queues.clear()
