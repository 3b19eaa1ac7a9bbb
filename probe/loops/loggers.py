"""Loggers: any callable `(dict, step)`; here the ready ones, whose libraries are optional extras.

Names are flat, such as `probe/L3H7/routing_pressure`, so that every dashboard groups them alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from ...hooks.errors import BadRequest
from ..columns import columns_of

# what a dashboard of many heads can carry; columns=None logs all
USUAL = columns_of("logger")


def _chosen(values: Mapping[str, float], columns: Iterable[str] | None) -> dict[str, float]:
    if columns is None:
        return dict(values)
    wanted = set(columns)
    return {name: value for name, value in values.items() if name.rsplit("/", 1)[-1] in wanted}


class TensorBoardLogger:
    """Writes scalars for TensorBoard.

    Args:
        target: a folder, or a `torch.utils.tensorboard.SummaryWriter` that is already open.
        columns: which columns to write; None writes all.

    Raises:
        BadRequest: when the `tensorboard` extra is not installed.
    """

    def __init__(self, target: Any, columns: Iterable[str] | None = USUAL) -> None:
        self.columns = None if columns is None else tuple(columns)
        if isinstance(target, (str, os.PathLike)):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise BadRequest("TensorBoard is not installed: pip install 'advantage-probe[tensorboard]'.") from error
            target = SummaryWriter(os.fspath(target))
        self.writer = target

    def __call__(self, values: dict[str, float], step: int) -> None:
        for name, value in _chosen(values, self.columns).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()


class WandbLogger:
    """Logs to a Weights & Biases run.

    Args:
        run: what `wandb.init()` returned; None takes the run that is active.
        columns: which columns to log; None logs all.

    Raises:
        BadRequest: when the `wandb` extra is not installed, or no run is active.
    """

    def __init__(self, run: Any = None, columns: Iterable[str] | None = USUAL) -> None:
        self.columns = None if columns is None else tuple(columns)
        if run is None:
            try:
                import wandb
            except ImportError as error:
                raise BadRequest("wandb is not installed: pip install 'advantage-probe[wandb]'.") from error
            run = wandb.run
            if run is None:
                raise BadRequest("No wandb run is active: call wandb.init() first, or pass its run.")
        self.run = run

    def __call__(self, values: dict[str, float], step: int) -> None:
        # no step=: the run's own counter may count other things, and wandb drops what goes backwards
        self.run.log({**_chosen(values, self.columns), "probe/step": step})
