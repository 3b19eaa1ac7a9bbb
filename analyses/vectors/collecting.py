"""Collecting vectors while a model runs: values, outputs, keys, u, update directions, the residual stream.

Values, outputs, keys and attention entropies are read in the forward pass, as the kernel has them (values and keys per
key/value head, keys after rotation and norm); u and update directions come with a backward pass.

Shapes: n sequences, P kept positions, H query heads, K key/value heads, W width of one head or of the stream.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...hooks.attach import calls, within_one_sequence
from ...hooks.call import AttentionCall
from ...hooks.errors import BadRequest, NoAttentionSeen
from ...probe.law.blocks import vectors as blockwise_vectors
from ...probe.law.definition import law
from ...probe.state import Key, label, module_label, shared_modules
from ..inputs.corpus import Batch

Array = NDArray[np.float64]
Where = Literal["value", "output", "key", "residual", "upstream", "update"]
By = Literal["head", "layer", "model"]
Positions = Literal["last", "all"]
Progress = Callable[[int, int, str], None]

LN2 = float(np.log(2))


@dataclass(frozen=True, eq=False)
class Collected:
    """What was seen of n sequences.

    Attributes:
        vectors: per layer the vectors (n,P,heads,W), float64; the residual stream has one "head".
        names: per layer the names of its heads.
        attention_entropy: per layer (n,P,H), nats: −Σ_j α ln α of the kept query rows.
        entropy (n,P): the model's own predictive entropy at the kept positions, bits.
        visible: per layer the mean number of keys that the kept rows can see.
        numbers: per layer its number in the stack.
    """

    vectors: dict[str, Array]
    names: dict[str, tuple[str, ...]]
    attention_entropy: dict[str, Array]
    entropy: Array
    visible: dict[str, float]
    numbers: dict[str, int]

    def layer_of(self, name: str) -> int | None:
        """The number of the layer that `by` calls by this name, or whose head it is; None for the model as a whole."""
        known = {head: layer for layer, heads in self.names.items() for head in heads}
        return self.numbers.get(known.get(name, name))

    def by(self, by: By) -> dict[str, Array]:
        """The vectors (n,P,·) of every head, of every layer (heads side by side), or of the model (layers as well)."""
        if by == "head":
            return {
                name: rows[:, :, place]
                for layer, rows in self.vectors.items()
                for place, name in enumerate(self.names[layer])
            }
        layers = {layer: rows.reshape(*rows.shape[:2], -1) for layer, rows in self.vectors.items()}
        return layers if by == "layer" else {"model": np.concatenate(list(layers.values()), -1)}


class _Reader:
    """Keeps the kept positions of every call of a forward; `rows` says which, per batch row."""

    def __init__(self, where: Where, attention: bool) -> None:
        self.where, self.attention = where, attention
        self.rows: Tensor = torch.zeros(0, dtype=torch.long)
        self.found: dict[Key, list[Array]] = {}
        self.entropies: dict[Key, list[Array]] = {}
        self.visible: dict[Key, list[float]] = {}

    def look(self, call: AttentionCall) -> None:
        key = Key(call.site, call.use)
        parts = {"value": call.value, "output": call.output, "key": call.key}
        if self.where in parts:
            self.found.setdefault(key, []).append(_picked(parts[self.where], self.rows))
        if self.attention:
            with torch.no_grad():
                whole = law(call)
                entropy = -torch.xlogy(whole.attention, whole.attention).sum(-1)[..., None]
                seen = whole.visible.sum(-1)[..., None].double()
            self.entropies.setdefault(key, []).append(_picked(entropy, self.rows)[..., 0])
            self.visible.setdefault(key, []).append(float(_picked(seen, self.rows).mean()))


class _Backward:
    """Keeps u, or the update directions −m, of every call of a backward."""

    def __init__(self, where: Where) -> None:
        self.where = where
        self.rows: Tensor = torch.zeros(0, dtype=torch.long)
        self.found: dict[Key, list[Array]] = {}

    def add(self, call: AttentionCall) -> None:
        rows = call.upstream if self.where == "upstream" else -blockwise_vectors(call).value_gradient
        self.found.setdefault(Key(call.site, call.use), []).append(_picked(rows, self.rows))


def _picked(tensor: Tensor, rows: Tensor) -> Array:
    """(B,P,heads,W) float64 of a tensor (B,heads,T,W): the positions `rows` (B,P) of every sequence."""
    index = rows.to(tensor.device)[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
    return tensor.detach().gather(2, index).transpose(1, 2).double().cpu().numpy()


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and no parameter wants a gradient; put back afterwards."""
    training = [module for module in model.modules() if module.training]
    wanting = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        model.eval()
        for parameter in wanting:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in wanting:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True


