"""A recurrence x → a·x + b (mod p), or independent symbols? Arithmetic tokens, or opaque ones.

With integer tokens three symbols settle a and b, and every further one multiplies the Bayes factor by p: 1, 1, 1, p,
p², …. With opaque tokens (a fresh relabelling per episode) the model sees only which symbols are equal, so the exact
posterior is over equality patterns: after five distinct symbols at p = 17 it is .579, where a reader who knew the
relabelling would be at .9966.

Shapes: n episodes, L tokens, p symbols, C = 2 classes, U distinct equality patterns of orbits.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from ..errors import TunnelError
from .tokens import check_symbols


@dataclass(frozen=True)
class RecurrenceContest:
    """`modulus` p, a prime; a, b and the first symbol are uniform on 0…p−1. `opaque`: tokens carry no arithmetic."""

    modulus: int = 17
    opaque: bool = False
    length: int = 16

    def __post_init__(self) -> None:
        if self.modulus < 2 or any(self.modulus % d == 0 for d in range(2, math.isqrt(self.modulus) + 1)):
            raise TunnelError(f"the modulus must be a prime, not {self.modulus}")

    stride = 1
    shift = 0
    classes = ("recurrence", "independent")

    @property
    def symbols(self) -> int:
        return self.modulus

    def draw(self, label: Tensor, generator: Generator, length: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Integer tokens (n, length) of classes `label` (n), and the coefficients (n, 2)."""
        n, p = len(label), self.modulus
        coefficients = torch.randint(p, (n, 2), generator=generator)
        independent = torch.randint(p, (n, length), generator=generator)
        orbit = [independent[:, 0]]
        for _ in range(length - 1):
            orbit.append((coefficients[:, 0] * orbit[-1] + coefficients[:, 1]) % p)
        return torch.where(label[:, None] == 0, torch.stack(orbit, 1), independent), {"coefficients": coefficients}

    def evidence(self, tokens: Tensor) -> Tensor:
        """(n, L, C) log probability of the tokens up to each position under each class."""
        length, p = tokens.shape[1], self.modulus
        independent = -math.log(p) * torch.arange(1, length + 1, dtype=torch.float64).expand(tokens.shape)
        if not self.opaque:
            recurrence = self._fitting(tokens).sum(-1).double().log() - 3 * math.log(p)
            return torch.stack((recurrence, independent), -1)
        patterns, weights = _orbit_patterns(p, length)
        pattern, distinct = equality_pattern(tokens)
        share = self._matching(pattern, patterns).double() @ weights
        naming = torch.lgamma((p - distinct + 1).double()) - math.lgamma(p + 1)
        return torch.stack((share.log() + naming, independent), -1)

    def following(self, tokens: Tensor) -> Tensor:
        """(n, L, C, p) next symbol under each class; uniform under a class already excluded."""
        (n, length), p = tokens.shape, self.modulus
        if self.opaque:
            recurrence = self._opaque_following(tokens)
        else:
            a, b = torch.arange(p * p) // p, torch.arange(p * p) % p
            fits = self._fitting(tokens).double()
            step = (a * tokens[..., None] + b) % p
            recurrence = torch.zeros(n, length, p, dtype=torch.float64).scatter_add_(2, step, fits)
        total = recurrence.sum(-1, keepdim=True)
        recurrence = torch.where(total > 0, recurrence / total.clamp(min=1e-300), 1 / p)
        return torch.stack((recurrence, torch.full((n, length, p), 1 / p, dtype=torch.float64)), 2)

    def class_asked(self, length: int) -> Tensor:
        """(L) bool: the class is asked at every symbol."""
        return torch.ones(length, dtype=torch.bool)

    def next_asked(self, length: int) -> Tensor:
        """(L) bool: and so is the next."""
        return torch.ones(length, dtype=torch.bool)

    def check(self, tokens: Tensor) -> None:
        """Raise `MalformedTokens` for symbols outside 0…p−1."""
        check_symbols(tokens, self.modulus)

    def _fitting(self, tokens: Tensor) -> Tensor:
        """(n, L, p²) bool: coefficient pairs that explain every step up to each position."""
        p = self.modulus
        a, b = torch.arange(p * p) // p, torch.arange(p * p) % p
        explained = (a * tokens[:, :-1, None] + b) % p == tokens[:, 1:, None]
        start = torch.ones(len(tokens), 1, p * p, dtype=torch.bool)
        return torch.cat((start, explained), 1).long().cumprod(1).bool()

    @staticmethod
    def _matching(pattern: Tensor, patterns: Tensor) -> Tensor:
        """(n, L, U) bool: orbit patterns equal to each prefix's."""
        same = pattern[:, :, None] == patterns.T[: pattern.shape[1]]
        return same.long().cumprod(1).bool()

    def _opaque_following(self, tokens: Tensor) -> Tensor:
        """(n, L, p) unnormalised: old symbols by their label in the pattern, new ones sharing what is left."""
        length, p = tokens.shape[1], self.modulus
        patterns, weights = _orbit_patterns(p, length + 1)
        pattern, distinct = equality_pattern(tokens)
        weighed = self._matching(pattern, patterns[:, :length]).double() * weights
        next_label = one_hot(patterns.T[1 : length + 1], p + 1).double()  # (L, U, p + 1)
        by_label = torch.einsum("nlu,lup->nlp", weighed, next_label)
        label_of = torch.full((*tokens.shape, p), -1)
        hot = one_hot(tokens, p).bool()
        label_of[hot] = pattern.flatten()
        label_of = label_of.cummax(1).values
        old = by_label.gather(2, label_of.clamp(min=0))
        fresh = by_label.gather(2, distinct[..., None].clamp(max=p)) / (p - distinct[..., None]).clamp(min=1)
        return torch.where(label_of >= 0, old, fresh)


def equality_pattern(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Labels 0, 1, 2… in order of first appearance (n, L), and the number of distinct symbols so far (n, L)."""
    earlier = tokens[:, :, None] == tokens[:, None]
    first = earlier.long().argmax(-1)
    fresh = first == torch.arange(tokens.shape[1])
    distinct = fresh.long().cumsum(1)
    return (distinct - 1).gather(1, first), distinct


@lru_cache(maxsize=16)
def _orbit_patterns(p: int, length: int) -> tuple[Tensor, Tensor]:
    """Distinct equality patterns (U, length) of all p³ orbits, and the share of orbits that show each (U)."""
    grid = torch.cartesian_prod(torch.arange(p), torch.arange(p), torch.arange(p))
    orbit = [grid[:, 2]]
    for _ in range(length - 1):
        orbit.append((grid[:, 0] * orbit[-1] + grid[:, 1]) % p)
    pattern, _ = equality_pattern(torch.stack(orbit, 1))
    patterns, counts = pattern.unique(dim=0, return_counts=True)
    return patterns, counts.double() / p**3
