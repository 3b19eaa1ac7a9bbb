"""Five sentences that answer what the loss is doing to a model's heads, each with the guard under which it may be said.

What singles heads out is simultaneous over all heads: replicates are drawn over sequences, the same for every head, and
the largest deviation of any head sets the limit for all. Where the guard fails, the sentence says so and how many sequences
would about be needed.

Shapes: N sequences, H heads, C sums, R replicates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..probe import bootstrap
from ..probe.statistics import SUMS, columns
from .paired import quantile

FEWEST = 12  # sequences: with fewer, a bootstrap over them is too narrow to single anything out
LEVEL = 0.95
NAMED = 3  # modules that are named for each reason why they were not captured
NOTHING = "nothing farther than random directions would"
_KEYS = ["module", "use", "head", "label"]
Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Resampled:
    """Heads in order, the layer of each, and columns of the whole (H,) and of every replicate (R,H)."""

    labels: list[str]
    layers: list[str]
    sequences: int
    whole: dict[str, Array]
    replicates: dict[str, Array]

    def singled_out(self, column: str) -> tuple[list[str], int]:
        """Heads whose column lies above the median head's, at once for all, strongest first; and about how many sequences
        would single out the strongest.
        """
        values, above, unit, limit = self._above(column)
        size = above / unit
        order = np.argsort(-np.nan_to_num(values, nan=-np.inf))
        found = [self.labels[head] for head in order if np.isfinite(size[head]) and size[head] > limit]
        strongest = float(size[order[0]]) if len(order) else 0.0
        needed = math.ceil(self.sequences * (limit / strongest) ** 2) if strongest > 0 else 0
        return found if self.sequences >= FEWEST else [], max(needed, FEWEST)

    def least_above(self, column: str) -> dict[str, float]:
        """By how much every head lies above the median head at least, at once for all heads (95 %)."""
        _, above, unit, limit = self._above(column)
        return dict(zip(self.labels, (above - limit * unit).tolist(), strict=True))

    def _above(self, column: str) -> tuple[Array, Array, Array, float]:
        """A column, how far heads lie above its median, the spread of that, and the limit for all in units of it."""
        values, drawn = self.whole[column], self.replicates[column]
        above, moved = values - np.nanmedian(values), drawn - np.nanmedian(drawn, axis=1, keepdims=True)
        spread = np.nanstd(moved, axis=0)
        unit = np.where(spread > 0, spread, np.inf)
        with np.errstate(invalid="ignore"):
            limit = self._widened(float(np.nanquantile(np.nanmax((moved - above) / unit, axis=1), LEVEL)))
        return values, above, unit, limit

    def not_told_from_zero(self, column: str) -> tuple[int, int]:
        """Heads whose simultaneous interval holds 0, and of how many heads the column is known."""
        values, drawn = self.whole[column], self.replicates[column]
        spread = np.nanstd(drawn, axis=0)
        unit = np.where(spread > 0, spread, np.inf)
        with np.errstate(invalid="ignore"):
            limit = self._widened(float(np.nanquantile(np.nanmax(np.abs(drawn - values) / unit, axis=1), LEVEL)))
        return int((np.abs(values) <= limit * spread).sum()), int(np.isfinite(values).sum())

    def _widened(self, limit: float) -> float:
        """A limit in bootstrap spreads as Student's for N sequences, whose spread is drawn as well: with 12 sequences the
        plain one named a head of equal heads in 10 to 20 % of trials.
        """
        count = self.sequences
        if count < 2 or not limit > 0:
            return limit
        return quantile(min(math.erf(limit / math.sqrt(2)), 1 - 1e-13), count - 1) * math.sqrt(count / (count - 1))


def resampled(sequences: pd.DataFrame) -> Resampled | None:
    """Replicates over the sequences of a run; None when it kept none."""
    if sequences.empty:
        return None
    table = sequences.assign(module=sequences["module"].astype(str), sequence=sequences["sequence"].astype(str))
    heads = table[[*_KEYS, "layer"]].drop_duplicates(_KEYS).reset_index(drop=True)
    place = {
        row: number for number, row in enumerate(heads[["module", "use", "head"]].itertuples(index=False, name=None))
    }
    names = sorted(table["sequence"].unique())
    sums = np.zeros((len(names), len(heads), len(SUMS)))
    line = table["sequence"].map({name: number for number, name in enumerate(names)}).to_numpy()
    column = np.array([place[row] for row in table[["module", "use", "head"]].itertuples(index=False, name=None)])
    sums[line, column] = table[list(SUMS)].to_numpy(dtype=np.float64)
    weights = bootstrap.weights([int(name, 16) for name in names]).numpy()
    drawn = np.tensordot(weights, sums, 1)
    # stacks and cross attention count their layers each for itself
    layers = [str(name).rsplit("H", 1)[0].rstrip(".").removeprefix("L") for name in heads["label"]]
    return Resampled(heads["label"].astype(str).tolist(), layers, len(names), columns(sums.sum(0)), columns(drawn))


def share_by_layer(found: Resampled) -> list[tuple[str, float, float, float]]:
    """(layer, share, low, high): each layer's part of the score slope Σ D² of all heads, largest first."""
    whole, drawn = -found.whole["score_slope"], -found.replicates["score_slope"]
    rows = []
    for layer in dict.fromkeys(found.layers):
        there = np.array([other == layer for other in found.layers])
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = np.nansum(drawn[:, there], axis=1) / np.nansum(drawn, axis=1)
            low, high = bootstrap.interval(shares[:, None])
            rows.append((layer, float(np.nansum(whole[there]) / np.nansum(whole)), float(low[0]), float(high[0])))
    return sorted(rows, key=lambda row: -row[1])


