"""A head of a model on a batch: every tensor that the law speaks of, at full resolution.

One float32 map of 2,048² is 17 MB a sequence and head, and a head has four of them; longer sequences are refused
unless asked for. The model is run forward and backward once, with the kernel it has; its gradients, buffers and
random state are as before.

Shapes: B sequences, Q query positions, S key positions, D head width, V value width.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor, nn

from ...hooks.attach import calls
from ...hooks.call import AttentionCall, CallSite
from ...hooks.errors import BadInput, BadRequest, NoAttentionSeen, NoGradientReached
from ...hooks.sequences import NON_TOKENS
from ...probe.law.definition import law
from ...probe.state import Key, label, shared_modules
from ...probe.tables import spell
from ..files.export import write_frame
from ..files.folders import new_folder
from ..pictures.plots import head_map
from .checked import check
from .question import Question, question
from .untouched import as_it_was

LONGEST = 2048  # positions of a side that a map has without being asked for more
MAPS = ("attention", "advantage", "score_gradient", "knockout")
VECTORS = ("query", "key", "value", "upstream", "output")
TENSORS = (*MAPS, *VECTORS, "query_ids", "key_ids", "query_positions", "key_positions")
FACTS = (
    "label",
    "module",
    "layer",
    "head",
    "kv_head",
    "use",
    "kind",
    "implementation",
    "loss",
    "loss_weight",
    "status",
)


@dataclass(frozen=True, eq=False)
class Head:
    """One head on one batch.

    Attributes:
        attention, advantage, score_gradient, knockout (B,Q,S): α, A, D and the first-order change of the loss when
            the edge is removed; NaN on padding and on keys that the row cannot see. All but α in the loss's unit, per
            summed loss where `loss_weight` is known.
        query (B,Q,D), key (B,S,D), value (B,S,V), upstream (B,Q,V), output (B,Q,V): what the model's kernel used and
            returned; upstream is ∂L/∂output, freed of the loss weight.
        query_ids (B,Q), key_ids (B,S): token ids, −1 where there is no token. query_positions (Q,), key_positions (S,).
        label, module, layer, head, kv_head, use, kind, implementation: which head, and the kernel that ran.
        loss: the loss that was differentiated. loss_weight: what it was freed of: 1.0 for a sum, 1/targets for a mean
            whose count was seen, "unknown" where neither is.
        status: "ok", or why some maps hold NaN.
    """

    label: str
    module: str
    layer: int
    head: int
    kv_head: int
    use: int
    kind: str
    implementation: str
    attention: Tensor
    advantage: Tensor
    score_gradient: Tensor
    knockout: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    upstream: Tensor
    output: Tensor
    query_ids: Tensor
    key_ids: Tensor
    query_positions: Tensor
    key_positions: Tensor
    loss: float
    loss_weight: float | str
    status: str = "ok"
    tokenizer: Any = None
    source: Source | None = None

    def __repr__(self) -> str:
        batch, queries, keys = self.attention.shape
        weight = self.loss_weight if isinstance(self.loss_weight, str) else f"{self.loss_weight:.3g}"
        return (
            f"Head({self.label}: {batch} sequence{'s' * (batch != 1)}, {queries} × {keys}, {self.kind}, loss weight "
            f"{weight}, {self.status})"
        )

    def tokens(self, side: Literal["query", "key"], sequence: int = 0) -> list[str]:
        """Tokens of one side as the tokenizer spells them; positions where none is known."""
        ids = (self.query_ids if side == "query" else self.key_ids)[sequence].tolist()
        return spelled(ids, self.tokenizer)

    def frame(self) -> Pairs:
        """One row a visible pair: sequence, positions, tokens, and the four maps; `.pivot()` is a labelled square."""
        place = self.attention.isfinite().nonzero()
        row, query, key = place.unbind(1)
        columns: dict[str, Any] = {
            "sequence": row.numpy(),
            "query_position": self.query_positions[query].numpy(),
            "key_position": self.key_positions[key].numpy(),
            "query_token": _column(self.query_ids, row, query, self.tokenizer),
            "key_token": _column(self.key_ids, row, key, self.tokenizer),
        }
        columns |= {name: getattr(self, name)[row, query, key].double().numpy() for name in MAPS}
        return Pairs(pd.DataFrame(columns))

    def plot(self, kind: str = "advantage", sequence: int = 0, **options: Any) -> Any:
        """The head's map over one sequence as matplotlib Axes; options as `plots.head_map`.

        Raises:
            BadRequest: for a map that there is none of, or a sequence that is not in the batch.
        """
        if kind not in MAPS:
            raise BadRequest(f"A head has maps of {', '.join(MAPS)}, not {kind!r}.")
        if not 0 <= sequence < len(self.attention):
            raise BadRequest(f"The batch has {len(self.attention)} sequences, numbered from 0; there is no {sequence}.")
        axes = head_map(
            getattr(self, kind)[sequence].numpy(),
            kind,
            query_tokens=self.tokens("query", sequence),
            key_tokens=self.tokens("key", sequence),
            **options,
        )
        axes.set_title(self.label)
        return axes

    def _repr_png_(self) -> bytes:
        """What a notebook shows: the advantage over the first sequence."""
        import io

        buffer = io.BytesIO()
        self.plot().figure.savefig(buffer, format="png", dpi=120)
        return buffer.getvalue()

    def save(self, folder: Any) -> None:
        """As safetensors and Parquet, a folder that is whole or not there; read back by `ap.load_head`."""
        from safetensors.torch import save_file

        with new_folder(Path(folder)) as work:
            save_file({name: getattr(self, name).contiguous() for name in TENSORS}, work / "head.safetensors")
            write_frame(self.frame(), work / "pairs", ("parquet",))
            facts = {"format": 1, **{name: getattr(self, name) for name in FACTS}}
            (work / "head.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def check(self, edges: int | pd.DataFrame | Sequence[tuple[int, int, int]] = 20) -> pd.DataFrame:
        """Remove edges for real and hold what the loss does against what was predicted; see `checked.check`."""
        return check(self, edges)


@dataclass(frozen=True, eq=False)
class Source:
    """Where a head came from, kept so that its edges can be checked on the same model and batch."""

    model: nn.Module
    question: Question


class Pairs(pd.DataFrame):
    """A frame of pairs of one head."""

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame

    def pivot(self, values: str = "advantage", sequence: int = 0) -> pd.DataFrame:
        """The (Q,S) square of one map over one sequence, labelled by position and token."""
        rows = pd.DataFrame(self[self["sequence"] == sequence])
        for side in ("query", "key"):
            rows[side] = rows[f"{side}_position"].astype(str) + " " + rows[f"{side}_token"].astype(str)
        order = {
            side: rows.drop_duplicates(side).sort_values(f"{side}_position")[side].tolist() for side in ("query", "key")
        }
        square = rows.pivot(index="query", columns="key", values=values)
        return square.loc[order["query"], order["key"]]


def spelled(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Each id as the tokenizer spells it, its number without one, "" where there is no token."""
    named = {number: f"<{name}>" for name, number in NON_TOKENS.items()}
    known = {number: named.get(number, "" if number < 0 else str(number)) for number in set(ids)}
    if tokenizer is not None:
        real = sorted(number for number in known if number >= 0)
        known |= dict(zip(real, spell(tokenizer, real)))
    return [known[number] for number in ids]


