"""Exact principal components of any number of vectors, seen in pieces of any size.

Kept are a count, a mean and a scatter matrix in float64. A block whose products would lose more than three digits to a
common offset is shifted by its own mean first, and blocks are joined by the rule of Chan, Golub and LeVeque (1983), so that
offsets cancel before they cost anything, and states of shards or ranks join in any order.

Shapes: N rows, d numbers in a row, r axes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ...hooks.errors import BadInput, BadRequest, MergeRefused

Array = NDArray[np.float64]

FEWEST = 3  # rows, below which there is no manifold to speak of
CONSTANT = 1e-12  # a column whose standard deviation is below this share of its size does not vary
GAP = 1e-6  # of the largest variance: axes closer than this can be turned into each other
_BLOCK = 1 << 18  # numbers taken at once: small enough to stay in the cache
_LOST = 1e-3  # of a column's sum of squares: where less than this is variance, an offset costs digits


@dataclass(frozen=True, eq=False)
class Manifold:
    """Principal components of `count` vectors.

    Attributes:
        mean (d,), scale (d,): what rows are centred on and divided by (ones, unless in correlation form).
        axes (r,d): unit vectors, largest variance first; r = min(d, count − 1). The loading of largest size is positive
            (the first one, where several are equally large).
        variances (r,): along the axes, divisor count − 1, in squared units of the rows (of standard deviations in
            correlation form).
        width, count: d and the rows that were used. `excluded`: rows left out because they held NaN or infinities.
        constant: columns that do not vary; in correlation form they are dropped (their scale is infinite).
        ambiguous (r,) bool: the gap to a neighbouring variance is below 1e-6 of the largest one, so that only the space
            of such axes means something, not each of them.
        source: what the vectors were, such as "gpt2: layer 3, value"; vectors of another source are not projected.
    """

    mean: Array
    scale: Array
    axes: Array
    variances: Array
    width: int
    count: int
    excluded: int
    correlation: bool
    constant: tuple[int, ...]
    ambiguous: NDArray[np.bool_]
    source: str = ""

    @property
    def explained(self) -> Array:
        """Share of the variance along each axis; 0 where nothing varies."""
        whole = self.variances.sum()
        return self.variances / whole if whole > 0 else np.zeros_like(self.variances)

    @property
    def participation_ratio(self) -> float:
        """(Σ λ)² / Σ λ²: 1 for a line, d for equal variances; 0 where nothing varies."""
        square = float((self.variances**2).sum())
        return float(self.variances.sum() ** 2 / square) if square > 0 else 0.0

    def project(self, rows: ArrayLike | Tensor, axes: int | None = None, source: str = "") -> Array:
        """Coordinates (N,r) of rows (N,d) along the first `axes` axes (default: all); NaN for non-finite rows.

        Raises:
            BadRequest: for rows of another width or of another source, or more axes than there are.
        """
        block = _rows(rows, self.width)
        if source and self.source and source != self.source:
            raise BadRequest(f"This basis belongs to {self.source!r}; vectors of {source!r} have no coordinates in it.")
        count = len(self.axes) if axes is None else axes
        if not 0 < count <= len(self.axes):
            raise BadRequest(f"There are {len(self.axes)} axes, not {count}.")
        block = block.astype(np.float64)
        block[~np.isfinite(block).all(1)] = np.nan
        return ((block - self.mean) / self.scale) @ self.axes[:count].T

    def towards(self, other: Manifold) -> Manifold:
        """The same with every axis turned to the side of the other's axis of the same number, for trajectories."""
        count = min(len(self.axes), len(other.axes))
        signs = np.ones(len(self.axes))
        signs[:count] = np.where((self.axes[:count] * other.axes[:count]).sum(1) < 0, -1.0, 1.0)
        return replace(self, axes=self.axes * signs[:, None])

    def to_frame(self) -> pd.DataFrame:
        """One row per axis: `axis` (from 1), `variance`, `explained`, `cumulative`, `ambiguous`."""
        return pd.DataFrame(
            {
                "axis": np.arange(1, len(self.axes) + 1),
                "variance": self.variances,
                "explained": self.explained,
                "cumulative": self.explained.cumsum(),
                "ambiguous": self.ambiguous,
            }
        )

    def save(self, path: str | Path) -> None:
        """Write a safetensors file that `load` reads; other programs find mean, scale, axes and variances in it."""
        from safetensors.numpy import save

        arrays = {"mean": self.mean, "scale": self.scale, "axes": self.axes, "variances": self.variances}
        arrays["ambiguous"] = self.ambiguous.astype(np.uint8)
        numbers = {name: getattr(self, name) for name in ("width", "count", "excluded", "correlation", "source")}
        told = {"manifold": json.dumps(numbers | {"constant": list(self.constant)})}
        Path(path).write_bytes(save({name: np.ascontiguousarray(part) for name, part in arrays.items()}, metadata=told))

    @classmethod
    def load(cls, path: str | Path) -> Manifold:
        """A manifold written by `save`.

        Raises:
            BadInput: for a file that is not there, is damaged, or holds something else.
        """
        from safetensors import safe_open

        try:
            with safe_open(str(path), framework="np") as file:
                told = json.loads((file.metadata() or {})["manifold"])
                arrays = {name: file.get_tensor(name) for name in ("mean", "scale", "axes", "variances", "ambiguous")}
        except Exception as error:
            raise BadInput(f"{str(path)!r} holds no manifold written by save() ({type(error).__name__}).") from error
        arrays["ambiguous"] = arrays["ambiguous"].astype(bool)
        return cls(**arrays, **(told | {"constant": tuple(told["constant"])}))


