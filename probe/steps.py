"""Closed optimizer steps: kept in memory, or streamed to a history folder; told to loggers as they close."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from ..hooks.errors import BadRequest, Notices
from . import tables
from .columns import HEADS
from .history import History
from .state import Step

Logger = Callable[[dict[str, float], int], object]
FLUSH_STEPS, FLUSH_SECONDS = 64, 30.0


class Steps:
    """What `Watch.history()` reads.

    Args:
        history: where rows go; None keeps every step in memory.
        loggers: callables `(dict, step)`; one that raises is reported once and not called again.
    """

    def __init__(self, history: History | None, loggers: Iterable[Logger]) -> None:
        self.history, self.loggers = history, list(loggers)
        self.waiting: list[Step] = []
        self.count = 0
        self.sought: int | None = None
        self._flushed_at = time.monotonic()
        self._notices = Notices()

    def __bool__(self) -> bool:
        return self.count > 0

    def add(self, step: Step) -> None:
        """Keep a step, tell the loggers, flush when it is time.

        Raises:
            BadRequest: at the first step, when the history folder already holds it and the run was not told to resume.
        """
        if self.history is not None and not self.count:
            told = self.sought is not None
            self.history.resumable(step.number, told)
            # from where the run goes on, also where its first observed step comes later
            self.history.cut(min(step.number, self.sought) if self.sought is not None else step.number)
        self.waiting.append(step)
        self.count += 1
        if not step.skipped:  # its numbers are in no trend, and on no dashboard
            self._tell(step)
        if self.history is None:
            return
        if len(self.waiting) >= FLUSH_STEPS or time.monotonic() - self._flushed_at > FLUSH_SECONDS:
            try:
                self.flush()
            except OSError as error:  # training goes on, rows wait for the next flush
                self._notices.say_once("history", f"the history could not be written ({error}).", stacklevel=5)

    def flush(self) -> None:
        """Write what waits.

        Raises:
            OSError: when the disk refuses; the rows stay in memory.
        """
        self._flushed_at = time.monotonic()
        if self.history is not None and self.waiting:
            self.history.append(tables.history(self.waiting))
            self.waiting = []

    def table(self) -> pd.DataFrame:
        """One row per closed step, module, use, delivery and head."""
        parts = self.history.read() if self.history is not None else []
        return tables.joined([*parts, tables.history(self.waiting)])

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
