"""The columns that the page shows of every head, and how a number is shortened for it."""

from __future__ import annotations

from typing import Any

import pandas as pd

# column → (unit, drawn on a scale that is symmetric around zero, what it says)
SHOWN: dict[str, tuple[str, bool, str]] = {
    "routing_pressure": ("loss", False, "√Σ (∂L/∂s)²: how hard the loss pulls on where the head looks"),
    "content_relative": ("loss", False, "‖αᵀU‖ · rms‖v‖: how hard the loss pulls on what the head moves, gauge-free"),
    "alignment": (
        "",
        True,
        "correlation of attention with advantage: positive where it attends to what lowers the loss",
    ),
    "edge_over_uniform": ("loss", True, "how much better its routing is than even attention, to first order"),
    "coherence": ("", False, "1: all users of a key push it the same way; 0: they cancel"),
    "update_cosine": ("", True, "cosine of the value update with the value: growth or shrinking"),
    "attention_entropy": ("nats", False, "entropy of attention, mean over queries"),
    "effective_keys": ("keys", False, "exp of the entropy: how many keys a query looks at"),
    "mean_distance": ("tokens", False, "how far back the head looks"),
    "first_key_share": ("", False, "attention on the first token"),
    "law_residual": ("", False, "do recomputed weights reproduce the kernel's own output"),
}


def short(value: Any, digits: int = 6) -> float | None:
    """So many significant digits: more than the page shows, few enough to keep it small."""
    return None if pd.isna(value) else float(f"{value:.{digits}g}")