@dataclass(eq=False)
class StreamingPCA:
    """Principal components of rows that come in pieces.

    Args:
        width: d. correlation: divide every column by its standard deviation, and leave out columns that do not vary.

    `update` takes (N,d) arrays or tensors of any dtype and any N, none included; what is computed is the PCA, in float64,
    of the numbers as they are stored.
    """

    width: int
    correlation: bool = False
    count: int = 0
    excluded: int = 0
    mean: Array = field(init=False)
    scatter: Array = field(init=False)
    _shift: Array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.width, int) or isinstance(self.width, bool) or self.width < 1:
            raise BadRequest(f"width must be a whole number, at least 1, not {self.width!r}.")
        self.mean = np.zeros(self.width)
        self.scatter = np.zeros((self.width, self.width))
        self._shift = np.zeros(self.width)

    def update(self, rows: ArrayLike | Tensor) -> StreamingPCA:
        """Add rows (N,d); rows with NaN or infinities are left out and counted in `excluded`.

        Raises:
            BadRequest: for rows of another width or shape.
        """
        block = _rows(rows, self.width)
        step = max(64, _BLOCK // self.width)
        room = np.empty((min(step, len(block)), self.width))
        for start in range(0, len(block), step):
            self._add(block[start : start + step], room)
        return self

    def _add(self, block: Any, room: Array) -> None:
        count = len(block)
        total, scatter = _products(block, self._shift, room)
        if not (np.isfinite(total).all() and np.isfinite(scatter).all()):
            good = np.isfinite(block).all(1)
            self.excluded += int((~good).sum())
            block, count = block[good], int(good.sum())
            if not count:
                return
            self._shift = (block.astype(np.float64) / count).sum(0)
            total, scatter = _products(block, self._shift, room)
        size = np.diag(scatter)
        if (size - total**2 / count < _LOST * size - count * (CONSTANT * np.abs(self._shift)) ** 2).any():
            self._shift = self._shift + total / count
            total, scatter = _products(block, self._shift, room)
        scatter -= np.outer(total, total / count)
        self._join(count, self._shift + total / count, scatter)

    def _join(self, count: int, mean: Array, scatter: Array) -> None:
        if count == 0:
            return
        whole = self.count + count
        step = mean - self.mean
        self.scatter += scatter
        self.scatter += np.outer(step, step * (self.count * count / whole))
        self.mean = self.mean + step * (count / whole)
        self.count = whole

    def merge(self, other: StreamingPCA) -> StreamingPCA:
        """Add what another state saw.

        Raises:
            MergeRefused: when it is of another width or form.
        """
        if not isinstance(other, StreamingPCA) or (other.width, other.correlation) != (self.width, self.correlation):
            raise MergeRefused("Only states of the same width and form (correlation or not) can be added.")
        self._join(other.count, other.mean, other.scatter.copy())
        self.excluded += other.excluded
        return self

    def finish(self, source: str = "") -> Manifold:
        """The principal components so far; the state stays usable.

        Raises:
            BadInput: for fewer than three finite rows.
        """
        if self.count < FEWEST:
            left = f" ({self.excluded} more held NaN or infinities)" if self.excluded else ""
            raise BadInput(f"A manifold needs at least {FEWEST} vectors; there are {self.count}{left}.")
        covariance = (self.scatter + self.scatter.T) / (2 * (self.count - 1))
        spread = np.sqrt(np.clip(np.diag(covariance), 0, None))
        still = spread <= CONSTANT * np.abs(self.mean)
        scale = np.ones(self.width)
        if self.correlation:
            scale = np.where(still, np.inf, spread)
        covariance = covariance / np.outer(scale, scale)
        covariance[still] = 0.0
        covariance[:, still] = 0.0
        variances, vectors = np.linalg.eigh(covariance)
        kept = min(self.width, self.count - 1)
        variances, axes = np.clip(variances[::-1][:kept], 0.0, None), vectors.T[::-1][:kept]
        return Manifold(
            mean=self.mean.copy(),
            scale=scale,
            axes=_signed(axes),
            variances=variances,
            width=self.width,
            count=self.count,
            excluded=self.excluded,
            correlation=self.correlation,
            constant=tuple(np.flatnonzero(still).tolist()),
            ambiguous=_close(variances),
            source=source,
        )


def _products(block: Any, shift: Array, room: Array) -> tuple[Array, Array]:
    """Sums (d,) and products (d,d), float64, of the rows (of any dtype) less `shift`; `room` is written over."""
    with np.errstate(over="ignore", invalid="ignore"):
        if shift.any():
            rows = np.subtract(block, shift, out=room[: len(block)], dtype=np.float64)
        else:
            rows = np.asarray(block, dtype=np.float64)
        return np.ones(len(rows)) @ rows, rows.T @ rows


def pca(rows: ArrayLike | Tensor, correlation: bool = False, source: str = "") -> Manifold:
    """The principal components of rows (N,d) that are all at hand; see `StreamingPCA`."""
    shape = np.shape(rows) if not isinstance(rows, Tensor) else tuple(rows.shape)
    if len(shape) != 2:
        raise BadRequest(f"Vectors are expected as (rows, width), not {tuple(shape)}.")
    return StreamingPCA(int(shape[1]), correlation).update(rows).finish(source)


def _signed(axes: Array) -> Array:
    """Axes whose loading of largest size is positive; loadings within 1e-9 of the largest count as equally large."""
    size = np.abs(axes)
    first = (size >= size.max(1, keepdims=True) * (1 - 1e-9)).argmax(1)
    signs = np.where(axes[np.arange(len(axes)), first] < 0, -1.0, 1.0)
    return np.asarray(axes * signs[:, None])


def _close(variances: Array) -> NDArray[np.bool_]:
    near = -np.diff(variances) < GAP * variances[:1]
    return np.concatenate([near, [False]]) | np.concatenate([[False], near])


def _rows(rows: ArrayLike | Tensor, width: int) -> Any:
    """Rows as a tensor or an array of shape (N, width), dtype as it came."""
    block: Any = rows.detach() if isinstance(rows, Tensor) else np.asarray(rows)
    if block.ndim != 2 or block.shape[1] != width:
        raise BadRequest(f"Vectors are expected as (rows, {width}), not {tuple(block.shape)}.")
    if isinstance(block, Tensor):
        return block.cpu().double().numpy() if block.dtype in (torch.bfloat16, torch.float16) else block.cpu().numpy()
    if block.dtype.kind not in "fiub":
        raise BadRequest(f"Vectors must hold real numbers, not {block.dtype}.")
    return block
