"""How orthogonal the columns of a head's W_K are, and against what that is held.

Orthogonality is the mean |cosine| of two different columns of W_K ∈ R^{M×D} of one key/value head. Random Gaussian columns
give about √(2/(πM)) with M the width of the *stream* (not of the head, which is a number some texts quote); the same
weights in shuffled places and a freshly initialised model are the measured references.

Shapes: M width of the residual stream, D head width.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import nn

from ...probe.state import Key, label
from ..intervals.nulls import DRAWS, bound, half_samples
from .projections import key_maps

Array = NDArray[np.float64]


def cosines(columns: Array) -> Array:
    """(D,D) |cosine| of the columns of (M,D); columns of zeros have cosine 0."""
    size = np.linalg.norm(columns, axis=0)
    unit = columns / np.where(size > 0, size, 1.0)
    return np.abs(unit.T @ unit)


def off_diagonal(square: Array) -> float:
    """Mean of a square matrix without its diagonal; NaN for a single column."""
    count = len(square)
    return float((square.sum() - np.trace(square)) / (count * (count - 1))) if count > 1 else float("nan")


def gaussian(width: int) -> float:
    """Expected |cosine| of two Gaussian vectors in R^width: Γ(w/2) / (√π Γ((w+1)/2)), close to √(2/(π·width))."""
    return math.exp(math.lgamma(width / 2) - math.lgamma((width + 1) / 2)) / math.sqrt(math.pi)


def head_columns(model: nn.Module) -> dict[str, tuple[int, Array, bool]]:
    """Per key/value head its layer, the columns (M,D) of W_K, float64, and whether a norm or factor follows.

    Raises:
        UnsupportedFamily: where W_K cannot be told apart.
    """
    heads = getattr(getattr(model, "config", None), "num_attention_heads", None)
    found = {}
    for entry in key_maps(model):
        kind = "KV" if isinstance(heads, int) and entry.weight.shape[0] < heads else "H"
        for head, weight in enumerate(entry.weight):
            columns = weight.double().cpu().numpy().T
            found[label(Key(entry.site, 0), head, letter=kind)] = (entry.site.layer, columns, entry.normalised)
    return found


def fresh(model: nn.Module, seed: int = 0) -> nn.Module:
    """A model of the same configuration with newly drawn weights (the library's initialisation), frozen, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: nn.Module = type(model)(copy.deepcopy(model.config))
    dtype, device = next(model.parameters()).dtype, next(model.parameters()).device
    return made.to(device=device, dtype=dtype).eval().requires_grad_(False)


def orthogonality(model: nn.Module, initial: nn.Module, *, draws: int = DRAWS, seed: int = 0) -> pd.DataFrame:
    """One row per key/value head.

    Columns: `layer`, `head`, `orthogonality` (mean |cos|, smaller is more orthogonal), `low`, `high` (95 %, half samples
    of columns), `gaussian`, `shuffled` and `shuffled_edge` (mean and 2.5 % point of `draws` W_K with entries in random
    places), `p` (upper bound for a shuffled W_K as orthogonal as this), `initial`, `columns` D, `stream` M, `normalised`.
    """
    generator = np.random.default_rng(seed)
    started = head_columns(initial)
    rows = []
    for name, (layer, columns, normalised) in head_columns(model).items():
        square = cosines(columns)
        value = off_diagonal(square)

        def again(chosen: NDArray[np.int64], square: Array = square) -> float:
            return off_diagonal(square[np.ix_(chosen, chosen)])

        low, high = half_samples(again, len(square), generator, draws)
        null = np.array(
            [
                off_diagonal(cosines(generator.permutation(columns.reshape(-1)).reshape(columns.shape)))
                for _ in range(draws)
            ]
        )
        rows.append(
            {
                "layer": layer,
                "head": name,
                "orthogonality": value,
                "low": low,
                "high": high,
                "gaussian": gaussian(len(columns)),
                "shuffled": float(null.mean()),
                "shuffled_edge": float(np.quantile(null, 0.025)),
                "p": bound(value, null, "small"),
                "initial": off_diagonal(cosines(started[name][1])),
                "columns": columns.shape[1],
                "stream": columns.shape[0],
                "normalised": normalised,
            }
        )
    return pd.DataFrame(rows)
