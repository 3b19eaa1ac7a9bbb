"""Safe writing: a reader finds the whole run folder or none, and cells mean in a spreadsheet what they mean here.

A folder is filled under a temporary name beside its destination and put in place by one rename. In CSV, a string that a
spreadsheet would take for a formula, or that is empty, gets one leading apostrophe, which `read_csv` takes off again; a
missing value is an empty cell.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from ...hooks.errors import BadInput, BadRequest
from ...probe.columns import SUMS
from ...probe.tables import readable
from ...probe.whole_file import whole_file
from .table_json import read_json_table, write_json_table

FORMATS = ("parquet", "csv", "json")
TABLES = ("parquet", "csv")  # unless asked otherwise
_TEXT = {"module", "label", "stack", "kind", "status", "side", "direction", "token", "query_token", "key_token"}
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")


@contextmanager
def new_folder(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a folder to fill; it becomes `out` when the block ends well and vanishes when it does not.

    A reader sees what was there (nothing, an empty folder, the earlier result) or the whole new folder: one rename puts it
    in place, and it trades names with an earlier result where the system can do that.

    Raises:
        BadInput: when `out` is a file, not empty (unless `overwrite`), the folder one stands in, or cannot be written.
    """
    out = out.expanduser().resolve()
    check_out(out, overwrite=overwrite)
    work: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name[:40]}-"))
        work.chmod(stat.S_IMODE(out.stat().st_mode) if out.is_dir() else 0o755)
        yield work
        for path in work.rglob("*"):  # some libraries write for the owner's eyes alone
            path.chmod(0o755 if path.is_dir() else 0o644)
        _put(work, out)
    except Exception as error:
        reason = _refused_by_the_disk(error)
        if not reason:
            raise
        kept = "what was there is unchanged" if out.is_dir() and any(out.iterdir()) else "nothing was left there"
        raise BadInput(f"{str(out)!r} could not be written ({reason}); {kept}.") from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)


def _refused_by_the_disk(error: BaseException) -> str:
    """Why a file could not be written, "" where that is not what went wrong; safetensors wraps what the system said."""
    if isinstance(error, BadInput) and isinstance(error.__cause__, OSError):
        error = error.__cause__
    if isinstance(error, OSError):
        return str(error.strerror or error)
    return str(error) if "os error" in str(error) else ""


def _put(work: Path, out: Path) -> None:
    """`work` under the name `out`; an earlier result then lies at `work`, or is gone."""
    if not out.is_dir() or not any(out.iterdir()):
        os.replace(work, out)  # an empty folder is replaced whole
    elif not _traded(work, out):
        old = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name[:40]}-old-"))
        out.rename(old / "run")
        try:
            work.rename(out)
        except BaseException:
            (old / "run").rename(out)
            old.rmdir()
            raise
        shutil.rmtree(old, ignore_errors=True)


