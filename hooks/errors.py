"""Named exceptions: what could not be read, and what to do about it.

Every refusal of the library derives from `ProbeError`; the command line turns it into one sentence and exit code 2.
What is no error but has to be known is told once, by `Notices`.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable


class ProbeError(Exception):
    """Base of every error that the probe raises on purpose."""


class NoAttentionSeen(ProbeError):
    """A step ended and no attention call that the probe can read was made."""


class NoGradientReached(ProbeError):
    """Attention was seen, but no gradient came back to any head."""


class UnsupportedKernel(ProbeError):
    """The attention implementation hides what the law needs (its mask, its weights, or its backward)."""


class UnsupportedFamily(ProbeError):
    """A model family that computes attention by hand and has no adapter."""


class LawViolated(ProbeError):
    """Recomputed weights times values do not reproduce the head output whose gradient was taken."""


class ClosedWatch(ProbeError):
    """A watch was used after it had been closed."""


class BadRequest(ProbeError):
    """An argument that cannot be served: an unknown head, a negative interval, more edges than were kept."""


class MergeRefused(ProbeError):
    """Two sets of statistics that do not describe the same thing cannot be added."""


class BadInput(ProbeError):
    """Text, ids or files that cannot be analysed."""


class Notices:
    """What the user was told, each thing once: a warning that comes back at every call teaches people to look away."""

    def __init__(self) -> None:
        self._told: set[Hashable] = set()

    def say_once(self, what: Hashable, message: str, *, stacklevel: int = 2) -> None:
        """Warn with `message` unless `what` was told before; `stacklevel` counts from the caller, as in `warnings.warn`."""
        if what not in self._told:
            self._told.add(what)
            warnings.warn(f"advantage_probe: {message}", stacklevel=stacklevel + 1)

    def told(self, what: Hashable) -> bool:
        return what in self._told
