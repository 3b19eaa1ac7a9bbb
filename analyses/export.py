"""Safe writing: a reader finds the whole run folder or none, and cells mean in a spreadsheet what they mean here.

A folder is filled under a temporary name beside its destination and renamed at the end. In CSV, a string that a
spreadsheet would take for a formula, or that is empty, gets one leading apostrophe, which `read_csv` takes off again; a
missing value is an empty cell.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..hooks.refusals import BadInput
from ..probe.frames import readable
from ..probe.statistics import SUMS

_TEXT = {"module", "label", "stack", "kind", "status", "side", "direction", "token", "query_token", "key_token"}
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")


@contextmanager
def new_folder(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a folder to fill; it becomes `out` when the block ends well and vanishes when it does not.

    Raises:
        BadInput: when `out` is a file, is not empty (unless `overwrite`), or its parent cannot be written.
    """
    out = out.expanduser().absolute()
    check_out(out, overwrite=overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name[:40]}-"))
    try:
        work.chmod(0o755)
        yield work
        if out.exists() and not any(out.iterdir()):
            for path in work.iterdir():  # the folder itself stays: somebody may stand in it
                path.rename(out / path.name)
        elif out.exists():
            old = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name[:40]}-old-"))
            out.rename(old / "run")
            try:
                work.rename(out)
            except BaseException:
                (old / "run").rename(out)
                old.rmdir()
                raise
            shutil.rmtree(old, ignore_errors=True)
        else:
            work.rename(out)
    except OSError as error:
        kept = "what was there is unchanged" if out.is_dir() and any(out.iterdir()) else "nothing was left there"
        raise BadInput(f"{str(out)!r} could not be written ({error.strerror or error}); {kept}.") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_out(out: Path, *, overwrite: bool = False) -> None:
    """Refuse a destination before any work is done.

    Raises:
        BadInput: as `new_folder`.
    """
    out = out.expanduser().absolute()
    if out.exists() and not out.is_dir():
        raise BadInput(f"{str(out)!r} is a file; give a folder with --out.")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise BadInput(f"The folder {str(out)!r} is not empty; choose another with --out, or say --overwrite.")
    if out.is_dir() and any(out.iterdir()):
        here, home = Path.cwd(), Path.home()
        if not (out / "run.json").is_file() or out in (here, home, *here.parents, *home.parents):
            raise BadInput(f"The folder {str(out)!r} holds no earlier result, so it is not replaced; choose another.")
    parent = next(folder for folder in out.parents if folder.exists())
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix=".probe-"):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(f"{str(parent)!r} cannot be written ({reason}); choose another folder with --out.") from error


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a file beside `path` to write; a reader of `path` sees what was there before, or all of it.

    Raises:
        BadInput: when it cannot be written; nothing is left behind.
    """
    partial: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem[:40]}-", suffix=path.suffix)
        os.close(handle)
        partial = Path(name)
        partial.chmod(0o644)
        yield partial
        os.replace(partial, path)
    except OSError as error:
        raise BadInput(f"{str(path)!r} could not be written ({error.strerror or error}).") from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def write_text(text: str, path: Path) -> None:
    """A UTF-8 file, whole or not at all; raises `BadInput` as `whole_file`."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_table(table: pd.DataFrame, path: Path) -> None:
    """One frame as .csv or .parquet by its ending, whole or not at all; raises `BadInput` as `whole_file`."""
    with whole_file(path) as partial:
        if path.suffix == ".parquet":
            table.to_parquet(partial, index=False)
        else:
            _write_csv(table, partial)


def _strings(table: pd.DataFrame, change: Callable[[str], str]) -> pd.DataFrame:
    """A copy in which `change` was applied to every string, also inside categoricals."""
    changed = {}
    for name, column in table.items():
        if isinstance(column.dtype, pd.CategoricalDtype):
            column = column.cat.rename_categories([change(str(label)) for label in column.cat.categories])
        elif isinstance(column.dtype, pd.StringDtype):
            column = column.map(change, na_action="ignore").astype("string")
        changed[name] = column
    return pd.DataFrame(changed, index=table.index)


def _inert(text: str) -> str:
    return f"'{text}" if not text or text.startswith(_FORMULA) else text


def _write_csv(table: pd.DataFrame, path: Path) -> None:
    table = _strings(table, _inert)
    # a lone carriage return is quoted only where it belongs to the end of a line
    strings = [table[name].dropna() for name in table if isinstance(table[name].dtype, pd.StringDtype)]
    odd = any(column.str.contains("\r", regex=False).any() for column in strings)
    table.to_csv(path, index=False, encoding="utf-8", lineterminator="\r\n" if odd else "\n")


def write_frame(table: pd.DataFrame, stem: Path) -> None:
    """`stem`.parquet and `stem`.csv of one frame."""
    table.to_parquet(stem.with_suffix(".parquet"), index=False)
    _write_csv(table, stem.with_suffix(".csv"))


def read_csv(path: Path) -> pd.DataFrame:
    """A frame written by `write_frame`, strings as they were and missing values missing."""
    names = set(pd.read_csv(path, nrows=0, encoding="utf-8").columns)
    # tokens and identities that look like numbers are none; elsewhere a sequence is numbered
    text = (_TEXT & names) | ({"sequence"} if {"sequence", *SUMS} <= names else set())
    table = pd.read_csv(
        path,
        keep_default_na=False,
        na_values=[""],
        dtype=dict.fromkeys(text, "string"),
        dtype_backend="numpy_nullable",
        encoding="utf-8",
    )
    return _strings(table, lambda text: text.removeprefix("'"))


def write_json(value: Any, path: Path) -> None:
    """JSON that every reader accepts: NaN and infinities become null."""
    path.write_text(json.dumps(jsonable(value), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def jsonable(value: Any) -> Any:
    """Plain Python values, with null for what is missing or not finite."""
    if isinstance(value, dict):
        return {str(name): jsonable(part) for name, part in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [jsonable(part) for part in value]
    if value is pd.NA or value is None:
        return None
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    return readable(str(value)) if not isinstance(value, os.PathLike) else str(value)