def _column(ids: Tensor, row: Tensor, place: Tensor, tokenizer: Any) -> list[str]:
    return spelled(ids[row, place].tolist(), tokenizer)


def head(
    model: nn.Module,
    batch: Any,
    which: str | Sequence[str] | None = None,
    *,
    layer: int | None = None,
    head: int | None = None,
    use: int = 0,
    tokenizer: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
    targets: Literal["all", "last"] | Tensor | None = None,
    against: Tensor | None = None,
    longer: bool = False,
) -> Any:
    """Take one head of `model` on `batch` in your hands, or several in one pass.

    Args:
        model: any model that can be watched, with the kernel it has; a compiled one is run uncompiled.
        batch: as the model takes it (a dict of its arguments, token ids), or a text with `tokenizer=`.
        which: a label as the tables have it ("L3H7", "decoder.xL3H7" for cross attention), or a list of them, for
            which a list is returned; or `layer=` and `head=`, with `use=` for modules that are called more than once.
        tokenizer: spells tokens, and encodes a text.
        loss: a scalar of the forward's output, taken as it comes. targets: "all" or "last" next tokens, or ids
            aligned with the output; against: ids that the targets' logits are held against. Without either: the
            batch's own labels.
        longer: also for sequences of more than 2,048 positions, whose maps take (Q × S × 16) bytes a sequence and head.

    Raises:
        BadRequest: for a label that does not exist (the message names those that do). BadInput: for a batch that
        gives no loss or lies on another device, or a sequence that is too long. NoGradientReached: when the loss does
        not depend on the head. Whatever cannot be read.
    """
    several = which is not None and not isinstance(which, str)
    asked = question(model, batch, tokenizer=tokenizer, loss=loss, targets=targets, against=against)
    model = getattr(model, "_orig_mod", model)
    taken = _Taken(_Wanted(which, layer, head, use), longer)
    with as_it_was(model), torch.enable_grad(), calls(model, taken.add, reach_all=True) as listener:
        taken.ran = listener.ran
        output = model(**asked.inputs)
        listener.check()
        value, weight = asked.loss(output)
        if not listener.ran:
            raise NoAttentionSeen(f"{type(model).__name__} made no attention call that the probe can read.")
        names = taken.names()
        if value.requires_grad:
            value.backward()
        listener.check()
    told: float | str = "unknown" if weight is None else weight
    missing = [name for name in names if name not in taken.found]
    if missing:
        raise NoGradientReached(f"No gradient came back to {missing[0]}; the loss does not depend on it.")
    made = [
        replace(
            taken.found[name],
            loss=float(value.detach()),
            loss_weight=told,
            tokenizer=tokenizer,
            source=Source(model, asked),
        )
        for name in names
    ]
    return made if several else made[0]


