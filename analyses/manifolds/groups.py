"""Keys in groups: by the count of symbols already used, by exact entropy, or by position.

On `bijection-repeats` a new key's entropy is a function of the count d, so that new keys alone cannot tell the two apart;
repeated keys can, because their entropy is 0 whatever the count. Inside one position p a count of symbols and a count of
repeats are one number, d = p − repeats: they are told apart across positions only.

Shapes: n episodes, L positions, N rows, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...hooks.errors import BadInput, BadRequest
from ..wind_tunnels.tasks.bijection import Bijection
from ..wind_tunnels.tasks.protocol import Tunnel

Array = NDArray[np.float64]
Whole = NDArray[np.int64]
Mask = NDArray[np.bool_]

Group = Literal["count", "entropy", "position"]
Kept = Literal["new", "repeated", "all"]

FEWEST = 12  # episodes in a group, below which its mean is not drawn
CURVE = 3  # groups, below which there is no curve
LEVELS, BINS = 24, 10  # distinct values that are groups of their own, and the bins of more than that


@dataclass(frozen=True, eq=False)
class Marks:
    """What is known of every asked place, N of them.

    Attributes:
        sequence, position: where it is. entropy: exact, bits. count: symbols already used (empty where the task counts
            nothing). repeated: whether the key was shown before (empty where keys do not come again).
    """

    sequence: Whole
    position: Whole
    entropy: Array
    count: Whole
    repeated: Mask

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def sequences(self) -> int:
        return int(self.sequence.max()) + 1 if len(self) else 0

    def where(self, keep: Mask) -> Marks:
        """Some of them, sequences numbered as they are."""
        count = self.count[keep] if len(self.count) else self.count
        repeated = self.repeated[keep] if len(self.repeated) else self.repeated
        return Marks(self.sequence[keep], self.position[keep], self.entropy[keep], count, repeated)

    def of(self, vectors: Array) -> Array:
        """The rows (N,d) of vectors (n,L,d)."""
        return np.asarray(vectors[self.sequence, self.position])


@dataclass(frozen=True, eq=False)
class Groups:
    """A number (N,) per row, −1 for a row that is in none; `values` (G,) of the groups; `left_out`: sentences."""

    number: Whole
    values: Array
    left_out: tuple[str, ...] = ()

    def without(self, group: int, why: str) -> Groups:
        """Without one group."""
        number = np.where(self.number == group, -1, self.number - (self.number > group))
        return Groups(number, np.delete(self.values, group), (*self.left_out, why))


def marks_of(tunnel: Tunnel, tokens: Tensor) -> Marks:
    """Every asked place of the episodes `tokens` (n,L) of a task."""
    entropy = tunnel.entropy(tokens).numpy()
    asked = np.isfinite(entropy)
    sequence, position = np.nonzero(asked)
    if not isinstance(tunnel, Bijection):
        empty = np.zeros(0, dtype=np.int64)
        return Marks(sequence, position, entropy[asked], empty, empty.astype(bool))
    keys = tokens[:, ::2].numpy()
    before = np.tril(np.ones((keys.shape[1],) * 2, dtype=bool), -1)
    same = (keys[:, :, None] == keys[:, None]) & before
    repeated = same.any(2)
    count = (~repeated).cumsum(1) - ~repeated  # of new keys before this one
    place = sequence, position // 2
    return Marks(sequence, position, entropy[asked], count[place].astype(np.int64), repeated[place])


def one_position(entropy: Array) -> Marks:
    """Marks of n prompts read at one place each, with the model's own entropy (n,)."""
    zeros = np.zeros(len(entropy), dtype=np.int64)
    return Marks(np.arange(len(entropy)), zeros, entropy, zeros[:0], zeros[:0].astype(bool))


def kept(marks: Marks, keys: Kept, name: str) -> Mask:
    """Which rows are new keys, repeated keys, or any.

    Raises:
        BadRequest: for repeated keys of a task that has none.
    """
    if keys not in get_args(Kept):
        raise BadRequest(f"--keys is {', '.join(get_args(Kept))}, not {keys!r}.")
    if keys == "all":
        return np.ones(len(marks), dtype=bool)
    if not len(marks.repeated):
        raise BadRequest(f"{name} has no keys that come again; leave --keys out.")
    if keys == "repeated" and not marks.repeated.any():
        raise BadRequest(f"{name} repeats no key; choose --keys new.")
    return marks.repeated if keys == "repeated" else ~marks.repeated


def grouped(marks: Marks, group: Group, name: str, bins: int = BINS, levels: int = LEVELS) -> Groups:
    """The rows in groups; values that are few are groups of their own, more than 24 are put into bins of equal size.

    Raises:
        BadRequest: for a group that the task does not define.
        BadInput: when fewer than three groups have rows of 12 episodes.
    """
    if group not in get_args(Group):
        raise BadRequest(f"--group is {', '.join(get_args(Group))}, not {group!r}.")
    if group == "count" and not len(marks.count):
        raise BadRequest(f"{name} counts no used symbols; choose --group entropy or --group position.")
    if group == "position" and len(np.unique(marks.position)) < 2:
        raise BadRequest(f"{name} is read at one position; choose --group entropy.")
    known = {"count": marks.count, "entropy": np.round(marks.entropy, 9), "position": marks.position}[group]
    numbers = known.astype(np.float64)
    values, number = np.unique(numbers, return_inverse=True)
    number = number.reshape(-1)
    if len(values) > levels:
        place = numbers.argsort(kind="stable").argsort(kind="stable")
        number = place * bins // len(numbers)
        values = np.array([numbers[number == one].mean() for one in range(bins)])
    found = Groups(number.astype(np.int64), values)
    small = [one for one in range(len(values)) if len(np.unique(marks.sequence[number == one])) < FEWEST]
    if small:
        named = ", ".join(f"{values[one]:g}" for one in small[:3]) + (", …" if len(small) > 3 else "")
        for one in reversed(small):
            found = found.without(one, "")
        plural = "groups have" if len(small) > 1 else "group has"
        found = replace(
            found, left_out=(f"{len(small)} {plural} rows of fewer than {FEWEST} episodes, left out: {named}.",)
        )
    if len(found.values) < CURVE:
        raise BadInput(
            f"{len(found.values)} of {len(values)} groups by {group} have rows of {FEWEST} episodes, and a curve needs "
            f"{CURVE}: give more --sequences."
        )
    return found


def first_key(marks: Marks, rows: Array) -> tuple[Mask, float]:
    """Which rows stay (N,) without the first key, and how far out its mean lies: the distance from the centre of the other
    positions' means over the furthest of theirs.

    It sees nothing but itself, so that its values, outputs and stream are of another kind; where they lie far off they take
    the first axis over. Rows of a single position all stay.
    """
    places = np.unique(marks.position)
    first = marks.position == places[0]
    if len(places) < 3:
        return np.ones(len(marks), dtype=bool), float("nan")
    means = np.stack([rows[marks.position == place].mean(0) for place in places[1:]])
    centre = means.mean(0)
    furthest = float(np.linalg.norm(means - centre, axis=1).max())
    return ~first, float(np.linalg.norm(rows[first].mean(0) - centre)) / max(furthest, 1e-300)
