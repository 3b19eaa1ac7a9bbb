"""Answers about explicit masks, kept while a forward and its backward last.

Every layer of a model is handed the same mask, and how many keys each query sees would be counted anew in every layer's
backward. Entries hold the tensors they speak of, so that a storage cannot be given to another tensor meanwhile; they are
dropped when the next forward begins and when the last watch closes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from torch import Tensor

MOST = 8  # a model has a mask per kind of layer, seldom more than two; several answers about each
Answer = TypeVar("Answer")


def _same(held: Tensor | None, version: int, given: Tensor | None) -> bool:
    if held is None or given is None:
        return held is given
    if given._version != version or held._version != version:
        return False
    return held is given or (
        held.data_ptr() == given.data_ptr()
        and held.shape == given.shape
        and held.stride() == given.stride()
        and held.dtype == given.dtype
        and held.device == given.device
    )


# one list for all threads: autograd's own thread answers what it asks; replaced whole, never changed
_kept: list[tuple[Hashable, list[tuple[Tensor | None, int]], Any]] = []


def remembered(key: Hashable, tensors: Sequence[Tensor | None], answer: Callable[[], Answer]) -> Answer:
    """`answer()`, or what it gave for the same `key` and the same, unchanged tensors."""
    global _kept
    if any(tensor is not None and tensor.is_inference() for tensor in tensors):  # it does not tell when it was changed
        return answer()
    for known, held, found in _kept:
        if known == key and all(
            _same(one, version, other) for (one, version), other in zip(held, tensors, strict=True)
        ):
            return found
    found = answer()
    kept = [(tensor, 0 if tensor is None else tensor._version) for tensor in tensors]
    _kept = [(key, kept, found), *_kept[: MOST - 1]]
    return found


def forget() -> None:
    """Drop everything that is remembered."""
    global _kept
    _kept = []
