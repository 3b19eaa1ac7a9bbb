"""What a watch was asked for, checked before anything is attached."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ..hooks.errors import BadRequest

Detail = Literal["heads", "tokens", "edges"]


@dataclass(frozen=True)
class Options:
    """The arguments of `watch()`, where each is explained.

    Raises:
        BadRequest: for arguments that cannot be served.
    """

    layers: Iterable[int] | None = None
    heads: Iterable[int] | None = None
    detail: Detail = "heads"
    every: int = 1
    edges: int = 64
    scaler: Any = None
    reach_all: bool = False
    tokenizer: Any = None
    history: str | os.PathLike[str] | None = None
    logger: Any = None
    fused: bool = False
    compiled: bool = False
    singly: bool = False

    def __post_init__(self) -> None:
        if self.detail not in ("heads", "tokens", "edges"):
            raise BadRequest(f'detail must be "heads", "tokens" or "edges", not {self.detail!r}.')
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise BadRequest(f"every must be a whole number of steps, at least 1, not {self.every!r}.")
        if not isinstance(self.edges, int) or isinstance(self.edges, bool) or self.edges < 1:
            raise BadRequest(f"edges must be a whole number, at least 1, not {self.edges!r}.")
        if self.scaler is not None and not callable(getattr(self.scaler, "get_scale", None)):
            raise BadRequest("scaler must be a GradScaler: an object with get_scale().")
        for name in ("layers", "heads"):
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))


def _numbers(name: str, given: Any) -> frozenset[int] | None:
    if given is None:
        return None
    given = given if isinstance(given, (str, int)) else list(given)
    if isinstance(given, (str, int)) or not all(isinstance(number, int) for number in given):
        raise BadRequest(f"{name} must be a list of whole numbers, such as {name}=[0, 3], not {given!r}.")
    return frozenset(given)
