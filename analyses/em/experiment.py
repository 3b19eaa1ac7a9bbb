"""EM against SGD on the sticky chain: is the released speed-up one of EM, or one of a larger step?

Every arm starts from the same weights on the same sequence and is judged on a second, fresh sequence first: training loss
falls below the entropy of the chain by fitting noise. Arms run over two processes, the longest first.

Shapes: S seeds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch

from ...hooks.errors import BadRequest
from .arms import ADAM, ARMS, Arm, Trained, train
from .chain import HELD_OUT, SEEDS, Sequences, draw, oracle_entropy

Progress = Callable[[int, int, str], None]
_ticks: Any = None


@dataclass(frozen=True, eq=False)
class Experiment:
    """All arms, in the order of the table.

    Attributes:
        seeds, steps, damping: what was run.
        oracle: H(y_t | y_{t−1}), nats, of a reader who knows the hidden symbol.
        filter_loss, held_out_filter_loss: the exact filter's own loss per seed on the two sequences, nats.
        arms: arm name → `Trained`; "adam" is the best of three rates by its held-out minimum.
        candidates: mean held-out minimum, nats, per Adam rate.
    """

    seeds: tuple[int, ...]
    steps: int
    damping: float
    oracle: float
    filter_loss: list[float]
    held_out_filter_loss: list[float]
    arms: dict[str, Trained]
    candidates: dict[float, float] = field(default_factory=dict)

    def steps_to(self, arm: str, bounds: list[float]) -> list[int | None]:
        """First step of each seed at which the training loss is at or below its bound; None where it never is."""
        losses = self.arms[arm].losses.numpy()
        found: list[int | None] = []
        for row, bound in zip(losses, bounds, strict=True):
            below = np.flatnonzero(row <= np.float32(bound))
            found.append(int(below[0]) if len(below) else None)
        return found

    def own_sgd_loss(self) -> list[float]:
        """Each seed's own SGD loss after the last step, nats."""
        return [float(loss) for loss in self.arms["sgd"].losses[:, -1]]


def run(
    seeds: tuple[int, ...] = SEEDS,
    steps: int = 1_000,
    *,
    damping: float = 1.0,
    processes: int = 2,
    progress: Progress | None = None,
) -> Experiment:
    """Every arm on every seed.

    Args:
        seeds: each draws sequence and first weights; its held-out sequence is that of seed + 10,000.
        steps: iterations of every arm.
        damping: τ in (0, 1], the part of each closed-form step that is taken.
        processes: how many arms at once, each on one thread.
        progress: told (iterations done, iterations in all, note).

    Raises:
        BadRequest: for repeated or negative seeds, no steps, a damping outside (0, 1].
    """
    if len(set(seeds)) < len(seeds):
        raise BadRequest(f"seeds must differ, not {list(seeds)}.")
    if steps < 1:
        raise BadRequest(f"steps must be 1 or more, not {steps}.")
    if not 0 < damping <= 1:
        raise BadRequest(f"damping must be above 0 and at most 1, not {damping}.")
    data, fresh = draw(seeds), draw(tuple(seed + HELD_OUT for seed in seeds))
    if steps < 50:  # done sooner than a second process has started
        processes = 1
    followed = {arm.follows: arm for arm in ARMS if arm.follows is not None}
    groups = [(arm, followed[arm.name]) if arm.name in followed else (arm,) for arm in ARMS if arm.follows is None]
    jobs = [Job(arms, seeds, steps, damping) for arms in (ADAM, *sorted(groups, key=lambda arms: -_passes(arms)))]
    found: dict[str, Trained] = {}
    candidates: dict[float, float] = {}
    for outcome in _each(jobs, (data, fresh), processes, progress):
        found.update(outcome.trained)
        candidates.update(outcome.candidates)
    return Experiment(
        seeds,
        steps,
        damping,
        oracle_entropy(),
        data.filter_loss.tolist(),
        fresh.filter_loss.tolist(),
        {name: found[name] for name in (*(arm.name for arm in ARMS), "adam")},
        candidates,
    )


@dataclass(frozen=True)
class Job:
    """Arms that one worker runs in this order: an arm with its follower, or the rates of Adam."""

    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    steps: int
    damping: float


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a job left, by arm."""

    trained: dict[str, Trained]
    candidates: dict[float, float] = field(default_factory=dict)


def _passes(arms: tuple[Arm, ...]) -> int:
    """Passes per step that the bar counts: the tries of Adam's rates stop early and count for none."""
    return 1 if arms == ADAM else sum(arm.passes for arm in arms)


