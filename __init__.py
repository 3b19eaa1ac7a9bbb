"""Advantage Probe: how cross-entropy reshapes every attention head of a transformer.

    import advantage_probe as ap

    with ap.watch(model) as watch:
        model(**batch, labels=labels).loss.backward()
        watch.step(loss_weight=1 / targets)
    watch.heads()

The names below load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
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
    "AttentionCall": ".hooks.call",
    "Head": ".analyses.heads.head",
    "head": ".analyses.heads.head",
    "heads": ".analyses.heads.table",
    "load_head": ".analyses.heads.stored",
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
    from .analyses.heads.head import Head, head
    from .analyses.heads.stored import load_head
    from .analyses.heads.table import heads
    from .analyses.page.report import write_report
    from .hooks.adapters.expose import expose
    from .hooks.call import AttentionCall
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
    "AttentionCall",
    "BadInput",
    "BadRequest",
    "ClosedWatch",
    "Head",
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
    "head",
    "heads",
    "law",
    "load_head",
    "verify",
    "watch",
    "write_report",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name], __name__), name)
    globals()[name] = value
    return value


# import paths of earlier releases, which work for one more, with a DeprecationWarning
_MOVED = {
    "analyses.export": "analyses.files.export",
    "analyses.figures": "analyses.pictures.figures",
    "analyses.plots": "analyses.pictures.plots",
    "analyses.report": "analyses.page.report",
    "analyses.against_truth": "analyses.wind_tunnels.truth.against_truth",
    "analyses.manifolds.collecting": "analyses.vectors.collecting",
    "analyses.manifolds.manifold": "analyses.vectors.pca",
    "hooks.handwritten": "hooks.adapters.expose",
    "hooks.refusals": "hooks.errors",
    "hooks.training": "probe.loops.trainer",
    "hooks.training_lightning": "probe.loops.lightning",
    "probe.loggers": "probe.loops.loggers",
    "probe.verify": "probe.law.verify",
}


class _Moved(MetaPathFinder, Loader):
    """Finds modules by the names that they had before; asked last, so that it costs nothing where a module is found."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        known = fullname.startswith(f"{__name__}.") and fullname.removeprefix(f"{__name__}.") in _MOVED
        return ModuleSpec(fullname, self) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = f"{__name__}.{_MOVED[spec.name.removeprefix(f'{__name__}.')]}"
        warnings.warn(f"{spec.name} is now {new}; the old name goes with the next release.", DeprecationWarning, 2)
        module = import_module(new)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        state = module.__spec__
        if state is not None and state.loader_state is not None:
            module.__spec__ = state.loader_state  # the import system has put the old name's there


sys.meta_path.append(_Moved())
