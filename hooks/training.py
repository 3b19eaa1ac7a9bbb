"""Callbacks that close a watch's steps inside other people's training loops.

A hook receives the watch from the user and needs three things of the loop: where an optimizer step ends, at which number
the run goes on, and the weight w = 1/targets that the loss carries, without which numbers would depend on the batch size.
It changes nothing of the run: no control flag, no random draw, no gradient.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from .refusals import BadRequest, ClosedWatch

IGNORED = -100  # the label that cross-entropy leaves out, in transformers and in torch


class Watched(Protocol):
    """What a hook needs of a watch."""

    scaler: Any

    @property
    def closed(self) -> bool: ...
    @property
    def number(self) -> int: ...
    @property
    def observing(self) -> bool: ...
    def seek(self, step: int) -> None: ...
    def weigh(self, loss_weight: float) -> None: ...
    def step(self, loss_weight: float | None = None) -> None: ...
    def flush(self) -> None: ...
    def at_close(self, action: Callable[[], None]) -> None: ...


class Closing:
    """Closes steps for a hook. An error at the first observed step is raised, so that a mistake shows at once; a later one
    is reported and observing ends, because a long training must not die of it. Reading the watch raises it again.
    """

    def __init__(self, watch: Watched) -> None:
        for name in ("step", "seek", "weigh", "flush"):
            if not callable(getattr(watch, name, None)):
                raise BadRequest(f"A training hook takes the watch that watch(model) returned, not {watch!r}.")
        self.watch, self._observed, self._broken = watch, False, False

    def begin(self, number: int) -> None:
        if self.watch.closed:
            raise ClosedWatch("This watch is closed; open a new one with watch(model) for this run.")
        if number != self.watch.number or number:
            self.watch.seek(number)

    def step(self, loss_weight: float | None = None) -> None:
        if self._broken or self.watch.closed:
            return
        try:
            observed = self.watch.observing
            self.watch.step(loss_weight)
            self._observed |= observed
        except Exception as error:
            if not self._observed:
                raise
            self._broken = True
            message = f"advantage_probe stopped observing, training goes on: {type(error).__name__}: {error}"
            warnings.warn(message, stacklevel=3)

    def flush(self) -> None:
        try:
            self.watch.flush()
        except OSError as error:
            warnings.warn(f"advantage_probe: the history could not be written ({error}).", stacklevel=3)


class TrainerHook(TrainerCallback):
    """Closes a step of the watch after each optimizer step of a `transformers.Trainer`.

    The loss weight is read off what the model is called with: `num_items_in_batch` where the model's loss divides by it,
    else the number of labels that its loss counts, and the number of micro-batches. With a loss of the user's own it
    cannot be known: pass `loss_weight`, or it is recorded as unknown.

    Args:
        watch: a watch of the model that is trained.
        loss_weight: a number, or a function of the keyword arguments of the model's forward, when the Trainer computes
            another loss than the model's mean cross-entropy: w such that the loss backpropagated for this micro-batch is
            w times its sum over targets.

    Raises:
        BadRequest: for anything but a watch. ClosedWatch: when training begins with a closed one.
    """

    def __init__(self, watch: Watched, loss_weight: float | Callable[[dict[str, Any]], float] | None = None) -> None:
        self._closing, self.watch, self._told = Closing(watch), watch, loss_weight
        self._handle: torch.utils.hooks.RemovableHandle | None = None
        self._parts = self._weighed = 0
        self._shared = False  # one weight for the whole step, or one per micro-batch

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self._closing.begin(state.global_step)
        scaler = getattr(others.get("optimizer"), "scaler", None)
        if scaler is not None and self.watch.scaler is None:
            self.watch.scaler = scaler
        self._parts = self._weighed = 0
        self._processes = args.world_size if getattr(args, "average_tokens_across_devices", False) else 1
        self._several = getattr(args, "n_gpu", 1) > 1  # DataParallel: each replica sees a part of the labels
        self._release()
        self._handle = model.register_forward_pre_hook(self._weigh, with_kwargs=True)
        self.watch.at_close(self._release)

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if not self._closing._broken and not self.watch.closed and state.global_step != self.watch.number:
            self.watch.seek(state.global_step)
        self._parts = self._weighed = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        known = self._weighed and self._weighed == self._parts
        self._closing.step((1.0 if self._shared else 1.0 / self._parts) if known else None)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._closing.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._closing.flush()
        self._release()

    def _release(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _weigh(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not model.training or not torch.is_grad_enabled() or torch.compiler.is_compiling() or self.watch.closed:
            return
        self._parts += 1
        self._shared, weight = self._weight(model, kwargs)
        if weight is not None:
            self._weighed += 1
            if self.watch.observing:
                self.watch.weigh(weight)

    def _weight(self, model: nn.Module, kwargs: dict[str, Any]) -> tuple[bool, float | None]:
        if self._told is not None:
            return True, float(self._told(kwargs) if callable(self._told) else self._told)
        items = kwargs.get("num_items_in_batch")
        if items is not None:
            count = float(items.reshape(-1)[0]) if isinstance(items, Tensor) else float(items)
            return True, self._processes / count if count > 0 else None
        labels = kwargs.get("labels")
        if labels is None or self._several:
            return False, None
        shifted = shifts_labels(model)
        if shifted is None:
            return False, None
        count = int((labels[..., 1:] if shifted else labels).ne(IGNORED).sum())
        return False, 1.0 / count if count else None


def shifts_labels(model: nn.Module) -> bool | None:
    """Whether the loss that `model` computes itself predicts label t+1 at t, so that the first label is no target; None
    where its class does not say.
    """
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    inner: Any = model.base_model.model if hasattr(model, "peft_config") else model  # type: ignore[union-attr]
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        return False
    kind = getattr(inner, "loss_type", None)
    if kind in LOSS_MAPPING:
        return LOSS_MAPPING[kind] is ForCausalLMLoss
    # without a type the library's loss_function is the causal one, as for GPT2LMHeadModel
    names = inspect.unwrap(type(inner).forward).__code__.co_names
    return True if "loss_function" in names else None
