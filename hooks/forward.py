"""Which top-level forward and which watched module are running.

Where one forward ends and the next begins is known at the modules that are handed the batch. Those are followed by
replacing `__call__` on their *class* while a watch is open: nothing is hung on a module, so copies, pickles and saved
models carry nothing of ours, and other people's hooks stay as they are.

A module that calls a plain function (`scaled_dot_product_attention`) does not tell the function its name; the innermost
module that runs is the one that called. What a kernel calls inside belongs to the call that is being read.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .sequences import Frame, Sequences, sequences_of, with_columns


@dataclass(eq=False)
class Forward:
    """One top-level forward of a watched model."""

    number: int
    gradients: bool
    reach: bool
    top: Frame | None
    uses: Counter[int] = field(default_factory=Counter)
    _cache: dict[tuple[object, ...], Sequences] = field(default_factory=dict)

    def use(self, module: nn.Module) -> int:
        count = self.uses[id(module)]
        self.uses[id(module)] += 1
        return count

    def sequences(self, batch: int, queries: int, keys: int, cross: bool, added: tuple[str, ...] = ()) -> Sequences:
        """What is known about the rows of a call of this shape, from the innermost module that was told."""
        inner = frames.innermost()
        key = (batch, queries, keys, cross, inner, added)  # the frame itself: an id would be given again
        if key not in self._cache:
            found = sequences_of(self.top, inner, batch, queries, keys - len(added), cross)
            self._cache[key] = with_columns(found, batch, queries, keys, cross, added)
        return self._cache[key]


class _Frames(threading.local):
    """The followed modules that are running on this thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[Frame] = []

    def innermost(self) -> Frame | None:
        """The innermost running module that was told what its batch is."""
        for entry in reversed(self.stack):
            if entry.stack or entry.ids is not None or entry.mask is not None:
                return entry
        return self.stack[-1] if self.stack else None


frames = _Frames()


@dataclass(frozen=True, eq=False)
class Running:
    """A running watched module; `crossing`: nn.MultiheadAttention was given keys of another sequence than its queries."""

    module: nn.Module
    crossing: bool


class _Stacks(threading.local):
    def __init__(self) -> None:
        self.modules: list[Running] = []
        self.calls: list[Any] = []  # modules, seams for the flash kernel, or None
        self.read = 0  # calls that reached an adapter, ever

    def innermost(self) -> Running | None:
        return self.modules[-1] if self.modules else None


stacks = _Stacks()


def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note that `module` starts with these arguments; `leave` when it ends."""
    crossing = False
    if isinstance(module, nn.MultiheadAttention):
        given = {**dict(zip(("query", "key", "value"), args)), **kwargs}
        crossing = given.get("key") is given.get("value") and given.get("key") is not given.get("query")
    stacks.modules.append(Running(module, crossing))


def leave() -> None:
    stacks.modules.pop()
