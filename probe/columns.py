"""One record a column: what it is made from, its unit, where it is shown, and what it means.

Sums are stored, because they add; what is read is divided by the number of rows that it was summed over, so that no column
grows with the corpus, and every replicate of a bootstrap is divided by its own number.

Every list of columns in the library is read from here: tables, page, plots, loggers, comparisons, LaTeX, what a bridge's
weight processing changes, and the table in the pages. A column that is made from known sums is one record in this file.

Symbols as in `law.definition`: R the counted query rows, n = |R|; V_i the visible keys of row i; α attention, w the weights
after dropout, b_ij = u_i·v_j, A the advantage, D = ∂L/∂s, m_j = Σ_i w_ij u_i, N_j = Σ_i α_ij.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Place = Literal["page", "notebook", "terminal", "logger", "latex", "compared", "resampled"]


@dataclass(frozen=True)
class Sum:
    """A stored sum of one head: it adds over sequences, batches, shards and ranks.

    Attributes:
        degree: power of u in it; dividing u by w divides the sum by w^degree.
        by_row: it adds up one number per query row, the attribute of that name of `law.vectors.Vectors`.
        meaning: what is added.
    """

    name: str
    degree: int
    meaning: str
    by_row: bool = False


_SUMS = (
    Sum("queries", 0, "n"),
    Sum("blind_queries", 0, "counted rows that see no key"),
    Sum("entropy", 0, "−Σ_j α ln α of every row", by_row=True),
    Sum("sink", 0, "1 − Σ_j α of every row", by_row=True),
    Sum("first_key", 0, "α on the first key that is not padding"),
    Sum("distance", 0, "Σ_j α·abs(position_i − position_j)"),
    Sum("advantage_square", 2, "Σ_j α A² of every row", by_row=True),
    Sum("missed", 1, "max_j A_ij of every row", by_row=True),
    Sum("alignment", 0, "Pearson correlation of α_i and A_i where it is known", by_row=True),
    Sum("aligned", 0, "rows whose correlation is known", by_row=True),
    Sum("score_square", 2, "Σ_j D² of every row", by_row=True),
    Sum("value_gradient_square", 2, "Σ_j ‖m_j‖²"),
    Sum("group_gradient_square", 2, "Σ_j ‖Σ_h m_j‖² over the query heads of a group"),
    Sum("value_square", 0, "Σ_j ‖v_j‖² over keys in use"),
    Sum("keys", 0, "keys in use"),
    Sum("usage_entropy", 0, "entropy of N/ΣN, weighted by rows"),
    Sum("uniform_entropy", 0, "the same if every row spread evenly"),
    Sum("over_uniform", 1, "mean of b over V_i, minus E_i, of every row", by_row=True),
    Sum("coherence_sum", 1, "Σ_j ‖m_j‖"),
    Sum("coherence_bound", 1, "Σ_j Σ_i w_ij ‖u_i‖"),
    Sum("cosine_sum", 0, "Σ_j N_j cos(−m_j, v_j)"),
    Sum("cosine_bound", 0, "Σ_j N_j where the cosine is known"),
    Sum("residual", 2, "(Σ_j w b − u·o)² of every row", by_row=True),
    Sum("residual_scale", 2, "Σ_j α b² of every row", by_row=True),
    Sum("hidden_queries", 0, "rows whose kernel dropped attention weights without saying which"),
)
SUMS: dict[str, int] = {entry.name: entry.degree for entry in _SUMS}
SUMS_OF_ROWS = tuple(entry.name for entry in _SUMS if entry.by_row)
INDEX = {name: place for place, name in enumerate(SUMS)}


@dataclass(frozen=True)
class Column:
    """A column of the heads table.

    Attributes:
        sums: names of the sums it is made from; `define`: the function of them, in that order.
        unit: "" for a pure number. signed: its sign means something, so that it is drawn around zero.
        needs_weights: NaN where the kernel dropped attention weights and does not say which.
        gauge_free: the same under (W_V, W_O) → (W_V G, G⁻¹ W_O), so that heads can be compared.
        processed: the same when weight processing folds value biases and centres what is written to the stream; None for a
            check, of which neither is said.
        definition: how it is computed, as the reference table says it. meaning: what it says, in one line.
        shown: rank in each place that shows a choice of columns.
    """

    name: str
    sums: tuple[str, ...]
    define: Callable[..., Array]
    definition: str
    meaning: str
    unit: str = ""
    signed: bool = False
    needs_weights: bool = True
    gauge_free: bool = True
    processed: bool | None = True
    shown: tuple[tuple[Place, int], ...] = ()

    @property
    def scale(self) -> Literal["plain", "log"]:
        """On which its intervals are taken: what has one sign and no upper end spreads in proportion to its size."""
        one_sign = self.name != "edge_over_uniform"
        return "log" if one_sign and self.unit in ("loss", "loss per value unit", "keys", "tokens") else "plain"


def _mean(total: Array, n: Array) -> Array:
    return total / n


def _root_mean(total: Array, n: Array) -> Array:
    return np.sqrt(total / n)


def _slope(total: Array, n: Array) -> Array:
    return -total / n


COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        Column(
            "queries",
            ("queries",),
            lambda n: n,
            "n",
            "query rows that count",
            unit="rows",
            needs_weights=False,
        ),
        Column(
            "attention_entropy",
            ("entropy", "queries"),
            _mean,
            "mean over rows of −Σ_j α ln α",
            "entropy of attention, mean over queries",
            unit="nats",
            needs_weights=False,
            shown=(("page", 7), ("logger", 3), ("compared", 7)),
        ),
        Column(
            "sink_share",
            ("sink", "queries"),
            _mean,
            "mean of 1 − S_i: attention on a hidden sink column",
            "attention on the sink column",
            needs_weights=False,
        ),
        Column(
            "effective_keys",
            ("entropy", "queries"),
            lambda total, n: np.exp(total / n),
            "exp(attention_entropy)",
            "exp of the entropy: how many keys a query looks at",
            unit="keys",
            needs_weights=False,
            shown=(("page", 8), ("notebook", 5), ("terminal", 5), ("latex", 5)),
        ),
        Column(
            "first_key_share",
            ("first_key", "queries"),
            _mean,
            "mean α on the first key that is not padding",
            "attention on the first token",
            needs_weights=False,
            shown=(("page", 10),),
        ),
        Column(
            "mean_distance",
            ("distance", "queries"),
            _mean,
            "mean Σ_j α·abs(position_i − position_j); NaN for cross-attention",
            "how far back the head looks",
            unit="tokens",
            needs_weights=False,
            shown=(("page", 9),),
        ),
        Column(
            "advantage_std",
            ("advantage_square", "queries"),
            lambda total, n: np.sqrt(total / n),
            "√(mean Σ_j α A²)",
            "spread of the advantage under the head's own attention",
            unit="loss",
        ),
        Column(
            "advantage_missed",
            ("missed", "queries"),
            _mean,
            "mean of max_j A_ij; grows with the length, so it ranks nothing",
            "the largest advantage of a row, mean over rows",
            unit="loss",
        ),
        Column(
            "alignment",
            ("alignment", "aligned"),
            _mean,
            "mean Pearson correlation of α_i and A_i over V_i, rows with n_i ≥ 3 in which both vary",
            "correlation of attention with advantage: positive where it attends to what lowers the loss",
            signed=True,
            shown=(("page", 3), ("notebook", 3), ("terminal", 3), ("latex", 3), ("compared", 3), ("resampled", 3)),
        ),
        Column(
            "routing_pressure",
            ("score_square", "queries"),
            _root_mean,
            "√(mean over rows of Σ_j D²), D = ∂L/∂(score that enters the softmax, after cap and bias)",
            "root mean square over queries of ∂L/∂s: how hard the loss pulls on where the head looks",
            unit="loss",
            shown=(
                ("page", 1),
                ("notebook", 1),
                ("terminal", 1),
                ("logger", 1),
                ("latex", 1),
                ("compared", 1),
                ("resampled", 1),
            ),
        ),
        Column(
            "content_pressure",
            ("value_gradient_square", "queries"),
            _root_mean,
            "√(Σ_j ‖m_j‖² / n); compares heads only within one gauge of (W_V, W_O)",
            "how hard the loss pulls on what the head moves, in units of its values",
            unit="loss per value unit",
            gauge_free=False,
            processed=False,
        ),
        Column(
            "content_relative",
            ("value_gradient_square", "queries", "value_square", "keys"),
            lambda square, n, size, keys: np.sqrt(square / n * size / keys),
            "content_pressure × rms‖v_j‖: gauge-free, what rankings use",
            "‖m‖ per query · rms‖v‖: how hard the loss pulls on what the head moves, gauge-free",
            unit="loss",
            processed=False,
            shown=(
                ("page", 2),
                ("notebook", 2),
                ("terminal", 2),
                ("logger", 2),
                ("latex", 2),
                ("compared", 2),
                ("resampled", 2),
            ),
        ),
        Column(
            "score_slope",
            ("score_square", "queries"),
            _slope,
            "−routing_pressure²: change of the loss per counted row and unit step along −D",
            "what a step of the scores would gain",
            unit="loss",
            signed=True,
            shown=(("resampled", 4),),
        ),
        Column(
            "value_slope",
            ("value_gradient_square", "queries"),
            _slope,
            "−content_pressure²: change of the loss per counted row and unit step along −m",
            "what a step of the values would gain, each query head by itself",
            unit="loss",
            signed=True,
            gauge_free=False,
            processed=False,
        ),
        Column(
            "kv_value_slope",
            ("group_gradient_square", "queries"),
            _slope,
            "−(1/n) Σ_j ‖Σ_heads of the group m_j‖²: the step that grouped heads can really take",
            "what a step of the values would gain, all query heads of a group together",
            unit="loss",
            signed=True,
            gauge_free=False,
            processed=False,
        ),
        Column(
            "edge_over_uniform",
            ("over_uniform", "queries"),
            _mean,
            "mean over rows of (mean of b over V_i − E_i): positive where routing beats even attention",
            "how much better its routing is than even attention, to first order",
            unit="loss",
            signed=True,
            shown=(("page", 4), ("compared", 4)),
        ),
        Column(
            "usage_effective",
            ("usage_entropy", "queries"),
            lambda total, n: np.exp(total / n),
            "exp of the entropy of N_j/ΣN_j, weighted over sequences",
            "how many keys of a sequence are used",
            unit="keys",
            needs_weights=False,
            shown=(("logger", 4), ("compared", 8)),
        ),
        Column(
            "usage_uniform",
            ("uniform_entropy", "queries"),
            lambda total, n: np.exp(total / n),
            "the same if every row spread evenly: the reference for it",
            "how many keys would be used by even attention",
            unit="keys",
            needs_weights=False,
        ),
        Column(
            "coherence",
            ("coherence_sum", "coherence_bound"),
            _mean,
            "Σ_j ‖m_j‖ / Σ_j Σ_i α_ij ‖u_i‖: 1 when all users of a key agree, 0 when they cancel",
            "1: all users of a key push it the same way; 0: they cancel",
            gauge_free=False,
            processed=False,
            shown=(("page", 5), ("notebook", 4), ("terminal", 4), ("latex", 4), ("compared", 5)),
        ),
        Column(
            "update_cosine",
            ("cosine_sum", "cosine_bound"),
            _mean,
            "N-weighted mean of cos(−m_j, v_j)",
            "cosine of the value update with the value: growth or shrinking",
            signed=True,
            gauge_free=False,
            processed=False,
            shown=(("page", 6), ("compared", 6)),
        ),
        Column(
            "law_residual",
            ("residual", "residual_scale"),
            lambda square, scale: np.sqrt(square / scale),
            "do the recomputed weights reproduce the kernel's own output along u?",
            "do recomputed weights reproduce the kernel's own output",
            processed=None,
            shown=(("page", 11), ("terminal", 6), ("logger", 5)),
        ),
    )
}
HEADS = tuple(COLUMNS)
WITHOUT_WEIGHTS = tuple(name for name, column in COLUMNS.items() if not column.needs_weights)


def columns_of(place: Place) -> tuple[str, ...]:
    """The columns that `place` shows, in its order."""
    ranked = [(rank, name) for name, column in COLUMNS.items() for where, rank in column.shown if where == place]
    return tuple(name for _, name in sorted(ranked))


def with_unit(name: str) -> str:
    """A column's name with its unit, as an axis says it."""
    unit = COLUMNS[name].unit if name in COLUMNS else ""
    return f"{name} ({unit})" if unit else name


