"""Update directions read in the vocabulary: which tokens is a head's value pushed to promote, and which to suppress?

A head's update direction −Σ_i α_ij u_i goes through W_O (and a norm behind it, where the family has one), the final norm
and the unembedding. Norms are taken by their mean Jacobian at the states that the text itself produced. Random directions
of the same norm go the same way, because a large unembedding lifts some token far in any direction.

Shapes: H heads, V value width, M width of the stream, R vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from ..hooks.attach import attach
from ..hooks.call import AttentionCall, CallSite, Needs
from ..hooks.projections import output_maps, unembedding
from ..hooks.refusals import NoGradientReached
from ..hooks.site import Site
from .blockwise import vectors
from .naming import label, shared_modules
from .state import Key

DRAWS = 200
STATES = 24  # token states at which a norm's Jacobian is taken


@dataclass(eq=False)
class _Pushes:
    """Sums of −m_j: per head over all keys in use, and per key token id."""

    layers: tuple[int, ...] | None
    total: dict[Key, Tensor] = field(default_factory=dict)
    count: dict[Key, float] = field(default_factory=dict)
    by_token: dict[Key, dict[int, tuple[Tensor, int]]] = field(default_factory=dict)
    error: Exception | None = None

    def wants(self, site: Site) -> Needs | None:
        if site.kind == "cross" or (self.layers is not None and site.layer not in self.layers):
            return None
        return Needs()

    def seen(self, call: CallSite, heads: int, group: int, reachable: bool) -> None:
        pass

    def refuse(self, error: Exception) -> None:
        self.error = error

    def receive(self, call: AttentionCall) -> None:
        rows = vectors(call)
        update = -rows.value_gradient.double().cpu()  # (B,H,S,V)
        key = Key(call.call.site, call.call.use)
        used = (rows.uniform > 0).any(1).cpu()  # (B,S)
        self.total[key] = self.total.get(key, torch.zeros_like(update[0, :, 0])) + update.sum((0, 2))
        self.count[key] = self.count.get(key, 0.0) + float(used.sum())
        ids = call.call.sequences.key_ids
        if ids is None:
            return
        known = self.by_token.setdefault(key, {})
        for number in ids.cpu()[used].unique().tolist():
            here = (ids.cpu() == number) & used
            part = update.transpose(1, 2)[here]  # (k,H,V)
            before = known.get(number, (torch.zeros_like(part[0]), 0))
            known[number] = (before[0] + part.sum(0), before[1] + len(part))


def _jacobian(norm: nn.Module, states: Tensor) -> Tensor:
    """(M,M) mean over states (P,M) of ∂norm/∂state, float64."""
    double = copy.deepcopy(norm).double().cpu()
    width = states.shape[1]
    whole = torch.zeros(width, width, dtype=torch.float64)
    basis = torch.eye(width, dtype=torch.float64)
    for state in states.double().cpu():
        moved = torch.func.jvp(double, (state.expand(width, -1).contiguous(),), (basis,))[1]
        whole += moved.double().T / len(states)
    return whole


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Tables of `vocabulary`.

    Attributes:
        tokens: one row per head, key token ("" for the mean over all keys), direction and rank: `head`, `key`, `keys` (how
            many keys were averaged), `pushed` ("promote" or "suppress"), `rank`, `token`, `logit` (change of the logit,
            centred over the vocabulary, per unit of the step), `random_edge` (95 % point of the largest |logit| of random
            directions of the same norm), `p` (upper bound for a random direction to move any token as far).
        norms: names of the norms that were passed by their Jacobian.
    """

    tokens: pd.DataFrame
    norms: tuple[str, ...]


