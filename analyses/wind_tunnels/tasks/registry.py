"""Names of tunnels. A tunnel registers itself by one decorator on a function without arguments that builds it."""

import importlib
from collections.abc import Callable
from typing import TypeVar

from ..errors import UnknownTunnel
from .protocol import Tunnel

Factory = TypeVar("Factory", bound=Callable[[], Tunnel])

_factories: dict[str, Callable[[], Tunnel]] = {}
_TASKS: tuple[str, ...] = (
    "bijection",
    "hidden_markov",
    "fresh_hidden_markov",
    "sticky_chain",
    "noisy_chain",
    "associative_recall",
    "model_selection",
    "belief_process",
    "conjugate_counts",
)


def register(name: str) -> Callable[[Factory], Factory]:
    """Register a builder under `name`; a second builder of that name raises `UnknownTunnel`'s base, ValueError."""

    def keep(factory: Factory) -> Factory:
        known = _factories.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (factory.__module__, factory.__qualname__):
            raise ValueError(f"a tunnel named {name!r} exists already: choose another name")
        _factories[name] = factory
        return factory

    return keep


def tunnel_names() -> tuple[str, ...]:
    """Every registered name, shipped tasks first."""
    for task in _TASKS:
        importlib.import_module(f"{__package__}.{task}")
    return tuple(_factories)


def tunnel(name: str) -> Tunnel:
    """Build the tunnel registered under `name`; raises `UnknownTunnel` with the names that exist."""
    names = tunnel_names()
    if name not in names:
        raise UnknownTunnel(f"no tunnel is named {name!r}: choose one of {', '.join(names)}")
    return _factories[name]()
