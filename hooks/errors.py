"""Named exceptions: what could not be read, and what to do about it.

Every refusal of the library derives from `ProbeError`; the command line turns it into one sentence and exit code 2.
"""


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
