"""Numbers as people read them, and fewer of them than there are."""

from __future__ import annotations

import numpy as np


def number(value: float) -> str:
    """Three significant digits; powers of ten where it is very small or large."""
    if value != value:
        return "–"
    size = abs(value)
    return "0" if value == 0 else f"{value:.2e}" if size < 1e-3 or size >= 1e4 else f"{value:.3g}"


def thinned(count: int, most: int) -> list[int]:
    """Places of at most `most` out of `count`, evenly, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(place) for place in np.linspace(0, count - 1, most)})
