"""Interventions on values or head outputs while a model runs, each beside what random directions and a full swap do.

`intervene` is a context manager: inside it, and only there, the chosen vectors are changed in every forward pass, with or
without gradients; whatever happens, the model is as it was afterwards. An axis is a direction in the space of the chosen
heads side by side.

Shapes: B sequences, T positions, F = heads · width numbers of the chosen heads, n sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...hooks.attach import edited
from ...hooks.call import AttentionCall, CallSite
from ...hooks.errors import BadRequest
from ...hooks.site import Site
from ..heads.attention_edits import AttentionEdit, edited_attention
from ..intervals.nulls import DRAWS, bound, half_samples

Array = NDArray[np.float64]
Change = Callable[[Tensor], Tensor]
Measure = Callable[[], Array]
Place = Literal["value", "output"]


@dataclass(frozen=True, eq=False)
class Edit:
    """One change: (B,T,F) → (B,T,F), of the values (per key/value head) or outputs (per query head) of one layer.

    `heads`: which ones, side by side in this order; None: all of them.
    """

    layer: int
    change: Change
    place: Place = "output"
    heads: tuple[int, ...] | None = None


# -- changes ------------------------------------------------------------------------------------------------------------


def _unit(axis: Array | Tensor) -> Tensor:
    vector = torch.as_tensor(axis, dtype=torch.float64).reshape(-1)
    size = vector.norm()
    if not bool(torch.isfinite(vector).all()) or float(size) == 0:
        raise BadRequest("An axis must be a finite vector that is not zero.")
    return vector / size


def _along(rows: Tensor, axis: Tensor, centre: Tensor | float) -> tuple[Tensor, Tensor]:
    if rows.shape[-1] != len(axis):
        raise BadRequest(f"An axis of {len(axis)} numbers does not fit vectors of {rows.shape[-1]}.")
    unit = axis.to(rows.device, rows.dtype)
    return ((rows - centre) @ unit)[..., None], unit


def _centre(centre: Array | None, rows: Tensor) -> Tensor | float:
    return 0.0 if centre is None else torch.as_tensor(centre).to(rows.device, rows.dtype)


def cut(axis: Array | Tensor, centre: Array | None = None, strength: float = 1.0) -> Change:
    """x − λ ((x − c)·a) a: takes the coordinate along the axis out (c: what it is measured from, 0 or the mean)."""
    unit = _unit(axis)

    def change(rows: Tensor) -> Tensor:
        along, direction = _along(rows, unit, _centre(centre, rows))
        return rows - strength * along * direction

    return change


def keep_only(axis: Array | Tensor, centre: Array | None = None) -> Change:
    """c + ((x − c)·a) a: leaves the coordinate along the axis and nothing else."""
    unit = _unit(axis)

    def change(rows: Tensor) -> Tensor:
        middle = _centre(centre, rows)
        along, direction = _along(rows, unit, middle)
        return middle + along * direction

    return change


def shift(axis: Array | Tensor, amount: float) -> Change:
    """x + δ a, δ in the units of the vectors."""
    unit = _unit(axis)

    def change(rows: Tensor) -> Tensor:
        _along(rows, unit, 0.0)
        return rows + amount * unit.to(rows.device, rows.dtype)

    return change


def ablate(towards: Array | None = None) -> Change:
    """Zeros, or the vector (F,) `towards`, in place of every vector."""

    def change(rows: Tensor) -> Tensor:
        return torch.zeros_like(rows) + _centre(towards, rows)

    return change


def swap(order: Sequence[int] | None = None) -> Change:
    """The vectors of other sequences of the batch, position by position; default: those of the sequence before."""

    def change(rows: Tensor) -> Tensor:
        if order is None:
            return rows.roll(1, 0)
        if len(order) != len(rows):
            raise BadRequest(f"An order of {len(order)} sequences does not fit a batch of {len(rows)}.")
        return rows[torch.as_tensor(list(order), device=rows.device)]

    return change


def displaced(change: Change, axis: Array | Tensor, heads: slice) -> Change:
    """What `change` does to the heads in `heads` (a slice of F), put along one axis of all of F instead: same length of the
    displacement at every token, another direction.
    """
    unit = _unit(axis)

    def moved(rows: Tensor) -> Tensor:
        size = (change(rows[..., heads]) - rows[..., heads]).norm(dim=-1, keepdim=True)
        return rows + size * unit.to(rows.device, rows.dtype)

    return moved


# -- the context manager ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Intervener:
    """Changes what the edits say, and notes which of them had something to change."""

    edits: tuple[Edit, ...]
    reached: set[int] = field(default_factory=set)
    layers: set[int] = field(default_factory=set)

    def wanted(self, site: Site) -> bool:
        if site.kind == "cross":
            return False
        self.layers.add(site.layer)
        return any(edit.layer == site.layer for edit in self.edits)

    def value(self, call: CallSite, value: Tensor) -> Tensor:
        return self._changed("value", call, value)

    def output(self, call: AttentionCall) -> Tensor:
        return self._changed("output", call, call.output)

    def _changed(self, place: Place, call: CallSite, tensor: Tensor) -> Tensor:
        for number, edit in enumerate(self.edits):
            if edit.layer != call.site.layer or edit.place != place:
                continue
            self.reached.add(number)
            heads = range(tensor.shape[1]) if edit.heads is None else edit.heads
            if any(not 0 <= head < tensor.shape[1] for head in heads):
                kind = "key/value heads" if place == "value" else "heads"
                raise BadRequest(
                    f"{call.site.module} has {tensor.shape[1]} {kind}, numbered from 0; there is no {max(heads)}."
                )
            index = torch.as_tensor(list(heads), device=tensor.device)
            rows = tensor[:, index].transpose(1, 2).flatten(2)
            made = edit.change(rows)
            if made.shape != rows.shape:
                raise BadRequest(f"A change must keep the shape {tuple(rows.shape)}, not make it {tuple(made.shape)}.")
            back = made.unflatten(2, (len(index), tensor.shape[3])).transpose(1, 2)
            tensor = tensor.index_copy(1, index, back.to(tensor.dtype))
        return tensor


@contextmanager
def intervene(model: nn.Module, *edits: Edit | AttentionEdit) -> Iterator[None]:
    """Change the model's values, head outputs or attention in every forward inside the block; restore everything
    after it.

    Raises:
        BadRequest: for a head that is not there (in the forward), or, when the block ends, for an edit that changed nothing
            because its layer has no attention that the probe can read. UnsupportedKernel: inside compiled graphs and
            gradient checkpoints, where an edit would be lost.
    """
    attention = tuple(edit for edit in edits if isinstance(edit, AttentionEdit))
    plain = tuple(edit for edit in edits if isinstance(edit, Edit))
    receiver = _Intervener(plain)
    with ExitStack() as stack:
        if attention:
            stack.enter_context(edited_attention(model, *attention))
        listener = stack.enter_context(
            edited(model, value=receiver.value, output=receiver.output, wanted=receiver.wanted)
        )
        yield
    if listener.error is not None:
        return
    missed = sorted({edit.layer for number, edit in enumerate(plain) if number not in receiver.reached})
    if missed:
        seen = sorted(receiver.layers)
        why = f"attention was seen in layers {seen}." if seen else "no attention call was seen inside the block."
        if missed[0] in receiver.layers:
            why = (
                "its attention took a path that no edit reaches; run it with gradients enabled, or with another kernel."
            )
        raise BadRequest(f"Nothing was changed in layer {missed[0]}: {why}")


# -- what interventions do, beside their controls -----------------------------------------------------------------------


def random_axes(
    axis: Array | None, count: int, generator: np.random.Generator, rows: Array | None = None, width: int | None = None
) -> Array:
    """(count, F) random unit vectors, orthogonal to `axis` where one is given: isotropic, or drawn from the covariance of
    `rows` (N,F).
    """
    size = width if width is not None else len(axis) if axis is not None else rows.shape[1]  # type: ignore[union-attr]
    found = generator.normal(size=(count, size))
    if rows is not None:
        centred = rows - rows.mean(0)
        values, vectors = np.linalg.eigh(centred.T @ centred / len(rows))
        found = (found * np.sqrt(np.clip(values, 0, None))) @ vectors.T
    if axis is not None:
        unit = axis / np.linalg.norm(axis)
        found = found - np.outer(found @ unit, unit)
    return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True))


def _row(name: str, effect: Array, generator: np.random.Generator, draws: int) -> dict[str, Any]:
    low, high = half_samples(lambda chosen: float(effect[chosen].mean()), len(effect), generator, draws)
    return {"what": name, "effect": float(effect.mean()), "low": low, "high": high, "n": len(effect)}


def _null(row: dict[str, Any], name: str, draws: Array) -> None:
    low, high = np.quantile(draws, [0.025, 0.975])
    row |= {f"{name}_mean": float(draws.mean()), f"{name}_low": float(low), f"{name}_high": float(high)}
    row[f"{name}_p"] = bound(row["effect"] - float(draws.mean()), draws - draws.mean(), "both")


def axis_effects(
    model: nn.Module,
    measure: Measure,
    rows: Array,
    axis: Array,
    layer: int,
    *,
    place: Place = "value",
    heads: tuple[int, ...] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> pd.DataFrame:
    """What cutting, keeping only and shifting along an axis do to a measure.

    Args:
        measure: runs the model and returns one number per sequence (n,), such as its loss.
        rows: vectors (N,F) seen at the place, for centre, spread (a shift is one standard deviation) and covariance.

    Returns:
        Rows "cut", "keep only", "shift +1 sd", "shift -1 sd" and "swap all": `effect` (mean change of the measure), `low`,
        `high` (95 %, half samples of sequences); `isotropic_*` and `covariance_*` of the same action on `draws` random axes
        of the same length, orthogonal to the axis: mean, 95 % range, and bound on p for as far from that mean.
    """
    generator = np.random.default_rng(seed)
    centre = rows.mean(0)
    spread = float(((rows - centre) @ (axis / np.linalg.norm(axis))).std())
    before = measure()

    def with_(change: Change) -> Array:
        with intervene(model, Edit(layer, change, place, heads)):
            return measure() - before

    actions: dict[str, Callable[[Array], Change]] = {
        "cut": lambda direction: cut(direction, centre),
        "keep only": lambda direction: keep_only(direction, centre),
        "shift +1 sd": lambda direction: shift(direction, spread),
        "shift -1 sd": lambda direction: shift(direction, -spread),
    }
    found = []
    isotropic = random_axes(axis, draws, generator)
    within = random_axes(axis, draws, generator, rows)
    for name, action in actions.items():
        row = _row(name, with_(action(axis)), generator, draws)
        for kind, axes in (("isotropic", isotropic), ("covariance", within)):
            _null(row, kind, np.array([with_(action(other)).mean() for other in axes]))
        found.append(row)
    found.append(_row("swap all", with_(swap()), generator, draws))
    return pd.DataFrame(found)


def head_effects(model: nn.Module, measure: Measure, layers: Sequence[int], heads: int) -> dict[tuple[int, int], Array]:
    """Change of the measure (n,) when each head's output is ablated (zeros), by (layer, head)."""
    before = measure()
    found = {}
    for layer in layers:
        for head in range(heads):
            with intervene(model, Edit(layer, ablate(), "output", (head,))):
                found[layer, head] = measure() - before
    return found


