"""Sums per sequence and head as a run keeps them, of random heads that are all alike."""

from __future__ import annotations

import numpy as np
import pandas as pd

from advantage_probe.probe.columns import SUMS

PLAIN = (("", "decoder_self"),)


def table(
    sequences: int = 20, heads: int = 4, layers: int = 2, stacks=PLAIN, hidden=(), seed: int = 0, **factors: float
) -> pd.DataFrame:
    """Sums of equal heads; `hidden`: (layer, head) whose weights are not known."""
    generator = np.random.default_rng(seed)
    numbers = [int(number) for number in generator.integers(0, 2**62, sequences)]
    rows = []
    for number in numbers:
        for stack, kind in stacks:
            name = f"{stack}." * bool(stack) + "x" * (kind == "cross")
            for layer in range(layers):
                for head in range(heads):
                    row = {"sequence": f"{number:016x}", "module": f"{name}{layer}", "use": 0, "head": head}
                    row |= {"label": f"{name}L{layer}H{head}", "layer": layer, "stack": stack, "kind": kind}
                    row |= {part: generator.chisquare(4) * factors.get(part, 1.0) for part in SUMS}
                    row |= {"queries": 10, "hidden_queries": 10 * ((layer, head) in hidden)}
                    rows.append(row)
    return pd.DataFrame(rows)
