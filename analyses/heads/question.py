"""What is asked of a model: the batch in any form, and the loss whose gradient is taken.

u has to be the gradient of the loss *summed* over targets, or numbers depend on the batch. A mean is taken apart only
where
its count is seen: the loss that the model returned has to be the mean of the cross-entropy that its own logits give
for the labels, shifted or not; else its weight is unknown, and said so.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...hooks.errors import BadInput
from ..inputs.objective import Objective

AGREE = 1e-4  # relative: a loss that is the mean of the labels' cross-entropy


@dataclass(frozen=True, eq=False)
class Question:
    """A batch as the model takes it, and how its loss is taken.

    Attributes:
        inputs: keyword arguments of the forward.
        ids (B,T): the token ids, where there are any.
        loss: of the forward's output: a scalar that is summed over targets where `weight` is known.
        weight: what the returned loss was multiplied by against the sum: 1.0 for a sum, None where it is not known.
            Set by the first call of `loss`.
    """

    inputs: Mapping[str, Any]
    ids: Tensor | None
    given: Callable[[Any], Tensor] | None = None
    targets: Tensor | None = None
    against: Tensor | None = None

    def loss(self, output: Any) -> tuple[Tensor, float | None]:
        """The loss of a forward's output, summed over targets where its count is seen, and the weight it was freed of.

        Raises:
            BadInput: for an output without a scalar loss.
        """
        if self.targets is not None:
            kind: Literal["ce", "logit-diff"] = "ce" if self.against is None else "logit-diff"
            logits = _logits(output)
            against = None if self.against is None else self.against.to(logits.device)
            return Objective(kind).summed(logits, self.targets.to(logits.device), against), 1.0
        if self.given is not None:
            return _scalar(self.given(output)), None
        loss = _scalar(getattr(output, "loss", output))
        count = _count(output, self.inputs.get("labels"), loss)
        return (loss, None) if count is None else (loss * count, 1 / count)

    def measured(self, output: Any) -> float:
        """The loss of a forward's output as a number, in double precision where its parts are known: differences of losses
        are small.
        """
        with torch.no_grad():
            if self.targets is not None:
                against = None if self.against is None else self.against.to(self.targets.device)
                logits = _logits(output).double()
                kind: Literal["ce", "logit-diff"] = "ce" if self.against is None else "logit-diff"
                return float(Objective(kind).summed(logits, self.targets.to(logits.device), against))
            if self.given is not None:
                return float(_scalar(self.given(output)))
            loss = _scalar(getattr(output, "loss", output))
            labels = self.inputs.get("labels")
            for shown, asked in _alignments(output, labels, loss):
                return float(cross_entropy(shown.flatten(0, -2).double(), asked.flatten(), reduction="sum"))
            return float(loss)


def question(
    model: nn.Module,
    batch: Any,
    *,
    tokenizer: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
    targets: Literal["all", "last"] | Tensor | None = None,
    against: Tensor | None = None,
) -> Question:
    """Read what the user gave.

    Args:
        batch: keyword arguments of the model, ids (T,) or (B,T), or a text with `tokenizer`.
        loss: of the forward's output, a scalar; it is taken as it comes.
        targets: "all" or "last" next tokens, or ids (B,T) aligned with the output, −100 where nothing is asked.
        against (B,T): ids whose logits the targets' are held against, −1 for the likeliest other.

    Raises:
        BadInput: for a text without a tokenizer, a batch on another device, or one with nothing that gives a loss.
    """
    inputs, plain = _inputs(batch, tokenizer)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.device != device:
            raise BadInput(f"The batch's {name} is on {value.device} and the model on {device}; move one to the other.")
    ids = next((inputs[name] for name in ("input_ids", "decoder_input_ids") if inputs.get(name) is not None), None)
    if loss is not None:
        return Question(inputs, ids, given=loss)
    if targets is None and (plain or "labels" not in inputs) and against is None:
        if not plain:
            raise BadInput("The batch has no labels; put labels into it, or pass targets= (such as 'all') or loss=.")
        targets = "all"
    if targets is None and against is None:
        return Question(inputs, ids)
    if isinstance(targets, Tensor):
        wanted = targets if targets.dim() == 2 else targets[None]
    else:
        if ids is None:
            raise BadInput("targets='all' needs token ids in the batch; pass a tensor of target ids, or loss=.")
        wanted = _next_tokens(ids, inputs.get("attention_mask"), targets or "all")
    rivals = None
    if against is not None:
        rivals = against if against.dim() == 2 else against[None]
    return Question({name: value for name, value in inputs.items() if name != "labels"}, ids, None, wanted, rivals)


def _inputs(batch: Any, tokenizer: Any) -> tuple[dict[str, Any], bool]:
    """Keyword arguments of the forward, and whether they say nothing of a loss."""
    if isinstance(batch, str):
        if tokenizer is None:
            raise BadInput("A text needs tokenizer=; or pass token ids.")
        ids = torch.tensor([tokenizer(batch)["input_ids"]])
        return {"input_ids": ids}, True
    if isinstance(batch, Tensor):
        return {"input_ids": batch if batch.dim() > 1 else batch[None]}, True
    if isinstance(batch, Mapping):
        return dict(batch), False
    raise BadInput(f"A batch is a dict of the model's arguments, token ids or a text, not {type(batch).__name__}.")


def _next_tokens(ids: Tensor, mask: Any, which: str) -> Tensor:
    if which not in ("all", "last"):
        raise BadInput(f"targets must be 'all', 'last' or a tensor of ids, not {which!r}.")
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    if isinstance(mask, Tensor) and mask.dim() == 2:
        real = mask.bool()
        targets[:, :-1] = torch.where(real[:, :-1] & real[:, 1:], targets[:, :-1], -100)
    if which == "last":
        known = targets != -100
        targets = torch.where(known & (known.flip(1).cumsum(1).flip(1) == 1), targets, -100)
    return targets


def _logits(output: Any) -> Tensor:
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise BadInput("targets= needs logits (batch, tokens, vocabulary) from the model; pass loss= instead.")
    return logits


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise BadInput("The batch gives no scalar loss; put labels into it, or pass targets= or loss=.")
    return loss.reshape(())


def _count(output: Any, labels: Any, loss: Tensor) -> int | None:
    """How many targets a mean loss was taken over, where the logits show that it was."""
    for _, asked in _alignments(output, labels, loss):
        return int((asked != -100).sum())
    return None


def _alignments(output: Any, labels: Any, loss: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and labels in the alignment whose mean cross-entropy the model's loss is, if there is one."""
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor) or logits.dim() != labels.dim() + 1:
        return
    alignments = [(logits, labels)]
    if labels.dim() == 2:
        alignments.insert(0, (logits[:, :-1], labels[:, 1:]))
    for shown, asked in alignments:
        if asked.is_floating_point() or shown.shape[:-1] != asked.shape or not bool((asked != -100).any()):
            continue
        with torch.no_grad():
            mean = cross_entropy(shown.flatten(0, -2).float(), asked.flatten()).to(loss.device)
            fits = bool((mean - loss).abs() <= AGREE * loss.abs().clamp(min=1e-6))
        if fits:
            yield shown, asked
            return
