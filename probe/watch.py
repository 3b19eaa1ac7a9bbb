"""`watch(model)`: opens, feeds, steps, closes.

A watch is a receiver of attention calls. What arrives between two `step()`s belongs to one optimizer step, however many
forwards and micro-batches that was; closing the step takes the loss weight out of u and adds the step to the whole.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import pandas as pd
from torch import nn

from ..hooks.attach import attach
from ..hooks.call import AttentionCall, CallSite, Needs
from ..hooks.refusals import BadRequest, ClosedWatch, MergeRefused, NoAttentionSeen, NoGradientReached
from ..hooks.site import Site
from . import frames
from .state import Key, State
from .statistics import Sums

Detail = Literal["heads", "tokens", "edges"]


@dataclass(frozen=True, eq=False)
class Step:
    """One closed step: its number and what was summed per key.

    `loss_weight` and `loss_scale` (of the GradScaler): None when they were not told. `skipped`: the scaler left the step
    out because of non-finite gradients; it is no part of the pooled numbers.
    """

    number: int
    sums: dict[Key, Sums]
    loss_weight: float | None
    loss_scale: float | None
    skipped: bool


class Watch:
    """Statistics of every attention head of a model while it runs; made by `watch()`.

    Reading (`heads`, `tokens`, `edges`, `updates`, `history`, `state`) works while the watch is open and after.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        detail: Detail = "heads",
        every: int = 1,
        edges: int = 64,
        scaler: Any = None,
        reach_all: bool = False,
        tokenizer: Any = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise BadRequest(f"watch() takes a torch.nn.Module, not {type(model).__name__}.")
        if detail not in ("heads", "tokens", "edges"):
            raise BadRequest(f'detail must be "heads", "tokens" or "edges", not {detail!r}.')
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise BadRequest(f"every must be a whole number of steps, at least 1, not {every!r}.")
        if not isinstance(edges, int) or isinstance(edges, bool) or edges < 1:
            raise BadRequest(f"edges must be a whole number, at least 1, not {edges!r}.")
        if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
            raise BadRequest("scaler must be a GradScaler: an object with get_scale().")
        self.model_name = type(model).__name__
        self.detail, self.every, self.capacity = detail, every, edges
        self.scaler, self.tokenizer = scaler, tokenizer
        self.layers, self.selected_heads = _numbers("layers", layers), _numbers("heads", heads)
        self._lock = threading.RLock()
        self._error: Exception | None = None
        self._number = 0
        self._asked = False
        self._open, self._closed_steps = State(), State()
        self._steps: list[Step] = []
        self._weights: set[float | None] = set()
        self._scale: float | None = None
        self._attachment = attach(model, self, reach_all=reach_all)

    # -- receiver ----------------------------------------------------------------------------------------------------

    def wants(self, site: Site) -> Needs | None:
        self._asked = True
        if self._number % self.every:
            return None
        if self.layers is not None and site.layer not in self.layers:
            return None
        return Needs()

    def seen(self, call: CallSite, heads: int, group: int, reachable: bool) -> None:
        with self._lock:
            self._open.seen(call, heads, group, reachable)

    def receive(self, call: AttentionCall) -> None:
        scale = float(self.scaler.get_scale()) if self.scaler is not None else 1.0
        with self._lock:
            self._scale = scale
            self._open.add(
                call,
                edges=self.capacity if self.detail == "edges" else 0,
                tokens=self.detail in ("tokens", "edges"),
                scale=scale,
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

    def step(self, loss_weight: float | None = None) -> None:
        """Close an optimizer step: everything since the last one belongs to it.

        Args:
            loss_weight: w when the loss that was backpropagated is w times the loss summed over target tokens (for a
                mean loss 1/targets); u is divided by it, so that numbers do not depend on the batch. None: not told;
                u stays as it came and the weight is recorded as unknown.

        Raises:
            ClosedWatch: after `close()`. NoAttentionSeen: when no readable attention call was made in an observed step.
            BadRequest: for a weight that is not a positive number. Whatever could not be read since the last step.
        """
        if self._error is not None:
            raise self._error
        if self.closed:
            raise ClosedWatch("This watch is closed; open a new one with watch(model).")
        if loss_weight is not None and not (0 < float(loss_weight) < float("inf")):
            raise BadRequest(f"loss_weight must be a positive number, not {loss_weight!r}.")
        with self._lock:
            observed = self._number % self.every == 0
            if observed:
                self._complain()
                self._close_step(loss_weight)
            self._number += 1

    def _close_step(self, loss_weight: float | None) -> None:
        skipped = self._scale is not None and self.scaler is not None and self.scaler.get_scale() < self._scale
        if loss_weight is not None:
            self._open.divide(float(loss_weight))
        self._open.close_step()
        self._weights.add(loss_weight)
        sums = {key: entry.sums.copy(replicated=False) for key, entry in self._open.entries.items()}
        scale = None if self.scaler is None else self._scale
        self._steps.append(Step(self._number, sums, loss_weight, scale, skipped))
        if skipped:  # its heads are known, its numbers are not
            for entry in self._open.entries.values():
                entry.sums, entry.updates, entry.edges, entry.tokens = Sums.empty(entry.heads), None, None, None
        self._closed_steps.merge(self._open)
        self._open, self._scale = State(), None

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
        if self.closed:
            raise ClosedWatch("This watch is closed; open a new one with watch(model).")
        with self._lock:
            self._number, self._asked, self._scale = 0, False, None
            self._open, self._closed_steps = State(), State()
            self._steps, self._weights = [], set()

    def close(self) -> None:
        """Stop listening and put everything back; may be called more than once."""
        self._attachment.close()

    def __enter__(self) -> Watch:
        if self.closed:
            raise ClosedWatch("This watch is closed; open a new one with watch(model).")
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
        if ran and not self._steps and not self._closed_steps.entries:
            self._complain()

    # -- reading -----------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Everything that was added by closed steps, as a copy that merges with other states.

        While no step has been closed, what the open one holds; its u still carries the loss weight.

        Raises:
            Whatever could not be read: a refused kernel, a violated law.
        """
        if self._error is not None:
            raise self._error
        with self._lock:
            whole = self._closed_steps.copy()
            if not self._steps:  # an open step still carries its loss weight, so it is not mixed with closed ones
                whole.merge(self._open)
        return whole

    def merge(self, other: Watch | State) -> None:
        """Add what another watch of the same model saw on other sequences.

        Raises:
            MergeRefused: when the other saw a different model.
        """
        state = other.state() if isinstance(other, Watch) else other
        if not isinstance(state, State):
            raise MergeRefused(f"merge() takes a watch or a state, not {type(other).__name__}.")
        if isinstance(other, Watch) and (other.detail, other.capacity) != (self.detail, self.capacity):
            raise MergeRefused(
                f'A watch with detail="{other.detail}", edges={other.capacity} cannot be merged into one with '
                f'detail="{self.detail}", edges={self.capacity}; open both alike.'
            )
        self.state().merge(state)  # refused here, nothing has changed yet
        with self._lock:
            self._closed_steps.merge(state)
            if isinstance(other, Watch):
                self._weights |= other._weights

    @property
    def loss_weight(self) -> float | str:
        """The loss weight that was taken out of u: a number, "varied" (known at every step) or "unknown"."""
        if not self._weights or None in self._weights:
            return "unknown"
        return next(iter(self._weights)) if len(self._weights) == 1 else "varied"  # type: ignore[return-value]

    def _filled(self) -> State:
        state = self.state()
        if not state.entries:
            with self._lock:
                self._complain()
        return state

    def heads(self, step: int | Literal["all"] = "all", *, intervals: bool = False, backward: int = 0) -> pd.DataFrame:
        """One row per module, use and head, with the columns of the README's table.

        Args:
            step: "all" pools the steps; a number selects one closed step.
            intervals: add `_low` and `_high` to every column: pointwise 95 % percentile intervals over sequences.
            backward: 0 for the first gradient that came back to each call, 1 for the second (`retain_graph`), …

        Raises:
            NoAttentionSeen: when nothing was captured. BadRequest: for a step that was not observed, or intervals of a
            single step, which are not kept.
        """
        if step == "all":
            table = frames.heads(self._filled(), intervals=intervals, backward=backward)
        else:
            if intervals:
                raise BadRequest("Intervals are kept for the whole watch only; leave step out.")
            chosen = next((closed for closed in self._steps if closed.number == step), None)
            if chosen is None:
                known = [closed.number for closed in self._steps]
                raise BadRequest(f"Step {step} was not observed; observed steps: {known[:5]}{'…' * (len(known) > 5)}.")
            table = frames.step_heads(self._filled(), chosen.sums, chosen.skipped, backward)
        return self._select(table)

    def tokens(self) -> pd.DataFrame:
        """Query rows and key rows, token by token; column `side` says which.

        Raises:
            BadRequest: when the watch was opened without `detail="tokens"` or `"edges"`.
        """
        if self.detail == "heads":
            raise BadRequest('Token rows were not kept; open the watch with detail="tokens".')
        return self._select(frames.tokens(self._filled(), self.tokenizer))

    def edges(self, top: int = 50) -> pd.DataFrame:
        """Per head the `top` strongest routed (D < 0: attention will rise) and anti-routed (D > 0) pairs.

        Raises:
            BadRequest: when the watch was opened without `detail="edges"`, or kept fewer than `top` edges.
        """
        if self.detail != "edges":
            raise BadRequest('Edges were not kept; open the watch with detail="edges".')
        if not 1 <= top <= self.capacity:
            raise BadRequest(f"{self.capacity} edges per head were kept, not {top}; open the watch with edges={top}.")
        return self._select(frames.edges(self._filled(), top, self.tokenizer))

    def updates(self) -> pd.DataFrame:
        """Responsibility-weighted update directions per head: mean of −m_j over keys, its norm, share of one axis."""
        return self._select(frames.updates(self._filled()))

    def modules(self) -> pd.DataFrame:
        """One row per attention module; layers that mix tokens otherwise are listed as "no softmax attention"."""
        return frames.modules(self._filled(), self._attachment.silent)

    def history(self) -> pd.DataFrame:
        """One row per closed step, module, use and head."""
        self._filled()
        return self._select(frames.history(self._steps))

    def _select(self, table: pd.DataFrame) -> pd.DataFrame:
        if self.selected_heads is None:
            return table
        return table[table["head"].isin(self.selected_heads)].reset_index(drop=True)


def _numbers(name: str, given: Any) -> frozenset[int] | None:
    if given is None:
        return None
    if isinstance(given, (str, int)) or not all(isinstance(number, int) for number in given):
        raise BadRequest(f"{name} must be a list of whole numbers, such as {name}=[0, 3], not {given!r}.")
    return frozenset(given)


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

    Raises:
        BadRequest: for arguments that cannot be served.
    """
    return Watch(model, layers, heads, detail, every, edges, scaler, reach_all, tokenizer)
