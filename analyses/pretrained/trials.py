"""The prompts of the label-association protocol, and its controls, for a given tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ...hooks.errors import BadInput
from ..inputs.corpus import Batch, start_token
from .evidence import LIKELIHOOD, SHOTS, predictive

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Control = Literal["main", "remapped", "shuffled", "ablated"]

PER = 50  # prompts per number of examples
CONTROLS: tuple[Control, ...] = ("main", "remapped", "shuffled", "ablated")
PAIRS = (("foo", "bar"), ("red", "blue"), ("cat", "dog"), ("yes", "no"), ("A", "B"), ("0", "1"))
BLANK = "?"
CARRIERS = [
    "apple",
    "river",
    "stone",
    "window",
    "garden",
    "engine",
    "pillow",
    "basket",
    "candle",
    "mirror",
    "ladder",
    "bottle",
    "carpet",
    "hammer",
    "pencil",
    "ribbon",
    "saddle",
    "tunnel",
    "violin",
    "wagon",
    "anchor",
    "bridge",
    "castle",
    "desert",
    "forest",
    "harbor",
    "island",
    "jacket",
    "kettle",
    "lantern",
    "meadow",
    "needle",
    "orchard",
    "palace",
    "quarry",
    "rocket",
    "statue",
    "temple",
    "valley",
    "wallet",
]


@dataclass(frozen=True, eq=False)
class Trials:
    """Prompts and what their labels say.

    Attributes:
        ids: token ids per prompt; labels: the ids of the two labels.
        shots, first (n,): k and n₁ as drawn; last (n,): 0 or 1, the last label, −1 where k = 0.
        informative: False where the prompt's labels carry nothing (shuffled, ablated), so that ½ is the answer.
    """

    ids: tuple[tuple[int, ...], ...]
    labels: tuple[int, int]
    words: tuple[str, str]
    shots: Ints
    first: Ints
    last: Ints
    informative: bool

    @property
    def second(self) -> Ints:
        return self.shots - self.first

    def truth(self) -> Array:
        """The label predictive (n,), ½ where labels carry nothing."""
        return predictive(self.first, self.second) if self.informative else np.full(len(self.shots), 0.5)


def single_token(word: str, tokenizer: Any) -> int:
    """The id of " word" as one token.

    Raises:
        BadInput: when the tokenizer splits it.
    """
    text = f" {word.strip()}"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or ids[0] == getattr(tokenizer, "unk_token_id", None):
        raise BadInput(
            f"The label {word!r} is {len(ids)} tokens of this tokenizer ({tokenizer.convert_ids_to_tokens(ids)}); labels "
            "must be single tokens: choose others with --labels."
        )
    return int(ids[0])


def label_pairs(tokenizer: Any, wanted: Sequence[str] | None = None) -> list[tuple[str, str]]:
    """Two pairs of labels that are single tokens: the one to use and the one of the remapped control.

    Raises:
        BadInput: when a wanted label is no single token, the two are equal, or no pair of the list fits.
    """
    fitting = []
    for pair in PAIRS:
        try:
            ids = [single_token(word, tokenizer) for word in pair]
        except BadInput:
            continue
        if ids[0] != ids[1]:
            fitting.append(pair)
    if wanted is not None:
        if len(wanted) != 2 or single_token(wanted[0], tokenizer) == single_token(wanted[1], tokenizer):
            raise BadInput(f"Two different labels are needed, not {', '.join(wanted) or 'none'}.")
        fitting = [(wanted[0], wanted[1]), *(pair for pair in fitting if not set(pair) & set(wanted))]
    if len(fitting) < 2:
        raise BadInput("This tokenizer has no two pairs of single-token labels; choose with --labels FIRST,SECOND.")
    return fitting[:2]


def trials(tokenizer: Any, words: tuple[str, str], control: Control = "main", per: int = PER, seed: int = 0) -> Trials:
    """`per` prompts for each number of examples, "carrier: label, carrier: label. carrier:".

    `control`: "shuffled" draws every label with probability ½, "ablated" puts "?" in place of every label; both leave ½ as
    the right answer. The draws are the same for "main", "remapped" and "ablated".

    Raises:
        BadInput: for labels that are not single tokens, or fewer than two prompts.
    """
    if per < 2:
        raise BadInput(f"At least 2 prompts for each number of examples are needed, not {per}.")
    labels = (single_token(words[0], tokenizer), single_token(words[1], tokenizer))
    generator = np.random.default_rng(seed)
    start = start_token(tokenizer)
    ids, shots, first, last = [], [], [], []
    for count in SHOTS:
        for _ in range(per):
            latent = int(generator.integers(2))
            wrong = generator.random(count) >= (0.5 if control == "shuffled" else LIKELIHOOD)
            drawn = np.where(wrong, 1 - latent, latent)
            carriers = [CARRIERS[place] for place in generator.permutation(len(CARRIERS))[: count + 1]]
            shown = [BLANK if control == "ablated" else words[label] for label in drawn]
            told = ", ".join(f"{carrier}: {label}" for carrier, label in zip(carriers, shown))
            text = f"{told}{'. ' if told else ''}{carriers[-1]}:"
            found = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids.append((*(() if start is None else (start,)), *(int(number) for number in found)))
            shots.append(count)
            first.append(int((drawn == 0).sum()))
            last.append(int(drawn[-1]) if count else -1)
    informative = control in ("main", "remapped")
    order = np.argsort([len(row) for row in ids], kind="stable")  # equally long ones lie together
    counts = [np.array(part)[order] for part in (shots, first, last)]
    return Trials(tuple(ids[place] for place in order), labels, words, counts[0], counts[1], counts[2], informative)


def batches(drawn: Trials, size: int = 25) -> list[Batch]:
    """Equally long prompts side by side, in their order."""
    found, start = [], 0
    for place in range(1, len(drawn.ids) + 1):
        ends = place == len(drawn.ids) or len(drawn.ids[place]) != len(drawn.ids[start])
        if ends or place - start == size:
            ids = torch.tensor(drawn.ids[start:place])
            found.append(Batch(ids, torch.ones_like(ids), torch.full_like(ids, -100)))
            start = place
    return found
