"""A training run that can be taken up again anywhere: state at log-spaced steps, and continuations from them.

The episodes of step t come from (seed, t), and weights, optimizer and step lie in every checkpoint, so a continuation with
nothing frozen repeats the run bit for bit, and one with routing or content frozen differs from it in that alone.

A run's folder holds `course.json` (task, recipe and steps; written last, so that a torn folder is none) and
`step-0000123.pt` for every kept step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ...hooks.errors import BadInput
from ..wind_tunnels.tasks.protocol import Episodes, Tunnel
from ..wind_tunnels.tasks.registry import tunnel
from ..wind_tunnels.training.checkpoints import save_state, write_whole
from ..wind_tunnels.training.models import Shape, build, logits
from ..wind_tunnels.training.recipes import Recipe
from ..wind_tunnels.training.runner import Runner
from .frame import log_spaced
from .roles import Frozen, Role

FORKS = (0.02, 0.05, 0.10, 0.20, 0.50)
FIXED_SEED = 2**41  # of the sequences that every checkpoint is held against
RECORD = "course.json"
Tick = Callable[[], None]


@dataclass(frozen=True)
class Course:
    """What decides a run: a registered tunnel with some of its numbers changed, a recipe, and a factor on the first
    matrices."""

    tunnel: str
    recipe: Recipe
    changes: dict[str, Any] = field(default_factory=dict)
    gain: float = 1.0

    @property
    def but_for_its_seed(self) -> str:
        """What two runs of one experiment share."""
        return repr((self.tunnel, sorted(self.changes.items()), replace(self.recipe, seed=0), self.gain))

    @property
    def task(self) -> Tunnel:
        return replace(tunnel(self.tunnel), **self.changes)  # type: ignore[type-var]

    @property
    def kept(self) -> list[int]:
        """Steps whose state is saved: log-spaced, and where continuations start."""
        return sorted({*log_spaced(self.recipe.steps), *self.forks})

    @property
    def forks(self) -> list[int]:
        """2, 5, 10, 20, 50 % of the run, in steps."""
        return [round(part * self.recipe.steps) for part in FORKS]

    def fresh(self) -> nn.Module:
        model = build(self.recipe.shape, self.task, self.recipe.seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(self.gain)
        return model

    def fixed(self, sequences: int = 256) -> Episodes:
        """Held-out sequences, the same for every checkpoint, seed and run of the task."""
        return self.task.sample(sequences, Generator().manual_seed(FIXED_SEED))


SMALL = Course(
    "bijection-repeats",
    Recipe(Shape("llama", 2, 4, 64), steps=400, batch=64, learning_rate=2e-3, warm_up=50, first_length=9, growth=200),
    {"symbols": 8, "pairs": 8},
    gain=2.0,  # at width 64 the usual .02 leaves attention idle for hundreds of steps
)


def runner_of(course: Course, state: dict[str, Any] | None = None) -> Runner:
    """The course at its start, or where `state` was saved."""
    return Runner(course.task, course.recipe, course.fresh(), state)


def train(course: Course, folder: Path, tick: Tick = lambda: None) -> None:
    """Run the course into `folder`; a folder whose run is complete is left as it is, a torn one continues."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / RECORD).is_file():
        if load(folder) != course:
            raise BadInput(f"{str(folder)!r} holds another run; choose another folder.")
        return
    runner = runner_of(course)
    for step in reversed(course.kept):
        if (folder / _name(step)).is_file():
            saved = state(folder, step)
            if saved["course"] != repr(course):
                raise BadInput(f"{str(folder)!r} holds another run that was not finished; choose another folder.")
            runner = runner_of(course, saved)
            break
    kept = set(course.kept)
    while True:
        if runner.step in kept:
            write_whole(
                folder / _name(runner.step), lambda path: save_state({**runner.state(), "course": repr(course)}, path)
            )
        if runner.step == course.recipe.steps:
            break
        runner.advance()
        tick()
    record: dict[str, Any] = {"tunnel": course.tunnel, "changes": course.changes, "recipe": asdict(course.recipe)}
    record |= {"gain": course.gain, "steps": course.kept}
    text = json.dumps(record, indent=1) + "\n"
    write_whole(folder / RECORD, lambda path: path.write_text(text, encoding="utf-8"))


def load(folder: Path) -> Course:
    """The course of a finished run.

    Raises:
        BadInput: where the folder holds none, or one that cannot be read.
    """
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        shape = Shape(**record["recipe"].pop("shape"))
        return Course(record["tunnel"], Recipe(shape=shape, **record["recipe"]), record["changes"], record["gain"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{str(folder)!r} holds no finished run ({RECORD} is missing or broken: {error}).") from error


def runs_in(folder: Path) -> list[Path]:
    """The run that `folder` is, or the runs that lie in it, by name.

    Raises:
        BadInput: where there are none.
    """
    if (folder / RECORD).is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob(f"*/{RECORD}")) if folder.is_dir() else []
    if not found:
        raise BadInput(
            f"{str(folder)!r} holds no run with a {RECORD}; make one with `advantage-probe dynamics --keep DIR`."
        )
    return found


def state(folder: Path, step: int) -> dict[str, Any]:
    """What was saved at `step`.

    Raises:
        BadInput: where it is missing or torn.
    """
    try:
        return torch.load(folder / _name(step), weights_only=True, map_location="cpu")
    except Exception as error:
        raise BadInput(f"{str(folder / _name(step))!r} cannot be read ({error}).") from error


def checkpoints(folder: Path) -> Iterator[Runner]:
    """Runners at every kept step, in order."""
    course = load(folder)
    for step in course.kept:
        yield runner_of(course, state(folder, step))


def continued(folder: Path, step: int, roles: tuple[Role, ...], tick: Tick = lambda: None) -> Runner:
    """The run from `step` to its end with the numbers of `roles` frozen; with none it is the run itself."""
    course = load(folder)
    runner = runner_of(course, state(folder, step))
    frozen = Frozen(runner.model, roles) if roles else None
    while runner.step < course.recipe.steps:
        runner.advance(None if frozen is None else frozen.restore)
        tick()
    return runner


@torch.no_grad()
def excess(model: nn.Module, task: Tunnel, episodes: Episodes, exact: Tensor | None = None) -> float:
    """Expected cross-entropy above Bayes, nats: mean KL(exact ‖ model) over asked positions, softmax over the whole
    vocabulary."""
    exact = task.predictive(episodes.tokens) if exact is None else exact
    asked = ~exact.isnan().any(-1)
    training = model.training
    model.eval()
    rows = logits(model, episodes.tokens)[asked].double().log_softmax(-1)[:, list(task.outcomes)]
    model.train(training)
    truth = exact[asked]
    return float((torch.special.xlogy(truth, truth) - truth * rows).sum(-1).mean())


def _name(step: int) -> str:
    return f"step-{step:07d}.pt"
