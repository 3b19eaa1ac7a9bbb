"""What is differentiated: which positions, and which loss.

The mean cross-entropy over a text is one question of many. `--targets` picks the positions, `--loss` what is asked there:
the next token's cross-entropy, or how far its logit lies above another one's.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...hooks.errors import BadInput
from .corpus import Batch, Window

Loss = Literal["ce", "logit-diff"]
LOSSES: tuple[Loss, ...] = ("ce", "logit-diff")
_COLUMNS = {"position", "text", "token", "against"}


@dataclass(frozen=True)
class Asked:
    """One target: the output at `position` − 1 of text `text` is asked for `token` (None: the text's own), against
    `against` where the loss is a difference of logits (None: the likeliest other token).
    """

    text: str
    position: int
    token: int | None = None
    against: int | None = None


@dataclass(frozen=True)
class Objective:
    """Which loss, at which positions: "all", "last" of every window, or `asked` ones."""

    loss: Loss = "ce"
    targets: str = "all"
    asked: tuple[Asked, ...] = ()

    @property
    def told(self) -> str:
        """What a run records, so that runs of other targets are not held against it."""
        if self.targets != "file":
            return self.targets
        return f"file {hashlib.sha256(repr(sorted(self.asked, key=repr)).encode()).hexdigest()[:16]}"

    def within(self, window: Window, offset: int) -> bool:
        """Whether a window holds any target."""
        return self.targets != "file" or any(
            one.text == window.source and 0 <= one.position - window.start + offset - 1 < len(window.ids) - 1
            for one in self.asked
        )

    @property
    def unit(self) -> str:
        return "nats per target" if self.loss == "ce" else "logits per target"

    def apply(self, batch: Batch, items: Sequence[Window], offset: int) -> tuple[Batch, Tensor | None]:
        """The batch with the chosen targets only, and what they are held against (B,T), −1 for the likeliest other.

        Args:
            items: the batch's windows; offset: tokens before the text's own in each (a start token).
        """
        targets = batch.targets
        if self.targets == "last":
            known = targets != -100
            last = known & (known.flip(1).cumsum(1).flip(1) == 1)
            return Batch(batch.ids, batch.mask, torch.where(last, targets, -100)), None
        if self.targets == "all":
            return batch, None
        chosen, against = torch.full_like(targets, -100), torch.full_like(targets, -1)
        for row, window in enumerate(items):
            for one in self.asked:
                place = one.position - window.start + offset - 1  # the output that predicts it
                if one.text == window.source and 0 <= place < len(window.ids) - 1:
                    chosen[row, place] = targets[row, place] if one.token is None else one.token
                    against[row, place] = -1 if one.against is None else one.against
        return Batch(batch.ids, batch.mask, chosen), against

    def summed(self, logits: Tensor, targets: Tensor, against: Tensor | None = None) -> Tensor:
        """The loss summed over targets: nats, or −(logit − the other's logit), so that it falls as the target wins."""
        if self.loss == "ce":
            logits = logits if logits.dtype == torch.float64 else logits.float()
            return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        there = targets != -100
        chosen, wanted = logits[there], targets[there]
        chosen = chosen if chosen.dtype == torch.float64 else chosen.float()
        own = chosen.gather(1, wanted[:, None])[:, 0]
        others = chosen.detach().scatter(1, wanted[:, None], float("-inf")).argmax(1)
        if against is not None:
            given = against[there].to(others.device)
            others = torch.where(given >= 0, given, others)
        return -(own - chosen.gather(1, others[:, None])[:, 0]).sum()


NEXT_TOKEN = Objective()


def objective(
    loss: str, targets: str, texts: Sequence[str], tokenizer: Any, windows: Sequence[Window], offset: int
) -> Objective:
    """From what the command line was told.

    Args:
        targets: "all", "last", or a CSV file with a column position (of the token that is asked for, 0 is the text's first)
            and, where wanted, text (name of the text file; default: the first), token and against (a token as the tokenizer
            spells it, or its id).

    Raises:
        BadInput: for another loss, a file that cannot be read, a column that is not known, a position in no window, or a
            string that is not one token.
    """
    if loss not in LOSSES:
        raise BadInput(f"--loss must be ce or logit-diff, not {loss!r}.")
    if targets in ("all", "last"):
        return Objective(loss, targets)
    path = Path(targets)
    if not path.is_file():
        raise BadInput(f"--targets must be all, last or a CSV file; {targets!r} does not exist.")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows, names = list(reader), set(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"The targets in {targets!r} cannot be read: {error}.") from error
    if "position" not in names or names - _COLUMNS:
        odd = ", ".join(sorted(names - _COLUMNS)) or "no column position"
        raise BadInput(f"{targets!r} needs a column position and may have text, token and against; it has {odd}.")
    if not rows:
        raise BadInput(f"{targets!r} names no target.")
    asked = tuple(_row(row, place + 2, targets, texts, tokenizer, windows, offset) for place, row in enumerate(rows))
    places = [(one.text, one.position) for one in asked]
    for line, place in enumerate(places):
        if place in places[:line]:
            raise BadInput(f"{targets!r}, line {line + 2}: position {place[1]} of {place[0]!r} is asked for twice.")
    return Objective(loss, "file", asked)


def _row(
    row: dict[str, str | None],
    line: int,
    file: str,
    texts: Sequence[str],
    tokenizer: Any,
    windows: Sequence[Window],
    offset: int,
) -> Asked:
    where = f"{file!r}, line {line}"
    try:
        position = int(row["position"] or "")
    except ValueError:
        raise BadInput(f"{where}: position must be a whole number, not {row['position']!r}.") from None
    text = row.get("text") or texts[0]
    if text not in texts:
        raise BadInput(f"{where}: no text is named {text!r}; there is {', '.join(repr(name) for name in texts)}.")
    if not any(
        window.source == text and 0 <= position - window.start + offset - 1 < len(window.ids) - 1 for window in windows
    ):
        raise BadInput(f"{where}: no window of {text!r} predicts position {position}; it has no context there.")
    return Asked(
        text, position, _token(row.get("token"), where, tokenizer), _token(row.get("against"), where, tokenizer)
    )


def _token(given: str | None, where: str, tokenizer: Any) -> int | None:
    if given is None or given == "":
        return None
    ids = tokenizer(given, add_special_tokens=False)["input_ids"]
    if len(ids) == 1:
        return int(ids[0])
    if given.isdigit() and int(given) < len(tokenizer):
        return int(given)
    raise BadInput(f"{where}: {given!r} is {len(ids)} tokens; give one token (mind a leading space) or its id.")
