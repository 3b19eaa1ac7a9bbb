"""The next real step of a run at a saved step, under the run's own optimizer and under others.

The others start fresh from the same weights, run `WARM` steps on the run's own data so that their momenta are theirs, and
then take the step that is looked at. Their sizes are comparable: SGD's first step is as long as that of the run's own
optimizer, Adam has the run's learning rate, and Muon (`torch.optim.Muon`, with AdamW on what is no hidden matrix) matches
AdamW's root mean square.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..inputs.precision import double
from .attention_calls import Loss, step_of
from .course import Course, runner_of

WARM = 20
Kind = Literal["own", "sgd", "adam", "muon"]
KINDS: tuple[Kind, ...] = ("own", "sgd", "adam", "muon")


@dataclass(frozen=True, eq=False)
class RealStep:
    """One step: the float64 model before it, what moved by parameter name, and the number and loss of its batch."""

    kind: Kind
    number: int
    before: nn.Module
    change: dict[str, Tensor]
    loss: Loss


def real_step(course: Course, state: dict[str, Any], kind: Kind = "own", warm: int = WARM) -> RealStep:
    """The step that optimizer `kind` takes from `state` (after `warm` steps of its own, unless it is the run's)."""
    if kind == "own":
        runner = runner_of(course, state)
        before, number = double(runner.model), runner.step
        runner.advance()
        return RealStep(kind, number, before, step_of(before, runner.model), runner.loss(number))
    runner = runner_of(course, state)
    rate = float(runner.optimizer.param_groups[0]["lr"])
    optimizers = _optimizers(course, state, runner.model, kind, rate)
    last = min(runner.step + warm, course.recipe.steps - 1)
    before, number = double(runner.model), runner.step
    for number in range(runner.step, last + 1):
        before = double(runner.model) if number == last else before
        runner.model.zero_grad(set_to_none=True)
        runner.loss(number)(runner.model).backward()
        nn.utils.clip_grad_norm_(runner.model.parameters(), course.recipe.clip)
        for optimizer in optimizers:
            optimizer.step()
    return RealStep(kind, number, before, step_of(before, runner.model), runner.loss(number))


def _optimizers(course: Course, state: dict[str, Any], model: nn.Module, kind: Kind, rate: float) -> list[Optimizer]:
    parameters = list(model.parameters())
    if kind == "adam":
        return [torch.optim.Adam(parameters, lr=rate)]
    if kind == "sgd":
        own = real_step(course, state)
        length = sum(float(part.square().sum()) for part in own.change.values()) ** 0.5
        own.loss(model).backward()
        slope = float(nn.utils.clip_grad_norm_(parameters, float("inf")))
        return [torch.optim.SGD(parameters, lr=length / min(slope, course.recipe.clip))]
    hidden = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and "embed" not in name and not name.startswith(("lm_head", "transformer.w"))
    ]
    chosen = {id(parameter) for parameter in hidden}
    others = [parameter for parameter in parameters if id(parameter) not in chosen]
    muon = torch.optim.Muon(hidden, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=rate, weight_decay=0.0)]
