"""Prompts that are the same for every model: shipped public-domain passages, or the user's own.

A prompt is the last `length` tokens of a passage (after the tokenizer's start token, where it puts one), so that all are
equally long; every passage ends in words and a full stop, so that they end in the same token. Where a tokenizer ends them
differently, `residualised` takes the last token's own mean out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ...hooks.errors import BadInput
from .corpus import Batch, context_of, encode, read_text, start_token
from .examples import text_file

Array = NDArray[np.float64]

GENRES = ("code", "fiction", "satire", "scripture", "speeches")
SEPARATOR = "\n%\n"
COUNT, LENGTH, SEED = 75, 64, 0
FEWEST = 10


@dataclass(frozen=True)
class Prompts:
    """Token ids of equally long prompts.

    `genres`: one name per prompt. `short`: passages left out because they have too few tokens. `last`: the last tokens.
    """

    ids: tuple[tuple[int, ...], ...]
    genres: tuple[str, ...]
    short: int

    @property
    def last(self) -> tuple[int, ...]:
        return tuple(row[-1] for row in self.ids)

    def batches(self, size: int = 15) -> Iterator[Batch]:
        """Batches of at most `size` prompts, next-token targets beside them."""
        for first in range(0, len(self.ids), size):
            ids = torch.tensor(self.ids[first : first + size])
            targets = torch.full_like(ids, -100)
            targets[:, :-1] = ids[:, 1:]
            yield Batch(ids, torch.ones_like(ids), targets)


def passages(genre: str) -> list[str]:
    """The shipped passages of a genre, in the order of their text.

    Raises:
        BadInput: for a genre that is not shipped.
    """
    if genre not in GENRES:
        raise BadInput(f"There is no genre {genre!r}; choose from {', '.join(GENRES)}.")
    return text_file(f"passages-{genre}.txt").read_text(encoding="utf-8").strip("\n").split(SEPARATOR)


def own_passages(path: str | Path) -> list[str]:
    """The passages of a file of one's own: separated by lines holding "%", else by blank lines.

    Raises:
        BadInput: when the file is missing, empty, blank or no text.
    """
    text = read_text(path).strip("\n")
    parts = text.split(SEPARATOR) if SEPARATOR in text else text.split("\n\n")
    return [part.strip("\n") for part in parts if part.strip()]


def drawn(genre: str | None = None, count: int = COUNT, seed: int = SEED) -> list[tuple[str, str]]:
    """`count` shipped passages as (genre, text), without repeats: of one genre, or evenly over all ("mixed").

    Raises:
        BadInput: when there are fewer.
    """
    generator = np.random.default_rng(seed)
    wanted = GENRES if genre is None else (genre,)
    found: list[tuple[str, str]] = []
    for place, name in enumerate(wanted):
        texts = passages(name)
        share = count // len(wanted) + (place < count % len(wanted))
        if share > len(texts):
            raise BadInput(f"{name} has {len(texts)} passages, not {share}.")
        found.extend((name, texts[number]) for number in generator.permutation(len(texts))[:share])
    return found


def prompts(texts: Sequence[tuple[str, str]], tokenizer: Any, model: nn.Module, length: int = LENGTH) -> Prompts:
    """The last `length` tokens of every passage (genre, text), start token included.

    Raises:
        BadInput: for a length that does not fit the model, or when fewer than ten passages are long enough.
    """
    context = context_of(model)
    if length < 2 or (context is not None and length > context):
        raise BadInput(f"Prompts of {length} tokens do not fit a model whose context is {context} tokens.")
    first = start_token(tokenizer)
    head = () if first is None else (first,)
    ids, genres, short = [], [], 0
    for genre, text in texts:
        found = encode(text, f"a passage of {genre}", tokenizer, model) if text.strip() else []
        if len(found) + len(head) < length:
            short += 1
            continue
        ids.append((*head, *found[len(found) - (length - len(head)) :]))
        genres.append(genre)
    if len(ids) < FEWEST:
        raise BadInput(
            f"{len(ids)} of {len(texts)} passages have {length} tokens; give longer ones or lower --length "
            f"(at least {FEWEST} prompts are needed)."
        )
    return Prompts(tuple(ids), tuple(genres), short)


def residualised(vectors: Array, last: Sequence[int]) -> tuple[Array, NDArray[np.bool_], str]:
    """Vectors (n,·) without what their prompts' last token explains, which of them are left, and a note.

    Prompts that all end in one token are returned as they are; else every vector loses the mean of its token, and
    prompts whose token ends no other one are left out.
    """
    tokens = np.asarray(last)
    if len(set(last)) == 1:
        return vectors, np.ones(len(tokens), dtype=bool), "all prompts end in the same token"
    _, number, count = np.unique(tokens, return_inverse=True, return_counts=True)
    mean = np.zeros((len(count), *vectors.shape[1:]))
    np.add.at(mean, number, vectors)
    mean /= count.reshape(-1, *(1,) * (vectors.ndim - 1))
    keep = count[number] > 1
    note = f"residualised on {len(count)} last tokens, {int((~keep).sum())} prompts with a token of their own left out"
    return (vectors - mean[number])[keep], keep, note
