"""Safe writing: a reader finds the whole run folder or none, and cells mean in a spreadsheet what they mean here.

A folder is filled under a temporary name beside its destination and put in place by one rename. In CSV, a string that a
spreadsheet would take for a formula, or that is empty, gets one leading apostrophe, which `read_csv` takes off again; a
missing value is an empty cell.
"""

from __future__ import annotations

import json
import math
import os
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