def measured(record: dict[str, Any], heads: pd.DataFrame) -> str:
    unit = str(record.get("loss_unit", "nats per target")).split()[0]
    kind = {"ce": "cross-entropy", "logit-diff": "logit difference"}.get(str(record.get("loss_kind", "ce")), "loss")
    return (
        f"Measured: {len(heads)} attention heads of {record.get('model')}, on {record.get('targets')} targets in "
        f"{record.get('windows')} windows of text; mean {kind} {record.get('loss', float('nan')):.3f} {unit}."
    )


def believed(record: dict[str, Any], heads: pd.DataFrame) -> str:
    status = heads["status"].astype(str)
    worst, ok = float(heads["law_residual"].max()), int((status == "ok").sum())
    blind, odd = int(status.str.startswith("no gradient").sum()), int(status.str.contains("non-finite").sum())
    if math.isfinite(worst):
        text = f"the recomputed weights reproduce every head's own output along its gradient to {worst:.0e}"
    else:
        text = "no head's output could be held against recomputed weights, so no number here is checked"
    remarks = f"{ok} of {len(heads)} heads are without remark" if ok else "no head is without remark"
    return (
        f"Can it be believed: {text}; {remarks}, {blind} received no gradient, {odd} had numbers that are not finite; "
        f"{captured(record)}."
    )


def captured(record: dict[str, Any]) -> str:
    """Which modules the run did not capture, and why, as its record has it."""
    missed = record.get("not_captured")
    if missed is None:
        return "which modules were not captured is not on its record"
    if not missed:
        return "every attention module was captured"
    parts = []
    for reason in dict.fromkeys(missed.values()):
        names = [name for name, why in missed.items() if why == reason]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        parts.append(f"{', '.join(names[:NAMED])}{more} ({reason})")
    return f"{len(missed)} module{'s were' if len(missed) > 1 else ' was'} not captured: {'; '.join(parts)}"


def where(found: Resampled | None) -> str:
    if found is None:
        return (
            "Where: this run kept no sequences apart, so no layer or head can be singled out; analyse the text again."
        )
    if not np.nansum(found.whole["score_slope"]):
        return "Where: no head has a score slope that is known and not zero, so no layer or head can be singled out."
    layer, share, low, high = share_by_layer(found)[0]
    text = f"Where: layer {layer} holds {share:.0%} of the heads' score slope"
    text += f" (95 % over sequences: {low:.0%} to {high:.0%})" if found.sequences >= FEWEST else ""
    if np.isfinite(found.whole["routing_pressure"]).sum() < 2:
        return f"{text}; a single head has no others to be told from."
    labels, needed = found.singled_out("routing_pressure")
    if not labels and found.sequences >= FEWEST >= needed:
        return f"{text}; no head lies above the median head."
    if not labels:
        return (
            f"{text}; single heads are not distinguishable from the median head with {found.sequences} sequences; about "
            f"{needed} would be needed."
        )
    least = found.least_above("routing_pressure")
    named = ", ".join(f"{label} (by {least[label]:.2g})" for label in labels[:5])
    named += f" and {len(labels) - 5} more" if len(labels) > 5 else ""
    return f"{text}; above the median head's routing pressure, by at least so much for all heads at once, lie {named}."


