#!/usr/bin/env python3
"""Print the table of the heads' columns, as `probe/README.md` holds it, from `probe/columns.py`."""

from advantage_probe.probe.columns import COLUMNS


def table() -> str:
    """A Markdown table: column, definition, unit."""
    rows = [f"| {column.name} | {column.definition} | {column.unit or '–'} |" for column in COLUMNS.values()]
    return "\n".join(["| column | definition | unit |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
