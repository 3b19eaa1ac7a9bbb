"""What can be read from a watch, while it is open and after: tables, and the state that they are made of."""

from __future__ import annotations

import threading
from typing import Any, Literal

import pandas as pd
from torch import nn

from ..hooks.attachment import Attachment
from ..hooks.errors import BadRequest, MergeRefused
from ..hooks.silent import uncalled
from . import tables as frames
from .state import State
from .steps import Steps


class Readings:
    """The reading half of a watch; the other half fills these."""

    detail: str
    capacity: int
    singly: bool
    tokenizer: Any
    layers: frozenset[int] | None
    selected_heads: frozenset[int] | None
    _lock: threading.RLock
    _error: Exception | None
    _open: State
    _closed_steps: State
    _steps: Steps
    _weights: set[float | None]
    _attachment: Attachment

    def _complain(self) -> None:
        raise NotImplementedError

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
            if not whole.entries:  # an open step still carries its loss weight, so it is not mixed with closed ones
                whole.merge(self._open)
        return whole

    def merge(self, other: Readings | State) -> None:
        """Add what another watch of the same model saw on other sequences.

        Raises:
            MergeRefused: when the other saw a different model.
        """
        state = other.state() if isinstance(other, Readings) else other
        if not isinstance(state, State):
            raise MergeRefused(f"merge() takes a watch or a state, not {type(other).__name__}.")
        if isinstance(other, Readings) and (other.detail, other.capacity) != (self.detail, self.capacity):
            raise MergeRefused(
                f'A watch with detail="{other.detail}", edges={other.capacity} cannot be merged into one with '
                f'detail="{self.detail}", edges={self.capacity}; open both alike.'
            )
        self.state().merge(state)  # refused here, nothing has changed yet
        with self._lock:
            self._closed_steps.merge(state)
            if isinstance(other, Readings):
                # what an open step holds still carries its weight
                self._weights |= other._weights or ({None} if state.entries else set())

    @property
    def model(self) -> nn.Module:
        """The model that is watched."""
        return self._attachment.model

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
            table = frames.step_heads(self._filled(), self._steps.of(step), backward)
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

    def sequences(self) -> pd.DataFrame:
        """One row per sequence and head: the sums that the columns of the heads table are functions of.

        Raises:
            BadRequest: when the watch was opened without `singly=True`.
        """
        if not self.singly:
            raise BadRequest("Sequences were not kept apart; open the watch with singly=True.")
        return self._select(frames.sequences(self._filled()))

    def updates(self) -> pd.DataFrame:
        """Responsibility-weighted update directions per head: mean of −m_j over keys, its norm, share of one axis."""
        return self._select(frames.updates(self._filled()))

    def modules(self) -> pd.DataFrame:
        """One row per attention module; what was not captured says why: "no softmax attention" for layers that mix tokens
        otherwise, "no attention call was seen" for attention that did not run, or not so that it can be read.
        """
        state, attachment = self._filled(), self._attachment
        idle = uncalled(self.model, {key.site.module for key in state.entries}, attachment.silent)
        asked = [site for site in idle if self.layers is None or site.layer in self.layers]
        return frames.modules(state, attachment.silent, asked)

    def history(self) -> pd.DataFrame:
        """One row per closed step, module, use and head; with `history=`, earlier parts of the run as well."""
        if not self._steps.history or not self._steps.history.parts:
            self._filled()
        elif self._error is not None:
            raise self._error
        with self._lock:
            return self._select(self._steps.table())

    def _select(self, table: pd.DataFrame) -> pd.DataFrame:
        if self.selected_heads is None:
            return table
        return table[table["head"].isin(self.selected_heads)].reset_index(drop=True)
