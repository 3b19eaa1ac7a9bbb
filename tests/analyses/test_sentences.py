"""The five sentences say no more than their guards allow."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from sums import table

from advantage_probe.analyses.intervals.resampled import FEWEST, resampled
from advantage_probe.analyses.page import sentences as said

BOTH = (("encoder", "encoder_self"), ("decoder", "decoder_self"), ("decoder", "cross"))


def edges(label: str) -> pd.DataFrame:
    row = {
        "label": label,
        "rank": 1,
        "direction": "routed",
        "score_gradient": -1.0,
        "query_token": "a",
        "key_token": "b",
    }
    return pd.DataFrame([row | {"query_position": 1, "key_position": 0}])


def test_a_head_that_is_ten_times_as_strong_is_named_with_how_much_it_is_elsewhere_and_equal_heads_are_not() -> None:
    rows = table(40)
    rows.loc[rows["label"] == "L1H2", "score_square"] *= 100
    found = resampled(rows)
    assert found.singled_out("routing_pressure") == (["L1H2"], 40)
    text = said.where(found)
    assert "picked on one half of the 40 sequences, estimated on the other" in text
    # by hand: the half that estimates is every second sequence in the order of their identities
    others = sorted(rows["sequence"].unique())[1::2]
    sums = rows[rows["sequence"].isin(others)].groupby("label")["score_square"].sum()
    expected = float(np.sqrt(sums["L1H2"]) / np.sqrt(sums).median())
    assert f"against the median head's routing pressure, all heads asked at once, L1H2 has {expected:.3g} [" in text
    share = sums[[name for name in sums.index if name.startswith("L1")]].sum() / sums.sum()
    assert f"layer 1 holds {share:.0%} [" in text


def test_stacks_and_cross_attention_have_layers_of_their_own() -> None:
    rows = table(stacks=BOTH)
    rows.loc[rows["kind"] == "cross", "score_square"] *= 50
    found = resampled(rows)
    assert "layer decoder.xL" in said.where(found)
    shares = said.share_by_layer(found.whole, found.layers)
    assert len(shares) == 6
    assert sum(share for _, share, _, _ in shares) == pytest.approx(1)


@pytest.mark.parametrize(
    ("column", "words"), [("queries", "L1H2 is not known there"), ("score_square", "L1H2 has 0 times as much, without")]
)
def test_a_head_that_the_other_half_does_not_have_is_not_given_a_number(column: str, words: str) -> None:
    rows = table(20)
    rows.loc[rows["label"] == "L1H2", "score_square"] *= 100
    others = sorted(rows["sequence"].unique())[1::2]
    rows.loc[(rows["label"] == "L1H2") & rows["sequence"].isin(others), column] = 0
    assert words in said.where(resampled(rows))


def test_a_layer_is_called_by_its_number_and_a_module_by_its_name() -> None:
    rows = table(12, heads=1, layers=1)
    assert resampled(rows).layers == ["0"]
    assert resampled(rows.assign(label="Lookup.H0")).layers == ["Lookup"]


def test_a_loss_that_is_not_finite_is_said_so_also_where_the_folder_holds_null() -> None:
    record = {"model": "m", "targets": 1, "windows": 2}
    for loss in (None, float("nan"), float("inf")):
        text = said.measured({**record, "loss": loss}, pd.DataFrame({"label": ["L0H0"]}))
        assert (
            text == "Measured: 1 attention head of m, on 1 target in 2 windows of text; mean cross-entropy not finite."
        )


def test_one_head_is_not_told_from_itself() -> None:
    assert said.where(resampled(table(heads=1, layers=1))).endswith("; a single head has no others to be told from.")


def test_more_sequences_are_asked_for_only_where_more_are_needed() -> None:
    text = said.where(resampled(table()))
    assert "not distinguishable from the median head with 20 sequences" in text
    assert int(text.split("about ")[1].split()[0]) > 20
    few = said.where(resampled(table(7)))
    assert "%]" not in few
    assert int(few.split("about ")[1].split()[0]) >= FEWEST


@pytest.mark.parametrize("case", ["hidden", "no slope"])
def test_what_is_not_known_is_said_without_a_number(case: str) -> None:
    everyone = [(layer, head) for layer in range(2) for head in range(4)]
    rows = table(hidden=everyone) if case == "hidden" else table(score_square=0.0)
    found = resampled(rows)
    texts = [said.where(found), said.routing_or_content(found), said.writes(found, edges("L0H0"), None)]
    assert "nan" not in " ".join(texts)
    assert "no layer or head can be singled out" in texts[0]
    assert "not known" in texts[1]
    assert case != "hidden" or "not known" in texts[2]


def test_heads_without_a_number_are_not_counted_as_told() -> None:
    assert " of 6 heads" in said.routing_or_content(resampled(table(hidden=[(0, 0), (1, 3)])))


def test_an_interval_that_holds_one_is_not_called_equal() -> None:
    assert "it is not told on which the loss pulls harder" in said.routing_or_content(resampled(table()))
    assert "harder on routing" in said.routing_or_content(resampled(table(score_square=1e4)))
    assert "harder on content" in said.routing_or_content(resampled(table(score_square=1e-4)))


def heads(*statuses: str, residual: float = 3e-7) -> pd.DataFrame:
    return pd.DataFrame({"status": statuses, "law_residual": residual})


def test_what_was_not_captured_is_counted_and_named_with_its_reason() -> None:
    rows = heads("ok", "ok", "no gradient", "non-finite (2 steps)")
    mixers = {f"layers.{layer}.mixer": "no softmax attention" for layer in range(0, 10, 2)}
    text = said.believed({"not_captured": {**mixers, "tower.attention": "no attention call was seen"}}, rows)
    assert (
        "to 3e-07; 2 of 4 heads are without remark, 1 received no gradient, 1 had numbers that are not finite" in text
    )
    assert text.endswith(
        "6 modules were not captured: layers.0.mixer, layers.2.mixer, layers.4.mixer and 2 more (no softmax attention); "
        "tower.attention (no attention call was seen)."
    )
    assert said.believed({"not_captured": {}}, rows).endswith("every attention module was captured.")


def test_a_run_that_does_not_say_what_it_missed_is_not_called_whole() -> None:
    assert said.believed({}, heads("ok")).endswith("which modules were not captured is not on its record.")


def test_numbers_that_were_not_checked_are_not_called_right() -> None:
    text = said.believed({}, heads("no gradient", "no gradient", residual=float("nan")))
    assert "nan" not in text
    assert "no number here is checked; none of the heads is without remark, 2 received no gradient" in text


def test_quoted_tokens_are_isolated_from_the_sentence() -> None:
    rows = edges("L0H0").assign(query_token="\u202eab", key_token=pd.NA)
    text = said.writes(resampled(table(heads=1, layers=1)), rows, None)
    assert "from “\u2068\u202eab\u2069” (position 1) to a token without text (position 0)" in text
