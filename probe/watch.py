"""`watch(model)`: opens, feeds, steps, closes.

A watch is a receiver of attention calls. What arrives between two `step()`s belongs to one optimizer step, however many
forwards and micro-batches that was; closing the step takes the loss weight out of u and adds the step to the whole.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..hooks.adapters import transformer_lens
from ..hooks.attach import attach
from ..hooks.call import AttentionCall, CallSite, Needs
from ..hooks.errors import BadRequest, ClosedWatch, NoAttentionSeen, NoGradientReached
from ..hooks.site import Site
from . import notebook
from . import tables as frames
from .columns import COLUMNS
from .history import History
from .law import compiled_block as inductor
from .law.vectors import Vectors
from .options import Detail, Options
from .readings import Readings
from .state import State
from .statistics import Sums
from .steps import Step, Steps, loggers


class Watch(Readings):
    """Statistics of every attention head of a model while it runs; made by `watch()`.

    Reading (`heads`, `tokens`, `edges`, `updates`, `history`, `state`) works while the watch is open and after.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        if not isinstance(model, nn.Module):
            raise BadRequest(f"watch() takes a torch.nn.Module, not {type(model).__name__}.")
        self.model_name = type(model).__name__
        self.detail, self.every, self.capacity = options.detail, options.every, options.edges
        self.singly, self.fused = options.singly, options.fused
        self.compiled = options.compiled and options.detail != "edges"
        self.scaler, self.tokenizer = options.scaler, options.tokenizer
        self.layers, self.selected_heads = (
            None if numbers is None else frozenset(numbers) for numbers in (options.layers, options.heads)
        )
        self._lock = threading.RLock()
        self._error: Exception | None = None
        self._number = 0
        self._asked = self._stepped = False
        self._farewells: list[Callable[[], None]] = []
        self._open, self._closed_steps = State(), State()
        size = sum(parameter.numel() for parameter in model.parameters())
        named = f"{self.model_name} with {size:,} parameters"
        history = None if options.history is None else History(options.history, named, frames.HISTORY)
        self._steps = Steps(history, loggers(options.logger))
        self._weights: set[float | None] = set()
        self._weighed: float | None = None
        self._step_weights: list[float | None] = []
        self._scale: float | None = None
        if self.compiled:
            _prepare(model, self.fused)
        self._attachment = attach(model, self, reach_all=options.reach_all)
        _announce_processing(model)

    # -- receiver ----------------------------------------------------------------------------------------------------

    def wants(self, site: Site) -> Needs | None:
        self._asked = True
        if not self.observing:
            return None
        if self.layers is not None and site.layer not in self.layers:
            return None
        return Needs(fused=self.fused)

    def seen(self, call: CallSite, heads: int, group: int, reachable: bool) -> None:
        with self._lock:
            self._open.seen(call, heads, group, reachable)

    def receive(self, call: AttentionCall) -> None:
        self._add(call, gradients=False)

    def receive_fused(self, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
        rows = self._add(call, gradients=True)
        assert rows.query_gradient is not None
        assert rows.key_gradient is not None
        by_value = rows.value_gradient
        if call.group > 1:
            by_value = by_value.unflatten(1, (-1, call.group)).sum(2)
        return rows.query_gradient, rows.key_gradient, by_value

    def _add(self, call: AttentionCall, gradients: bool) -> Vectors:
        scale = float(self.scaler.get_scale()) if self.scaler is not None else 1.0
        with self._lock:
            self._scale = scale
            return self._open.add(
                call,
                edges=self.capacity if self.detail == "edges" else 0,
                tokens=self.detail in ("tokens", "edges"),
                singly=self.singly,
                scale=scale * (self._weighed or 1.0),
                gradients=gradients,
                compiled=self.compiled,
            )

    def refuse(self, error: Exception) -> None:
        if self._error is None:
            self._error = error

    # -- life --------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return not self._attachment.open

    @property
    def error(self) -> Exception | None:
        """What could not be read so far, which the next step or reading raises; None when all is well."""
        return self._error

    @property
    def number(self) -> int:
        """The number of the step that is open: how many were closed before it, 0 at first."""
        return self._number

    @property
    def observing(self) -> bool:
        """Whether the step that is open is one of every n-th."""
        return self._number % self.every == 0

    def seek(self, step: int) -> None:
        """Go on at step number `step`, as after loading a checkpoint; rows of the history from there on are replaced, and
        what came since the last step belongs to none.

        Raises:
            ClosedWatch: after `close()`. BadRequest: for a number that lies before a step that this watch has closed.
        """
        self._still_open()
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise BadRequest(f"seek() takes the number of a step, 0 or more, not {step!r}.")
        if self._stepped and step < self._number:
            raise BadRequest(
                f"The step counter went backwards, from {self._number} to {step}; call watch.reset() first, or open a new "
                "watch for the resumed run."
            )
        self._number = step
        if not self._steps.count:
            self._steps.sought = step
        self.drop()

    def drop(self) -> None:
        """Forget what came since the last step, as when a step is given up half-way and begun again."""
        with self._lock:
            self._open, self._scale = State(), None
            self._weighed, self._step_weights = None, []

    def weigh(self, loss_weight: float | None) -> None:
        """Say the weight of the loss that is backpropagated next, where the micro-batches of one step differ.

        It holds for every gradient that arrives until it is called again or the step is closed; `step(loss_weight=)`
        multiplies it. None: not known; u stays as it comes, and the weight of the whole step is recorded as unknown.

        Raises:
            ClosedWatch: after `close()`. BadRequest: for a weight that is not a positive number.
        """
        self._still_open()
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
        if self._error is not None:
            raise self._error
        self._still_open()
        weight = None if loss_weight is None else _weight(loss_weight)
        with self._lock:
            if self.observing:
                self._complain()
                self._close_step(weight)
            self._number += 1
            self._stepped = True
            self._weighed, self._step_weights = None, []

    def _close_step(self, weight: float | None) -> None:
        skipped = self._scale is not None and self.scaler is not None and self.scaler.get_scale() < self._scale
        if weight is not None:
            self._open.divide(weight)
        if self._step_weights:
            known = [part for part in self._step_weights if part is not None]
            complete = len(known) == len(self._step_weights)
            weight = (weight or 1.0) * sum(known) / len(known) if complete else None
        self._open.close_step()
        self._weights.add(weight)
        sums = {key: entry.sums.copy(replicated=False) for key, entry in self._open.entries.items()}
        scale = None if self.scaler is None else self._scale
        self._steps.add(Step(self._number, sums, weight, scale, skipped))
        if skipped:  # its heads are known, its numbers are not
            for entry in self._open.entries.values():
                entry.sums, entry.singly = Sums.empty(entry.heads), None
                entry.updates = entry.edges = entry.tokens = None
        self._closed_steps.merge(self._open)
        self._open, self._scale = State(), None

    def _still_open(self) -> None:
        if self.closed:
            raise ClosedWatch("This watch is closed; open a new one with watch(model).")

    def _complain(self) -> None:
        """Raise when an observed step saw nothing: an empty table must not look like a result."""
        if self._open.entries:
            entries = self._open.entries.values()
            if not any(entry.sums.total.any() or entry.sums.bad_now.any() for entry in entries):
                self._hint()
            return
        blind = self._attachment.blind_calls
        if blind:
            raise NoGradientReached(
                f"{blind} attention calls ran under torch.no_grad(), where no gradient can come back; "
                "run the forward with gradients enabled and call loss.backward() before step()."
            )
        if self.layers is not None and self._asked:
            raise NoAttentionSeen(f"No attention call was made in layers {sorted(self.layers)}; check layers=.")
        raise NoAttentionSeen(
            f"{self.model_name} made no attention call that the probe can read; it may compute attention by hand, "
            "have no softmax attention, or not have run its forward inside the watch."
        )

    def _hint(self) -> None:
        if any(entry.reachable for entry in self._open.entries.values()):
            message = "attention ran, but no gradient came back: call loss.backward() before step()."
        else:
            message = (
                "no gradient path leads through any head (parameters before it are frozen); "
                "open the watch with reach_all=True to see u everywhere."
            )
        warnings.warn(f"advantage_probe: {message}", stacklevel=4)

    def reset(self) -> None:
        """Forget everything that was added and start again at step 0."""
        self._still_open()
        with self._lock:
            self._number, self._asked, self._scale, self._stepped = 0, False, None, False
            self._open, self._closed_steps = State(), State()
            self._steps, self._weights = Steps(self._steps.history, self._steps.loggers), set()
            self._weighed, self._step_weights = None, []
            self._steps.sought = 0

    def flush(self) -> None:
        """Write the history rows that wait, as every 64 observed steps, every 30 seconds and `close()` do.

        Raises:
            OSError: when the disk refuses; the rows stay in memory.
        """
        with self._lock:
            self._steps.flush()

    def at_close(self, action: Callable[[], None]) -> None:
        """Run `action` when the watch is closed, however that comes about."""
        self._farewells.append(action)

    def close(self) -> None:
        """Stop listening, put everything back and write what waits; may be called more than once."""
        self._attachment.close()
        while self._farewells:
            self._farewells.pop()()
        self.flush()

    def _repr_html_(self) -> str:
        """What a notebook shows: how far the watch is, and its strongest heads."""
        facts = {
            "open": not self.closed,
            "closed steps": self._steps.count,
            "every": self.every,
            "detail": self.detail,
            "loss weight": self.loss_weight,
        }
        if self._error is not None:
            return notebook.block(f"Watch of {self.model_name}", {**facts, "error": self._error})
        state = self.state()
        heads = frames.heads(state) if state.entries else None
        return notebook.block(
            f"Watch of {self.model_name}", facts, None if heads is None else notebook.strongest(self._select(heads))
        )

    def __enter__(self) -> Watch:
        self._still_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ran = self._attachment.ran
        self.close()
        if kind is not None:
            return
        if self._error is not None:
            raise self._error
        if ran and self.observing and not self._steps and not self._closed_steps.entries:
            self._complain()


def _announce_processing(model: nn.Module) -> None:
    """Warn where columns speak of processed weights and not of the model as it was trained."""
    found = transformer_lens.processing(model)
    if found is not None:
        same = [name for name, column in COLUMNS.items() if column.processed and column.needs_weights]
        other = [name for name, column in COLUMNS.items() if column.processed is False]
        warnings.warn(
            f"advantage_probe: the bridge's weights were processed ({found}); {', '.join(same)} and the "
            f"attention columns are those of the original model, {', '.join(other)} are not.",
            stacklevel=4,
        )


def _prepare(model: nn.Module, fused: bool) -> None:
    """Compile the pass now, where the model is on a CPU, so that a machine that cannot is told before any work."""
    parameter = next(model.parameters(), torch.zeros(()))
    if parameter.device.type == "cpu":
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        inductor.compiled(dtype, True, fused)


def _weight(given: Any) -> float:
    weight = float(given)
    if not 0 < weight < float("inf"):
        raise BadRequest(f"loss_weight must be a positive number, not {given!r}.")
    return weight


def watch(
    model: nn.Module,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    detail: Detail = "heads",
    every: int = 1,
    edges: int = 64,
    scaler: Any = None,
    reach_all: bool = False,
    tokenizer: Any = None,
    history: str | os.PathLike[str] | None = None,
    logger: Any = None,
    fused: bool = False,
    compiled: bool = False,
    singly: bool = False,
) -> Watch:
    """Watch every attention head of `model` until the returned `Watch` is closed.

    Args:
        model: any model whose attention an adapter can read; nothing of it is changed.
        layers, heads: restrict to these layer and head numbers.
        detail: "heads" keeps sums per head; "tokens" also a row per query and key token; "edges" also the strongest
            (query, key) pairs.
        every: observe every n-th optimizer step (steps are closed by `step()`).
        edges: how many edges per head and direction to keep.
        scaler: the GradScaler in use, so that u can be unscaled; without it u is taken as it comes.
        reach_all: give calls a gradient path where the model's own graph has none (frozen layers before the first
            trainable one). Entirely frozen models need nothing.
        tokenizer: turns ids into strings in `tokens()` and `edges()`.
        history: a folder that `history()` is streamed to, as Parquet files that `pandas.read_parquet(folder)` reads as
            one table; a resumed run gives the same folder and calls `seek(step)`. None: steps are kept in memory.
        logger: a callable `(dict, step)`, or several; told after each observed step, with flat names such as
            `probe/L3H7/routing_pressure` (see `TensorBoardLogger`, `WandbLogger`).
        fused: let one pass give the gradients of `scaled_dot_product_attention` and the statistics, instead of the kernel's
            backward and a pass of our own. Cheaper on a CPU, but the last bits of the model's gradients change; calls with
            dropout, caps, sinks, padding or a checkpoint around them keep the kernel's backward.
        compiled: let torch.compile make the part of the pass between the products, for the CPU. That takes a C++ compiler
            and, when first used on a machine, about 15 seconds here; afterwards the pass costs about half. Calls with
            dropout or sinks, `detail="edges"` and other devices run as without it.
        singly: also keep the sums of every sequence, so that runs can be compared sequence by sequence; see `sequences()`.

    Raises:
        BadRequest: for arguments that cannot be served. BadInput: for a history of another model or of other columns.
    """
    options = Options(
        layers, heads, detail, every, edges, scaler, reach_all, tokenizer, history, logger, fused, compiled, singly
    )
    return Watch(model, options)
