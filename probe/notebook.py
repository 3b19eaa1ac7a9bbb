"""How results show themselves in a notebook: a caption and a table, every string escaped."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import pandas as pd

from .columns import columns_of

MOST = 12


def cell(value: Any) -> str:
    if isinstance(value, float):
        return "–" if value != value else f"{value:.3g}"
    return escape(str(value))


def table(rows: pd.DataFrame) -> str:
    """An HTML table of a frame, three significant digits."""
    head = "".join(f"<th style='text-align:right'>{escape(str(name))}</th>" for name in rows.columns)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:right'>{cell(value)}</td>" for value in row) + "</tr>"
        for row in rows.itertuples(index=False)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def block(title: str, facts: Mapping[str, Any], rows: pd.DataFrame | None = None) -> str:
    """A titled block: facts in one line, then a table."""
    line = " · ".join(f"{escape(str(name))}: {cell(value)}" for name, value in facts.items())
    return f"<div><b>{escape(title)}</b><br><small>{line}</small>{'' if rows is None else table(rows)}</div>"


def strongest(heads: pd.DataFrame) -> pd.DataFrame:
    """The strongest heads by routing pressure, in the columns that a notebook shows."""
    names = [name for name in ("label", *columns_of("notebook"), "status") if name in heads]
    return heads.sort_values("routing_pressure", ascending=False)[names].head(MOST)