def routing_or_content(found: Resampled | None) -> str:
    if found is None:
        return "Routing or content: not known, this run kept no sequences apart."
    with np.errstate(invalid="ignore", divide="ignore"):
        whole = float(np.nanmedian(found.whole["content_relative"] / found.whole["routing_pressure"]))
        drawn = np.nanmedian(found.replicates["content_relative"] / found.replicates["routing_pressure"], axis=1)
    if not math.isfinite(whole):
        return "Routing or content: not known, no head has both pressures."
    if found.sequences < FEWEST:
        return (
            f"Routing or content: not distinguishable with {found.sequences} sequences; about {FEWEST} would be needed "
            "for an interval."
        )
    low, high = (float(end[0]) for end in bootstrap.interval(drawn[:, None]))
    verdict = "content" if low > 1 else "routing" if high < 1 else None
    settled, known = found.not_told_from_zero("alignment")
    pull = f"the loss pulls harder on {verdict}" if verdict else "it is not told on which the loss pulls harder"
    return (
        f"Routing or content: in the median head {pull}: a relative change of its values would move the loss {whole:.2g} "
        f"times as much as a unit change of its scores ({low:.2g} to {high:.2g}); on {settled} of {known} "
        "heads the pull on attention is not told from one that is uncorrelated with where it goes."
    )


def writes(found: Resampled | None, edges: pd.DataFrame, vocabulary: pd.DataFrame | None) -> str:
    """What the strongest head's values are pushed to write, and its strongest edge."""
    if found is None or edges.empty:
        return "What it writes: no edges were kept."
    if not np.isfinite(found.whole["routing_pressure"]).any():
        return "What it writes: not known, no head has a routing pressure."
    labels, _ = found.singled_out("routing_pressure")
    strongest = labels[0] if labels else found.labels[int(np.nanargmax(found.whole["routing_pressure"]))]
    name = strongest if labels else f"{strongest} (the largest here, not told from the others)"
    rows = edges[(edges["label"].astype(str) == strongest) & (edges["rank"] == 1)]
    text = f"What it writes: {name}"
    if vocabulary is not None and (vocabulary["label"].astype(str) == strongest).any():
        own = vocabulary[vocabulary["label"].astype(str) == strongest]
        for direction, verb in (("promoted", "to promote"), ("suppressed", "to suppress")):
            beyond = own[(own["direction"].astype(str) == direction) & (own["p"] <= 1 - LEVEL)]
            quoted = ", ".join(_quoted(token) for token in beyond.sort_values("rank")["token"].head(3))
            text += f"{' and' if direction == 'suppressed' else ' is pushed'} {verb} {quoted or NOTHING}"
    if rows.empty:
        return f"{text}."
    edge = rows.loc[rows["score_gradient"].abs().idxmax()]
    wants = "more" if edge["score_gradient"] < 0 else "less"
    joint = ";" if " is pushed" in text else ":"
    return (
        f"{text}{joint} most of all the loss wants {wants} attention from {_quoted(edge['query_token'])} (position "
        f"{edge['query_position']}) to {_quoted(edge['key_token'])} (position {edge['key_position']})."
    )


def _quoted(token: Any) -> str:
    return "a token without text" if token is None or token is pd.NA or pd.isna(token) else f"“{token}”"


def sentences(
    record: dict[str, Any],
    heads: pd.DataFrame,
    edges: pd.DataFrame,
    sequences: pd.DataFrame,
    vocabulary: pd.DataFrame | None = None,
) -> list[str]:
    """The five, in the order of the first screen."""
    found = resampled(sequences)
    return [
        measured(record, heads),
        believed(record, heads),
        where(found),
        routing_or_content(found),
        writes(found, edges, vocabulary),
    ]
