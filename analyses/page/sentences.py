"""Five sentences that answer what the loss is doing to a model's heads, each with the guard under which it may be said.

What singles heads out is simultaneous over all heads, picks on one half of the sequences and estimates on the other. Where
the guard fails, the sentence says so and how many sequences would about be needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from ...probe import bootstrap
from ..intervals.resampled import FEWEST, LEVEL, Resampled, Sample, quiet
from . import training_sentences

NAMED, HEADS = 3, 5  # modules that are named for each reason why they were not captured, and heads that are named
NOTHING = "nothing farther than random directions would"


def share_by_layer(sample: Sample, layers: list[str]) -> list[tuple[str, float, float, float]]:
    """(layer, share, low, high): each layer's part of the score slope Σ D² of all heads, largest first."""
    whole, drawn = -sample.whole["score_slope"], -sample.replicates["score_slope"]
    names, rows = np.array(layers, dtype=object), []
    with quiet():
        all_of_it, of_replicates = np.nansum(whole), np.nansum(drawn, axis=1)
        for layer in dict.fromkeys(layers):
            there = names == layer
            low, high = bootstrap.percentiles((np.nansum(drawn[:, there], axis=1) / of_replicates)[:, None])
            rows.append((layer, float(np.nansum(whole[there]) / all_of_it), float(low[0]), float(high[0])))
    return sorted(rows, key=lambda row: -row[1])


