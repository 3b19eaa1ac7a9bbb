"""Edits of attention: drop edges, drop keys, set a pattern, scale a score, and whatever else maps scores to scores.

The model's kernel runs untouched. The rows that an edit changes are computed anew from query, key and value,
differentiably, and written over the kernel's output; every other row stays as the kernel returned it, bit for bit. An
edge is removed after the cap and the bias, as a mask of −inf would; with a sink, the sink stays in the normaliser.
Attention dropout is refused (which weights were dropped would have to be drawn again), as are compiled graphs and
gradient checkpoints, where an edit would be lost. In cached generation positions count from the start of the
sequence, and pairs of queries that are not in a forward wait for theirs.

Shapes: B sequences, H heads of the module, h edited ones, Q query positions, S key positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from ...hooks.attach import anywhere, edited
from ...hooks.call import AttentionCall
from ...hooks.errors import BadInput, BadRequest, UnsupportedKernel


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of the edited heads: `raw` (B,h,Q,S) scale·q·k, `final` capped and biased, −inf where hidden; positions of
    queries (Q,) and keys (S,) in the sequence.
    """

    raw: Tensor
    final: Tensor
    query_positions: Tensor
    key_positions: Tensor
    finish: Callable[[Tensor], Tensor]

    def places(self, positions: Sequence[int], side: Literal["query", "key"]) -> Tensor:
        """Places of positions on a side; −1 for those that are not in this forward."""
        line = self.query_positions if side == "query" else self.key_positions
        known = {int(position): place for place, position in enumerate(line.tolist())}
        return torch.tensor([known.get(int(position), -1) for position in positions], dtype=torch.long)


# final scores (or weights, where `weighs`) of the edited heads → what to use instead
Change = Callable[[Scores], Tensor]


@dataclass(frozen=True, eq=False)
class AttentionEdit:
    """One change of the attention of one module: `module` by its qualified name, or `layer` of a model with one stack.

    `heads`: which query heads; None: all. `use`: which call of the module in a forward; None: every one.
    """

    module: str | int
    change: Change
    heads: tuple[int, ...] | None = None
    use: int | None = None


def drop_edges(edges: Iterable[tuple[int, int, int] | tuple[int, int]]) -> Change:
    """Remove (sequence, query position, key position) triples, or (query, key) pairs in every sequence; the row
    renormalises.

    An edge that the row cannot see is refused in the forward.
    """
    listed = [tuple(int(part) for part in edge) for edge in edges]
    if not listed or any(len(edge) not in (2, 3) for edge in listed):
        raise BadRequest("Edges are (sequence, query position, key position) or (query position, key position).")

    def change(scores: Scores) -> Tensor:
        gone = torch.zeros_like(scores.final, dtype=torch.bool)
        rows = scores.places([edge[-2] for edge in listed], "query")
        columns = scores.places([edge[-1] for edge in listed], "key")
        for edge, row, column in zip(listed, rows.tolist(), columns.tolist()):
            if row < 0:
                continue  # a query of another forward of the generation
            if column < 0:
                raise BadInput(f"There is no key at position {edge[-1]} for the query at {edge[-2]}.")
            batch = slice(None) if len(edge) == 2 else edge[0]
            if len(edge) == 3 and not 0 <= edge[0] < len(gone):
                raise BadInput(f"The batch has {len(gone)} sequences, numbered from 0; there is no {edge[0]}.")
            gone[batch, :, row, column] = True
        unseen = gone & torch.isneginf(scores.final)
        if bool(unseen.any()) and any(len(edge) == 3 for edge in listed):
            place = unseen.nonzero()[0].tolist()
            raise BadInput(
                f"Query {int(scores.query_positions[place[2]])} of sequence {place[0]} does not see key "
                f"{int(scores.key_positions[place[3]])}, so the edge cannot be removed."
            )
        return scores.final.masked_fill(gone, -torch.inf)

    return change


def drop_keys(positions: Iterable[int]) -> Change:
    """Hide keys from every row; a row that sees nothing else is left as it was."""
    listed = [int(position) for position in positions]

    def change(scores: Scores) -> Tensor:
        columns = scores.places(listed, "key")
        if bool((columns < 0).any()):
            raise BadInput(f"There is no key at position {listed[int((columns < 0).nonzero()[0])]} in this forward.")
        gone = torch.zeros(scores.final.shape[-1], dtype=torch.bool, device=scores.final.device)
        gone[columns.to(gone.device)] = True
        hidden = scores.final.masked_fill(gone, -torch.inf)
        return torch.where(torch.isneginf(hidden).all(-1, keepdim=True), scores.final, hidden)

    return change


def scale_scores(factor: float, *, before_cap: bool = False) -> Change:
    """Multiply scores: those that enter the softmax (after cap and bias), or q·k before them."""

    def change(scores: Scores) -> Tensor:
        if before_cap:
            return scores.finish(scores.raw * factor)
        return torch.where(torch.isneginf(scores.final), scores.final, scores.final * factor)

    return change


