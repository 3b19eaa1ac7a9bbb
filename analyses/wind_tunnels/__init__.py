"""Bayesian wind tunnels: tasks whose exact posterior is known at every position, and transformers trained in them.

Names are imported on first use, so that the command line can list its options without loading torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tasks.associative_recall import AssociativeRecall as AssociativeRecall
    from .tasks.belief_process import BeliefProcess as BeliefProcess
    from .tasks.bijection import Bijection as Bijection
    from .tasks.conjugate_counts import ConjugateCounts as ConjugateCounts
    from .tasks.fresh_hidden_markov import FreshHiddenMarkov as FreshHiddenMarkov
    from .tasks.hidden_markov import HiddenMarkov as HiddenMarkov
    from .tasks.model_selection import ModelSelection as ModelSelection
    from .tasks.noisy_chain import NoisyChain as NoisyChain
    from .tasks.permutation_contest import PermutationContest as PermutationContest
    from .tasks.protocol import Beliefs as Beliefs
    from .tasks.protocol import Episodes as Episodes
    from .tasks.protocol import Tunnel as Tunnel
    from .tasks.recurrence_contest import RecurrenceContest as RecurrenceContest
    from .tasks.registry import register as register
    from .tasks.registry import tunnel as tunnel
    from .tasks.registry import tunnel_names as tunnel_names
    from .tasks.sticky_chain import StickyChain as StickyChain
    from .training.runner import train as train
    from .truth.beliefs import probe_beliefs as probe_beliefs
    from .truth.calibration import calibrate as calibrate
    from .truth.shipped import load as load

_HOMES = {
    "AssociativeRecall": "tasks.associative_recall",
    "BeliefProcess": "tasks.belief_process",
    "Beliefs": "tasks.protocol",
    "Bijection": "tasks.bijection",
    "ConjugateCounts": "tasks.conjugate_counts",
    "Episodes": "tasks.protocol",
    "FreshHiddenMarkov": "tasks.fresh_hidden_markov",
    "HiddenMarkov": "tasks.hidden_markov",
    "ModelSelection": "tasks.model_selection",
    "NoisyChain": "tasks.noisy_chain",
    "PermutationContest": "tasks.permutation_contest",
    "RecurrenceContest": "tasks.recurrence_contest",
    "StickyChain": "tasks.sticky_chain",
    "Tunnel": "tasks.protocol",
    "calibrate": "truth.calibration",
    "load": "truth.shipped",
    "probe_beliefs": "truth.beliefs",
    "register": "tasks.registry",
    "train": "training.runner",
    "tunnel": "tasks.registry",
    "tunnel_names": "tasks.registry",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
