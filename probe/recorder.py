"""What a watch hears: the receiver of attention calls, and the steps that it adds them up in.

What arrives between two steps belongs to one optimizer step, however many forwards and micro-batches that was; closing the
step takes the loss weight out of u and adds the step to the whole. `watch.Watch` is the face of it that users see.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ..hooks.adapters import transformer_lens
from ..hooks.attach import attach
from ..hooks.call import AttentionCall, CallSite, Flash, Gradients, Needs
from ..hooks.errors import BadRequest, ClosedWatch, NoAttentionSeen, NoGradientReached
from ..hooks.site import Site
from . import tables
from .columns import COLUMNS
from .history import History
from .law.strongest import RankBy
from .law.vectors import Vectors
from .operator import classes, ways
from .operator.one_pass import EdgeRequest
from .operator.report import Ways
from .state import State, Step
from .statistics import Sums
from .steps import Steps, loggers

Detail = Literal["heads", "tokens", "edges"]


@dataclass(frozen=True)
class Options:
    """What a watch was asked for: the arguments of `watch()` after the model.

    Attributes:
        layers, heads: restrict to these layer and head numbers.
        detail: "heads" keeps sums per head; "tokens" also a row per query and key token; "edges" also the strongest
            (query, key) pairs.
        every: observe every n-th optimizer step (steps are closed by `step()`).
        edges: how many edges per head and direction to keep; rank_by: the strongest by "score_gradient" (D, where the loss
            pulls) or by "knockout" (what removing the edge would do to the loss).
        scaler: the GradScaler in use, so that u can be unscaled; without it u is taken as it comes.
        reach_all: give calls a gradient path where the model's own graph has none (frozen layers before the first
            trainable one). Entirely frozen models need nothing.
        tokenizer: turns ids into strings in `tokens()` and `edges()`.
        history: a folder that `history()` is streamed to, as Parquet files that `pandas.read_parquet(folder)` reads as
            one table; a resumed run gives the same folder and calls `seek(step)`. None: steps are kept in memory.
        logger: a callable `(dict, step)`, or several; told after each observed step, with flat names such as
            `probe/L3H7/routing_pressure` (see `TensorBoardLogger`, `WandbLogger`).
        fused, compiled: ignored, and gone in the next release: one C++ pass gives the kernel's own gradients, bit for bit,
            along with the statistics wherever it can; `modules()` tells where.
        singly: also keep the sums of every sequence, so that runs can be compared sequence by sequence; see `sequences()`.

    Raises:
        BadRequest: for arguments that cannot be served.
    """

    layers: Iterable[int] | None = None
    heads: Iterable[int] | None = None
    detail: Detail = "heads"
    every: int = 1
    edges: int = 64
    scaler: Any = None
    reach_all: bool = False
    tokenizer: Any = None
    history: str | os.PathLike[str] | None = None
    logger: Any = None
    fused: bool = False
    compiled: bool = False
    singly: bool = False
    rank_by: RankBy = "score_gradient"

    def __post_init__(self) -> None:
        if self.detail not in ("heads", "tokens", "edges"):
            raise BadRequest(f'detail must be "heads", "tokens" or "edges", not {self.detail!r}.')
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise BadRequest(f"every must be a whole number of steps, at least 1, not {self.every!r}.")
        if not isinstance(self.edges, int) or isinstance(self.edges, bool) or self.edges < 1:
            raise BadRequest(f"edges must be a whole number, at least 1, not {self.edges!r}.")
        if self.scaler is not None and not callable(getattr(self.scaler, "get_scale", None)):
            raise BadRequest("scaler must be a GradScaler: an object with get_scale().")
        if self.rank_by not in ("score_gradient", "knockout"):
            raise BadRequest(f'rank_by must be "score_gradient" or "knockout", not {self.rank_by!r}.')
        for name in ("fused", "compiled"):
            if getattr(self, name):
                warnings.warn(
                    f"advantage_probe: {name}= is ignored and goes in the next release; the C++ operator does the same by "
                    "default, with the kernel's own gradients.",
                    DeprecationWarning,
                    stacklevel=4,
                )
        for name in ("layers", "heads"):
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))


def _numbers(name: str, given: Any) -> frozenset[int] | None:
    if given is None:
        return None
    given = given if isinstance(given, (str, int)) else list(given)
    if isinstance(given, (str, int)) or not all(isinstance(number, int) for number in given):
        raise BadRequest(f"{name} must be a list of whole numbers, such as {name}=[0, 3], not {given!r}.")
    return frozenset(given)


class Recorder:
    """Attached to `model` from the start until `close`; everything that it heard, by closed steps and the open one."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        if not isinstance(model, nn.Module):
            raise BadRequest(f"watch() takes a torch.nn.Module, not {type(model).__name__}.")
        self.options = options
        self.model_name = type(model).__name__
        self.scaler = options.scaler
        self.lock = threading.RLock()
        self.error: Exception | None = None
        self.number = 0
        self.open, self.closed_steps = State(), State()
        self.weights: set[float | None] = set()  # of the closed steps; None: not told
        self._asked = self._stepped = False
        self._weighed: float | None = None
        self._step_weights: list[float | None] = []
        self._scale: float | None = None
        self.ways = Ways()
        size = sum(parameter.numel() for parameter in model.parameters())
        named = f"{self.model_name} with {size:,} parameters"
        self.steps = Steps(
            None if options.history is None else History(options.history, named, tables.HISTORY, model),
            loggers(options.logger),
            options.every,
        )
        if next(model.parameters(), torch.zeros(())).device.type == "cpu":
            ways.usable()  # built now, not in the middle of the first step
        self.attachment = attach(model, self, reach_all=options.reach_all)
        _announce_processing(model)

    def wants(self, site: Site) -> Needs | None:
        self._asked = True
        if not self.observing:
            return None
        if self.options.layers is not None and site.layer not in self.options.layers:
            return None
        return Needs(flash=ways.usable())

    def seen(self, call: CallSite, heads: int, group: int, reachable: bool) -> None:
        with self.lock:
            self.open.seen(call, heads, group, reachable)

    def receive(self, call: AttentionCall) -> None:
        way = self._add(call, None)
        self.ways.note(call, way, call.beside)

    def receive_flash(self, call: AttentionCall, flash: Flash) -> Gradients:
        request = EdgeRequest(self._edges, self.options.rank_by == "knockout")
        rows, gradients, way = classes.attend(call, flash, request)
        self._add(call, rows)
        self.ways.note(call, way, "" if way == classes.ONE_PASS else "the one pass did not give the kernel's bits")
        return gradients

    @property
    def _edges(self) -> int:
        return self.options.edges if self.options.detail == "edges" else 0

    def _add(self, call: AttentionCall, rows: Vectors | None) -> str:
        scale = float(self.scaler.get_scale()) if self.scaler is not None else 1.0
        with self.lock:
            self._scale = scale
            return self.open.add(
                call,
                edges=self._edges,
                rank_by=self.options.rank_by,
                tokens=self.options.detail in ("tokens", "edges"),
                singly=self.options.singly,
                scale=scale * (self._weighed or 1.0),
                rows=rows,
            )

    def refuse(self, error: Exception) -> None:
        if self.error is None:
            self.error = error

    @property
    def observing(self) -> bool:
        """Whether the step that is open is one of every n-th."""
        return self.number % self.options.every == 0

    @property
    def closed(self) -> bool:
        return not self.attachment.open

    def check_open(self) -> None:
        if self.closed:
            raise ClosedWatch("This watch is closed; open a new one with watch(model).")

    def seek(self, step: int) -> None:
        """Go on at step number `step`, as after loading a checkpoint; rows of the history from there on are replaced, and
        what came since the last step belongs to none.

        Raises:
            ClosedWatch: after `close()`. BadRequest: for a number that lies before a step that this watch has closed.
        """
        self.check_open()
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise BadRequest(f"seek() takes the number of a step, 0 or more, not {step!r}.")
        if self._stepped and step < self.number:
            raise BadRequest(
                f"The step counter went backwards, from {self.number} to {step}; call watch.reset() first, or open a new "
                "watch for the resumed run."
            )
        self.number = step
        if not self.steps.count:
            self.steps.sought = step
        self.drop()

    def drop(self) -> None:
        """Forget what came since the last step, as when a step is given up half-way and begun again."""
        with self.lock:
            self.open, self._scale = State(), None
            self._weighed, self._step_weights = None, []

    def weigh(self, loss_weight: float | None) -> None:
        """Say the weight of the loss that is backpropagated next, where the micro-batches of one step differ.

        It holds for every gradient that arrives until it is called again or the step is closed; `step(loss_weight=)`
        multiplies it. None: not known; u stays as it comes, and the weight of the whole step is recorded as unknown.

        Raises:
            ClosedWatch: after `close()`. BadRequest: for a weight that is not a positive number.
        """
        self.check_open()
        self._weighed = None if loss_weight is None else _weight(loss_weight)
        self._step_weights.append(self._weighed)

    def step(self, loss_weight: float | None = None) -> None:
        """Close an optimizer step: everything since the last one belongs to it.

        Args:
            loss_weight: w when the loss that was backpropagated is w times the loss summed over target tokens (for a
                mean loss 1/targets); u is divided by it, so that numbers do not depend on the batch. None: not told;
                u stays as it came and the weight is recorded as unknown.

        Raises:
            ClosedWatch: after `close()`. NoAttentionSeen: when no readable attention call was made in an observed step.
            BadRequest: for a weight that is not a positive number, or a history that was not told to resume. Whatever
            could not be read since the last step.
        """
        if self.error is not None:
            raise self.error
        self.check_open()
        weight = None if loss_weight is None else _weight(loss_weight)
        with self.lock:
            if self.observing:
                self.complain()
                self._close_step(weight)
            self.number += 1
            self._stepped = True
            self._weighed, self._step_weights = None, []

    def _close_step(self, weight: float | None) -> None:
        skipped = self._scale is not None and self.scaler is not None and self.scaler.get_scale() < self._scale
        if weight is not None:
            self.open.divide(weight)
        if self._step_weights:
            known = [part for part in self._step_weights if part is not None]
            complete = len(known) == len(self._step_weights)
            weight = (weight or 1.0) * sum(known) / len(known) if complete else None
        self.open.close_step()
        self.weights.add(weight)
        sums = {key: entry.sums.copy(replicated=False) for key, entry in self.open.entries.items()}
        scale = None if self.scaler is None else self._scale
        self.steps.add(Step(self.number, sums, weight, scale, skipped))
        if skipped:  # its heads are known, its numbers are not
            for entry in self.open.entries.values():
                entry.sums, entry.singly = Sums.empty(entry.heads), None
                entry.updates = entry.edges = entry.tokens = None
        self.closed_steps.merge(self.open)
        self.open, self._scale = State(), None

    def reset(self) -> None:
        """Forget everything that was added and start again at step 0."""
        self.check_open()
        with self.lock:
            self.number, self._asked, self._scale, self._stepped = 0, False, None, False
            self.open, self.closed_steps = State(), State()
            self.steps, self.weights = Steps(self.steps.history, self.steps.loggers, self.options.every), set()
            self._weighed, self._step_weights = None, []
            self.steps.sought = 0

    def state(self) -> State:
        """Everything that was added by closed steps, as a copy that merges with other states.

        While no step has been closed, what the open one holds; its u still carries the loss weight.

        Raises:
            Whatever could not be read: a refused kernel, a violated law.
        """
        if self.error is not None:
            raise self.error
        with self.lock:
            whole = self.closed_steps.copy()
            if not whole.entries:  # an open step still carries its loss weight, so it is not mixed with closed ones
                whole.merge(self.open)
        return whole

    def filled(self) -> State:
        state = self.state()
        if not state.entries:
            with self.lock:
                self.complain()
        return state

    def complain(self) -> None:
        """Raise when an observed step saw nothing: an empty table must not look like a result."""
        if self.open.entries:
            entries = self.open.entries.values()
            if not any(entry.sums.total.any() or entry.sums.bad_now.any() for entry in entries):
                self._hint()
            return
        blind = self.attachment.blind_calls
        if blind:
            raise NoGradientReached(
                f"{blind} attention calls ran under torch.no_grad(), where no gradient can come back; "
                "run the forward with gradients enabled and call loss.backward() before step()."
            )
        if self.options.layers is not None and self._asked:
            raise NoAttentionSeen(f"No attention call was made in layers {sorted(self.options.layers)}; check layers=.")
        raise NoAttentionSeen(
            f"{self.model_name} made no attention call that the probe can read; it may compute attention by hand, "
            "have no softmax attention, or not have run its forward inside the watch."
        )

    def _hint(self) -> None:
        if any(entry.reachable for entry in self.open.entries.values()):
            message = "attention ran, but no gradient came back: call loss.backward() before step()."
        else:
            message = (
                "no gradient path leads through any head (parameters before it are frozen); "
                "open the watch with reach_all=True to see u everywhere."
            )
        warnings.warn(f"advantage_probe: {message}", stacklevel=5)


def _announce_processing(model: nn.Module) -> None:
    """Warn where columns speak of processed weights and not of the model as it was trained."""
    found = transformer_lens.processing(model)
    if found is not None:
        same = [name for name, column in COLUMNS.items() if column.processed and column.needs_weights]
        other = [name for name, column in COLUMNS.items() if column.processed is False]
        warnings.warn(
            f"advantage_probe: the bridge's weights were processed ({found}); {', '.join(same)} and the "
            f"attention columns are those of the original model, {', '.join(other)} are not.",
            stacklevel=6,
        )


def _weight(given: Any) -> float:
    weight = float(given)
    if not 0 < weight < float("inf"):
        raise BadRequest(f"loss_weight must be a positive number, not {given!r}.")
    return weight