def set_pattern(weights: Tensor) -> Change:
    """Attend by `weights`, (Q,S) or what broadcasts to (B,h,Q,S), whatever the scores say; rows must sum to one, and
    keys that a row cannot see must have none.
    """
    given = torch.as_tensor(weights)
    if given.dim() < 2 or bool((given < 0).any()) or not bool(torch.isfinite(given).all()):
        raise BadRequest("A pattern is a tensor of weights, finite and not negative, with at least two axes.")
    if bool(((given.sum(-1) - 1).abs() > 1e-4).any()):
        raise BadRequest("Every row of a pattern must sum to 1.")

    def change(scores: Scores) -> Tensor:
        try:
            spread = given.to(scores.final).expand(scores.final.shape)
        except RuntimeError:
            shape = tuple(scores.final.shape)
            raise BadRequest(f"A pattern of shape {tuple(given.shape)} does not fit scores of shape {shape}.") from None
        if bool(((spread > 0) & torch.isneginf(scores.final)).any()):
            raise BadInput("The pattern gives weight to a key that its row cannot see.")
        return spread.log()  # a softmax gives the weights back, and 0 becomes −inf

    return change


@dataclass(eq=False)
class _Editor:
    edits: tuple[AttentionEdit, ...]
    reached: set[int] = field(default_factory=set)
    seen: dict[str, int] = field(default_factory=dict)

    def _meant(self, edit: AttentionEdit, call: AttentionCall) -> bool:
        named = edit.module == call.site.module if isinstance(edit.module, str) else edit.module == call.site.layer
        return named and (edit.use is None or edit.use == call.use)

    def output(self, call: AttentionCall) -> Tensor:
        self.seen[call.site.module] = call.site.layer
        output = call.output
        for number, edit in enumerate(self.edits):
            if self._meant(edit, call):
                self.reached.add(number)
                output = _edited(call, output, edit)
        return output


def _edited(call: AttentionCall, output: Tensor, edit: AttentionEdit) -> Tensor:
    """The head output (B,H,Q,V) with the changed rows of the edited heads computed anew."""
    if call.dropout or call.hidden or call.weights is not None:
        raise UnsupportedKernel(
            f"{call.site.module} drops attention weights, which an edit would have to draw again; call model.eval() first."
        )
    count = output.shape[1]
    heads = range(count) if edit.heads is None else edit.heads
    if any(not 0 <= head < count for head in heads):
        raise BadRequest(f"{call.site.module} has {count} heads, numbered from 0; there is no {max(heads)}.")
    index = torch.as_tensor(list(heads), device=output.device)
    owner = index // call.group
    dtype = torch.float64 if call.query.dtype == torch.float64 else torch.float32
    raw = call.query[:, index].to(dtype) @ call.key[:, owner].to(dtype).mT * call.scale
    visible, bias = call.visibility.dense(output.shape[0], output.device)
    if visible.shape[1] > 1:
        visible = visible[:, index]
    if bias is not None and bias.shape[1] > 1:
        bias = bias[:, index]

    def finish(score: Tensor) -> Tensor:
        if call.softcap is not None:
            score = call.softcap * torch.tanh(score / call.softcap)
        if bias is not None:
            score = score + bias.to(dtype)
        return score.masked_fill(~visible, -torch.inf)

    final = finish(raw)
    own, other = call.visibility.positions(output.device)
    changed = edit.change(Scores(raw, final, own, other, finish))
    moved = (changed != final).any(-1)  # (B,h,Q)
    if not bool(moved.any()):
        return output
    place = moved.nonzero(as_tuple=True)
    score = changed[place]  # (rows, S)
    alive = ~torch.isneginf(score).all(-1, keepdim=True)
    if call.sinks is not None:
        sink = call.sinks[index].to(dtype)[place[1], None]
        weights = torch.softmax(torch.cat([score, sink], -1), -1)[:, :-1]
    elif not bool(alive.all()):
        raise BadInput("The edit leaves a row without any key; leave it one.")
    else:
        weights = torch.softmax(score, -1)
    values = call.value[:, owner].to(dtype)[place[0], place[1]]  # (rows, S, V)
    rows = torch.einsum("rs,rsv->rv", weights, values).to(output.dtype)
    return output.index_put((place[0], index[place[1]], place[2]), rows)


@contextmanager
def edited_attention(model: nn.Module, *edits: AttentionEdit) -> Iterator[None]:
    """Change the model's attention in every forward inside the block; everything is as it was after it.

    Raises:
        BadRequest: for heads or shapes that are not there (in the forward), or, when the block ends, for an edit
            whose module made no call. BadInput: for edges that cannot be removed. UnsupportedKernel: under dropout,
            in compiled graphs and gradient checkpoints.
    """
    editor = _Editor(tuple(edits))
    with edited(model, output=editor.output, wanted=anywhere) as listener:
        yield
    if listener.error is not None:
        return
    missed = [edit.module for number, edit in enumerate(edits) if number not in editor.reached]
    if missed:
        known = ", ".join(list(editor.seen)[:4]) or "none"
        raise BadRequest(f"No attention of {missed[0]!r} was edited; attention was seen in {known}.")