@dataclass(frozen=True)
class _Wanted:
    labels: str | Sequence[str] | None
    layer: int | None
    head: int | None
    use: int

    def chosen(self, known: dict[str, tuple[Key, int]]) -> list[str]:
        if self.labels is not None:
            names = [self.labels] if isinstance(self.labels, str) else list(self.labels)
        elif self.layer is None or self.head is None:
            raise BadRequest('Name a head: head(model, batch, "L3H7"), or layer=3, head=7.')
        else:
            place = self.layer, self.head, self.use
            names = [name for name, (key, head) in known.items() if (key.site.layer, head, key.use) == place]
            if not names:
                names = [f"layer={self.layer}, head={self.head}, use={self.use}"]
            elif len(names) > 1:
                raise BadRequest(
                    f"layer={self.layer}, head={self.head} names {', '.join(names)}; give one of the labels."
                )
        for name in names:
            if name not in known:
                some = list(known)
                shown = ", ".join(some[:8]) + (f" … {some[-1]}" if len(some) > 8 else "")
                raise BadRequest(f"There is no head {name!r} here; the model has {shown}.")
        return names


class _Taken:
    """Cuts the wanted heads out of the calls as their gradients come."""

    def __init__(self, wanted: _Wanted, longer: bool) -> None:
        self.wanted, self.longer = wanted, longer
        self.ran: list[tuple[CallSite, int]] = []
        self.found: dict[str, Head] = {}
        self._places: dict[tuple[Key, int], str] | None = None

    def names(self) -> list[str]:
        """Labels of the wanted heads, once the forward has shown which there are."""
        shared = shared_modules(Key(call.site, call.use) for call, _ in self.ran)
        known = {
            label(key, head, shared): (key, head)
            for call, heads in self.ran
            for key in (Key(call.site, call.use),)
            for head in range(heads)
        }
        names = self.wanted.chosen(known)
        self._places = {known[name]: name for name in names}
        return names

    def add(self, call: AttentionCall) -> None:
        if call.delivery or self._places is None:
            return
        key = Key(call.site, call.use)
        for head in range(call.query.shape[1]):
            name = self._places.get((key, head))
            if name is not None:
                longest = max(call.query.shape[2], call.key.shape[2])
                if longest > LONGEST and not self.longer:
                    size = call.query.shape[2] * call.key.shape[2] * call.query.shape[0] * 16 / 2**20
                    raise BadInput(
                        f"Maps of {longest:,} positions take {size:,.0f} MiB a head; shorten the batch, or pass "
                        "longer=True."
                    )
                self.found[name] = _cut(call, head, name)


def one_head(call: AttentionCall, head: int) -> AttentionCall:
    """The call of one query head alone, as if the model had no other."""
    one, group = slice(head, head + 1), slice(head // call.group, head // call.group + 1)

    def cut(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[1] == 1 else tensor[:, one]

    seen = replace(call.visibility, mask=cut(call.visibility.mask), bias=cut(call.visibility.bias))
    return replace(
        call,
        query=call.query[:, one],
        key=call.key[:, group],
        value=call.value[:, group],
        output=call.output[:, one],
        upstream=call.upstream[:, one],
        visibility=seen,
        sinks=None if call.sinks is None else call.sinks[one],
        weights=cut(call.weights),
    )


def _cut(call: AttentionCall, head: int, name: str) -> Head:
    alone = one_head(call, head)
    terms = law(alone)
    batch, queries, keys = terms.attention[:, 0].shape
    counted = call.visibility.counted(batch, call.query.device)
    shown = terms.visible[:, 0] & counted[..., None]
    status = "ok"
    unknown = ("advantage", "score_gradient", "knockout") if call.hidden else ()
    if call.hidden:
        status = f"{call.implementation} drops weights and does not say which: only attention is known"

    def map_of(kind: str) -> Tensor:
        values = torch.full_like(terms.attention[:, 0], torch.nan) if kind in unknown else getattr(terms, kind)[:, 0]
        return torch.where(shown, values, torch.nan).detach().cpu()

    maps: dict[str, Any] = {kind: map_of(kind) for kind in MAPS}

    def ids(given: Tensor | None, length: int) -> Tensor:
        found = torch.full((batch, length), -1) if given is None else given.detach().cpu().expand(batch, -1)
        return found.to(torch.int64).clone()

    own, other = call.visibility.positions(torch.device("cpu"))
    vectors: dict[str, Any] = {kind: getattr(alone, kind)[:, 0].detach().cpu().clone() for kind in VECTORS}
    return Head(
        name,
        call.site.module,
        call.site.layer,
        head,
        head // call.group,
        call.use,
        call.site.kind,
        call.implementation,
        **maps,
        **vectors,
        query_ids=ids(call.sequences.query_ids, queries),
        key_ids=ids(call.sequences.key_ids, keys),
        query_positions=own.clone(),
        key_positions=other.clone(),
        loss=float("nan"),
        loss_weight="unknown",
        status=status,
    )
