"""Freezing from a fork on, without what confounded it: episodes of one length, forks after the warm-up, three arms.

A recipe that lengthens its episodes until its half, forked in its warm-up, freezes attention that has never seen the late
positions; what that costs says nothing on the order of frame and content. Here episodes have their whole length from the
first step on, every fork lies behind the warm-up, and beside routing (W_Q, W_K) and content (W_V, W_O) stands the arm of
the papers' own pilot, embeddings frozen together with W_Q and W_K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from torch import nn

from ...hooks.errors import BadRequest
from ..intervals.paired import quantile
from .course import SMALL, Course, continued, excess, load, runner_of, state
from .roles import CONTENT, ROUTING, Frozen, Role

STEPS = 3_000
FORKS = (0.10, 0.20, 0.50)  # of the run
ARMS: dict[str, tuple[tuple[Role, ...], bool]] = {
    "routing": (ROUTING, False),
    "routing and embeddings": (ROUTING, True),
    "content": (CONTENT, False),
}
Told = Callable[[str], None]


def plain(seed: int, steps: int = STEPS) -> Course:
    """The small course with every episode of whole length."""
    return replace(SMALL, recipe=replace(SMALL.recipe, steps=steps, growth=0, first_length=0, seed=seed))


class _Embeddings:
    """Keeps the input embeddings where they are."""

    def __init__(self, model: nn.Module) -> None:
        self._slot = model.get_input_embeddings().weight.data  # type: ignore[operator]
        self._kept = self._slot.clone()

    def restore(self) -> None:
        self._slot.copy_(self._kept)


class Held(Frozen):
    """Roles frozen, and the embeddings with them where wanted."""

    def __init__(self, model: nn.Module, roles: tuple[Role, ...], embeddings: bool) -> None:
        super().__init__(model, roles)
        self._embeddings = _Embeddings(model) if embeddings else None

    def restore(self) -> None:
        super().restore()
        if self._embeddings is not None:
            self._embeddings.restore()


def forks(course: Course, shares: Sequence[float] = FORKS) -> list[int]:
    """The steps at these shares of the run.

    Raises:
        BadRequest: where one lies in the warm-up or while episodes grow.
    """
    steps = [round(share * course.recipe.steps) for share in shares]
    first = max(course.recipe.warm_up, course.recipe.growth)
    if min(steps) < first:
        raise BadRequest(f"A fork at step {min(steps)} lies before step {first}, where warm-up or growth ends.")
    return steps


def costs(folder: Path, steps: Sequence[int], told: Told = lambda note: None) -> pd.DataFrame:
    """What freezing each arm from each step on costs at the end of the run in `folder`.

    Returns:
        `seed`, `step`, `share`, `arm`, `excess` (nats above Bayes at the end), `unfrozen` (of the run itself), `cost`.

    Raises:
        BadInput: where the folder holds no finished run, or not the state of a step.
    """
    course = load(folder)
    task, episodes = course.task, course.fixed()
    exact = task.predictive(episodes.tokens)
    own = excess(runner_of(course, state(folder, course.recipe.steps)).model, task, episodes, exact)
    rows = []
    for step in steps:
        for arm, (roles, embeddings) in ARMS.items():
            runner = runner_of(course, state(folder, step))
            held = Held(runner.model, roles, embeddings)
            while runner.step < course.recipe.steps:
                runner.advance(held.restore)
            reached = excess(runner.model, task, episodes, exact)
            told(f"seed {course.recipe.seed}: {arm} frozen from step {step}: {reached - own:+.4f} nats")
            row = {"seed": course.recipe.seed, "step": step, "share": step / course.recipe.steps, "arm": arm}
            rows.append(row | {"excess": reached, "unfrozen": own, "cost": reached - own})
    return pd.DataFrame(rows)


def repeats(folder: Path, step: int) -> bool:
    """Whether the continuation with nothing frozen ends in the run's own excess, bit for bit."""
    course = load(folder)
    episodes = course.fixed()
    end = continued(folder, step, ())
    own = runner_of(course, state(folder, course.recipe.steps))
    return excess(end.model, course.task, episodes) == excess(own.model, course.task, episodes)


def over_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """Mean cost per fork and arm, with Student's 95 % interval over seeds (NaN for one seed)."""
    rows = []
    for (share, arm), part in table.groupby(["share", "arm"], sort=False):
        cost = part["cost"].to_numpy()
        count = len(cost)
        half = quantile(0.95, count - 1) * cost.std(ddof=1) / np.sqrt(count) if count > 1 else float("nan")
        row = {"share": share, "arm": arm, "cost": cost.mean(), "low": cost.mean() - half, "high": cost.mean() + half}
        rows.append(row | {"seeds": count, "unfrozen": part["unfrozen"].mean()})
    return pd.DataFrame(rows)
