"""Tables as JSON that every reader accepts and that comes back exactly, dtypes included.

The file is one object: `types` (the dtype of every column, with the categories of categoricals), and `columns` (name → list
of values, so that `pandas.DataFrame(json.load(file)["columns"])` is the table for anybody). null is a missing value; what
JSON has no number for is a string in a column of numbers: "NaN" where a nullable column holds one that is not missing,
"Infinity", "-Infinity". The file is ASCII, so broken UTF-8 (a lone surrogate) is an escape like any other.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...hooks.errors import BadInput, BadRequest

VERSION = 1
_BEYOND = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def write_json_table(table: pd.DataFrame, path: Path) -> None:
    """Write the columns one after the other; the index is left out, as in the other formats.

    Raises:
        BadRequest: for columns that share a name or have none, and dtypes that have no exact JSON (times, lists …).
    """
    names = list(table.columns)
    if len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
        raise BadRequest("A JSON table needs a name for every column, each a string of its own.")
    types = {name: _type(name, table[name]) for name in names}
    with path.open("w", encoding="ascii") as file:
        file.write(f'{{"table": {VERSION}, "rows": {len(table)},\n"types": {json.dumps(types)},\n"columns": {{')
        for place, name in enumerate(names):
            values = json.dumps(_values(table[name]), allow_nan=False)
            file.write(f"{',' if place else ''}\n{json.dumps(name)}: {values}")
        file.write("\n}}\n")


def read_json_table(path: Path) -> pd.DataFrame:
    """The table that `write_json_table` wrote.

    Raises:
        BadInput: for a file that is none, of another version, or damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="ascii"))
        version = found["table"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{str(path)!r} is no table of this library, or damaged ({error}); write it again.") from error
    if version != VERSION:
        raise BadInput(
            f"{str(path)!r} is a table of version {version!r}, this version reads {VERSION}; write it again."
        )
    try:
        types, columns, rows = found["types"], found["columns"], int(found["rows"])
        if list(types) != list(columns) or any(len(values) != rows for values in columns.values()):
            raise ValueError("columns, types and rows do not agree")
        made = {name: _column(types[name], columns[name]) for name in types}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise BadInput(f"{str(path)!r} is damaged ({error}); write it again.") from error
    return pd.DataFrame(made, index=pd.RangeIndex(rows), columns=list(types))


def _type(name: str, column: pd.Series) -> Any:
    """How a dtype is written: its name, or the categories of a categorical."""
    dtype = column.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        labels = pd.Series(dtype.categories, dtype=dtype.categories.dtype)
        kind = _type(name, labels)
        return {"category": kind, "categories": _values(labels), "ordered": bool(dtype.ordered)}
    if isinstance(dtype, pd.StringDtype):
        return "string" if dtype.na_value is pd.NA else "str"
    if dtype.kind == "O":
        if not all(value is None or isinstance(value, str) for value in column):
            raise BadRequest(f"The column {name!r} holds objects that are no strings; give it a dtype.")
        return "object"
    if dtype.kind in "biuf" and (isinstance(dtype, np.dtype) or str(dtype).lower() in _NULLABLE):
        return str(dtype)
    raise BadRequest(f"The column {name!r} has the dtype {dtype}, which JSON does not hold exactly; turn it into text.")


_NULLABLE = {"boolean", "float32", "float64", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}


def _values(column: pd.Series) -> list[Any]:
    """Plain Python values, null for what is missing."""
    if column.dtype.kind != "f" or isinstance(column.dtype, pd.CategoricalDtype):
        values = column.astype(object)
        return values.where(column.notna(), None).tolist()
    numbers = column.to_numpy(dtype="float64", na_value=np.nan)
    values = numbers.tolist()
    missing = np.isnan(numbers) if isinstance(column.dtype, np.dtype) else column.isna().to_numpy()
    for place in np.flatnonzero(~np.isfinite(numbers)):
        number = values[place]
        named = "NaN" if number != number else "Infinity" if number > 0 else "-Infinity"
        values[place] = None if missing[place] else named
    return values


def _column(kind: Any, values: list[Any]) -> pd.Series:
    if isinstance(kind, dict):
        labels = _column(kind["category"], kind["categories"])
        known = {label: place for place, label in enumerate(labels)}
        codes = [-1 if value is None else known[value] for value in values]
        return pd.Series(
            pd.Categorical.from_codes(codes, pd.Index(labels, dtype=labels.dtype), ordered=kind["ordered"])
        )
    if "float" in kind.lower():
        missing = np.array([value is None for value in values], dtype=bool)
        numbers = [
            math.nan if value is None else _BEYOND[value] if isinstance(value, str) else value for value in values
        ]
        array = np.array(numbers, dtype=kind.lower())
        return pd.Series(pd.arrays.FloatingArray(array, missing) if kind[0] == "F" else array)
    return pd.Series(values, dtype=kind)
