"""Advantage Probe: how cross-entropy reshapes every attention head of a transformer.

    import advantage_probe as ap

    with ap.watch(model) as watch:
        model(**batch, labels=labels).loss.backward()
        watch.step(loss_weight=1 / targets)
    watch.heads()

The names below load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "Watch": ".probe.watch",
    "watch": ".probe.watch",
    "TensorBoardLogger": ".probe.loggers",
    "WandbLogger": ".probe.loggers",
    "TrainerHook": ".hooks.training",
    "LightningHook": ".hooks.training_lightning",
    "verify": ".probe.verify",
    "write_report": ".analyses.report",
    "law": ".probe.law",
    "expose": ".hooks.handwritten",
    "State": ".probe.state",
    "ProbeError": ".hooks.refusals",
    "BadInput": ".hooks.refusals",
    "BadRequest": ".hooks.refusals",
    "ClosedWatch": ".hooks.refusals",
    "LawViolated": ".hooks.refusals",
    "MergeRefused": ".hooks.refusals",
    "NoAttentionSeen": ".hooks.refusals",
    "NoGradientReached": ".hooks.refusals",
    "UnsupportedFamily": ".hooks.refusals",
    "UnsupportedKernel": ".hooks.refusals",
}

if TYPE_CHECKING:
    from .analyses.report import write_report
    from .hooks.handwritten import expose
    from .hooks.refusals import (
        BadInput,
        BadRequest,
        ClosedWatch,
        LawViolated,
        MergeRefused,
        NoAttentionSeen,
        NoGradientReached,
        ProbeError,
        UnsupportedFamily,
        UnsupportedKernel,
    )
    from .hooks.training import TrainerHook
    from .hooks.training_lightning import LightningHook
    from .probe.law import law
    from .probe.loggers import TensorBoardLogger, WandbLogger
    from .probe.state import State
    from .probe.verify import verify
    from .probe.watch import Watch, watch

__all__ = [
    "BadInput",
    "BadRequest",
    "ClosedWatch",
    "LawViolated",
    "LightningHook",
    "MergeRefused",
    "NoAttentionSeen",
    "NoGradientReached",
    "ProbeError",
    "State",
    "TensorBoardLogger",
    "TrainerHook",
    "UnsupportedFamily",
    "UnsupportedKernel",
    "WandbLogger",
    "Watch",
    "__version__",
    "expose",
    "law",
    "verify",
    "watch",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name], __name__), name)
    globals()[name] = value
    return value
