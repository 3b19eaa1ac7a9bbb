"""Associative recall: noisy key–value pairs, then questions about keys shown once, again, or never.

Every key holds one value, uniform and independent. A presentation shows it, except that with probability ε it shows
one of the others; keys are drawn afresh for every presentation, so that some come several times and their evidence
adds up. After the pairs come questions, bare keys of which some are absent; the answer is the value the key truly
holds, which a single flipped presentation does not settle.

Shapes: n episodes, L tokens (k₁ v₁ … k_P v_P, then questions), K keys, W values. Keys are tokens 0…K−1, values
K…K+W−1.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from ..errors import ImpossibleObservation, MalformedTokens, TunnelError
from .bits import entropy_bits, never_asked, uniform_like
from .protocol import Beliefs, Episodes
from .registry import register
from .tokens import check_shape


@dataclass(frozen=True)
class AssociativeRecall:
    """`pairs` P presentations and `questions`; `flip` ε; a question is about an absent key with probability `absent`
    where one exists.
    """

    keys: int = 16
    values: int = 8
    pairs: int = 12
    questions: int = 4
    flip: float = 0.1
    absent: float = 0.25

    def __post_init__(self) -> None:
        if self.keys < 1 or self.values < 2 or self.pairs < 1 or self.questions < 1:
            raise TunnelError("recall needs a key, two values, a pair and a question at least")
        if not 0 <= self.flip <= 1 or not 0 <= self.absent <= 1:
            raise TunnelError(f"flip ({self.flip}) and absent ({self.absent}) are probabilities")

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return tuple(f"k{i}" for i in range(self.keys)) + tuple(f"v{i}" for i in range(self.values))

    @property
    def outcomes(self) -> tuple[int, ...]:
        return tuple(range(self.keys, self.keys + self.values))

    @property
    def hypotheses(self) -> None:
        """W^K tables are not listed; `posterior` gives each key's marginal."""
        return None

    @property
    def length(self) -> int:
        return 2 * self.pairs + self.questions

    def sample(self, n: int, generator: Generator, length: int | None = None) -> Episodes:
        """n episodes; questions are supervised with the true value of their key. A longer `length` asks more
        questions.
        """
        length = self.length if length is None else length
        asked = max(0, length - 2 * self.pairs)
        table = torch.randint(self.values, (n, self.keys), generator=generator)
        shown = torch.randint(self.keys, (n, self.pairs), generator=generator)
        flips = torch.rand(n, self.pairs, generator=generator) < self.flip
        shift = torch.randint(1, self.values, (n, self.pairs), generator=generator)
        values = (table.gather(1, shown) + torch.where(flips, shift, 0)) % self.values
        present = one_hot(shown, self.keys).sum(1).clamp(max=1).double()
        wants_absent = torch.rand(n, asked, generator=generator) < self.absent
        all_present = present.sum(-1) == self.keys
        pick = torch.rand(n, asked, self.keys, generator=generator, dtype=torch.float64) + 1e-9
        eligible = torch.where(
            (wants_absent & ~all_present[:, None])[..., None], 1 - present[:, None], present[:, None]
        )
        questions = (pick * eligible).argmax(-1)
        pairs = torch.stack((shown, values + self.keys), -1).flatten(1)
        tokens = torch.cat((pairs, questions), 1)[:, :length].contiguous()
        targets = torch.full(tokens.shape, -1)
        targets[:, 2 * self.pairs :] = table.gather(1, questions)
        return Episodes(tokens, targets, {"table": table}, self.outcomes)

    def predictive(self, tokens: Tensor) -> Tensor:
        """(n, L, W) at questions: ∝ Π (1 − ε or ε/(W − 1)) over the key's presentations; uniform for an absent key."""
        keys, values = self._read(tokens)
        return self._answer(tokens, keys, values, bound=True)

    def posterior(self, tokens: Tensor) -> Beliefs:
        """Marginals (n, L, K, W) of the table at every position; keys are independent."""
        keys, values = self._read(tokens)
        shown = one_hot(keys, self.keys)[..., None] * one_hot(values, self.values)[:, :, None]
        counts = torch.cat((shown.new_zeros(len(tokens), 1, self.keys, self.values), shown), 1).cumsum(1)
        when = (torch.arange(tokens.shape[1]) + 1) // 2
        return Beliefs(self._belief(counts[:, when.clamp(max=keys.shape[1])]), "marginals")

    def entropy(self, tokens: Tensor, of: Literal["predictive", "posterior"] = "predictive") -> Tensor:
        """(n, L) bits; of="posterior": of the whole table, the sum over keys."""
        if of == "predictive":
            return entropy_bits(self.predictive(tokens))
        return entropy_bits(self.posterior(tokens).values).sum(-1)

    def baselines(self, tokens: Tensor) -> dict[str, Tensor]:
        """Uniform (the best constant and position, by symmetry), the last 1/2/3 pairs, and no binding: every value
        shown, whatever its key.
        """
        keys, values = self._read(tokens)
        truth = self._answer(tokens, keys, values, bound=True)
        rivals = {"uniform": uniform_like(truth), "constant": uniform_like(truth), "position": uniform_like(truth)}
        for window in (1, 2, 3):
            rivals[f"last {window} pairs"] = self._answer(tokens, keys[:, -window:], values[:, -window:], bound=True)
        rivals["no binding"] = self._answer(tokens, keys, values, bound=False)
        return rivals

    def _belief(self, counts: Tensor) -> Tensor:
        """(…, W) from presentation counts (…, W)."""
        counts = counts.double()
        total = counts.sum(-1, keepdim=True)
        log_weight = torch.special.xlogy(counts, torch.tensor(1 - self.flip, dtype=torch.float64))
        log_weight = log_weight + torch.special.xlogy(
            total - counts, torch.tensor(self.flip / (self.values - 1), dtype=torch.float64)
        )
        return log_weight.softmax(-1)

    def _answer(self, tokens: Tensor, keys: Tensor, values: Tensor, bound: bool) -> Tensor:
        table = never_asked(*tokens.shape, self.values)
        questions = tokens[:, 2 * self.pairs :]
        if not questions.shape[1]:
            return table
        hot = one_hot(values, self.values).double()
        if bound:
            table[:, 2 * self.pairs :] = self._belief((questions[:, :, None] == keys[:, None]).double() @ hot)
        else:
            table[:, 2 * self.pairs :] = ((hot.sum(1) + 1) / (hot.shape[1] + self.values))[:, None]
        return table

    def _read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Presented keys and values (n, pairs complete so far), checked."""
        check_shape(tokens)
        pairs = tokens[:, : 2 * self.pairs]
        keys, values = pairs[:, ::2], pairs[:, 1::2] - self.keys
        asked = tokens[:, 2 * self.pairs :]
        wrong = ((keys < 0) | (keys >= self.keys)).any(1) | ((values < 0) | (values >= self.values)).any(1)
        wrong |= ((asked < 0) | (asked >= self.keys)).any(1)
        if wrong.any():
            raise MalformedTokens(f"row {int(wrong.nonzero()[0])}: {self.pairs} pairs of key and value, then bare keys")
        keys = keys[:, : values.shape[1]]
        if self.flip == 0 or self.flip == 1:
            counts = torch.einsum("npk,npw->nkw", one_hot(keys, self.keys), one_hot(values, self.values))
            kinds = (counts > 0).sum(-1)
            torn = (kinds > 1 if self.flip == 0 else kinds == self.values).any(1)
            if torn.any():
                raise ImpossibleObservation(f"row {int(torn.nonzero()[0])}: a key shows values that no table permits")
        return keys, values


@register("associative-recall")
def associative_recall() -> AssociativeRecall:
    return AssociativeRecall()
