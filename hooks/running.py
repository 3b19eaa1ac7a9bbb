"""What is running on this thread: the watched modules, and the attention calls that are already being read.

A module that calls a plain function (`scaled_dot_product_attention`) does not tell the function its name; the innermost
module that runs is the one that called. What a kernel calls inside belongs to the call that is being read.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, eq=False)
class Running:
    """A running watched module; `crossing`: nn.MultiheadAttention was given keys of another sequence than its queries."""

    module: nn.Module
    crossing: bool


class _Stacks(threading.local):
    def __init__(self) -> None:
        self.modules: list[Running] = []
        self.calls: list[nn.Module | None] = []
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
