"""Heads and layers taken out one by one: what each costs, and what a random direction of the same length costs there.

A head's output is put at its own mean, so that what it says about the text goes and its constant part stays. The strongest
heads are picked on one half of the sequences and every figure is estimated on the other: the largest of many noisy numbers
is too large on the sequences that made it the largest. The control moves the layer's outputs by as much, at every token,
along directions drawn from the covariance of these outputs.

Shapes: n sequences, N rows, H heads, V value width, F = H·V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import nn

from ...hooks.errors import BadInput
from ..intervals.nulls import DRAWS, bound, half_samples
from .edits import Change, Edit, Measure, ablate, displaced, intervene, random_axes

Array = NDArray[np.float64]
Note = Callable[[int, int, str], None]

FEWEST = 12  # sequences in all, below which half of them say nothing
DIRECTIONS = 20


def ablation(
    model: nn.Module,
    measure: Measure,
    outputs: dict[int, Array],
    *,
    top: int = 5,
    directions: int = DIRECTIONS,
    draws: int = DRAWS,
    seed: int = 0,
    progress: Note | None = None,
) -> pd.DataFrame:
    """One row per head and per layer.

    Args:
        measure: runs the model and returns one number per sequence (n,), nats per target.
        outputs: per layer the head outputs seen, (N,H,V), for means and covariance. top: heads that get a control, those
            that cost most on the picking half; every layer gets one.

    Returns:
        `what` ("head" or "layer"), `layer`, `head` (−1 for a layer), `picked` (its cost on the picking half), `cost` with
        `low`, `high` (95 %, half samples) on the other half, `random`, `random_low`, `random_high` (mean and 95 % range of
        the control) and `p` (upper bound for a random direction to cost as much), NaN without a control.

    Raises:
        BadInput: for fewer than 12 sequences. Whatever `intervene` refuses.
    """
    generator = np.random.default_rng(seed)
    before = measure()
    count = len(before)
    if count < FEWEST:
        raise BadInput(f"Ablations are picked on one half and estimated on the other: {count} sequences of {FEWEST}.")
    order = generator.permutation(count)
    pick, estimate = order[: count // 2], np.sort(order[count // 2 :])
    rows: list[dict[str, Any]] = []
    heads = [(layer, head) for layer, seen in outputs.items() for head in range(seen.shape[1])]
    whole = len(heads) + len(outputs) + (min(top, len(heads)) + len(outputs)) * directions
    done = [0]

    def cost(layer: int, change: Change, chosen: tuple[int, ...] | None, note: str) -> Array:
        with intervene(model, Edit(layer, change, "output", chosen)):
            found = measure() - before
        done[0] += 1
        if progress is not None:
            progress(done[0], whole, note)
        return np.asarray(found)

    for layer, head in heads:
        mean = outputs[layer][:, head].mean(0)
        effect = cost(layer, ablate(mean), (head,), f"L{layer}H{head}")
        rows.append(_row("head", layer, head, effect, pick, estimate, generator, draws))
    controlled = sorted(rows, key=lambda row: -row["picked"])[:top]
    for layer, seen in outputs.items():
        effect = cost(layer, ablate(seen.reshape(len(seen), -1).mean(0)), None, f"L{layer}")
        rows.append(_row("layer", layer, -1, effect, pick, estimate, generator, draws))
        controlled.append(rows[-1])
    for row in controlled:
        layer, head = row["layer"], row["head"]
        seen = outputs[layer]
        flat, width = seen.reshape(len(seen), -1), seen.shape[2]
        place = slice(0, flat.shape[1]) if head < 0 else slice(head * width, (head + 1) * width)
        change = ablate(flat[:, place].mean(0))
        axes = random_axes(None, directions, generator, flat)
        others = np.array(
            [cost(layer, displaced(change, axis, place), None, "random directions")[estimate].mean() for axis in axes]
        )
        low, high = np.quantile(others, [0.025, 0.975])
        row |= {"random": float(others.mean()), "random_low": float(low), "random_high": float(high)}
        row["p"] = bound(row["cost"], others, "large")
    return pd.DataFrame(rows)


def sentences(table: pd.DataFrame) -> list[str]:
    """What the controls allow to say of the strongest heads and layers."""
    found = []
    for row in table[table["p"].notna()].sort_values("cost", ascending=False).to_dict("records"):
        name = f"L{row['layer']}H{row['head']}" if row["what"] == "head" else f"layer {row['layer']}"
        told = f"{name} costs {row['cost']:.4f} nats [{row['low']:.4f}, {row['high']:.4f}]"
        beside = f"random directions of the same length {row['random']:.4f} [{row['random_low']:.4f}, "
        beside += f"{row['random_high']:.4f}]"
        word = "more than" if row["cost"] > row["random_high"] else "no more than"
        found.append(f"{told}, {word} {beside}.")
    return found


def layers_of(outputs: dict[str, Array]) -> dict[int, Array]:
    """`Collected.vectors` of outputs (n,P,H,V) by layer number, as (N,H,V)."""
    return {int(name[1:]): seen.reshape(-1, *seen.shape[2:]) for name, seen in outputs.items() if name[1:].isdigit()}


def _row(
    what: str,
    layer: int,
    head: int,
    effect: Array,
    pick: Sequence[int] | NDArray[np.int64],
    estimate: NDArray[np.int64],
    generator: np.random.Generator,
    draws: int,
) -> dict[str, Any]:
    held = effect[estimate]
    low, high = half_samples(lambda chosen: float(held[chosen].mean()), len(held), generator, draws)
    row: dict[str, Any] = {"what": what, "layer": layer, "head": head, "picked": float(effect[np.asarray(pick)].mean())}
    row |= {"cost": float(held.mean()), "low": low, "high": high, "n": len(held)}
    return row | dict.fromkeys(("random", "random_low", "random_high", "p"), float("nan"))
