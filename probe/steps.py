"""Closed optimizer steps: kept in memory, or streamed to a history folder; told to loggers as they close."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from ..hooks.errors import BadInput, BadRequest, Notices, ProbeError
from . import tables
from .columns import HEADS
from .history import History
from .state import Step

Logger = Callable[[dict[str, float], int], object]
FLUSH_STEPS, FLUSH_SECONDS = 64, 30.0
PATIENCE = 600.0  # seconds at most between tries on a disk that refuses


class Steps:
    """What `Watch.history()` reads.

    Args:
        history: where rows go; None keeps every step in memory.
        loggers: callables `(dict, step)`; one that raises is reported once and not called again.
        every: which steps are observed.
    """

    def __init__(self, history: History | None, loggers: Iterable[Logger], every: int = 1) -> None:
        self.history, self.loggers, self.every = history, list(loggers), every
        self.restored = pd.DataFrame()  # rows that a checkpoint carried
        self.waiting: list[Step] = []
        self.count = 0
        self.sought: int | None = None
        self._flushed_at = time.monotonic()
        self._notices = Notices()
        self._wait = 0.0  # seconds until the next try, after a refusal

    def __bool__(self) -> bool:
        return self.count > 0

    def add(self, step: Step) -> None:
        """Keep a step, tell the loggers, flush when it is time.

        Raises:
            BadRequest: at the first step, when the history folder already holds it and the run was not told to resume.
        """
        if self.history is not None and not self.count:
            self._begin(self.history, step)
        self.waiting.append(step)
        self.count += 1
        if not step.skipped:  # its numbers are in no trend, and on no dashboard
            self._tell(step)
        if self.history is None:
            return
        late = time.monotonic() - self._flushed_at
        if late >= self._wait and (len(self.waiting) >= FLUSH_STEPS or late > FLUSH_SECONDS):
            try:
                self.flush()
            except (OSError, ProbeError) as error:  # training goes on, rows wait for the next try
                self._wait = min(PATIENCE, max(FLUSH_SECONDS, 2 * self._wait))
                self._notices.say_once(
                    "history", f"the history could not be written ({error}); its rows wait in memory.", stacklevel=5
                )

    def _begin(self, history: History, step: Step) -> None:
        """Ready the folder: cut what is replaced, put back what a checkpoint carried, say what is lost."""
        told = self.sought is not None
        history.resumable(step.number, told)
        # from where the run goes on, also where its first observed step comes later
        start = min(step.number, self.sought) if self.sought is not None else step.number
        history.cut(start)
        if len(self.restored):
            last = -1 if history.last is None else history.last
            steps = self.restored["step"].astype("int64")
            history.append(self.restored[(steps > last) & (steps < start)].reset_index(drop=True))
            self.restored = pd.DataFrame()
        hole = history.missing(start, self.every)
        if told and hole is not None:
            self._notices.say_once(
                "hole",
                f"the history has no steps {hole[0]} to {hole[1]}: the run before ended without writing them; keep "
                "watch.state_dict() in the checkpoint, or call watch.flush() before it is saved.",
                stacklevel=6,
            )

    def flush(self) -> None:
        """Write what waits.

        Raises:
            OSError: when the disk refuses; the rows stay in memory.
        """
        self._flushed_at = time.monotonic()
        if self.history is not None and self.waiting and self.history.ours:
            self.history.append(tables.history(self.waiting))
            self.waiting = []
            self._wait = 0.0

    def state(self) -> Tensor:
        """The rows that wait to be written, as bytes that a checkpoint can carry."""
        buffer = io.BytesIO()
        self._unwritten().to_parquet(buffer)
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).clone()

    def restore(self, rows: Tensor) -> None:
        """Take up the rows of `state`; those that were written since are not written again.

        Raises:
            BadInput: for bytes that are none of these.
        """
        try:
            self.restored = pd.read_parquet(io.BytesIO(rows.numpy().tobytes()))
        except Exception as error:
            raise BadInput(f"The watch's part of the checkpoint is damaged ({error}); go on without it.") from error

    def _unwritten(self) -> pd.DataFrame:
        return tables.joined([self.restored, tables.history(self.waiting)])

    def close(self) -> None:
        """Write what waits and give the folder up.

        Raises:
            OSError, ProbeError: when it cannot be written; the rows stay in memory.
        """
        try:
            self.flush()
        finally:
            if self.history is not None:
                self.history.release()

    def table(self) -> pd.DataFrame:
        """One row per closed step, module, use, delivery and head."""
        parts = self.history.read() if self.history is not None else []
        return tables.joined([*parts, self._unwritten()])

    def of(self, number: int) -> pd.DataFrame:
        """The rows of one step.

        Raises:
            BadRequest: when it was not observed.
        """
        waiting = [step for step in self.waiting if step.number == number]
        if waiting:
            return tables.history(waiting)
        table = self.table()
        rows = table[table["step"] == number]
        if rows.empty:
            known = table["step"].unique().tolist()
            raise BadRequest(f"Step {number} was not observed; observed steps: {known[:5]}{'…' * (len(known) > 5)}.")
        return rows.reset_index(drop=True)

    def _tell(self, step: Step) -> None:
        if not self.loggers:
            return
        values = flat(tables.history([step]), HEADS)
        for logger in list(self.loggers):
            try:
                logger(values, step.number)
            except Exception as error:
                self.loggers.remove(logger)
                name = getattr(logger, "__name__", type(logger).__name__)
                self._notices.say_once(
                    logger,
                    f"the logger {name} raised {type(error).__name__}: {error}; training goes on without it.",
                    stacklevel=6,
                )


def loggers(given: Any) -> list[Logger]:
    """One logger or several, checked.

    Raises:
        BadRequest: for what cannot be called.
    """
    if given is None:
        return []
    several = list(given) if isinstance(given, (list, tuple)) else [given]
    for one in several:
        if not callable(one):
            raise BadRequest(f"logger must be a callable (dict, step), or a list of them, not {one!r}.")
    return several


def flat(rows: pd.DataFrame, columns: Iterable[str]) -> dict[str, float]:
    """The numbers of one step's rows by flat name; first deliveries only, and only what is finite.

    Args:
        rows: rows of one step, as `Watch.history()` gives them.
        columns: which numeric columns to name.
    """
    rows = rows[rows["backward"] == 0]
    found: dict[str, float] = {}
    for column in columns:
        for head, value in zip(rows["label"].astype(str), rows[column].astype(float), strict=True):
            if pd.notna(value) and abs(value) != float("inf"):
                found[f"probe/{head}/{column}"] = float(value)
    return found
