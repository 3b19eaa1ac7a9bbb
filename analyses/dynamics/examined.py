"""What happens to the heads of one training run, from its saved steps.

Attention maps, pressures and precision at every saved step; the real step, how it follows the law, its feedback and its
linear radius at the steps where continuations start; and the continuations themselves, with routing frozen and with content
frozen, which alone decide what may be said about the order of the two.

Shapes: n sequences, H heads of all layers, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from ...hooks.errors import BadRequest
from ...probe.watch import watch
from ..wind_tunnels.errors import TunnelError
from ..wind_tunnels.tasks.protocol import Episodes, Tunnel
from ..wind_tunnels.tasks.registry import tunnel
from ..wind_tunnels.training.models import logits
from ..wind_tunnels.training.recipes import recipe
from ..wind_tunnels.training.runner import training_episodes
from . import frame
from .attention_calls import Head, Loss, heads
from .course import SMALL, Course, Runner, checkpoints, continued, excess, load, state, train
from .feedback import feedback
from .following import Batch, follow
from .real_steps import KINDS, real_step
from .roles import CONTENT, ROUTING, Role
from .step_size import step_size

CUTS = {"whole": 1, "half": 2, "quarter": 4}
FROZEN: dict[str, tuple[Role, ...]] = {"routing": ROUTING, "content": CONTENT}
SEQUENCES = 256
FEWEST = 40  # steps: below, 2 and 5 % of a run are hardly steps of their own
HELD_OUT = 64  # sequences on which a step made by others is looked at
NULLS = (1, 2, 3)  # shifts of the targets across sequences
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class Examined:
    """One run.

    Attributes:
        course: what was run.
        checkpoints: step; excess (nats above Bayes); frame_whole, frame_half, frame_quarter: F of the run cut there, NaN
            beyond the cut.
        pressures: step, layer, head, routing_pressure, content_relative, ratio.
        times: cut → the four 90 % times, in steps.
        start_divergence: mean divergence of the first maps from the last, nats; what F is over.
        maps (n,H,T,T): attention at the end, float32.
        following, feedback, steps: one table each over the fork steps; `causal`: fork, frozen, excess at the end and its
            cost over the unfrozen run (nats), empty where continuations were left out.
    """

    course: Course
    checkpoints: pd.DataFrame
    pressures: pd.DataFrame
    times: dict[str, dict[str, float]]
    start_divergence: float
    maps: Tensor
    following: pd.DataFrame
    feedback: pd.DataFrame
    steps: pd.DataFrame
    causal: pd.DataFrame

    @property
    def seed(self) -> int:
        return self.course.recipe.seed


def courses(name: str, seeds: Sequence[int], steps: int | None) -> list[Course]:
    """One course per seed: `SMALL`, or the registered tunnel `name` with its tiny preset; `steps` shortens either.

    Raises:
        BadRequest: for repeated or negative seeds, too few steps, or a name that no tunnel has.
    """
    if len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise BadRequest(f"seeds must differ and be 0 or above, not {list(seeds)}.")
    base = SMALL
    if name:
        try:
            tunnel(name)
        except TunnelError as error:
            raise BadRequest(str(error)) from error
        base = Course(name, recipe(name, "tiny"))
    if steps is not None:
        if steps < FEWEST:
            raise BadRequest(f"steps must be {FEWEST} or more, not {steps}.")
        growth = base.recipe.growth * steps // base.recipe.steps
        base = replace(base, recipe=replace(base.recipe, steps=steps, growth=growth))
    return [replace(base, recipe=replace(base.recipe, seed=seed)) for seed in seeds]


def trained(wanted: Sequence[Course], folder: Path, progress: Progress | None = None) -> list[Path]:
    """Train every course under `folder`/seed-N, where finished ones stay and killed ones go on; their folders."""
    whole, done = sum(course.recipe.steps for course in wanted), [0]
    folders = []
    for course in wanted:

        def tick(seed: int = course.recipe.seed) -> None:
            done[0] += 1
            if progress is not None:
                progress(done[0], whole, f"seed {seed}: training")

        folders.append(folder / f"seed-{course.recipe.seed}")
        train(course, folders[-1], tick)
    return folders


def summed(task: Tunnel, episodes: Episodes, shift: int = 0) -> Loss:
    """Cross-entropy summed over asked positions, nats; `shift` gives every sequence the targets of another."""
    targets = episodes.targets.roll(shift, 0)
    outcomes = torch.tensor(task.outcomes)
    asked = targets >= 0

    def loss(model: nn.Module) -> Tensor:
        rows = logits(model, episodes.tokens)[asked]
        return nn.functional.cross_entropy(rows, outcomes[targets[asked]], reduction="sum")

    return loss


def batch(task: Tunnel, episodes: Episodes) -> Batch:
    """The sequences as following wants them."""
    return Batch(summed(task, episodes), tuple(summed(task, episodes, shift) for shift in NULLS))


def examine(folder: Path, *, causal: bool = True, progress: Progress | None = None) -> Examined:
    """Everything about the run in `folder`, as `course.train` left it.

    Args:
        causal: also run the continuations, which take most of the time.
        progress: told (parts done, parts in all, note).

    Raises:
        BadInput: where the folder holds no finished run.
    """
    course = load(folder)
    task, steps = course.task, course.recipe.steps
    forks = sorted(set(course.forks))
    longer = sum(steps - fork for fork in forks) * len(FROZEN) if causal else 0
    done, whole = [0], len(course.kept) + len(forks) * (len(KINDS) + 1) + longer

    def told(parts: int, note: str) -> None:
        done[0] += parts
        if progress is not None:
            progress(done[0], whole, f"seed {course.recipe.seed}: {note}")

    episodes = course.fixed(SEQUENCES)
    exact, loss = task.predictive(episodes.tokens), summed(task, episodes)
    rows, pressures, maps = [], [], {}
    for runner in checkpoints(folder):
        model = runner.model.eval()
        with watch(model) as seen:
            found = heads(model, loss)
            seen.step(loss_weight=1.0)
        maps[runner.step] = _maps(found)
        rows.append({"step": runner.step, "excess": excess(model, task, episodes, exact)})
        table = seen.heads()[["layer", "head", "routing_pressure", "content_relative"]].copy()
        table.insert(0, "step", runner.step)
        table["ratio"] = table["routing_pressure"] / table["content_relative"]
        pressures.append(table)
        told(1, "attention and precision")
    curve = pd.DataFrame(rows)
    times, start = {}, math.nan
    for cut, part in CUTS.items():
        end = steps // part
        divergences = {
            step: float(frame.divergence(one, maps[end]).mean()) for step, one in maps.items() if step <= end
        }
        first = divergences[0]
        start = first if cut == "whole" else start
        curve[f"frame_{cut}"] = [
            divergences[step] / first if step in divergences and first else math.nan for step in curve["step"]
        ]
        inside = curve[curve["step"] <= end]
        times[cut] = frame.times(inside["step"].tolist(), inside[f"frame_{cut}"].tolist(), inside["excess"].tolist())
    following, feedbacks, sizes = _forks(folder, course, forks, told)
    final = float(curve["excess"].iloc[-1])
    return Examined(
        course,
        curve,
        pd.concat(pressures, ignore_index=True),
        times,
        start,
        maps[steps],
        following,
        feedbacks,
        sizes,
        _continuations(folder, course, forks if causal else [], final, episodes, exact, told),
    )


Told = Callable[[int, str], None]


def _maps(found: dict[str, Head]) -> Tensor:
    return torch.cat([head.attention.float() for head in found.values()], 1)


def _forks(
    folder: Path, course: Course, forks: list[int], told: Told
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Following of every optimizer, feedback and size of the run's own step, at the fork steps."""
    task = course.task
    held_out = batch(task, course.fixed(HELD_OUT))
    tables, feedbacks, sizes = [], [], []
    for fork in forks:
        saved = state(folder, fork)
        for kind in KINDS:
            real = real_step(course, saved, kind)
            batches = {
                "own": batch(task, training_episodes(course.task, course.recipe, real.number)),
                "held out": held_out,
            }
            table = follow(real.before, real.change, real.loss, batches)
            table.insert(0, "step", fork)
            table.insert(1, "optimizer", kind)
            tables.append(table)
            size = step_size(real.before, real.change, real.loss)
            shares = {f"share_{name}": share for name, share in size.shares().items()}
            record = {"step": fork, "optimizer": kind, "norm": size.norm, "radius": size.radius}
            record |= {"unbounded": size.unbounded, "change": size.change, "predicted": size.predicted}
            sizes.append(record | shares)
            if kind == "own":
                back = feedback(real.before, real.change, batches["held out"].loss)
                back.insert(0, "step", fork)
                feedbacks.append(back)
                told(1, "feedback")
            told(1, f"steps of {kind}")
    return pd.concat(tables, ignore_index=True), pd.concat(feedbacks, ignore_index=True), pd.DataFrame(sizes)


def _continuations(
    folder: Path, course: Course, forks: list[int], final: float, episodes: Episodes, exact: Tensor, told: Told
) -> pd.DataFrame:
    rows = []
    for fork in forks:
        for name, roles in FROZEN.items():
            end: Runner = continued(folder, fork, roles, lambda: told(1, f"{name} frozen at step {fork}"))  # noqa: B023
            reached = excess(end.model, course.task, episodes, exact)
            rows.append({"step": fork, "frozen": name, "excess": reached, "cost": reached - final})
    return pd.DataFrame(rows, columns=["step", "frozen", "excess", "cost"])
