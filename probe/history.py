"""The history of a training run on disk: a folder of Parquet files, one row group each, written whole or not at all.

A single Parquet file is readable only once its footer is written, so a killed run would lose all of it. A file per
flush keeps what was flushed; `pandas.read_parquet(folder)` reads the folder as one table. A run that resumes at step n
replaces the rows from n on, so that no step appears twice.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ..hooks.errors import BadInput, BadRequest
from .older import per_row
from .owner import NAME as OWNER
from .owner import Owner
from .whole_file import whole_file

FORMAT, OLDEST = 3, 1  # 1: six columns were not yet divided by the number of query rows; 2 was never written
_MARK = b"advantage_probe"
_writing: weakref.WeakValueDictionary[str, History] = weakref.WeakValueDictionary()  # of this process, by folder


def _name(rows: pd.DataFrame) -> str:
    return f"part-{int(rows['step'].min()):012d}.parquet"


def _plain(table: pa.Table) -> pa.Table:
    """Categories with indices of one width: else a file with more of them cannot be read after one with few."""
    wide = pa.dictionary(pa.int32(), pa.string())
    fields = [field.with_type(wide) if pa.types.is_dictionary(field.type) else field for field in table.schema]
    return table.cast(pa.schema(fields, metadata=table.schema.metadata))


def _told(part: Path) -> dict[str, Any]:
    """What a file says of itself: format, model, columns.

    Raises:
        BadInput: for a file that this library did not write, or of another format.
    """
    try:
        told = json.loads((pq.read_schema(part).metadata or {})[_MARK])
    except (KeyError, ValueError, OSError, pa.ArrowInvalid) as error:
        raise BadInput(f"{str(part)!r} is not part of a history that this library wrote; remove it.") from error
    if told["format"] not in (OLDEST, FORMAT):
        raise BadInput(
            f"The history {str(part.parent)!r} has format {told['format']}, this version reads {OLDEST} and {FORMAT}; "
            "give a new folder, or install a newer version."
        )
    return told


def _rows(part: Path) -> pd.DataFrame:
    """The rows of a file, as the columns mean today."""
    rows = pq.read_table(part).to_pandas()
    return per_row(rows) if _told(part)["format"] == OLDEST else rows


def read_history(folder: str | os.PathLike[str]) -> tuple[list[pd.DataFrame], str]:
    """The rows of every file of a history, in the order of their steps, and the name of its model.

    Raises:
        BadInput: where a file is damaged or of another kind, or the folder holds none.
    """
    parts = sorted(Path(folder).glob("part-*.parquet"))
    if not parts:
        raise BadInput(f"{str(folder)!r} holds no history; give the folder that watch(history=) wrote.")
    models = {str(_told(part)["model"]) for part in parts}
    if len(models) > 1:
        raise BadInput(f"{str(folder)!r} mixes histories of {' and '.join(sorted(models))}; keep a folder for each.")
    return [_rows(part) for part in parts], models.pop()


class History:
    """Rows of closed steps in `folder`, which belongs to one model.

    One watch at a time writes into it (`owner.Owner`). One of this process that watches the same model is closed and
    replaced, as a notebook cell that is run again needs; any other is refused.

    Args:
        folder: made now; may hold the history of an earlier part of the same run.
        model: what names the model; a history of another one is refused.
        columns: the columns of the rows.
        watched: what tells models of this process apart.

    Raises:
        BadInput: for a file in the folder's place, a folder with anything else in it, a history of another model or with
            other columns, or a folder that cannot be written. BadRequest: when somebody else writes into it.
    """

    def __init__(self, folder: str | os.PathLike[str], model: str, columns: list[str], watched: object = None) -> None:
        self.folder, self.model, self.columns, self.watched = Path(folder), model, columns, id(watched)
        self.replaced: Callable[[], None] | None = None  # closes the watch that writes here
        if self.folder.exists() and not self.folder.is_dir():
            raise BadInput(f"The history {str(folder)!r} is a file; give a folder, new or of an earlier run.")
        if self.folder.is_dir():
            strangers = [
                path.name
                for path in self.folder.iterdir()
                if path not in set(self.parts) and path.name != OWNER and not path.name.startswith(".part-")
            ]
            if strangers:
                raise BadInput(f"The history folder {str(folder)!r} holds {strangers[0]!r}; give a folder of its own.")
        for part in self.parts:
            self._check(part)
            if _told(part)["format"] == OLDEST:
                raise BadInput(
                    f"The history {str(folder)!r} was begun by an earlier version, whose columns were not divided by the "
                    f"number of query rows; run `advantage-probe convert {folder}` and go on."
                )
        self._place = os.path.realpath(self.folder)
        before = _writing.get(self._place)
        if before is not None and before.watched == self.watched and before.replaced is not None:
            before.replaced()
        try:
            self._owner = Owner(self.folder, model)
        except OSError as error:
            raise BadInput(f"The history {str(folder)!r} cannot be written ({error.strerror or error}).") from error
        _writing[self._place] = self
        for part in self.folder.glob(".part-*"):  # of a run that was killed while it wrote
            part.unlink()

    @property
    def ours(self) -> bool:
        """False in a forked child, which must not write what its parent writes."""
        return self._owner.ours

    def release(self) -> None:
        """Give the folder up to others."""
        self._owner.release()
        if _writing.get(self._place) is self:
            del _writing[self._place]

    @property
    def parts(self) -> list[Path]:
        """The files, in the order of their steps."""
        return sorted(self.folder.glob("part-*.parquet")) if self.folder.is_dir() else []

    @property
    def last(self) -> int | None:
        """The last step that was written, None when there is none."""
        parts = self.parts
        return int(pq.read_table(parts[-1], columns=["step"])["step"].to_numpy().max()) if parts else None

    def append(self, rows: pd.DataFrame) -> None:
        """Write rows of steps after `last`, all of them or none. Rows whose write was interrupted after it was done are
        written again in their own place, so that none is doubled.

        Raises:
            BadRequest: when the folder was removed or replaced by another since it was opened.
        """
        if rows.empty or not self.ours:
            return
        if not self._owner.there():
            raise BadRequest(
                f"The history {str(self.folder)!r} was removed or replaced while it was written; its rows stay in memory. "
                "Give the next run a folder of its own."
            )
        first = int(rows["step"].min())
        for part in self.parts:  # of an interrupted flush: this one holds its rows as well
            if int(part.stem.removeprefix("part-")) > first:
                part.unlink()
        _write(self.folder / _name(rows), rows, self.model, self.columns)

    def cut(self, step: int) -> None:
        """Take out every row from `step` on."""
        for part in reversed(self.parts):
            rows = pq.read_table(part).to_pandas()
            kept = rows[rows["step"] < step]
            if len(kept) == len(rows):
                return
            if kept.empty:
                part.unlink()
            else:
                _write(self.folder / _name(kept), kept, self.model, self.columns)

    def read(self) -> list[pd.DataFrame]:
        """The rows of every file, in the order of their steps."""
        return [pq.read_table(part).to_pandas() for part in self.parts]

    def _check(self, part: Path) -> None:
        told = _told(part)
        if told["model"] != self.model:
            raise BadInput(
                f"The history {str(self.folder)!r} belongs to {told['model']}, not to {self.model}; give another folder."
            )
        if told["columns"] != self.columns:
            other = sorted(set(told["columns"]) ^ set(self.columns)) or ["their order"]
            raise BadInput(
                f"The history {str(self.folder)!r} has other columns (different: {', '.join(other[:4])}); "
                "give another folder."
            )

    def missing(self, first: int, every: int) -> tuple[int, int] | None:
        """The first and the last observed step between what was written and step `first`, where the run goes on: the run
        before ended without writing them.
        """
        last = self.last
        if last is None or last + every >= first:
            return None
        return last + every, last + (first - 1 - last) // every * every

    def resumable(self, first: int, told: bool) -> None:
        """Refuse to go on at step `first` where that would drop rows that nobody asked to drop.

        Raises:
            BadRequest: when the folder holds steps from `first` on and `told` (that the run resumes there) is False.
        """
        last = self.last
        if last is not None and last >= first and not told:
            raise BadRequest(
                f"The history {str(self.folder)!r} already holds steps up to {last}; call watch.seek(step) with the step "
                "that the run resumes at, or give another folder."
            )


def convert(folder: str | os.PathLike[str]) -> int:
    """Rewrite a history of an earlier format as one of this format; returns how many of its files were old.

    Every file is put in place whole; a conversion that was interrupted goes on when it is called again.

    Raises:
        BadInput: where the folder holds no history, or a file of it is damaged.
    """
    read_history(folder)  # every file can be read, before one is changed
    old = [part for part in sorted(Path(folder).glob("part-*.parquet")) if _told(part)["format"] == OLDEST]
    for part in old:
        told = _told(part)
        _write(part, _rows(part), told["model"], told["columns"])
    return len(old)


def _write(part: Path, rows: pd.DataFrame, model: str, columns: list[str]) -> None:
    table = _plain(pa.Table.from_pandas(rows, preserve_index=False))
    told = json.dumps({"format": FORMAT, "model": model, "columns": columns}).encode()
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), _MARK: told})
    with whole_file(part) as partial:
        pq.write_table(table, partial, row_group_size=max(1, len(rows)))
