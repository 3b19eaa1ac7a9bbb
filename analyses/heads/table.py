"""The heads table in one line, for people who do not want a context manager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor, nn

from ...hooks.errors import NoGradientReached
from ...probe.watch import watch
from .question import question
from .untouched import as_it_was


def heads(
    model: nn.Module,
    batch: Any,
    *,
    tokenizer: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
    targets: Literal["all", "last"] | Tensor | None = None,
    against: Tensor | None = None,
    intervals: bool = False,
) -> pd.DataFrame:
    """One row a head of `model` on `batch`, with the columns of `Watch.heads`; the model is as it was afterwards.

    Args:
        batch, tokenizer, loss, targets, against: as in `ap.head`.
        intervals: 95 % intervals over the batch's sequences, from 12 on.

    Raises:
        BadInput: for a batch that gives no loss. NoGradientReached: when the loss depends on no head. Whatever cannot
            be read.
    """
    asked = question(model, batch, tokenizer=tokenizer, loss=loss, targets=targets, against=against)
    model = getattr(model, "_orig_mod", model)
    with as_it_was(model), torch.enable_grad(), watch(model, reach_all=True) as seen:
        value, weight = asked.loss(model(**asked.inputs))
        if seen.error is not None:
            raise seen.error
        if not value.requires_grad:
            raise NoGradientReached("The loss depends on no head; pass one that is computed from the model's output.")
        value.backward()
        seen.step(loss_weight=None if weight is None else 1.0)
    return seen.heads(intervals=intervals)
