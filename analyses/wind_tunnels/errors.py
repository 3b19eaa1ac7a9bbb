"""What a tunnel refuses, by name, each with the row at fault and the remedy in the sentence."""

from ...hooks.errors import ProbeError


class TunnelError(ProbeError, ValueError):
    """A tunnel was given something it cannot answer exactly."""


class BadMatrix(TunnelError):
    """Rows that are no probability distributions, or states that nothing reaches."""


class ImpossibleObservation(TunnelError):
    """Tokens of probability zero under every hypothesis: no posterior exists."""


class MalformedTokens(TunnelError):
    """Tokens outside the vocabulary, of the wrong shape, or out of place."""


class UnknownTunnel(TunnelError):
    """No tunnel, preset or trained model is registered under this name."""


class UnusableCheckpoint(TunnelError):
    """A folder that holds no trained model of this tunnel, or a run with other settings."""