def _traded(one: Path, other: Path) -> bool:
    """Let two folders trade names in one step (Linux); False where the system or the file system cannot."""
    try:
        trade = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return trade(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def check_out(out: Path, *, overwrite: bool = False) -> None:
    """Refuse a destination before any work is done.

    Raises:
        BadInput: as `new_folder`.
    """
    out = out.expanduser().resolve()
    if out.exists() and not out.is_dir():
        raise BadInput(f"{str(out)!r} is a file; give a folder with --out.")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise BadInput(f"The folder {str(out)!r} is not empty; choose another with --out, or say --overwrite.")
        here, home = Path.cwd(), Path.home()
        if not (out / "run.json").is_file() or out in (here, home, *here.parents, *home.parents):
            raise BadInput(f"The folder {str(out)!r} holds no earlier result, so it is not replaced; choose another.")
    elif out.is_dir() and (out == Path.cwd() or out.is_mount()):
        which = "the folder you are in" if out == Path.cwd() else "a mount point"
        raise BadInput(f"{str(out)!r} is {which} and cannot be put in place whole; give a folder inside it with --out.")
    check_writable(out.parent, "--out")


def check_writable(folder: Path, option: str) -> None:
    """Refuse a folder, there or still to be made, in which nothing can be written; `option` is how it was named.

    Raises:
        BadInput: where that is so.
    """
    folder = folder.expanduser().absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.TemporaryDirectory(dir=there, prefix=".probe-"):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(f"{str(there)!r} cannot be written ({reason}); choose another folder with {option}.") from error


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """As `whole_file`; raises `BadInput` when it cannot be written."""
    try:
        with whole_file(path) as partial:
            yield partial
    except OSError as error:
        raise BadInput(f"{str(path)!r} could not be written ({error.strerror or error}).") from error


def write_text(text: str, path: Path) -> None:
    """A UTF-8 file, whole or not at all; raises `BadInput` as `new_file`."""
    with new_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_table(table: pd.DataFrame, path: Path) -> None:
    """One frame as .csv, .parquet or .json by its ending, whole or not at all.

    Raises:
        BadRequest: for another ending, and for broken UTF-8 in anything but JSON. BadInput: as `new_file`.
    """
    check_table(path)
    with new_file(path) as partial:
        _WRITE[path.suffix](table, partial)


def check_table(path: Path) -> None:
    """Refuse a name that is no table's, before any work is done; raises `BadRequest`."""
    if path.suffix not in _WRITE:
        raise BadRequest(f"A table's name ends in .csv, .parquet or .json, not {path.name!r}.")


def write_frame(table: pd.DataFrame, stem: Path, formats: Sequence[str] = TABLES) -> None:
    """`stem`.parquet, `stem`.csv, `stem`.json of one frame: those of `formats`."""
    for kind in formats:
        _WRITE[f".{kind}"](table, stem.with_name(f"{stem.name}.{kind}"))


def read_table(path: Path) -> pd.DataFrame:
    """A frame that `write_table` or `write_frame` wrote. Parquet and JSON give back every dtype, CSV strings and numbers.

    Raises:
        BadRequest: for another ending. BadInput: for a file that is missing or damaged.
    """
    check_table(path)
    try:
        return _READ[path.suffix](path)
    except FileNotFoundError:
        raise BadInput(f"The table {str(path)!r} does not exist.") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise BadInput(f"{str(path)!r} cannot be read ({str(error).splitlines()[0]}); write it again.") from error


def wanted_tables(given: str) -> tuple[str, ...]:
    """ "csv,json" as ("parquet", "csv", "json"): Parquet is always written, because runs are opened from it.

    Raises:
        BadInput: for another format.
    """
    asked = [name.strip() for name in given.split(",") if name.strip()]
    odd = sorted(set(asked) - set(FORMATS))
    if odd:
        raise BadInput(f"--tables takes {', '.join(FORMATS)} with commas between, not {odd[0]!r}.")
    return tuple(dict.fromkeys(("parquet", *asked)))


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


def _no_number(text: str) -> str:
    """`_inert` for columns of which `read_csv` does not know that they hold text."""
    try:
        float(text)
    except ValueError:
        return f"'{text}" if text.lower() in ("true", "false") else _inert(text)
    return f"'{text}"


def _write_csv(table: pd.DataFrame, path: Path) -> None:
    known = [name for name in table if name in _TEXT or (name == "sequence" and {*SUMS} <= {*table})]
    inert = _strings(table[known], _inert)
    table = _strings(table.drop(columns=known), _no_number).join(inert)[list(table)]
    # a lone carriage return is quoted only where it belongs to the end of a line
    strings = [table[name].dropna() for name in table if isinstance(table[name].dtype, pd.StringDtype)]
    odd = any(column.str.contains("\r", regex=False).any() for column in strings)
    with _utf8():
        table.to_csv(path, index=False, encoding="utf-8", lineterminator="\r\n" if odd else "\n")


def _write_parquet(table: pd.DataFrame, path: Path) -> None:
    with _utf8():
        table.to_parquet(path, index=False)


@contextmanager
def _utf8() -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError as error:
        raise BadRequest(
            "A string of the table holds half a character (a lone surrogate), which CSV and Parquet cannot hold; write "
            "JSON, or spell it out with probe.frames.readable."
        ) from error


def read_csv(path: Path) -> pd.DataFrame:
    """A frame written by `write_frame`, strings and numbers as they were and missing values missing."""
    names = set(pd.read_csv(path, nrows=0, encoding="utf-8").columns)
    # tokens and identities that look like numbers are none; elsewhere a sequence is numbered
    text = (_TEXT & names) | ({"sequence"} if {"sequence", *SUMS} <= names else set())
    table = pd.read_csv(
        path,
        keep_default_na=False,
        na_values=[""],
        dtype=dict.fromkeys(text, "string"),
        dtype_backend="numpy_nullable",
        float_precision="round_trip",
        encoding="utf-8",
    )
    return _strings(table, lambda text: text.removeprefix("'"))


_WRITE = {".parquet": _write_parquet, ".csv": _write_csv, ".json": write_json_table}
_READ = {".parquet": pd.read_parquet, ".csv": read_csv, ".json": read_json_table}


def write_json(value: Any, path: Path) -> None:
    """JSON that every reader accepts: NaN and infinities become null."""
    path.write_text(json.dumps(jsonable(value), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def jsonable(value: Any) -> Any:
    """Plain Python values, with null for what is missing; an infinite number is the string "Infinity" or "-Infinity"."""
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
        if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        return None if math.isnan(value) else float(value)
    return readable(str(value)) if not isinstance(value, os.PathLike) else str(value)
