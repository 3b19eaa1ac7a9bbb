"""What single heads attend to and what the loss wants of it, over one window: pooled for all heads, finer for some.

The sums of the other tables say nothing about where in a text; these maps do, at a cost that is quadratic in its length,
so they are made for one window. Pooling adds over keys and averages over queries, so that a cell of α is how much a query
of its block attends to the keys of its block; the advantage of a cell is −ΣD/Σα, its α-weighted mean.

Shapes: Q query tokens, S key tokens, P cells of a pooled side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...hooks.attach import calls
from ...hooks.call import AttentionCall
from ...hooks.errors import BadInput
from ...probe.law.definition import law
from ...probe.state import Key, label, shared_modules

POOLED, FINE = 64, 256  # cells of a side at most
Grid = NDArray[np.float32]
Place = tuple[str, int, int]  # module, use and head: what a head is known by in every table


@dataclass(frozen=True, eq=False)
class HeadMap:
    """One head over one window: `attention` and `score_gradient` (P,P′), each cell standing for `queries` × `keys` tokens.

    `length`: (Q,S), the tokens that the cells cover.
    """

    attention: Grid
    score_gradient: Grid
    length: tuple[int, int]

    @property
    def advantage(self) -> Grid:
        """α-weighted mean advantage of every cell, NaN where nothing is attended to."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found = -self.score_gradient / self.attention
        return np.where(self.attention > 0, found, np.nan).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Maps:
    """Maps of one window: `pooled` for every head, `fine` for the heads that are shown first; by label.

    `query_tokens`, `key_tokens`: ids of the window.
    """

    pooled: Mapping[str, HeadMap] = field(default_factory=dict)
    fine: Mapping[str, HeadMap] = field(default_factory=dict)
    tokens: tuple[int, ...] = ()

    def save(self, path: Path) -> None:
        """As safetensors, float32."""
        from safetensors.numpy import save_file

        arrays = {"tokens": np.array(self.tokens, dtype=np.int64)}
        for kind, maps in (("pooled", self.pooled), ("fine", self.fine)):
            for name, one in maps.items():
                both = np.stack([one.attention, one.score_gradient])
                arrays[f"{kind}/{name}/{one.length[0]}x{one.length[1]}"] = np.ascontiguousarray(both)
        save_file(arrays, path)

    @classmethod
    def load(cls, path: Path) -> Maps:
        """What `save` wrote; no maps when the file is missing.

        Raises:
            BadInput: for a damaged file.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        if not path.is_file():
            return cls()
        try:
            arrays = load_file(path)
        except (SafetensorError, OSError) as error:
            raise BadInput(f"{str(path)!r} is damaged ({error}); analyse again.") from error
        found: dict[str, dict[str, HeadMap]] = {"pooled": {}, "fine": {}}
        for name, both in arrays.items():
            if name != "tokens":
                kind, rest = name.split("/", 1)
                head, size = rest.rsplit("/", 1)
                queries, keys = (int(part) for part in size.split("x"))
                found[kind][head] = HeadMap(both[0], both[1], (queries, keys))
        return cls(found["pooled"], found["fine"], tuple(arrays["tokens"].tolist()))


def pool(values: Tensor, cells: int) -> Grid:
    """(Q,S) to at most (cells,cells): added over keys, averaged over queries."""
    for axis, reduce in ((0, torch.mean), (1, torch.sum)):
        count = values.shape[axis]
        if count > cells:
            parts = torch.tensor_split(values, cells, dim=axis)
            values = torch.stack([reduce(part, dim=axis) for part in parts], dim=axis)
    return values.float().cpu().numpy()


class _Mapper:
    """Maps the first row of every call, of the heads (module, use, head) `fine` in finer cells as well."""

    def __init__(self, fine: Collection[Place]) -> None:
        self.wanted = fine
        self.pooled: dict[tuple[Key, int], HeadMap] = {}
        self.fine: dict[tuple[Key, int], HeadMap] = {}

    def add(self, call: AttentionCall) -> None:
        if call.delivery or call.hidden:
            return
        key = Key(call.site, call.use)
        counted = call.visibility.counted(call.query.shape[0], call.query.device)[0]
        for head in range(call.query.shape[1]):
            terms = law(_single(call, head))
            real = counted[:, None].to(terms.attention.dtype)
            grids = terms.attention[0, 0] * real, terms.score_gradient[0, 0] * real
            length = grids[0].shape[0], grids[0].shape[1]
            self.pooled[key, head] = HeadMap(pool(grids[0], POOLED), pool(grids[1], POOLED), length)
            if (key.site.module, key.use, head) in self.wanted:
                self.fine[key, head] = HeadMap(pool(grids[0], FINE), pool(grids[1], FINE), length)


def _single(call: AttentionCall, head: int) -> AttentionCall:
    """The first batch row and one head of a call."""
    owner, row = head // call.group, slice(0, 1)
    one, group = slice(head, head + 1), slice(owner, owner + 1)

    def cut(tensor: Tensor | None, heads: slice) -> Tensor | None:
        if tensor is None:
            return None
        return tensor[row if tensor.shape[0] > 1 else slice(None), heads if tensor.shape[1] > 1 else slice(None)]

    seen = replace(
        call.visibility,
        mask=cut(call.visibility.mask, one),
        bias=cut(call.visibility.bias, one),
        rows=None if call.visibility.rows is None else call.visibility.rows[row],
    )
    return replace(
        call,
        query=call.query[row, one],
        key=call.key[row, group],
        value=call.value[row, group],
        output=call.output[row, one],
        upstream=call.upstream[row, one],
        visibility=seen,
        sinks=None if call.sinks is None else call.sinks[one],
        weights=cut(call.weights, one),
    )


def maps(model: nn.Module, run: Callable[[], Tensor], tokens: Iterable[int], fine: Collection[Place] = ()) -> Maps:
    """Map every head of `model` over the first row of one backward.

    Args:
        run: runs the model and returns the loss, summed over targets, so that D is per summed loss as in the tables.
        fine: the heads to map in finer cells as well.

    Raises:
        Whatever the hooks could not read.
    """
    mapper = _Mapper(fine)
    with calls(model, mapper.add):
        loss = run()
        if loss.requires_grad:
            loss.backward()
    shared = shared_modules(key for key, _ in mapper.pooled)
    pooled, finer = (
        {label(key, head, shared): one for (key, head), one in part.items()} for part in (mapper.pooled, mapper.fine)
    )
    return Maps(pooled, finer, tuple(tokens))
