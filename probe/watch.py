"""`watch(model)`: opens, feeds, steps, closes, and is read.

A `Watch` is the face of a `recorder.Recorder`, which hears the attention calls: here are its life and its tables.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec

import pandas as pd
from torch import nn

from ..hooks.errors import BadInput, BadRequest, MergeRefused
from ..hooks.site import uncalled
from . import notebook, tables
from .recorder import Options, Recorder
from .state import State

Given = ParamSpec("Given")


class Watch:
    """Statistics of every attention head of a model while it runs; made by `watch()`.

    Reading (`heads`, `tokens`, `edges`, `updates`, `history`, `state`) works while the watch is open and after.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        self.options = options
        self._farewells: list[Callable[[], None]] = []
        self._recorder = Recorder(model, options)
        if self._recorder.steps.history is not None:
            mine = weakref.WeakMethod(self.close)
            self._recorder.steps.history.replaced = lambda: (close := mine()) and close()

    # -- life --------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model that is watched."""
        return self._recorder.attachment.model

    @property
    def model_name(self) -> str:
        """The class of the model."""
        return self._recorder.model_name

    @property
    def scaler(self) -> Any:
        """The GradScaler whose scale u is freed of; a training hook that finds one sets it."""
        return self._recorder.scaler

    @scaler.setter
    def scaler(self, scaler: Any) -> None:
        self._recorder.scaler = scaler

    @property
    def closed(self) -> bool:
        return self._recorder.closed

    @property
    def error(self) -> Exception | None:
        """What could not be read so far, which the next step or reading raises; None when all is well."""
        return self._recorder.error

    @property
    def number(self) -> int:
        """The number of the step that is open: how many were closed before it, 0 at first."""
        return self._recorder.number

    @property
    def observing(self) -> bool:
        """Whether the step that is open is one of every n-th."""
        return self._recorder.observing

    @property
    def loss_weight(self) -> float | str:
        """The loss weight that was taken out of u: a number, "varied" (known at every step) or "unknown"."""
        if not self._recorder.weights or None in self._recorder.weights:
            return "unknown"
        return next(iter(self._recorder.weights)) if len(self._recorder.weights) == 1 else "varied"  # type: ignore[return-value]

    def seek(self, step: int) -> None:
        """Go on at step number `step`, as after loading a checkpoint; rows of the history from there on are replaced, and
        what came since the last step belongs to none.

        Raises:
            ClosedWatch: after `close()`. BadRequest: for a number that lies before a step that this watch has closed.
        """
        self._recorder.seek(step)

    def drop(self) -> None:
        """Forget what came since the last step, as when a step is given up half-way and begun again."""
        self._recorder.drop()

    def weigh(self, loss_weight: float | None) -> None:
        """Say the weight of the loss that is backpropagated next, where the micro-batches of one step differ.

        It holds for every gradient that arrives until it is called again or the step is closed; `step(loss_weight=)`
        multiplies it. None: not known; u stays as it comes, and the weight of the whole step is recorded as unknown.

        Raises:
            ClosedWatch: after `close()`. BadRequest: for a weight that is not a positive number.
        """
        self._recorder.weigh(loss_weight)

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
        self._recorder.step(loss_weight)

    def reset(self) -> None:
        """Forget everything that was added and start again at step 0."""
        self._recorder.reset()

    def flush(self) -> None:
        """Write the history rows that wait, as every 64 observed steps, every 30 seconds and `close()` do.

        Raises:
            OSError: when the disk refuses; the rows stay in memory.
        """
        with self._recorder.lock:
            self._recorder.steps.flush()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of the run should carry, so that resuming loses no row: the number of the open step and
        the rows that were not written yet. `torch.save` and `torch.load(weights_only=True)` keep it.
        """
        with self._recorder.lock:
            return {"step": self.number, "rows": self._recorder.steps.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken: `seek` to its step, with the rows that had not been written.

        Raises:
            BadInput: for what is no such state. As `seek`.
        """
        if not isinstance(state, dict) or set(state) != {"step", "rows"}:
            raise BadInput("load_state_dict() takes what state_dict() returned.")
        with self._recorder.lock:
            self._recorder.steps.restore(state["rows"])
            self.seek(int(state["step"]))

    def at_close(self, action: Callable[[], None]) -> None:
        """Run `action` when the watch is closed, however that comes about."""
        self._farewells.append(action)

    def close(self) -> None:
        """Stop listening, put everything back and write what waits; may be called more than once."""
        self._recorder.attachment.close()
        while self._farewells:
            self._farewells.pop()()
        with self._recorder.lock:
            self._recorder.steps.close()

    def __enter__(self) -> Watch:
        self._recorder.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ran = self._recorder.attachment.ran
        self.close()
        if kind is not None:
            return
        if self._recorder.error is not None:
            raise self._recorder.error
        if ran and self.observing and not self._recorder.steps and not self._recorder.closed_steps.entries:
            self._recorder.complain()

    # -- reading -----------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Everything that was added by closed steps, as a copy that merges with other states.

        While no step has been closed, what the open one holds; its u still carries the loss weight.

        Raises:
            Whatever could not be read: a refused kernel, a violated law.
        """
        return self._recorder.state()

    def merge(self, other: Watch | State) -> None:
        """Add what another watch of the same model saw on other sequences.

        Raises:
            MergeRefused: when the other saw a different model.
        """
        state = other.state() if isinstance(other, Watch) else other
        if not isinstance(state, State):
            raise MergeRefused(f"merge() takes a watch or a state, not {type(other).__name__}.")
        if isinstance(other, Watch):
            theirs, ours = other.options, self.options
            if (theirs.detail, theirs.edges, theirs.rank_by) != (ours.detail, ours.edges, ours.rank_by):
                raise MergeRefused(
                    f'A watch with detail="{theirs.detail}", edges={theirs.edges}, rank_by="{theirs.rank_by}" cannot be '
                    f'merged into one with detail="{ours.detail}", edges={ours.edges}, rank_by="{ours.rank_by}"; open both '
                    "alike."
                )
        self.state().merge(state)  # refused here, nothing has changed yet
        with self._recorder.lock:
            self._recorder.closed_steps.merge(state)
            if isinstance(other, Watch):
                # what an open step holds still carries its weight
                self._recorder.weights |= other._recorder.weights or ({None} if state.entries else set())

    def heads(self, step: int | Literal["all"] = "all", *, intervals: bool = False, backward: int = 0) -> pd.DataFrame:
        """One row per module, use and head, with the columns of the README's table.

        Args:
            step: "all" pools the steps; a number selects one closed step.
            intervals: add `_low` and `_high` to every column, pointwise 95 % intervals over sequences, and `interval`:
                "ok", "few: …" below 30 sequences, "none: …" below 12, where there is none.
            backward: 0 for the first gradient that came back to each call, 1 for the second (`retain_graph`), …

        Raises:
            NoAttentionSeen: when nothing was captured. BadRequest: for a step that was not observed, or intervals of a
            single step, which are not kept.
        """
        if step == "all":
            table = tables.heads(self._recorder.filled(), intervals=intervals, backward=backward)
        else:
            if intervals:
                raise BadRequest("Intervals are kept for the whole watch only; leave step out.")
            table = tables.step_heads(self._recorder.filled(), self._recorder.steps.of(step), backward)
        return self._select(table)

    def tokens(self) -> pd.DataFrame:
        """Query rows and key rows, token by token; column `side` says which.

        Raises:
            BadRequest: when the watch was opened without `detail="tokens"` or `"edges"`.
        """
        if self.options.detail == "heads":
            raise BadRequest('Token rows were not kept; open the watch with detail="tokens".')
        return self._select(tables.tokens(self._recorder.filled(), self.options.tokenizer))

    def edges(self, top: int = 50) -> pd.DataFrame:
        """Per head the `top` strongest routed (D < 0: attention will rise) and anti-routed (D > 0) pairs.

        Raises:
            BadRequest: when the watch was opened without `detail="edges"`, or kept fewer than `top` edges.
        """
        if self.options.detail != "edges":
            raise BadRequest('Edges were not kept; open the watch with detail="edges".')
        if not 1 <= top <= self.options.edges:
            raise BadRequest(
                f"{self.options.edges} edges per head were kept, not {top}; open the watch with edges={top}."
            )
        return self._select(tables.edges(self._recorder.filled(), top, self.options.tokenizer))

    def sequences(self) -> pd.DataFrame:
        """One row per sequence and head: the sums that the columns of the heads table are functions of.

        Raises:
            BadRequest: when the watch was opened without `singly=True`.
        """
        if not self.options.singly:
            raise BadRequest("Sequences were not kept apart; open the watch with singly=True.")
        return self._select(tables.sequences(self._recorder.filled()))

    def updates(self) -> pd.DataFrame:
        """Responsibility-weighted update directions per head: mean of −m_j over keys, its norm, share of one axis."""
        return self._select(tables.updates(self._recorder.filled()))

    def modules(self) -> pd.DataFrame:
        """One row per attention module; what was not captured says why: "no softmax attention" for layers that mix tokens
        otherwise, "no attention call was seen" for attention that did not run, or not so that it can be read.

        `way`: how its numbers were computed last. "one pass" gives the kernel's gradients and the statistics together; "two
        products" and "three products" run beside a kernel that keeps its own backward; "blocks in Python" is the way of a
        machine where the C++ operator cannot be had. `reason`: why it was not the first.
        """
        state, attachment = self._recorder.filled(), self._recorder.attachment
        idle = uncalled(self.model, {key.site.module for key in state.entries}, attachment.silent)
        asked = [site for site in idle if self.options.layers is None or site.layer in self.options.layers]
        return self._recorder.ways.beside(tables.modules(state, attachment.silent, asked))

    def history(self) -> pd.DataFrame:
        """One row per closed step, module, use and head; with `history=`, earlier parts of the run as well."""
        if not self._recorder.steps.history or not self._recorder.steps.history.parts:
            self._recorder.filled()
        elif self._recorder.error is not None:
            raise self._recorder.error
        with self._recorder.lock:
            return self._select(self._recorder.steps.table())

    def _select(self, table: pd.DataFrame) -> pd.DataFrame:
        if self.options.heads is None:
            return table
        return table[table["head"].isin(self.options.heads)].reset_index(drop=True)

    def _repr_html_(self) -> str:
        """What a notebook shows: how far the watch is, and its strongest heads."""
        facts = {
            "open": not self.closed,
            "closed steps": self._recorder.steps.count,
            "every": self.options.every,
            "detail": self.options.detail,
            "loss weight": self.loss_weight,
        }
        title = f"Watch of {self.model_name}"
        if self.error is not None:
            return notebook.block(title, {**facts, "error": self.error})
        state = self.state()
        heads = tables.heads(state) if state.entries else None
        return notebook.block(title, facts, None if heads is None else notebook.strongest(self._select(heads)))


Opened = Callable[Concatenate[nn.Module, Given], Watch]


def _with_options(
    options: Callable[Given, Options],
) -> Callable[[Callable[[nn.Module, Options], Watch]], Opened[Given]]:
    """Let a function of a model and `Options` be called with the options themselves: they are written down once."""

    def wrap(made: Callable[[nn.Module, Options], Watch]) -> Opened[Given]:
        @wraps(made)
        def opened(model: nn.Module, *args: Given.args, **kwargs: Given.kwargs) -> Watch:
            return made(model, options(*args, **kwargs))

        own = list(inspect.signature(options).parameters.values())
        model = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="nn.Module")
        told = inspect.cleandoc(options.__doc__ or "").split("Attributes:\n")[1]
        opened.__doc__ = f"{inspect.cleandoc(made.__doc__ or '')}\n\nArgs:\n{told}"
        opened.__signature__ = inspect.Signature([model, *own], return_annotation="Watch")  # type: ignore[attr-defined]
        vars(opened).pop("__wrapped__")
        return opened

    return wrap


@_with_options(Options)
def watch(model: nn.Module, options: Options) -> Watch:
    """Watch every attention head of `model`, any model whose attention an adapter can read, until the returned `Watch` is
    closed; nothing of it is changed.
    """
    return Watch(model, options)
