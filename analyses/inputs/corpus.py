"""From text files to windows of token ids that fit a model's context.

Shapes: T tokens in a window.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...hooks.errors import BadInput


@dataclass(frozen=True)
class Window:
    """A run of consecutive tokens of one text; `source` names the text, `start` is its first token there."""

    ids: tuple[int, ...]
    source: str
    start: int


@dataclass(frozen=True, eq=False)
class Batch:
    """Windows side by side, padded on the right: ids and mask (B,T), targets (B,T) aligned with the output, −100 unused."""

    ids: Tensor
    mask: Tensor
    targets: Tensor

    @property
    def count(self) -> int:
        return int((self.targets != -100).sum())


def read_text(path: str | Path) -> str:
    """The text of a file, or of standard input for "-".

    Raises:
        BadInput: when it cannot be read, is not UTF-8 text, or is blank.
    """
    if str(path) == "-":
        data, name = sys.stdin.buffer.read(), "standard input"
    else:
        file, name = Path(path), repr(str(path))
        if file.is_dir():
            raise BadInput(f"{name} is a folder; give a text file.")
        if not file.exists():
            raise BadInput(f"The text file {name} does not exist.")
        try:
            data = file.read_bytes()
        except OSError as error:
            raise BadInput(f"{name} cannot be read ({error.strerror}).") from error
    if b"\0" in data:
        raise BadInput(f"{name} is binary, not text.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{name} is not UTF-8 text (byte {error.start}); convert it first.") from error
    text = text.replace("\r\n", "\n")
    if not text.strip():
        raise BadInput(f"{name} is {'blank' if text else 'empty'}; give a text with at least two tokens.")
    return text


def context_of(model: nn.Module) -> int | None:
    """The longest sequence that the model's configuration allows, or None when it names none."""
    config = getattr(model, "config", None)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value - _position_offset(model)
    return None


def _position_offset(model: nn.Module) -> int:
    """Rows of the position table that no token uses: families after RoBERTa count positions from the padding id on."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.padding_idx + 1
    return 0


def encode(text: str, source: str, tokenizer: Any, model: nn.Module) -> list[int]:
    """Token ids of a text without special tokens.

    Raises:
        BadInput: when there are fewer than two tokens, or an id that the model has no embedding for.
    """
    ids = [int(number) for number in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
    if len(ids) < 2:
        raise BadInput(f"{source} is {len(ids)} token{'s' * (len(ids) != 1)} long; a next-token loss needs two.")
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    rows = int(embedding.num_embeddings)
    worst = max(ids)
    if worst >= rows:
        raise BadInput(
            f"{source} has token {tokenizer.convert_ids_to_tokens(worst)!r} with id {worst}, but the model has only "
            f"{rows} embeddings (the tokenizer knows {len(tokenizer)} tokens); load the model's own tokenizer."
        )
    return ids


def start_token(tokenizer: Any) -> int | None:
    """The token that the tokenizer itself puts before every text, if it does."""
    first = getattr(tokenizer, "bos_token_id", None)
    if first is None:
        return None
    return first if tokenizer("a")["input_ids"][:1] == [first] else None


def windows(ids: Sequence[int], source: str, length: int, start: int | None) -> list[Window]:
    """Cut ids into windows of at most `length` tokens, each after the start token; a rest of one token is left out."""
    room = max(1, length - (start is not None))
    head = () if start is None else (start,)
    cut = [Window((*head, *ids[place : place + room]), source, place) for place in range(0, len(ids), room)]
    return [window for window in cut if len(window.ids) >= 2]


def batches(items: Sequence[Window], size: int, padding: int) -> Iterator[Batch]:
    """Windows in groups of `size`, padded on the right with id `padding` under a mask built from lengths."""
    for first in range(0, len(items), size):
        group = items[first : first + size]
        width = max(len(window.ids) for window in group)
        ids = torch.full((len(group), width), padding, dtype=torch.long)
        mask = torch.zeros(len(group), width, dtype=torch.long)
        targets = torch.full((len(group), width), -100, dtype=torch.long)
        for row, window in enumerate(group):
            count = len(window.ids)
            ids[row, :count] = torch.tensor(window.ids)
            mask[row, :count] = 1
            targets[row, : count - 1] = ids[row, 1:count]
        yield Batch(ids, mask, targets)