def strongest_head(
    model: nn.Module,
    measure: Measure,
    outputs: dict[int, Array],
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> pd.DataFrame:
    """The head whose ablation changes the measure most on one half of the sequences, estimated on the other half.

    Args:
        outputs: per layer the head outputs seen, (N,H,V), for the controls.

    Returns:
        Rows "ablate" and "swap" of the head: effect and interval on the other half, beside displacements of the same length
        at every token along `draws` random axes of the layer (isotropic; within the covariance of its outputs); "swap all":
        every head of the layer from another sequence, the ceiling.
    """
    generator = np.random.default_rng(seed)
    heads = next(iter(outputs.values())).shape[1]
    effects = head_effects(model, measure, list(outputs), heads)
    count = len(next(iter(effects.values())))
    order = generator.permutation(count)
    pick, estimate = order[: count // 2], np.sort(order[count // 2 :])
    layer, head = max(effects, key=lambda name: abs(effects[name][pick].mean()))
    before = measure()
    rows = outputs[layer]
    width = rows.shape[2]
    flat = rows.reshape(len(rows), -1)
    place = slice(head * width, (head + 1) * width)
    isotropic = random_axes(None, draws, generator, width=flat.shape[1])
    within = random_axes(None, draws, generator, flat)

    def with_(change: Change, chosen: tuple[int, ...] | None) -> Array:
        with intervene(model, Edit(layer, change, "output", chosen)):
            return np.asarray((measure() - before)[estimate])

    found = []
    for name, change in (("ablate", ablate()), ("swap", swap())):
        row = _row(f"{name} L{layer}H{head}", with_(change, (head,)), generator, draws)
        for kind, axes in (("isotropic", isotropic), ("covariance", within)):
            _null(row, kind, np.array([with_(displaced(change, axis, place), None).mean() for axis in axes]))
        found.append(row)
    found.append(_row(f"swap all of L{layer}", with_(swap(), None), generator, draws))
    return pd.DataFrame(found).assign(picked_on=len(pick))


def entropy_axis(rows: Array, entropy: Array, ridge: float = 1e-3) -> Array:
    """Unit direction (F,) along which a ridge regression reads entropy (N,) off rows (N,F)."""
    centred = rows - rows.mean(0)
    gram = centred.T @ centred
    axis = np.linalg.solve(
        gram + ridge * np.trace(gram) / len(gram) * np.eye(len(gram)), centred.T @ (entropy - entropy.mean())
    )
    return np.asarray(axis / np.linalg.norm(axis))
