"""Bijection: key–value pairs of a fresh permutation; what does the next key map to?

Two forms. With `repeats` > 0 keys may come again, so that key and value must be bound and entropy differs within one
position: 0 bits for a key already shown, log2(V − d) after d distinct pairs otherwise. With `repeats` = 0 (the papers'
form) every key is new: the posterior depends on the set of used values only, and its entropy on the position only, so
that a model can be calibrated without binding anything.

Shapes: n episodes, L tokens (k₁ v₁ k₂ v₂ … k_P: P keys, the last value not shown), V symbols. Keys are tokens 0…V−1,
values V…2V−1.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from ..errors import ImpossibleObservation, MalformedTokens, TunnelError
from .bits import LN2, never_asked, uniform_like
from .protocol import Beliefs, Episodes
from .registry import register
from .tokens import check_shape


@dataclass(frozen=True)
class Bijection:
    """`symbols` V, `pairs` P keys per episode, `repeats` the probability that a key is one already shown."""

    symbols: int = 20
    pairs: int = 19
    repeats: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.repeats < 1.0:
            raise TunnelError(f"repeats is a probability below 1, not {self.repeats}")
        if self.symbols < 1 or self.pairs < 1 or (self.repeats == 0.0 and self.pairs > self.symbols):
            raise TunnelError(
                f"{self.pairs} distinct keys do not fit {self.symbols} symbols: lower pairs or allow repeats"
            )

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return tuple(f"k{i}" for i in range(self.symbols)) + tuple(f"v{i}" for i in range(self.symbols))

    @property
    def outcomes(self) -> tuple[int, ...]:
        return tuple(range(self.symbols, 2 * self.symbols))

    @property
    def hypotheses(self) -> None:
        """V! permutations are not listed; `posterior` gives their V×V marginals."""
        return None

    @property
    def length(self) -> int:
        return 2 * self.pairs - 1

    def sample(self, n: int, generator: Generator, length: int | None = None) -> Episodes:
        """n episodes of `length` tokens; every key position is supervised with the value of its key."""
        length = self.length if length is None else length
        pairs = (length + 1) // 2
        if self.repeats == 0.0 and pairs > self.symbols:
            raise TunnelError(f"{length} tokens need {pairs} distinct keys of {self.symbols}")
        permutation = torch.rand(n, self.symbols, generator=generator).argsort(-1)
        order = torch.rand(n, self.symbols, generator=generator).argsort(-1)
        wants_repeat = torch.rand(n, pairs, generator=generator) < self.repeats
        pick = torch.rand(n, pairs, generator=generator)
        distinct = torch.zeros(n, dtype=torch.int64)
        keys = torch.empty(n, pairs, dtype=torch.int64)
        for j in range(pairs):
            repeat = (wants_repeat[:, j] & (distinct > 0)) | (distinct == self.symbols)
            old = (pick[:, j] * distinct).long().clamp(max=self.symbols - 1)
            keys[:, j] = order.gather(1, torch.where(repeat, old, distinct)[:, None])[:, 0]
            distinct = distinct + (~repeat).long()
        values = permutation.gather(1, keys)
        tokens = torch.stack((keys, values + self.symbols), -1).flatten(1)[:, :length].contiguous()
        targets = torch.full((n, length), -1)
        targets[:, ::2] = values
        return Episodes(tokens, targets, {"permutation": permutation}, self.outcomes)

    def predictive(self, tokens: Tensor) -> Tensor:
        """(n, L, V): at a key, one-hot on its value if shown before, else uniform over the unused values; NaN at
        values.
        """
        keys, values = self._read(tokens)
        return self._answers(tokens, keys, values, window=None)

    def posterior(self, tokens: Tensor) -> Beliefs:
        """Marginals (n, L, V, V) of the permutation, row key, column value, at every position."""
        keys, values = self._read(tokens)
        n, length = tokens.shape
        shown = one_hot(keys[:, : values.shape[1]], self.symbols)[..., None] * one_hot(values, self.symbols)[:, :, None]
        known = torch.cat((shown.new_zeros(n, 1, self.symbols, self.symbols), shown), 1).cumsum(1).clamp(max=1).double()
        known = known[:, (torch.arange(length) + 1) // 2]
        used, bound = known.sum(-2), known.sum(-1)
        free = (1 - used) / (self.symbols - used.sum(-1, keepdim=True)).clamp(min=1)
        return Beliefs(torch.where(bound[..., None] > 0, known, free[..., None, :]), "marginals")

    def entropy(self, tokens: Tensor, of: Literal["predictive", "posterior"] = "predictive") -> Tensor:
        """(n, L) bits: log2(V − d) or 0 at keys; of="posterior": log2 (V − d)! of the whole permutation."""
        keys, values = self._read(tokens)
        used, seen, _ = self._seen(keys, values, window=None)
        n, length = tokens.shape
        if of == "predictive":
            entropy = torch.full((n, length), math.nan, dtype=torch.float64)
            entropy[:, ::2] = torch.where(seen, 0.0, (self.symbols - used.sum(-1)).clamp(min=1).double().log2())
            return entropy
        counts = (one_hot(values, self.symbols).cumsum(1) > 0).sum(-1)
        counts = torch.cat((counts.new_zeros(n, 1), counts), 1)[:, (torch.arange(length) + 1) // 2]
        return torch.lgamma((self.symbols - counts + 1).double()) / LN2 + 0.0

    def baselines(self, tokens: Tensor) -> dict[str, Tensor]:
        """Uniform (also the best constant and the best per position, by symmetry), the last 1/2/3 pairs, and no
        binding.
        """
        keys, values = self._read(tokens)
        truth = self._answers(tokens, keys, values, window=None)
        rivals = {"uniform": uniform_like(truth), "constant": uniform_like(truth), "position": uniform_like(truth)}
        for window in (1, 2, 3):
            rivals[f"last {window} pairs"] = self._answers(tokens, keys, values, window)
        used, _, _ = self._seen(keys, values, window=None)
        count = used.sum(-1, keepdim=True)
        old = used / count.clamp(min=1)
        new = (1 - used) / (self.symbols - count).clamp(min=1)
        again = torch.where(count == 0, 0.0, torch.where(count == self.symbols, 1.0, self.repeats))
        rivals["no binding"] = never_asked(*truth.shape)
        rivals["no binding"][:, ::2] = again * old + (1 - again) * new
        return rivals

    def _answers(self, tokens: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """The predictive of a reader that remembers the last `window` pairs (None: all of them)."""
        used, seen, answer = self._seen(keys, values, window)
        unused = (1 - used) / (self.symbols - used.sum(-1, keepdim=True)).clamp(min=1)
        answers = never_asked(*tokens.shape, self.symbols)
        answers[:, ::2] = torch.where(seen[..., None], answer, unused)
        return answers

    def _seen(self, keys: Tensor, values: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Per key position: used values (n, P, V), whether the key was shown (n, P), its value one-hot (n, P, V)."""
        row, column = torch.arange(keys.shape[1])[:, None], torch.arange(values.shape[1])
        visible = column < row
        if window is not None:
            visible = visible & (column >= row - window)
        hot = one_hot(values, self.symbols).double()
        same = ((keys[:, :, None] == keys[:, None, : values.shape[1]]) & visible).double()
        answer = (same @ hot).clamp(max=1)
        used = (visible.double() @ hot).clamp(max=1)
        return used, answer.sum(-1) > 0, answer

    def _read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (n, P) and values (n, P or P − 1), both 0…V−1, after checking that some permutation permits them."""
        check_shape(tokens)
        keys, values = tokens[:, ::2], tokens[:, 1::2] - self.symbols
        outside = ((keys < 0) | (keys >= self.symbols)).any(1)
        outside |= ((values < 0) | (values >= self.symbols)).any(1)
        if outside.any():
            raise MalformedTokens(
                f"row {int(outside.nonzero()[0])}: keys 0…{self.symbols - 1} and values "
                f"{self.symbols}…{2 * self.symbols - 1} must alternate, a key first"
            )
        shown = keys[:, : values.shape[1]]
        same_key = shown[:, :, None] == shown[:, None]
        same_value = values[:, :, None] == values[:, None]
        torn = (same_key != same_value).flatten(1).any(1)
        if torn.any():
            raise ImpossibleObservation(f"row {int(torn.nonzero()[0])}: its pairs fit no permutation of the symbols")
        return keys, values


@register("bijection-repeats")
def bijection_repeats() -> Bijection:
    return Bijection(symbols=12, pairs=18, repeats=0.5)


@register("bijection-distinct")
def bijection_distinct() -> Bijection:
    return Bijection(symbols=20, pairs=19)
