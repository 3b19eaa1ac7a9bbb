"""What every tunnel offers: a sampler and the exact answer to what the sampler asks.

The exact side reads tokens and nothing else. Latents are carried for the curious; `predictive` and `posterior` never
see them, so that the truth is always what a perfect reader of the model's own input could know.

Shapes: n episodes, L positions, O outcomes, d input dimensions of an embedded task.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor
from torch.nn import functional

from ..errors import MalformedTokens


@dataclass(frozen=True)
class Episodes:
    """Sampled sequences and what the output at each position has to answer.

    `tokens` is (n, L) int64, or (n, L, d) float for embedded tasks: exactly what the model sees. `targets` is (n, L)
    int64 and indexes `outcomes`; the entry at t is what the output AT t predicts and -1 means not supervised. Already
    aligned, so never hand it to Hugging Face's `labels=`, which shifts again (training then stalls): use `loss`.
    """

    tokens: Tensor
    targets: Tensor
    latents: Mapping[str, Tensor] = field(default_factory=dict)
    outcomes: tuple[int, ...] = ()

    def loss(self, logits: Tensor) -> Tensor:
        """Mean cross-entropy in nats over supervised positions of `logits` (n, L, vocabulary), softmax over the whole
        vocabulary.
        """
        targets = self.targets.to(logits.device)
        supervised = targets >= 0
        if logits.shape[:2] != targets.shape:
            raise MalformedTokens(f"logits {tuple(logits.shape)} do not fit targets {tuple(self.targets.shape)}")
        identity = torch.arange(logits.shape[-1])
        outcomes = (torch.tensor(self.outcomes) if self.outcomes else identity).to(logits.device)
        return functional.cross_entropy(logits[supervised], outcomes[targets[supervised]])


@dataclass(frozen=True)
class Beliefs:
    """An exact posterior. `values` is float64 and `kind` says how to read it.

    "hypotheses": (n, L, hypotheses) probabilities; "marginals": (n, L, a, b), rows over b sum to one; "parameters":
    (n, L, parameters) of a conjugate family.
    """

    values: Tensor
    kind: Literal["hypotheses", "marginals", "parameters"] = "hypotheses"


@runtime_checkable
class Tunnel(Protocol):
    """A task with an exact posterior. Positions where nothing is asked hold NaN in every table."""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Names of the token ids; empty for embedded tasks' inputs beyond their outcomes."""

    @property
    def outcomes(self) -> tuple[int, ...]:
        """Token ids that can be answers, in the order of `predictive`'s last axis."""

    @property
    def hypotheses(self) -> tuple[str, ...] | None:
        """Names of the hypotheses where they can be listed."""

    @property
    def length(self) -> int:
        """Positions of an episode when `sample` is given no length."""

    def sample(self, n: int, generator: Generator, length: int | None = None) -> Episodes: ...

    def predictive(self, tokens: Tensor) -> Tensor:
        """(n, L, O) float64 probabilities; row t uses tokens[:, :t+1] only; any prefix is accepted."""

    def posterior(self, tokens: Tensor) -> Beliefs: ...

    def entropy(self, tokens: Tensor, of: Literal["predictive", "posterior"] = "predictive") -> Tensor:
        """(n, L) float64, bits."""

    def baselines(self, tokens: Tensor) -> dict[str, Tensor]:
        """Trivial rivals, each shaped like `predictive`."""
