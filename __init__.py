"""Advantage Probe: how cross-entropy reshapes every attention head of a transformer."""

__version__ = "0.1.0"
