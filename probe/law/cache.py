"""Where what can be made again is kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """ADVANTAGE_PROBE_CACHE, else `advantage-probe` in the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    chosen = os.environ.get("ADVANTAGE_PROBE_CACHE")
    return (
        Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "advantage-probe"
    )
