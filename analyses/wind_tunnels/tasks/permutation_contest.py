"""Involution or three-cycles: two classes of fixed-point-free permutations, told apart by pairs (x, f(x)) of distinct
keys.

Evidence is a ratio of completions. After some pairs, an involution that fits has m matched couples and (V − 2m − 1)!!
completions; a product of three-cycles that fits has e₁ components known by one arrow and e₂ known by two or three,
leaving r = V − 2e₁ − 3e₂ free points: r!/(r − e₁)! ways to close the former and (r − e₁)!/(3^k k!), k = (r − e₁)/3, to
arrange the rest. Relabelling the symbols changes nothing, so opaque and integer tokens have the same posterior.

Shapes: n episodes, L tokens (x₁ f(x₁) x₂ f(x₂) …), V symbols, C = 2 classes.
"""

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from ..errors import TunnelError
from .tokens import check_symbols


@dataclass(frozen=True)
class Arrows:
    """What n partial permutations have shown: images and preimages (n, V; −1 unknown), component counts and what still
    fits (n).
    """

    image: Tensor
    preimage: Tensor
    couples: Tensor
    single: Tensor
    triple: Tensor
    is_involution: Tensor
    is_cycles: Tensor

    def extend(self, key: Tensor, value: Tensor) -> "Arrows":
        """The arrow key → value (n) added; an arrow shown before changes nothing."""
        n = torch.arange(len(key))
        follows, precedes = self.image[n, value], self.preimage[n, key]
        again = self.image[n, key] == value
        torn = ~again & ((self.image[n, key] >= 0) | (self.preimage[n, value] >= 0) | (key == value))
        back = follows == key
        involution = (follows < 0) | back
        involution &= (precedes < 0) | (precedes == value)
        before = self.preimage[n, precedes.clamp(min=0)].where(precedes >= 0, -1)
        after = self.image[n, follows.clamp(min=0)].where(follows >= 0, -1)
        cycles = ~back & ((precedes < 0) | (follows < 0) | (precedes == follows))
        cycles &= ((before < 0) | (before == value)) & ((after < 0) | (after == key))
        new = ~again
        grows = new & ((precedes >= 0) ^ (follows >= 0))
        alone = new & (precedes < 0) & (follows < 0)
        image, preimage = self.image.clone(), self.preimage.clone()
        image[n, key], preimage[n, value] = value, key
        return Arrows(
            image,
            preimage,
            self.couples + (new & ~back).long(),
            self.single + alone.long() - grows.long(),
            self.triple + grows.long(),
            self.is_involution & ~torn & (again | involution),
            self.is_cycles & ~torn & (again | cycles),
        )


@dataclass(frozen=True)
class PermutationContest:
    """`symbols` V, a multiple of six, and `pairs` ≤ V distinct keys per episode.

    Keys and values share tokens 0…V−1, so that only a position's parity tells them apart, which rotary positions do not
    show. `separate` writes values as V…2V−1 instead.
    """

    symbols: int = 12
    pairs: int = 11
    separate: bool = False

    def __post_init__(self) -> None:
        if self.symbols < 6 or self.symbols % 6:
            raise TunnelError(f"{self.symbols} symbols split into no couples and triples both: use a multiple of six")
        if not 1 <= self.pairs <= self.symbols:
            raise TunnelError(f"{self.pairs} distinct keys do not fit {self.symbols} symbols")

    stride = 2
    classes = ("involution", "3-cycles")

    @property
    def shift(self) -> int:
        """What a value's token is above its symbol."""
        return self.symbols if self.separate else 0

    @property
    def length(self) -> int:
        return 2 * self.pairs

    def draw(self, label: Tensor, generator: Generator, length: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Tokens (n, length) of classes `label` (n), and the permutations (n, V)."""
        if math.ceil(length / 2) > self.symbols:
            raise TunnelError(f"{length} tokens need more distinct keys than {self.symbols}")
        n, symbols = len(label), self.symbols
        shuffled = torch.rand(n, symbols, generator=generator).argsort(-1)
        place = torch.arange(symbols)
        partner = torch.where(label[:, None] == 0, place ^ 1, place + 1 - 3 * (place % 3 == 2).long())
        permutation = torch.empty_like(shuffled).scatter_(1, shuffled, shuffled.gather(1, partner))
        keys = torch.rand(n, symbols, generator=generator).argsort(-1)
        tokens = torch.stack((keys, permutation.gather(1, keys)), -1).flatten(1)
        return tokens[:, :length].contiguous(), {"permutation": permutation}

    def evidence(self, tokens: Tensor) -> Tensor:
        """(n, L, C) log of the share of each class's permutations that fit the pairs up to each token, −∞ where none
        does.
        """
        fits, state = [], self._nothing(len(tokens))
        for t in range(tokens.shape[1]):
            if t % 2:
                state = state.extend(tokens[:, t - 1], tokens[:, t])
            fits.append(self._log_completions(state))
        return torch.stack(fits, 1) - self._log_completions(self._nothing(1))

    def following(self, tokens: Tensor) -> Tensor:
        """(n, L, C, V) next value under each class, at keys; NaN at values, uniform under a class already excluded."""
        n, length = tokens.shape
        rows = torch.full((n, length, 2, self.symbols), math.nan, dtype=torch.float64)
        state = self._nothing(n)
        for t in range(length):
            if t % 2:
                state = state.extend(tokens[:, t - 1], tokens[:, t])
                continue
            options = [
                self._log_completions(state.extend(tokens[:, t], torch.full((n,), value)))
                for value in range(self.symbols)
            ]
            weights = torch.stack(options, -1)
            dead = weights.isinf().all(-1, keepdim=True)
            rows[:, t] = torch.where(dead, 0.0, weights).softmax(-1)
        return rows

    def class_asked(self, length: int) -> Tensor:
        """(L) bool: the class is asked once a pair is complete, at its value."""
        return torch.arange(length) % 2 == 1

    def next_asked(self, length: int) -> Tensor:
        """(L) bool: the next symbol is asked at keys."""
        return torch.arange(length) % 2 == 0

    def check(self, tokens: Tensor) -> None:
        """Raise `MalformedTokens` for symbols outside 0…V−1."""
        check_symbols(tokens, self.symbols)

    def _nothing(self, n: int) -> Arrows:
        unknown = torch.full((n, self.symbols), -1)
        none, fits = torch.zeros(n, dtype=torch.int64), torch.ones(n, dtype=torch.bool)
        return Arrows(unknown, unknown.clone(), none, none, none, fits, fits)

    def _log_completions(self, state: Arrows) -> Tensor:
        """(n, C) logarithm of the number of permutations of each class that fit."""
        left = (self.symbols - 2 * state.couples).double()
        half = left / 2
        # (2h − 1)!! = (2h)! / (2^h h!)
        involutions = torch.lgamma(left + 1) - half * math.log(2) - torch.lgamma(half + 1)
        free = (self.symbols - 2 * state.single - 3 * state.triple).double()
        rest = free - state.single
        closings = torch.lgamma(free + 1) - torch.lgamma(rest.clamp(min=0) + 1)
        arranged = (
            torch.lgamma(rest.clamp(min=0) + 1) - rest / 3 * math.log(3) - torch.lgamma(rest.clamp(min=0) / 3 + 1)
        )
        possible = torch.stack((state.is_involution & (left >= 0), state.is_cycles & (rest >= 0)), -1)
        counts = torch.stack((involutions, closings + arranged), -1)
        return torch.where(possible, counts, -math.inf)
