"""Group means over training: the same layer of the same run at every kept step."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ...hooks.errors import BadInput
from ..intervals.nulls import DRAWS
from ..vectors.collecting import Where
from .group_report import TRAINED, tunnel_groups
from .groups import Group, Kept

Note = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class Course:
    """`curves` and `order` of a `GroupReport`, of one layer, with a column `step`; `words`."""

    curves: pd.DataFrame
    order: pd.DataFrame
    words: tuple[str, ...]


def over_training(
    folder: Path,
    group: Group,
    keys: Kept | None = None,
    where: Where = "value",
    *,
    layer: int | None = None,
    episodes: int = 256,
    draws: int = DRAWS,
    seed: int = 0,
    progress: Note | None = None,
) -> Course:
    """Every `step-N` folder in `folder`, in the order of steps, on the same episodes; the last layer unless one is given.

    Raises:
        BadInput: where there is none. Whatever `tunnel_groups` refuses.
    """
    found = {}
    for path in folder.glob("step-*"):
        number = re.fullmatch(r"step-(\d+)", path.name)
        if number is not None and (path / "card.json").is_file():
            found[int(number[1])] = path
    if not found:
        raise BadInput(f"{str(folder)!r} holds no step-N folders with a card.json; train with --strip.")
    curves: list[pd.DataFrame] = []
    orders: list[pd.DataFrame] = []
    site = ""
    for place, step in enumerate(sorted(found)):
        layers = None if layer is None else [layer]
        report = tunnel_groups(
            str(found[step]), group, keys, where, layers=layers, episodes=episodes, draws=draws, seed=seed, rule=False
        )
        site = list(report.curves["site"])[-1]
        for table, into in ((report.curves, curves), (report.order, orders)):
            mine = table[(table["network"] == TRAINED) & (table["site"] == site)]
            into.append(mine.assign(step=step))
        if progress is not None:
            progress(place + 1, len(found), f"step {step}")
    order = pd.concat(orders, ignore_index=True)
    last = order.iloc[-1]
    told = f"Over training, {site}: the held-out rank correlation goes from {order['r'].iloc[0]:.2f} at step "
    told += f"{int(order['step'].iloc[0])} to {last['r']:.2f} at step {int(last['step'])}; one seed."
    return Course(pd.concat(curves, ignore_index=True), order, (told,))
