"""Bayesian wind tunnels: tasks whose exact posterior is known at every position, and transformers trained in them.

Names are imported on first use, so that the command line can list its options without loading torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .associative_recall import AssociativeRecall as AssociativeRecall
    from .belief_process import BeliefProcess as BeliefProcess
    from .beliefs import probe_beliefs as probe_beliefs
    from .bijection import Bijection as Bijection
    from .calibration import calibrate as calibrate
    from .conjugate_counts import ConjugateCounts as ConjugateCounts
    from .fresh_hidden_markov import FreshHiddenMarkov as FreshHiddenMarkov
    from .hidden_markov import HiddenMarkov as HiddenMarkov
    from .model_selection import ModelSelection as ModelSelection
    from .noisy_chain import NoisyChain as NoisyChain
    from .permutation_contest import PermutationContest as PermutationContest
    from .protocol import Beliefs as Beliefs
    from .protocol import Episodes as Episodes
    from .protocol import Tunnel as Tunnel
    from .recurrence_contest import RecurrenceContest as RecurrenceContest
    from .registry import register as register
    from .registry import tunnel as tunnel
    from .registry import tunnel_names as tunnel_names
    from .shipped import load as load
    from .sticky_chain import StickyChain as StickyChain
    from .training import train as train

_HOMES = {
    "AssociativeRecall": "associative_recall",
    "BeliefProcess": "belief_process",
    "Beliefs": "protocol",
    "Bijection": "bijection",
    "ConjugateCounts": "conjugate_counts",
    "Episodes": "protocol",
    "FreshHiddenMarkov": "fresh_hidden_markov",
    "HiddenMarkov": "hidden_markov",
    "ModelSelection": "model_selection",
    "NoisyChain": "noisy_chain",
    "PermutationContest": "permutation_contest",
    "RecurrenceContest": "recurrence_contest",
    "StickyChain": "sticky_chain",
    "Tunnel": "protocol",
    "calibrate": "calibration",
    "load": "shipped",
    "probe_beliefs": "beliefs",
    "register": "registry",
    "train": "training",
    "tunnel": "registry",
    "tunnel_names": "registry",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
