"""Replacing an attribute of a class, a module or a dictionary of globals while somebody needs it, and putting it back.

Several watches may need the same replacement: it is made for the first and undone after the last. What is put back is
exactly what was there; where nothing was (an inherited attribute), the attribute is deleted; where somebody else has
replaced ours in the meantime, theirs stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_MISSING = object()
_lock = threading.RLock()
# replacements are made once per original: compiled graphs that were traced through one are found again
_made: dict[tuple[Callable[[Any], Any], Any], Any] = {}
_makers: dict[Any, Callable[[Any], Any]] = {}
_active: dict[tuple[int, str], list[Any]] = {}


def acquire(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` (`owner[name]` of a dictionary) by `make(current value)`; a second call only counts."""
    with _lock:
        key = (id(owner), name)
        if key in _active:
            _active[key][0] += 1
            return
        before = _namespace(owner).get(name, _MISSING)
        current = owner[name] if isinstance(owner, dict) else getattr(owner, name)
        # what is inherited from a class whose own is replaced already is not replaced twice
        replacement = current if _makers.get(current) is make else _made.get((make, current))
        if replacement is None:
            replacement = _made[make, current] = make(current)
            _makers[replacement] = make
        _set(owner, name, replacement)
        _active[key] = [1, owner, before, _namespace(owner).get(name)]


def release(owner: Any, name: str) -> None:
    """Undo one `acquire`; the last one puts the original back."""
    with _lock:
        key = (id(owner), name)
        entry = _active.get(key)
        if entry is None:
            return
        entry[0] -= 1
        if entry[0]:
            return
        del _active[key]
        _, owner, before, ours = entry
        if _namespace(owner).get(name) is not ours:
            return
        if before is _MISSING:
            delattr(owner, name)
        else:
            _set(owner, name, before)


def original(owner: Any, name: str, current: Any) -> Any:
    """What `owner.name`, now `current`, was before it was replaced."""
    entry = _active.get((id(owner), name))
    return current if entry is None or entry[3] is not current else entry[2]


def _namespace(owner: Any) -> Any:
    return owner if isinstance(owner, dict) else vars(owner)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