def counted(number: Any, what: str) -> str:
    """Such as 1 head, 2 heads."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def measured(record: dict[str, Any], heads: pd.DataFrame) -> str:
    unit = str(record.get("loss_unit", "nats per target")).split()[0]
    kind = {"ce": "cross-entropy", "logit-diff": "logit difference"}.get(str(record.get("loss_kind", "ce")), "loss")
    loss = record.get("loss")  # a run folder holds null for what is not finite
    told = "not finite" if loss is None or not math.isfinite(loss) else f"{loss:.3f} {unit}"
    return (
        f"Measured: {counted(len(heads), 'attention head')} of {record.get('model')}, on "
        f"{counted(record.get('targets'), 'target')} in {counted(record.get('windows'), 'window')} of text; mean {kind} "
        f"{told}."
    )


def believed(record: dict[str, Any], rows: pd.DataFrame, what: str = "heads") -> str:
    """`rows`: of the heads table, or of a history (`what` says so)."""
    if "law_residual" not in rows:
        return "Can it be believed: these tables keep no residuals; “advantage-probe verify” checks a saved model."
    status = rows["status"].astype(str)
    worst, ok = float(rows["law_residual"].max()), int((status == "ok").sum())
    blind, odd = int(status.str.startswith("no gradient").sum()), int(status.str.contains("non-finite").sum())
    if math.isfinite(worst):
        text = f"the recomputed weights reproduce every head's own output along its gradient to {worst:.0e}"
    else:
        text = "no head's output could be held against recomputed weights, so no number here is checked"
    remarks = f"{ok:,} of {len(rows):,} {what} are without remark" if ok else f"none of the {what} is without remark"
    return (
        f"Can it be believed: {text}; {remarks}, {blind:,} received no gradient, {odd:,} had numbers that are not finite; "
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
    if not np.nansum(found.whole.whole["score_slope"]):
        return "Where: no head has a score slope that is known and not zero, so no layer or head can be singled out."
    text = _layer(found)
    if np.isfinite(found.whole.whole["routing_pressure"]).sum() < 2:
        return f"{text}; a single head has no others to be told from."
    labels, needed = found.singled_out("routing_pressure")
    if not labels and not needed:
        return f"{text}; no head lies above the median head."
    if not labels:
        return (
            f"{text}; single heads are not distinguishable from the median head with "
            f"{counted(found.sequences, 'sequence')}; about {needed} would be needed."
        )
    named = [f"{label} {_times(found, label)}" for label in labels[:HEADS]]
    named += [f"{len(labels) - HEADS} more lie above it"] if len(labels) > HEADS else []
    return f"{text}; against the median head's routing pressure, all heads asked at once, {', '.join(named)}."


def _layer(found: Resampled) -> str:
    """The layer that holds most, picked on one half of the sequences and estimated on the other where there are enough."""
    if not found.halved or not all(np.nansum(half.whole["score_slope"]) for half in (found.picking, found.estimating)):
        layer, share, _, _ = share_by_layer(found.whole, found.layers)[0]
        return f"Where: layer {layer} holds {share:.0%} of the heads' score slope"
    layer = share_by_layer(found.picking, found.layers)[0][0]
    rows = {row[0]: row[1:] for row in share_by_layer(found.estimating, found.layers)}
    share, low, high = rows[layer]
    return (
        f"Where (picked on one half of the {found.sequences} sequences, estimated on the other; brackets: 95 %): layer "
        f"{layer} holds {share:.0%} [{low:.0%}, {high:.0%}] of the heads' score slope"
    )


def _times(found: Resampled, label: str) -> str:
    """How a named head compares with the median head on the half that did not pick it."""
    ratio, low, high = found.estimated("routing_pressure", label)
    if math.isnan(ratio):
        return "is not known there"
    if math.isinf(ratio):
        return "has some where it has none"
    if not math.isfinite(low):
        return f"has {ratio:.3g} times as much, without an interval"
    return f"has {ratio:.3g} [{low:.3g}, {high:.3g}] times as much"


def routing_or_content(found: Resampled | None) -> str:
    if found is None:
        return "Routing or content: not known, this run kept no sequences apart."
    whole, drawn = (
        (part["content_relative"], part["routing_pressure"]) for part in (found.whole.whole, found.whole.replicates)
    )
    with quiet():
        ratio = float(np.nanmedian(whole[0] / whole[1]))
        replicates = np.nanmedian(drawn[0] / drawn[1], axis=1)
    if not math.isfinite(ratio):
        return "Routing or content: not known, no head has both pressures."
    if found.sequences < FEWEST:
        return (
            f"Routing or content: not distinguishable with {counted(found.sequences, 'sequence')}; about {FEWEST} would be "
            "needed for an interval."
        )
    low, high = (float(end[0]) for end in bootstrap.percentiles(replicates[:, None]))
    verdict = "content" if low > 1 else "routing" if high < 1 else None
    settled, known = found.whole.not_told_from_zero("alignment")
    pull = f"the loss pulls harder on {verdict}" if verdict else "it is not told on which the loss pulls harder"
    return (
        f"Routing or content: in the median head {pull}: a relative change of its values would move the loss {ratio:.2g} "
        f"times as much as a unit change of its scores ({low:.2g} to {high:.2g}); on {settled} of {known} "
        "heads the pull on attention is not told from one that is uncorrelated with where it goes."
    )


def writes(found: Resampled | None, edges: pd.DataFrame, vocabulary: pd.DataFrame | None) -> str:
    """What the strongest head's values are pushed to write, and its strongest edge."""
    if found is None or edges.empty:
        return "What it writes: no edges were kept."
    pressure = found.whole.whole["routing_pressure"]
    if not np.isfinite(pressure).any():
        return "What it writes: not known, no head has a routing pressure."
    labels, _ = found.singled_out("routing_pressure")
    strongest = labels[0] if labels else found.labels[int(np.nanargmax(pressure))]
    alone = len(found.labels) == 1
    name = strongest if labels or alone else f"{strongest} (the largest here, not told from the others)"
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
    """A token in quotation marks, isolated: one that turns the direction of writing turns nothing but itself."""
    return "a token without text" if token is None or token is pd.NA or pd.isna(token) else f"“\u2068{token}\u2069”"


def sentences(
    record: dict[str, Any],
    heads: pd.DataFrame,
    edges: pd.DataFrame,
    found: Resampled | None,
    more: Mapping[str, pd.DataFrame],
) -> list[str]:
    """The five, in the order of the first screen; of a training run what its steps say, where it kept no more.

    Args:
        found: `resampled` of the run's sequences. more: frames that not every run has.
    """
    history = more.get("history")
    if history is None or history.empty:
        return [
            measured(record, heads),
            believed(record, heads),
            where(found),
            routing_or_content(found),
            writes(found, edges, more.get("vocabulary")),
        ]
    told = [
        training_sentences.observed(record, history),
        believed(record, history, "rows (a head at a step)"),
        training_sentences.moved(history, len(record.get("seeds", [0]))) if found is None else where(found),
        training_sentences.balance(history) if found is None else routing_or_content(found),
        training_sentences.unwritten() if edges.empty else writes(found, edges, more.get("vocabulary")),
    ]
    # what `dynamics` says of the order of frame and precision, under its own guard
    return [*told, f"Frame or precision first: {record['wording']}"] if record.get("wording") else told
