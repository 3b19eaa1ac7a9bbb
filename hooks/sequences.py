"""Who the rows of a call's batch are: ids, padding, positions, identities, packed documents.

The attention interface sees queries, keys and a ready-made mask; which rows are padding and which tokens they are is known
one floor up, at the modules that are given ids and a 2-D mask.

Several documents may be packed in one row, told apart by position ids that start again. A model may take the hint and keep
its documents apart, or attend across them when a mask of ones is given too; loss falls either way. What the model really
did is reported as it is, and said once where attention crosses.

Shapes: B batch, Q query positions, S key positions.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .errors import Notices
from .site import Site
from .visibility import Structure, Visibility

# token ids of key columns that are no tokens, by the name of what they are
NON_TOKENS = {"bias_k": -2, "zero_attn": -3, "prefix": -4}

_IDS = ("input_ids", "decoder_input_ids")
_STACK_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values")
_INPUTS = (*_IDS, "inputs_embeds", "pixel_values", "input_features", "input_values", "tokens", "idx", "x")


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()


def takes_inputs(module: nn.Module) -> bool:
    """True for modules that are handed ids, embeddings or pixels: those whose arguments describe the batch."""
    return any(name in _INPUTS for name in _parameters(type(module).forward))


@dataclass(frozen=True, eq=False)
class Frame:
    """One running call of a followed module, with the arguments that describe its batch."""

    module: nn.Module
    ids: Tensor | None
    source_ids: Tensor | None
    mask: Tensor | None
    encoder_mask: Tensor | None
    positions: Tensor | None
    inputs: tuple[Tensor, ...]
    stack: bool


def frame(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Frame:
    """The arguments of a call that say what its batch is; anything else is left alone."""
    names = _parameters(type(module).forward)
    given: dict[str, Any] = {**dict(zip(names, args)), **kwargs}

    def tensor(name: str, dimensions: int) -> Tensor | None:
        value = given.get(name)
        return value if isinstance(value, Tensor) and value.dim() == dimensions else None

    inputs = tuple(value for name in _INPUTS if isinstance(value := given.get(name), Tensor))
    if not inputs:
        inputs = tuple(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))[:1]
    ids = next((value for name in _IDS if (value := tensor(name, 2)) is not None), None)
    if ids is None:
        ids = next((value for value in inputs if value.dim() == 2 and not value.is_floating_point()), None)
    return Frame(
        module,
        ids,
        tensor("input_ids", 2),
        _padding(tensor("attention_mask", 2)),
        _padding(tensor("encoder_attention_mask", 2)),
        tensor("position_ids", 2),
        inputs,
        any(isinstance(given.get(name), Tensor) for name in _STACK_INPUTS),
    )


def _padding(mask: Tensor | None) -> Tensor | None:
    """A (B, T) mask as True on real tokens; None for a square one that orders queries instead of naming padding."""
    if mask is None:
        return None
    if mask.is_floating_point() and bool((mask < 0).any()):  # additive: 0 where visible
        return mask > -1
    mask = mask.bool()
    if mask.shape[0] == mask.shape[1] > 1 and not bool(mask.triu(1).any()) and bool(mask.diagonal().all()):
        return None
    return mask


def looks_padded(model: nn.Module, top: Frame | None) -> bool:
    """True when ids came without a mask and some row begins with padding, or ends with two of it, and others do not.

    A single padding id at the end may be a genuine end of text where the two share an id.
    """
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    if top is None or top.ids is None or top.mask is not None or not isinstance(padding, int) or top.ids.shape[1] < 3:
        return False
    blank = top.ids == padding
    rows = blank[:, 0] | blank[:, -2:].all(1)
    return bool(rows.any()) and not bool(rows.all())


@dataclass(frozen=True, eq=False)
class Sequences:
    """What the rows of one call's batch are.

    Attributes:
        identities: one 64-bit number per batch row, equal for equal sequences however they are batched or padded.
        query_ids (B,Q), key_ids (B,S): token ids, or None where there are no tokens (patches, embeddings).
        query_rows (B,Q), key_rows (B,S): False on padding, or None where no padding mask was given.
        positions (B,Q): position ids as the model was given them, or None.
        added: names of the last key columns that are no tokens; `key_ids` holds their `NON_TOKENS` numbers.
    """

    identities: tuple[int, ...]
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    query_rows: Tensor | None = None
    key_rows: Tensor | None = None
    positions: Tensor | None = None
    added: tuple[str, ...] = ()


def digest(*parts: bytes) -> int:
    """A 64-bit number that is the same for the same bytes, anywhere."""
    return int.from_bytes(hashlib.blake2b(b"\0".join(parts), digest_size=8).digest(), "little")


def _identities(top: Frame | None, batch: int) -> tuple[int, ...]:
    """A number per batch row from the ids the forward was given (padding left out), else from its first input."""
    if top is None or not top.inputs:
        return tuple(digest(b"row", str(row).encode()) for row in range(batch))
    source = top.ids if top.ids is not None else top.inputs[0]
    source = source.detach().to("cpu")
    if source.dim() == 0:
        source = source[None]
    mask = top.mask.detach().to("cpu").bool() if top.mask is not None else None
    numbers = []
    for row in range(source.shape[0]):
        values = source[row]
        if mask is not None and top.ids is not None and mask.shape == source.shape:
            values = values[mask[row]]
        values = values.to(torch.int64) if not values.is_floating_point() else values.to(torch.float32)
        numbers.append(digest(values.contiguous().numpy().tobytes()))
    if len(numbers) == batch:
        return tuple(numbers)
    if batch % len(numbers) == 0:  # windows or images of one sequence lie next to each other
        return tuple(number for number in numbers for _ in range(batch // len(numbers)))
    whole = digest(*(str(number).encode() for number in numbers))
    return (whole,) * batch


def with_columns(
    found: Sequences, batch: int, queries: int, keys: int, cross: bool, added: tuple[str, ...]
) -> Sequences:
    """The same with the key columns that are no tokens of this forward: a prefix before them, `added` ones behind."""
    ids, rows = found.key_ids, found.key_rows
    own = None if cross or added else found.query_ids
    if ids is None and own is not None and rows is not None and queries < keys:
        ids = torch.cat([own.new_full((batch, keys - queries), NON_TOKENS["prefix"]), own], 1)
    if added:
        numbers = torch.tensor([[NON_TOKENS[name] for name in added]])
        tokens = torch.full((1, keys - len(added)), -1) if ids is None else ids
        ids = torch.cat([tokens.expand(batch, -1), numbers.to(tokens.device).expand(batch, -1)], 1)
        if rows is not None:
            rows = torch.cat([rows, rows.new_ones(batch, len(added))], 1)
    return replace(found, key_ids=ids, key_rows=rows, added=added)


def _tail(tensor: Tensor | None, batch: int, length: int) -> Tensor | None:
    """The last `length` columns of a (B, …) tensor when it is at least that long."""
    if tensor is None or tensor.dim() != 2 or tensor.shape[1] < length or tensor.shape[0] not in (1, batch):
        return None
    return tensor[:, tensor.shape[1] - length :].detach().expand(batch, -1)


def _exact(tensor: Tensor | None, batch: int, length: int) -> Tensor | None:
    return _tail(tensor, batch, length) if tensor is not None and tensor.shape[-1] == length else None


def sequences_of(top: Frame | None, inner: Frame | None, batch: int, queries: int, keys: int, cross: bool) -> Sequences:
    inner = inner if inner is not None else top
    if inner is None:
        return Sequences(_identities(None, batch))
    query_ids = _exact(inner.ids, batch, queries)
    mask = inner.mask
    fits = mask is not None and mask.shape[1] in (queries, keys)  # else it speaks of another stack, or of raw input
    query_rows = _tail(mask, batch, queries) if fits else None
    if cross:
        encoder = inner.encoder_mask if inner.encoder_mask is not None else (top.mask if top is not None else None)
        key_ids = _exact(top.source_ids, batch, keys) if top is not None and top is not inner else None
        key_rows = _exact(encoder, batch, keys)
    else:
        key_ids = _exact(inner.ids, batch, keys)
        key_rows = _exact(mask, batch, keys)
    rows = query_rows.bool() if query_rows is not None else None
    columns = key_rows.bool() if key_rows is not None else None
    return Sequences(
        _identities(top if top is not None else inner, batch),
        query_ids,
        key_ids,
        rows,
        columns,
        _exact(inner.positions, batch, queries),
    )


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
    """Looks at packed documents once per module, and says once per watch where attention crosses."""

    def __init__(self, notices: Notices) -> None:
        self._looked: set[Site] = set()
        self._notices = notices

    def look(self, site: Site, structure: Structure, mask: Tensor | None, sequences: Sequences) -> None:
        """Warn where positions start again but attention crosses."""
        if self._notices.told("packing") or site in self._looked or sequences.positions is None:
            return
        found = documents(sequences.positions, sequences.query_rows)
        if found is None:
            return
        self._looked.add(site)
        if crosses(found, structure, mask):
            self._notices.say_once(
                "packing",
                f"position ids start again inside a row, but attention of {site.module} crosses from one document into "
                "another; pass position_ids without attention_mask, or a mask that keeps them apart.",
            )
