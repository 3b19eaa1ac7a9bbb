"""The Lightning callback; Lightning is an optional extra, so it lives apart.

Lightning calls `on_before_optimizer_step` and `on_before_zero_grad` in places that differ with accumulation and with the
precision plugin; what never differs is that `global_step` has grown at the end of a batch in which an optimizer stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...hooks.errors import BadRequest
from ..watch import Watch
from .trainer import IGNORED, Closing

try:
    from lightning.pytorch import Callback
except ImportError:  # the older name of the same library
    try:
        from pytorch_lightning import Callback  # type: ignore[assignment]
    except ImportError as missing:
        raise BadRequest("Lightning is not installed: pip install 'advantage-probe[lightning]'.") from missing


def labelled(batch: Any) -> int | None:
    """How many targets a batch has, where it says so under "labels" or "targets"; None elsewhere."""
    for name in ("labels", "targets"):
        if isinstance(batch, Mapping) and name in batch:
            return int(batch[name].ne(IGNORED).sum())
    return None


class LightningHook(Callback):
    """Closes a step of the watch after each optimizer step of a `lightning.Trainer`.

    The loss that `training_step` returns is taken to be a mean over `targets(batch)` targets, which Lightning divides by
    the number of accumulated batches.

    Args:
        watch: a watch of the module that is trained, or of a part of it.
        targets: the number of targets over which `training_step` averages, a function of the batch. Without it, the labels
            of a batch with "labels" or "targets" are counted, -100 left out, and other batches leave the loss weight
            unknown. A causal model that shifts its labels itself has one target fewer per sequence: say so here.

    Raises:
        BadRequest: for anything but a watch. ClosedWatch: when training begins with a closed one.
    """

    def __init__(self, watch: Watch, targets: Callable[[Any], int] | None = None) -> None:
        self._closing, self.watch, self._targets = Closing(watch), watch, targets or labelled
        self._parts = self._weighed = self._steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps = trainer.global_step
        self._closing.begin(self._steps)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and self.watch.scaler is None:
            self.watch.scaler = scaler

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        count = self._targets(batch)
        self._parts += 1
        self._weighed += bool(count)
        if self.watch.observing and not self.watch.closed:
            self.watch.weigh(1.0 / (count * trainer.accumulate_grad_batches) if count else None)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        known = self._weighed and self._weighed == self._parts
        self._parts = self._weighed = 0
        self._closing.step(1.0 if known else None)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._closing.flush()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._closing.flush()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._closing.flush()
