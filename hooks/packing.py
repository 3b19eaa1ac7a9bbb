"""Packed documents: several in one row, told apart by position ids that start again.

A model may take the hint and keep its documents apart, or attend across them when a mask of ones is given too; loss falls
either way. What the model really did is reported as it is, and said once where attention crosses.

Shapes: B batch, H query heads, Q query positions, S key positions.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from .forward import Sequences
from .site import Site
from .visibility import Structure, Visibility


def documents(positions: Tensor, rows: Tensor | None = None) -> Tensor | None:
    """(B,Q) number of the document of every token, or None where no position starts again.

    Args:
        positions (B,Q): position ids. rows (B,Q): False on padding, whose positions say nothing.
    """
    starts = torch.zeros_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions[:, 1:] <= positions[:, :-1]
    if rows is not None:
        starts[:, 1:] &= rows[:, 1:].to(starts.device) & rows[:, :-1].to(starts.device)
    return starts.cumsum(1) if bool(starts.any()) else None


def crosses(documents: Tensor, structure: Structure, mask: Tensor | None) -> bool:
    """True where some query may see a key of another document."""
    queries = documents.shape[1]
    everything = slice(None)
    visibility = Visibility(structure, queries, queries, mask)
    seen, _ = visibility.block(everything, everything, 0, queries, 0, queries, documents.device)
    apart = documents[:, None, :, None] != documents[:, None, None, :]
    return bool((apart if seen is None else apart & seen).any())


class Packing:
    """What was said about packed documents: once per watch, and looked at once per module."""

    def __init__(self) -> None:
        self._looked: set[Site] = set()
        self._said = False

    def look(self, site: Site, structure: Structure, mask: Tensor | None, sequences: Sequences) -> None:
        """Warn where positions start again but attention crosses."""
        if self._said or site in self._looked or sequences.positions is None:
            return
        found = documents(sequences.positions, sequences.query_rows)
        if found is None:
            return
        self._looked.add(site)
        if crosses(found, structure, mask):
            self._said = True
            warnings.warn(
                f"advantage_probe: position ids start again inside a row, but attention of {site.module} crosses from one "
                "document into another; pass position_ids without attention_mask, or a mask that keeps them apart.",
                stacklevel=2,
            )
