"""Receivers that only look: what most of them answer alike.

A looker reads calls in the forward pass and changes nothing; with no gradient asked for, none comes back to it.
"""

from __future__ import annotations

from torch import Tensor

from .call import AttentionCall, CallSite, Needs
from .site import Site


class Looking:
    """Sees every self-attention call in `output`, which a subclass extends; what cannot be read is raised at once."""

    edits = True

    def wants(self, site: Site) -> Needs | None:
        return None if site.kind == "cross" else Needs(editor=self)

    def seen(self, call: CallSite, heads: int, group: int, reachable: bool) -> None:
        pass

    def refuse(self, error: Exception) -> None:
        raise error

    def receive(self, call: AttentionCall) -> None:
        raise AssertionError("nothing comes back to a receiver that only looks")

    def value(self, call: CallSite, value: Tensor) -> Tensor:
        return value

    def output(self, call: AttentionCall) -> Tensor:
        return call.output