def _one(job: Job, data: tuple[Sequences, Sequences], tick: Callable[[int], None]) -> Outcome:
    """Of Adam's rates, each up to where its held-out loss has clearly turned, then the best one to the end."""
    if job.arms == ADAM:
        lowest: dict[float, float] = {}
        for candidate in ADAM:
            tried = train(candidate, job.seeds, *data, job.steps, turned=0.1)
            lowest[candidate.rates[0]] = float(tried.held_out_losses.mean(0).min())
        best = min(ADAM, key=lambda candidate: lowest[candidate.rates[0]])
        return Outcome({"adam": train(best, job.seeds, *data, job.steps, tick=lambda: tick(1))}, lowest)
    done: dict[str, Trained] = {}
    for arm in job.arms:
        lengths = None if arm.follows is None else done[arm.follows].lengths

        def told(passes: int = arm.passes) -> None:
            tick(passes)

        done[arm.name] = train(arm, job.seeds, *data, job.steps, damping=job.damping, lengths=lengths, tick=told)
    return Outcome(done)


def _each(
    jobs: list[Job], data: tuple[Sequences, Sequences], processes: int, progress: Progress | None
) -> list[Outcome]:
    tell = progress or (lambda done, total, note: None)
    whole = sum(job.steps * _passes(job.arms) for job in jobs)
    if processes < 2:
        done = [0]

        def tick(passes: int) -> None:
            done[0] += passes
            tell(done[0], whole, "passes")

        return [_one(job, data, tick) for job in jobs]
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    before = set(multiprocessing.active_children())
    with ProcessPoolExecutor(processes, context, _start, (counter, os.getpid())) as pool:
        outcomes: list[Outcome] = []
        try:
            # workers come up deaf to the interrupt that a terminal sends to all: this process ends them
            deaf = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                waiting = {pool.submit(_work, job, data) for job in jobs}
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, deaf)
            while waiting:
                ended, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                outcomes += [future.result() for future in ended]
                tell(counter.value, whole, "passes")
        except BaseException:  # an interrupt must not wait for minutes of work that nobody wants
            pool.shutdown(wait=False, cancel_futures=True)
            for child in set(multiprocessing.active_children()) - before:
                child.terminate()
            raise
    return outcomes


def _start(counter: Any, parent: int) -> None:
    """A worker: one thread, no interrupt of its own, and no life after the parent's."""
    global _ticks
    _ticks = (counter, parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _work(job: Job, data: tuple[Sequences, Sequences]) -> Outcome:
    counter, parent = _ticks

    def tick(passes: int) -> None:
        with counter.get_lock():
            counter.value += passes
        if os.getppid() != parent:
            sys.exit(1)

    return _one(job, data, tick)


def curves(experiment: Experiment) -> pd.DataFrame:
    """One row per arm, seed and kept step: passes, cumulative step length, training and held-out loss (nats)."""
    rows = []
    for name, trained in experiment.arms.items():
        for place, seed in enumerate(experiment.seeds):
            rows.append(
                pd.DataFrame(
                    {
                        "arm": name,
                        "seed": seed,
                        "step": trained.held_out_steps,
                        "passes": [step * trained.arm.passes for step in trained.held_out_steps],
                        "length": trained.lengths[place, trained.held_out_steps].numpy(),
                        "heldout_loss": trained.held_out_losses[place].numpy(),
                        "loss": trained.losses[place, trained.held_out_steps].numpy(),
                    }
                )
            )
    return pd.concat(rows, ignore_index=True)


def trajectories(experiment: Experiment) -> pd.DataFrame:
    """Values of the eight noiseless symbols, μ_y W_V, in the first two principal axes of their own arm and seed.

    Columns: arm, seed, symbol, step, first, second, and `shown`, the share of the variance over symbols and steps that the
    two axes hold. The sign of an axis makes its largest final coordinate positive.
    """
    from .chain import task

    symbols = task().embedding.double()
    rows = []
    for name, trained in experiment.arms.items():
        for place, seed in enumerate(experiment.seeds):
            points = symbols @ trained.values[:, place].double()  # (steps, symbols, V)
            centred = points - points.mean((0, 1))
            _, sizes, axes = torch.linalg.svd(centred.flatten(0, 1), full_matrices=False)
            along = centred @ axes[:2].mT
            last = along[-1]
            along = along * last.gather(0, last.abs().argmax(0, keepdim=True)).sign()
            shown = float((sizes[:2] ** 2).sum() / (sizes**2).sum())
            steps, count = len(trained.held_out_steps), len(symbols)
            rows.append(
                pd.DataFrame(
                    {
                        "arm": name,
                        "seed": seed,
                        "symbol": np.tile(np.arange(count), steps),
                        "step": np.repeat(trained.held_out_steps, count),
                        "first": along[..., 0].flatten().numpy(),
                        "second": along[..., 1].flatten().numpy(),
                        "shown": shown,
                    }
                )
            )
    return pd.concat(rows, ignore_index=True)