def vocabulary(
    model: nn.Module,
    losses: Iterable[Callable[[], Tensor]],
    tokenizer: Any,
    *,
    layers: Sequence[int] | None = None,
    top: int = 5,
    keys: int = 3,
    draws: int = DRAWS,
    seed: int = 0,
) -> Vocabulary:
    """Read the update directions of every head in the vocabulary.

    Args:
        losses: each runs a forward of the model and returns its loss, summed over targets.
        layers: restrict to these. top: tokens per direction. keys: how many key tokens to list per head, those of the
            longest summed update; 0 for none.

    Raises:
        NoGradientReached: when nothing came back. UnsupportedFamily: where W_O or the unembedding cannot be found.
        Whatever the hooks refuse.
    """
    last = unembedding(model)
    maps = {entry.site.module: entry for entry in output_maps(model)}
    modules = dict(model.named_modules())
    wanted = {entry.norm for entry in maps.values() if layers is None or entry.site.layer in layers} | {last.norm}
    states: dict[str, list[Tensor]] = {name: [] for name in wanted if name is not None}

    def note(name: str) -> Callable[[nn.Module, Any], None]:
        def told(module: nn.Module, given: Any) -> None:
            rows = given[0].detach().flatten(0, -2)
            places = torch.linspace(0, len(rows) - 1, min(len(rows), STATES)).long()
            states[name].append(rows[places.to(rows.device)].cpu())

        return told

    pushes = _Pushes(None if layers is None else tuple(layers))
    attachment = attach(model, pushes)
    with ExitStack() as stack:
        stack.callback(attachment.close)
        for name in states:
            stack.callback(modules[name].register_forward_pre_hook(note(name)).remove)
        for loss in losses:
            loss().backward()
            if pushes.error is not None:
                raise pushes.error
    if not pushes.total:
        raise NoGradientReached("No gradient reached any head, so there is no update to read.")
    jacobians = {}
    for name, found in states.items():
        rows = torch.cat(found)
        places = torch.linspace(0, len(rows) - 1, min(len(rows), STATES)).long()
        jacobians[name] = _jacobian(modules[name], rows[places])
    generator = torch.Generator().manual_seed(seed)
    words = last.weight.double().cpu()
    words = words - words.mean(0)  # centred over the vocabulary
    if last.norm is not None:
        words = words @ jacobians[last.norm]
    lines: list[dict[str, Any]] = []
    shared = shared_modules(pushes.total)
    for key, total in sorted(pushes.total.items(), key=lambda item: (item[0].site.layer, item[0])):
        entry = maps[key.site.module]
        for head in range(total.shape[0]):
            way = entry.weight[head].double().cpu()  # (V,M)
            if entry.norm is not None:
                way = way @ jacobians[entry.norm].T
            known = pushes.by_token.get(key, {})
            order = sorted(known, key=lambda number: -float(known[number][0][head].norm()))[:keys]
            pushed = [("", int(pushes.count[key]), total[head] / max(pushes.count[key], 1.0))]
            pushed += [(_text(tokenizer, n), known[n][1], known[n][0][head] / known[n][1]) for n in order]
            random = torch.randn(draws, total.shape[1], generator=generator, dtype=torch.float64)
            random = random / random.norm(dim=1, keepdim=True)
            largest = (random @ way @ words.T).abs().amax(1)  # of unit directions
            for name, count, update in pushed:
                lines += _lines(
                    label(key, head, shared), name, count, update, (update @ way) @ words.T, largest, top, tokenizer
                )
    return Vocabulary(pd.DataFrame(lines), tuple(sorted(jacobians)))


def _lines(
    head: str, key: str, count: int, update: Tensor, logits: Tensor, largest: Tensor, top: int, tokenizer: Any
) -> list[dict[str, Any]]:
    size = float(update.norm())
    edge = float(largest.quantile(0.95)) * size
    found = []
    for pushed, sign in (("promote", 1.0), ("suppress", -1.0)):
        values, places = (sign * logits).topk(min(top, len(logits)))
        for rank, (value, place) in enumerate(zip(values.tolist(), places.tolist())):
            extreme = float((largest * size >= abs(value)).sum())
            found.append(
                {
                    "head": head,
                    "key": key,
                    "keys": count,
                    "pushed": pushed,
                    "rank": rank + 1,
                    "token": _text(tokenizer, place),
                    "logit": sign * value,
                    "random_edge": edge,
                    "p": (1 + extreme) / (1 + len(largest)),
                }
            )
    return found


def _text(tokenizer: Any, number: int) -> str:
    return str(tokenizer.decode([number])) if number >= 0 else ""
