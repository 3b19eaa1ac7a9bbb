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
    "TensorBoardLogger": ".probe.loops.loggers",
    "WandbLogger": ".probe.loops.loggers",
    "TrainerHook": ".probe.loops.trainer",
    "LightningHook": ".probe.loops.lightning",
    "verify": ".probe.law.verify",
    "write_report": ".analyses.page.report",
    "law": ".probe.law.definition",
    "expose": ".hooks.adapters.expose",
    "State": ".probe.state",
    "ProbeError": ".hooks.errors",
    "BadInput": ".hooks.errors",
    "BadRequest": ".hooks.errors",
    "ClosedWatch": ".hooks.errors",
    "LawViolated": ".hooks.errors",
    "MergeRefused": ".hooks.errors",
    "NoAttentionSeen": ".hooks.errors",
    "NoGradientReached": ".hooks.errors",
    "UnsupportedFamily": ".hooks.errors",
    "UnsupportedKernel": ".hooks.errors",
}

if TYPE_CHECKING:
    from .analyses.page.report import write_report
    from .hooks.adapters.expose import expose
    from .hooks.errors import (
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
    from .probe.law.definition import law
    from .probe.law.verify import verify
    from .probe.loops.lightning import LightningHook
    from .probe.loops.loggers import TensorBoardLogger, WandbLogger
    from .probe.loops.trainer import TrainerHook
    from .probe.state import State
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