def columns(sums: Array, names: Sequence[str] = HEADS) -> dict[str, Array]:
    """Columns of the heads table from sums (…,C); NaN where nothing was counted, or dropout was hidden."""
    counted = sums[..., INDEX["queries"]] > 0
    known = counted & (sums[..., INDEX["hidden_queries"]] == 0)
    found: dict[str, Array] = {}
    with np.errstate(divide="ignore", invalid="ignore"):
        for name in names:
            column = COLUMNS[name]
            values = column.define(*(sums[..., INDEX[part]] for part in column.sums))
            there = known if column.needs_weights else counted
            found[name] = values if name == "queries" else np.where(there, values, np.nan)
    return found


@dataclass(frozen=True)
class Field:
    """A column of the token or edge rows: its degree in u, its unit and its definition."""

    name: str
    degree: int
    unit: str
    definition: str


QUERY_ROWS: dict[str, Field] = {
    field.name: field
    for field in (
        Field("entropy", 0, "nats", "−Σ_j α ln α of the query's row"),
        Field("expected_compatibility", 1, "loss", "E_i"),
        Field("advantage_missed", 1, "loss", "max_j A_ij"),
        Field("advantage_spread", 1, "loss", "½ Σ_j abs(D_ij): the mass of attention that the gradient wants moved"),
        Field("upstream_norm", 1, "loss per value unit", "‖u_i‖"),
    )
}
KEY_ROWS: dict[str, Field] = {
    field.name: field
    for field in (
        Field("usage", 0, "queries", "N_j"),
        Field("coherence", 0, "", "‖m_j‖ / Σ_i α_ij ‖u_i‖"),
        Field("update_norm", 1, "loss per value unit", "‖m_j‖"),
        Field("update_cosine", 0, "", "cos(−m_j, v_j)"),
    )
}
EDGE_ROWS: dict[str, Field] = {
    field.name: field
    for field in (
        Field("attention", 0, "", "α_ij"),
        Field("advantage", 1, "loss", "A_ij"),
        Field("compatibility", 1, "loss", "b_ij"),
        Field("score_gradient", 1, "loss", "D_ij"),
        Field("knockout", 1, "loss", "ΔL to first order when the edge is removed and the row renormalised: −D/(1 − α)"),
    )
}
