"""Model selection: which of two classes of hypotheses made this sequence?

A contest supplies the mathematics of its two classes; this file turns evidence into class posteriors, Bayes factors
and predictives. `posterior` conditions on exactly what the model sees. With opaque tokens the relabelling is hidden
from both; what a reader who was told it would believe is `posterior(tokens, informed=relabelling)`, for comparison
only.

Shapes: n episodes, L tokens, V symbols, C = 2 classes, O outcomes (C, or V when the next symbol is asked).
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional

from ..errors import ImpossibleObservation, MalformedTokens, TunnelError
from .bits import constant_like, entropy_bits, never_asked, uniform_like
from .permutation_contest import PermutationContest
from .protocol import Beliefs, Episodes
from .recurrence_contest import RecurrenceContest
from .registry import register
from .tokens import check_shape


@dataclass(frozen=True)
class ModelSelection:
    """`asks` for the class, for the next symbol, or for both in turn (pairs only); `opaque` relabels every episode's
    symbols; only the first `horizon` questions of an episode are supervised (None: all), so that what was never
    trained can be measured too.
    """

    contest: PermutationContest | RecurrenceContest = field(default_factory=PermutationContest)
    asks: Literal["class", "next", "both"] = "class"
    opaque: bool = False
    horizon: int | None = None

    def __post_init__(self) -> None:
        if self.horizon is not None and self.horizon < 1:
            raise TunnelError(f"a loss horizon of {self.horizon} supervises nothing")
        if self.asks == "both" and self.contest.stride == 1:
            raise TunnelError('one position cannot ask for class and next symbol: asks="both" needs pairs')
        if isinstance(self.contest, RecurrenceContest) and self.contest.opaque != self.opaque:
            object.__setattr__(self, "contest", replace(self.contest, opaque=self.opaque))

    @classmethod
    def permutations(
        cls, symbols: int = 12, pairs: int | None = None, separate: bool = False, **choices
    ) -> "ModelSelection":
        """Involution against three-cycles on `symbols` symbols; `pairs` distinct keys, all but one by default."""
        return cls(PermutationContest(symbols, symbols - 1 if pairs is None else pairs, separate), **choices)

    @classmethod
    def recurrence(cls, modulus: int = 17, length: int = 16, **choices) -> "ModelSelection":
        """x → a·x + b (mod `modulus`) against independent symbols."""
        return cls(RecurrenceContest(modulus, choices.get("opaque", False), length), **choices)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        symbols = tuple(str(i) for i in range(self.contest.symbols))
        values = tuple(f"→{i}" for i in symbols) if self.contest.shift else ()
        return symbols + values + self.contest.classes

    @property
    def outcomes(self) -> tuple[int, ...]:
        shift, first = self.contest.shift, self.contest.shift + self.contest.symbols
        symbols, classes = tuple(range(shift, first)), (first, first + 1)
        return {"class": classes, "next": symbols, "both": symbols + classes}[self.asks]

    @property
    def hypotheses(self) -> tuple[str, ...]:
        return self.contest.classes

    @property
    def length(self) -> int:
        return self.contest.length

    def sample(self, n: int, generator: Generator, length: int | None = None) -> Episodes:
        """n episodes, classes drawn with probability one half each."""
        length = self.length if length is None else length
        label = torch.randint(2, (n,), generator=generator)
        beyond = self.asks != "class" and bool(self.contest.next_asked(length)[-1])
        stream, latents = self.contest.draw(label, generator, length + beyond)
        relabelling = torch.arange(self.contest.symbols).expand(n, -1)
        if self.opaque:
            relabelling = torch.rand(n, self.contest.symbols, generator=generator).argsort(-1)
        stream = relabelling.gather(1, stream)
        tokens = stream[:, :length] + self._shifts(length)
        following = torch.cat((stream, stream[:, :1]), 1)[:, 1 : length + 1]
        class_here, next_here = self._asked(length)
        start = self.contest.symbols if self.asks == "both" else 0
        targets = torch.where(class_here, start + label[:, None], torch.where(next_here, following, -1))
        if self.horizon is not None:
            targets = torch.where((class_here | next_here).long().cumsum(0) <= self.horizon, targets, -1)
        return Episodes(tokens, targets, {"class": label, "relabelling": relabelling, **latents}, self.outcomes)

    def bayes_factor(self, tokens: Tensor, informed: Tensor | None = None) -> Tensor:
        """(n, L) evidence ratio of the first class over the second; 0 or infinite where one is excluded."""
        evidence = self._evidence(tokens, informed)
        return (evidence[..., 0] - evidence[..., 1]).exp()

    def posterior(self, tokens: Tensor, informed: Tensor | None = None) -> Beliefs:
        """Class posterior (n, L, C) at every position, prior one half each.

        `informed` (n, V), as in `latents["relabelling"]`, names the opaque token of each integer: the belief of a
        reader who knows it.
        """
        return Beliefs(self._evidence(tokens, informed).softmax(-1), "hypotheses")

    def predictive(self, tokens: Tensor, informed: Tensor | None = None) -> Tensor:
        """(n, L, O): the class posterior where the class is asked, or the next symbol averaged over it."""
        return self._answer(tokens, self._evidence(tokens, informed), informed)

    def entropy(self, tokens: Tensor, of: Literal["predictive", "posterior"] = "predictive") -> Tensor:
        return entropy_bits(self.predictive(tokens) if of == "predictive" else self.posterior(tokens).values)

    def baselines(self, tokens: Tensor) -> dict[str, Tensor]:
        """Uniform (by symmetry also the best constant and position), "contradiction seen, else ½", and the last 1/2/3
        items alone.
        """
        evidence = self._evidence(tokens)
        truth = self._answer(tokens, evidence)
        uniform = self._uniform(truth)
        rivals = {"uniform": uniform, "constant": uniform, "position": uniform}
        excluded = torch.where(evidence.isinf(), evidence, 0.0)
        rivals["contradiction or half"] = self._answer(tokens, excluded)
        stride, length = self.contest.stride, tokens.shape[1]
        for window in (1, 2, 3):
            rows = never_asked(*truth.shape)
            for t in range(length):
                first = max(0, (t // stride - window + 1) * stride)
                seen = tokens[:, first : t + 1]
                rows[:, t] = self._answer(seen, self._evidence(seen))[:, -1]
            rivals[f"last {window} items"] = rows
        return rivals

    def _evidence(self, tokens: Tensor, informed: Tensor | None = None) -> Tensor:
        """(n, L, C) log evidence; raises where both classes are excluded."""
        contest, tokens = self._as_seen(tokens, informed)
        evidence = contest.evidence(tokens)
        excluded = evidence.isinf().all(-1).any(1)
        if excluded.any():
            raise ImpossibleObservation(f"row {int(excluded.nonzero()[0])}: neither class can make these tokens")
        return evidence

    def _answer(self, tokens: Tensor, evidence: Tensor, informed: Tensor | None = None) -> Tensor:
        belief = evidence.softmax(-1)
        class_here, next_here = self._asked(tokens.shape[1])
        table = never_asked(*tokens.shape, len(self.outcomes))
        if self.asks != "class":
            contest, seen = self._as_seen(tokens, informed)
            following = (belief[..., None] * contest.following(seen)).sum(2)
            if informed is not None:
                following = following.gather(2, informed.argsort(-1)[:, None].expand_as(following))
            table[:, next_here] = functional.pad(following, (0, table.shape[-1] - following.shape[-1]))[:, next_here]
        padded = functional.pad(belief, (table.shape[-1] - 2, 0)) if self.asks != "next" else table
        table[:, class_here] = padded[:, class_here]
        return table

    def _asked(self, length: int) -> tuple[Tensor, Tensor]:
        """Where the class and where the next symbol is asked, each (L) bool."""
        nowhere = torch.zeros(length, dtype=torch.bool)
        class_here = nowhere if self.asks == "next" else self.contest.class_asked(length)
        return class_here, nowhere if self.asks == "class" else self.contest.next_asked(length)

    def _shifts(self, length: int) -> Tensor:
        """(L) what each position's token is above its symbol."""
        return self.contest.shift * self.contest.class_asked(length).long()

    def _uniform(self, truth: Tensor) -> Tensor:
        """Equal shares of the classes or of the symbols, whichever the position asks for."""
        if self.asks != "both":
            return uniform_like(truth)
        class_here, _ = self._asked(truth.shape[1])
        classes = (torch.arange(truth.shape[-1]) >= self.contest.symbols).double()
        share = torch.where(class_here[:, None], classes / 2, (1 - classes) / self.contest.symbols)
        return constant_like(truth, share)

    def _as_seen(
        self, tokens: Tensor, informed: Tensor | None
    ) -> tuple[PermutationContest | RecurrenceContest, Tensor]:
        """The contest and tokens of a reader who was told the relabelling, or not."""
        check_shape(tokens)
        tokens = tokens - self._shifts(tokens.shape[1])
        self.contest.check(tokens)
        if informed is None:
            return self.contest, tokens
        if informed.shape != (len(tokens), self.contest.symbols):
            raise MalformedTokens(
                f"informed must be ({len(tokens)}, {self.contest.symbols}), not {tuple(informed.shape)}"
            )
        contest = self.contest
        if isinstance(contest, RecurrenceContest):
            contest = replace(contest, opaque=False)
        return contest, informed.argsort(-1).gather(1, tokens)


@register("selection")
def selection() -> ModelSelection:
    """Class after each pair, next value at each key: with the class alone nothing tells a model to look pairs up."""
    return ModelSelection.permutations(12, asks="both", separate=True)


@register("selection-class")
def selection_class() -> ModelSelection:
    return ModelSelection.permutations(12)


@register("selection-next")
def selection_next() -> ModelSelection:
    return ModelSelection.permutations(12, asks="next", opaque=True)


@register("recurrence")
def recurrence() -> ModelSelection:
    return ModelSelection.recurrence(17)


@register("recurrence-opaque")
def recurrence_opaque() -> ModelSelection:
    return ModelSelection.recurrence(17, opaque=True)


@register("recurrence-next")
def recurrence_next() -> ModelSelection:
    return ModelSelection.recurrence(17, asks="next")
