"""What a receiver gets: one attention call, with everything the law needs.

`CallSite` is made in the forward pass and holds no activations, so that whoever keeps it does not keep the graph's
memory. `AttentionCall` exists only in the backward pass, while the receiver looks at it.

Shapes: B batch, H query heads, K key/value heads, Q query positions, S key positions, D head width, V value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .sequences import Sequences
from .site import Site
from .visibility import Visibility

_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Needs:
    """What a receiver wants of a call, beside u = ∂L/∂(head output).

    Attributes:
        inputs: the gradients of query, key and value as the kernel computes them.
        flash: to give the gradients of sdpa's CPU flash kernel itself, in `receive_flash`, where it runs.
        editor: to see the call in the forward pass and put other values or outputs in their place, instead of any gradient.
    """

    inputs: bool = False
    flash: bool = False
    editor: Editor | None = None


@dataclass(frozen=True)
class CallSite:
    """One call as the forward pass knows it.

    Attributes:
        site: the module; `use`: order of this call among the module's calls in one top-level forward.
        forward: running number of that top-level forward within the watch.
        scale: factor on q·k; `softcap`: cap c of c·tanh(s/c), or None.
        dropout: probability with which attention weights were dropped (0 when none were).
        implementation: name of the kernel that ran.
        sequences: what the rows of the batch are: tokens, padding, identity.
        hidden: the kernel dropped attention weights and does not say which; α is known, w and D are not.
        beside: why the kernel keeps its own backward, where the receiver would have given the gradients; else "".
    """

    site: Site
    use: int
    forward: int
    scale: float
    softcap: float | None
    dropout: float
    implementation: str
    sequences: Sequences
    hidden: bool = False
    beside: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionCall(CallSite):
    """One call with its tensors, as the backward pass delivers it: what `CallSite` says of it, and

    Attributes:
        delivery: 0 for the first gradient that came back to this call, 1 for the next (`retain_graph`), …
        query (B,H,Q,D), key (B,K,S,D), value (B,K,S,V): as the kernel got them (rotated, before group repetition).
        output (B,H,Q,V): Σ_j w_ij v_j as the kernel returned it; upstream (B,H,Q,V): ∂L/∂output.
        visibility: who sees whom.
        sinks: (H,) score of the hidden column with value 0, or None.
        weights: (B,H,Q,S) weights after dropout where the kernel returned them, else None.
        query_gradient, key_gradient, value_gradient: ∂L/∂ of the three inputs, where wanted.
    """

    delivery: int
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    upstream: Tensor
    visibility: Visibility
    sinks: Tensor | None = None
    weights: Tensor | None = None
    query_gradient: Tensor | None = None
    key_gradient: Tensor | None = None
    value_gradient: Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads per key/value head, H / K; query head h reads key/value head h // group."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def plain(self) -> bool:
        """True for a softmax of scaled, masked scores and nothing else: what specialised passes are written for."""
        return is_plain(self.softcap, self.sinks, self.weights, self.hidden)


def is_plain(softcap: float | None, sinks: Tensor | None, weights: object, hidden: bool) -> bool:
    """The one definition of a plain call: no cap, no sink, no dropped weight, known or hidden."""
    return softcap is None and sinks is None and weights is None and not hidden


@dataclass(frozen=True, eq=False)
class Flash:
    """How sdpa's flash kernel on the CPU ran: what it was given and what it returned.

    query (B,H,Q,D), key, value (B,K,S,D): H is a multiple of K. output (B,H,Q,D). normalizer (B,H,Q): the log-sum-exp of
    the scores. mask: what was added to the scores, in their dtype, broadcastable to (B,H,Q,S), or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    normalizer: Tensor
    mask: Tensor | None
    causal: bool
    scale: float

    def gradients(self, upstream: Tensor) -> Gradients:
        """∂L/∂q, ∂L/∂k, ∂L/∂v by the kernel's own backward, from ∂L/∂output (B,H,Q,D)."""
        found: Gradients = _BACKWARD(
            upstream,
            self.query,
            self.key,
            self.value,
            self.output,
            self.normalizer,
            0.0,
            self.causal,
            attn_mask=self.mask,
            scale=self.scale,
        )
        return found


class Editor(Protocol):
    """Sees calls while the model runs, with or without gradients. What it raises reaches whoever runs the model."""

    def value(self, call: CallSite, value: Tensor) -> Tensor:
        """The value (B,K,S,V) to use; the same tensor leaves the call as it is."""

    def output(self, call: AttentionCall) -> Tensor:
        """The head output (B,H,Q,V) to use; `call.upstream` holds zeros, for nothing has come back yet."""


class Receiver(Protocol):
    """Whoever looks at attention calls. `hooks` knows no statistics; it asks and delivers.

    A receiver whose attribute `edits` is true looks on in the forward pass, with or without gradients, through the editor
    of its needs; nothing comes back to it.
    """

    def wants(self, site: Site) -> Needs | None:
        """Asked in the forward pass, once per call: None leaves the call alone."""

    def seen(self, call: CallSite, heads: int, group: int, reachable: bool) -> None:
        """Told in the forward pass that a wanted call ran; `reachable`: a gradient can come back to it."""

    def receive(self, call: AttentionCall) -> None:
        """Handed the call in the backward pass. Whatever it raises closes the attachment and is kept for later."""

    def refuse(self, error: Exception) -> None:
        """Told that something could not be read; raised by the receiver at the next step or read."""


class FlashReceiver(Receiver, Protocol):
    """A receiver that answers `Needs(flash=True)`."""

    def receive_flash(self, call: AttentionCall, flash: Flash) -> tuple[Tensor, Tensor, Tensor]:
        """Handed the call and the kernel in the backward pass; returns the gradients of the kernel's query, key and value.
        When it raises, the kernel's own backward gives them.
        """
