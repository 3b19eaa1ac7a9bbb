"""What a head is called in every table: L3H7 where no other head has that name, else by its module."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from .state import Key


def label(key: Key, head: int, shared: Collection[str] = ()) -> str:
    """Short name of a head, such as L3H7; prefixed by its stack and, for cross attention, by "x". Where the module's name
    has no layer, or is one of `shared`, the name itself stands for it: blocks.attention.H7.
    """
    use = f"u{key.use}" if key.use else ""
    if key.site.layer < 0 or key.site.module in shared:
        return f"{key.site.module or '?'}.H{head}{use}"
    return f"{_place(key)}H{head}{use}"


def shared_modules(keys: Iterable[Key]) -> frozenset[str]:
    """The modules whose layer holds another module of the same stack and kind, so that its number names neither."""
    there: dict[str, set[str]] = {}
    for key in keys:
        there.setdefault(_place(key), set()).add(key.site.module)
    return frozenset(name for names in there.values() if len(names) > 1 for name in names)


def _place(key: Key) -> str:
    stack = f"{key.site.stack}." if key.site.stack else ""
    return f"{stack}{'x' if key.site.kind == 'cross' else ''}L{key.site.layer}"
