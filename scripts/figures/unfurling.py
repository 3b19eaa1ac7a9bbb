#!/usr/bin/env python3
"""How the last residual stream of `bijection-repeats` comes to carry entropy while it is trained: the README's table.

Trains the shipped recipe again (a quarter of an hour on a busy core) and reads the stream before eleven of its steps on the
same 128 episodes.
"""

from __future__ import annotations

import torch

from advantage_probe.analyses.manifolds.pictures import number
from advantage_probe.analyses.manifolds.report import unfurling_report
from advantage_probe.analyses.wind_tunnels import load
from advantage_probe.analyses.wind_tunnels.training.recipes import SHIPPED

STEPS = (0, 250, 500, 1_000, 1_500, 2_000, 2_500, 3_000, 4_000, 5_000, 6_999)


def main() -> None:
    """Print one row per step and figure."""
    torch.set_num_threads(1)
    tunnel, _, _ = load("bijection-repeats")
    table = unfurling_report(tunnel, SHIPPED["bijection-repeats"], STEPS, 1, "residual", episodes=128)
    shown = table[["step", "figure", "value", "low", "high", "null_mean", "p", "axis_turn"]]
    print(shown.to_string(index=False, float_format=number, na_rep="–"))


if __name__ == "__main__":
    main()
