"""Callbacks that close a watch's steps inside other people's training loops.

A hook receives the watch from the user and needs three things of the loop: where an optimizer step ends, at which number
the run goes on, and the weight w = 1/targets that the loss carries, without which numbers would depend on the batch size.
It changes nothing of the run: no control flag, no random draw, no gradient.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ...hooks.errors import BadRequest, ClosedWatch
from ..watch import Watch

IGNORED = -100  # the label that cross-entropy leaves out, in transformers and in torch


class Closing:
    """Closes steps for a hook. An error at the first observed step is raised, so that a mistake shows at once; a later one
    is reported and observing ends, because a long training must not die of it. Reading the watch raises it again.
    """

    def __init__(self, watch: Watch) -> None:
        if not isinstance(watch, Watch):
            raise BadRequest(f"A training hook takes the watch that watch(model) returned, not {watch!r}.")
        self.watch, self._observed, self._broken = watch, False, False

    def begin(self, number: int) -> None:
        if self.watch.closed:
            raise ClosedWatch("This watch is closed; open a new one with watch(model) for this run.")
        if number != self.watch.number or number:
            self.watch.seek(number)
        self.watch.drop()  # of a run that was given up in the middle of a step

    def step(self, loss_weight: float | None = None) -> None:
        if self._broken or (self.watch.closed and self.watch.error is None):  # an error of ours closes the watch
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


class _Weigher:
    """What hangs on the model while it trains; a copy or a pickle of the model takes along one that does nothing."""

    def __init__(self, weigh: Callable[[nn.Module, dict[str, Any]], None] | None = None) -> None:
        self._weigh = weigh

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._weigh is not None:
            self._weigh(model, kwargs)

    def __reduce__(self) -> tuple[type[_Weigher], tuple[()]]:
        return _Weigher, ()


class TrainerHook(TrainerCallback):
    """Closes a step of the watch after each optimizer step of a `transformers.Trainer`.

    The loss weight is read off what the model is called with: `num_items_in_batch` where the model's loss divides by it,
    else the number of labels that its loss counts, and the number of micro-batches. With a loss of the user's own
    (`compute_loss_func`, a `compute_loss` that does not pass `num_items_in_batch` on, a model that wraps another) it cannot
    be known: pass `loss_weight`, or it is recorded as unknown.

    Args:
        watch: a watch of the model that is trained.
        loss_weight: a number, or a function of the keyword arguments of the model's forward, when the Trainer computes
            another loss than the model's mean cross-entropy: w such that the loss backpropagated for this micro-batch is
            w times its sum over targets.

    Raises:
        BadRequest: for anything but a watch. ClosedWatch: when training begins with a closed one.
    """

    def __init__(self, watch: Watch, loss_weight: float | Callable[[dict[str, Any]], float] | None = None) -> None:
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
        self._smoothed = bool(getattr(args, "label_smoothing_factor", 0))
        self._several = getattr(args, "n_gpu", 1) > 1  # DataParallel: each replica sees a part of the labels
        self._release()
        self._handle = model.register_forward_pre_hook(_Weigher(self._weigh), with_kwargs=True)
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

    def _weigh(self, model: nn.Module, kwargs: dict[str, Any]) -> None:
        if not model.training or not torch.is_grad_enabled() or torch.compiler.is_compiling() or self.watch.closed:
            return
        self._parts += 1
        self._shared, weight = self._weight(model, kwargs)
        self._weighed += weight is not None
        if self.watch.observing:
            self.watch.weigh(weight)

    def _weight(self, model: nn.Module, kwargs: dict[str, Any]) -> tuple[bool, float | None]:
        if self._told is not None:
            return True, float(self._told(kwargs) if callable(self._told) else self._told)
        items, labels = kwargs.get("num_items_in_batch"), kwargs.get("labels")
        if (items is not None) != takes_items(model) and labels is not None:
            return False, None  # the Trainer gives the number to every model that takes it: the loss is someone's own
        names = loss_names(model)
        if items is not None and ("loss_function" in names if labels is not None else self._smoothed):
            count = float(items.reshape(-1)[0]) if isinstance(items, Tensor) else float(items)
            return True, self._processes / count if count > 0 else None
        shifted = shifts_labels(model)
        # a model that takes the number and ignores it: its own mean, which the Trainer leaves as it is
        own = items is None or ("CrossEntropyLoss" in names and shifted is False)
        if labels is None or self._several or shifted is None or not own:
            return False, None
        count = int((labels[..., 1:] if shifted else labels).ne(IGNORED).sum())
        if not count:
            return False, None
        return (False, 1.0 / count) if items is None else (True, self._processes / count)


def _inner(model: nn.Module) -> Any:
    """The model itself, where it lies inside adapters of PEFT; adapters that transformers itself added lie inside it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def takes_items(model: nn.Module) -> bool:
    """Whether the Trainer gives `num_items_in_batch` to `model`, and then leaves its loss undivided."""
    inner = _inner(model)
    if hasattr(inner, "accepts_loss_kwargs"):
        return bool(inner.accepts_loss_kwargs)
    parameters = inspect.signature(inner.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def loss_names(model: nn.Module) -> set[str]:
    """What the forward of `model` calls by name, with what it inherits where it says `super()`."""
    found: set[str] = set()
    for owner in type(_inner(model)).__mro__:
        code = getattr(inspect.unwrap(vars(owner)["forward"]), "__code__", None) if "forward" in vars(owner) else None
        if code is not None:
            found |= set(code.co_names)
            if "super" not in code.co_names:
                break
    return found


def shifts_labels(model: nn.Module) -> bool | None:
    """Whether the loss that `model` computes itself predicts label t+1 at t, so that the first label is no target; None
    where its class does not say.
    """
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    inner, names = _inner(model), loss_names(model)
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        return False
    kind = getattr(inner, "loss_type", None)
    if kind in LOSS_MAPPING:
        shifted = LOSS_MAPPING[kind] is ForCausalLMLoss
        # the name of a class is no proof where it computes a loss by itself: BartForCausalLM does not shift
        return None if shifted and "CrossEntropyLoss" in names and "loss_function" not in names else shifted
    # without a type the library's loss_function is the causal one, as for GPT2LMHeadModel
    return True if "loss_function" in names else None
