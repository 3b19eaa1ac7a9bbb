"""The record of a run: what `analyze` and training runs make, what a folder holds, and what every page and table shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from ...probe import notebook
from .maps import Maps


@dataclass(frozen=True, eq=False)
class Run:
    """One run, just made or opened again: its frames, its record, maps of one window, frames that not every run has
    (`more`), and the folder that it was read from.
    """

    heads: pd.DataFrame
    tokens: pd.DataFrame
    edges: pd.DataFrame
    updates: pd.DataFrame
    sequences: pd.DataFrame
    record: dict[str, Any] = field(default_factory=dict)
    maps: Maps = field(default_factory=Maps)
    more: dict[str, pd.DataFrame] = field(default_factory=dict)
    folder: Path | None = None

    def _repr_html_(self) -> str:
        """What a notebook shows: what was measured, and the strongest heads."""
        names = ("targets", "windows", "loss", "loss_unit", "dtype", "attention_implementation")
        facts = {name: self.record[name] for name in names if name in self.record}
        return notebook.block(f"Run on {self.record.get('model')}", facts, notebook.strongest(self.heads))

    @property
    def frames(self) -> dict[str, pd.DataFrame]:
        return {
            "heads": self.heads,
            "tokens": self.tokens,
            "edges": self.edges,
            "updates": self.updates,
            "sequences": self.sequences,
        }