def collect(
    model: nn.Module,
    batches: Iterable[Batch],
    where: Where = "value",
    positions: Positions = "last",
    *,
    attention: bool = False,
    progress: Progress | None = None,
    total: int = 0,
) -> Collected:
    """Run a causal language model over batches (padded on the right, if at all) and keep the vectors at `where`.

    Args:
        where: "value", "key" (per key/value head), "output", "upstream" (u = ∂L/∂output) or "update" (−m_j = −Σ_i α_ij
            u_i, per key position) per query head, L the summed next-token loss; or "residual", the stream after every
            block, the last one after the final norm.
        positions: the last token of every sequence, or all positions (of sequences of one length).
        attention: keep the attention entropies as well (full α, one layer at a time).

    Raises:
        BadRequest: for sequences of several lengths with positions="all", or an unknown `where`.
        NoAttentionSeen: when no call was read. Whatever the hooks refuse.
    """
    if where not in get_args(Where):
        raise BadRequest(f"Vectors are collected at {', '.join(get_args(Where))}, not at {where!r}.")
    back = where in ("upstream", "update")
    reader, behind = _Reader(where, attention), _Backward(where) if back else None
    entropies: list[Array] = []
    streams: list[list[Array]] = []
    done, width = 0, None
    keeps_last = positions == "last" and "logits_to_keep" in inspect.signature(model.forward).parameters
    with ExitStack() as stack:
        stack.enter_context(_frozen(model))
        stack.enter_context(torch.set_grad_enabled(back))
        stack.enter_context(calls(model, reader.look, wanted=within_one_sequence, forward=True))
        if behind is not None:
            gradients = stack.enter_context(calls(model, behind.add, wanted=within_one_sequence))
        for batch in batches:
            rows = _kept(batch, positions)
            if width is not None and rows.shape[1] != width:
                raise BadRequest("positions='all' needs sequences of one length.")
            width = rows.shape[1]
            reader.rows = rows
            device = next(model.parameters()).device
            last = keeps_last and not back and bool(batch.mask.all())
            result = model(
                input_ids=batch.ids.to(device),
                attention_mask=batch.mask.to(device),
                use_cache=False,
                output_hidden_states=where == "residual",
                **({"logits_to_keep": 1} if last else {}),
            )
            logits = result.logits if not last else result.logits.expand(-1, batch.ids.shape[1], -1)
            picked = logits.detach().gather(1, rows.to(device)[..., None].expand(-1, -1, logits.shape[-1]))
            entropies.append(_entropy_bits(picked))
            if where == "residual":
                found = [stream[:, None] for stream in result.hidden_states[1:]]
                streams.append([_picked(stream, rows) for stream in found])
            if behind is not None:
                behind.rows = rows
                targets = batch.targets.to(device).flatten()
                nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").backward()
                gradients.check()
            done += len(batch.ids)
            if progress is not None:
                progress(done, total, where)
    seen = behind.found if behind is not None else reader.found
    same = shared_modules({**seen, **reader.entropies})
    layers = {key: module_label(key, same) for key in (*seen, *reader.entropies)}
    names: dict[str, tuple[str, ...]]
    if where == "residual":
        vectors = {f"L{layer}": np.concatenate(parts) for layer, parts in enumerate(zip(*streams))}
        names = {layer: (f"{layer} residual",) for layer in vectors}
        numbers = {layer: place for place, layer in enumerate(vectors)}
    else:
        if not seen:
            raise NoAttentionSeen(f"{type(model).__name__} made no attention call that the probe can read.")
        grouped = where in ("value", "key")
        vectors = {layers[key]: np.concatenate(parts) for key, parts in _in_order(seen)}
        names = {}
        for key, rows in _in_order(seen):
            letter = "KV" if grouped and _is_shared(model, key, rows) else "H"
            count = vectors[layers[key]].shape[2]
            names[layers[key]] = tuple(label(key, head, same, letter) for head in range(count))
        numbers = {layers[key]: key.site.layer for key in seen}
    attended = {layers[key]: np.concatenate(parts) for key, parts in _in_order(reader.entropies)}
    visible = {layers[key]: float(np.mean(parts)) for key, parts in _in_order(reader.visible)}
    return Collected(vectors, names, attended, np.concatenate(entropies), visible, numbers)


def _in_order(found: dict[Key, Any]) -> list[tuple[Key, Any]]:
    """By stack and layer number: names would put layer 10 before layer 2."""
    return sorted(found.items(), key=lambda item: (item[0].site.stack, item[0].site.layer, item[0]))


def _is_shared(model: nn.Module, key: Key, rows: list[Array]) -> bool:
    """True where fewer key/value heads than query heads are known."""
    heads = getattr(getattr(model, "config", None), "num_attention_heads", rows[0].shape[2])
    return isinstance(heads, int) and rows[0].shape[2] < heads


def _kept(batch: Batch, positions: Positions) -> Tensor:
    """(B,P) positions to keep."""
    if positions == "last":
        return batch.mask.sum(1, keepdim=True) - 1
    if not bool(batch.mask.all()):
        raise BadRequest("positions='all' needs sequences of one length.")
    return torch.arange(batch.ids.shape[1]).expand(batch.ids.shape)


def _entropy_bits(logits: Tensor) -> Array:
    """Predictive entropy, bits, of logits (…,V)."""
    logs = torch.log_softmax(logits.double(), -1)
    return (-(logs.exp() * logs).sum(-1) / LN2).cpu().numpy()
