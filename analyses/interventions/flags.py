"""Heads that a practitioner may act on: dead ones, sinks, twins, and heads whose pressure has died down.

Each flag is a sentence made by a rule with a null, and the rule is in the sentence. No flag says that a head may be
removed: several flagged heads together can carry what none of them carries alone.

Shapes: n sequences, H heads, T positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...hooks.attach import calls
from ...hooks.call import AttentionCall
from ...probe.law.definition import law
from ..inputs.corpus import Batch

Array = NDArray[np.float64]

DEAD = 1e-3  # of the loss: a head whose removal costs less, at the upper end of its interval
SINK = 0.5  # of the attention on the first key
FIRST = 8  # query rows before it are left out: they have few keys to choose from
ALIKE = 0.1  # mean total variation of two heads' rows
DOWN = 0.05  # of a pressure's peak
ODD = 5  # times as far down as the median head


@torch.no_grad()
def attention_maps(model: nn.Module, batches: Iterable[Batch]) -> dict[int, Tensor]:
    """Attention (n,H,T,T) of every layer on sequences of one length without padding."""
    found: dict[int, list[Tensor]] = {}

    def keep(call: AttentionCall) -> None:
        layer = call.site.layer
        found.setdefault(-1 if layer is None else layer, []).append(law(call).attention.float().cpu())

    with calls(model, keep, forward=True):
        for batch in batches:
            model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
    return {layer: torch.cat(parts) for layer, parts in sorted(found.items())}


def dead(table: pd.DataFrame, loss: float) -> list[str]:
    """Heads of `ablation.ablation` whose removal changes the loss by less than a thousandth of it, at both ends of the
    95 % interval on sequences they were not picked on.
    """
    heads = table[table["what"] == "head"]
    edge = DEAD * loss
    found = heads[(heads["high"].abs() < edge) & (heads["low"].abs() < edge)]
    return [
        f"{_name(row)} is dead here: with its mean in its place the loss changes by {row['cost']:+.1e} nats "
        f"[{row['low']:.1e}, {row['high']:.1e}], within {DEAD:.1%} of {loss:.3f}; alone, which says nothing of several."
        for row in found.to_dict("records")
    ]


def sinks(maps: dict[int, Tensor]) -> list[str]:
    """Heads with more than half of their attention on the first key, beside what even attention would put there."""
    found = []
    for layer, rows in maps.items():
        first = rows[:, :, FIRST:, 0].double()
        even = float((1 / torch.arange(FIRST + 1, rows.shape[2] + 1, dtype=torch.float64)).mean())
        per = first.mean(2)
        for head, mass in enumerate(per.mean(0).tolist()):
            if mass > SINK:
                half = 1.96 * float(per[:, head].std()) / np.sqrt(len(per))
                found.append(
                    f"L{layer}H{head} is a sink: {mass:.2f} ± {half:.2f} of its attention lies on the first key, "
                    f"{even:.2f} if it were even (rows from {FIRST} on)."
                )
    return found


def alike(maps: dict[int, Tensor]) -> list[str]:
    """Pairs of heads of one layer whose attention rows differ by less than .1 in total variation; beside it the same two
    heads with the sequences of one exchanged, which is what they share by position alone.
    """
    found = []
    for layer, rows in maps.items():
        for one in range(rows.shape[1]):
            for other in range(one + 1, rows.shape[1]):
                distance = _variation(rows[:, one], rows[:, other])
                if distance >= ALIKE:
                    continue
                exchanged = _variation(rows[:, one], rows[:, other].roll(1, 0))
                how = "in what they read" if distance < exchanged / 2 else "by position alone"
                found.append(
                    f"L{layer}H{one} and L{layer}H{other} are alike {how}: their rows differ by {distance:.3f} in total "
                    f"variation, by {exchanged:.3f} with the sequences of one exchanged."
                )
    return found


def died_down(history: pd.DataFrame) -> list[str]:
    """Heads of a training's history (step, label or head, routing_pressure) whose pressure, over the last tenth of the
    steps, is below 5 % of its peak and five times as far down as the median head's.

    The median head is the null: as the loss falls every pressure falls.
    """
    name = "label" if "label" in history else "head"
    steps = np.unique(history["step"])
    if len(steps) < 10:
        return []
    last = steps[-max(1, len(steps) // 10) :]
    shares = {}
    for head, part in history.groupby(name, observed=True, sort=False):
        peak = float(part["routing_pressure"].max())
        end = float(part.loc[part["step"].isin(last), "routing_pressure"].mean())
        if peak > 0:
            shares[str(head)] = end / peak
    median = float(np.median(list(shares.values()))) if shares else float("nan")
    return [
        f"{head}'s routing pressure has died down: {share:.1%} of its peak over the last tenth of the steps, the median "
        f"head's is at {median:.1%}."
        for head, share in shares.items()
        if share < DOWN and share * ODD < median
    ]


def _variation(one: Tensor, other: Tensor) -> float:
    """Mean total variation of rows (n,T,T), rows before the eighth left out."""
    return float((one[:, FIRST:] - other[:, FIRST:]).abs().sum(-1).mean() / 2)


def _name(row: dict[Any, Any]) -> str:
    return f"L{row['layer']}H{row['head']}"
