"""The five sentences say no more than their guards allow."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from advantage_probe.analyses import sentences as said
from advantage_probe.probe.statistics import SUMS

PLAIN = (("", "decoder_self"),)
BOTH = (("encoder", "encoder_self"), ("decoder", "decoder_self"), ("decoder", "cross"))


def table(
    sequences: int = 20, heads: int = 4, layers: int = 2, stacks=PLAIN, hidden=(), seed: int = 0, **factors: float
) -> pd.DataFrame:
    """Sums of equal heads; `hidden`: (layer, head) whose weights are not known."""
    generator = np.random.default_rng(seed)
    numbers = [int(number) for number in generator.integers(0, 2**62, sequences)]
    rows = []
    for number in numbers:
        for stack, kind in stacks:
            name = f"{stack}." * bool(stack) + "x" * (kind == "cross")
            for layer in range(layers):
                for head in range(heads):
                    row = {"sequence": f"{number:016x}", "module": f"{name}{layer}", "use": 0, "head": head}
                    row |= {"label": f"{name}L{layer}H{head}", "layer": layer, "stack": stack, "kind": kind}
                    row |= {part: generator.chisquare(4) * factors.get(part, 1.0) for part in SUMS}
                    row |= {"queries": 10, "hidden_queries": 10 * ((layer, head) in hidden)}
                    rows.append(row)
    return pd.DataFrame(rows)


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


def test_a_head_that_is_ten_times_as_strong_is_named_and_equal_heads_are_not() -> None:
    rows = table(40)
    there = rows["label"] == "L1H2"
    rows.loc[there, "score_square"] *= 100
    found = said.resampled(rows)
    assert "lie L1H2 (by " in said.where(found)
    least = found.least_above("routing_pressure")
    assert [name for name, value in least.items() if value > 0] == ["L1H2"]
    values = dict(zip(found.labels, found.whole["routing_pressure"], strict=True))
    assert 0 < least["L1H2"] < values["L1H2"] - sorted(values.values())[len(values) // 2]


@pytest.mark.parametrize("sequences", [12, 20])
def test_of_equal_heads_one_is_named_in_few_trials(sequences: int) -> None:
    named = [
        bool(said.resampled(table(sequences, heads=6, seed=seed)).singled_out("routing_pressure")[0])
        for seed in range(60)
    ]
    assert np.mean(named) <= 0.1  # of 5 %, with 60 trials


def test_stacks_and_cross_attention_have_layers_of_their_own() -> None:
    rows = table(stacks=BOTH)
    rows.loc[rows["kind"] == "cross", "score_square"] *= 50
    found = said.resampled(rows)
    assert "layer decoder.xL" in said.where(found)
    assert len(said.share_by_layer(found)) == 6
    assert sum(share for _, share, _, _ in said.share_by_layer(found)) == pytest.approx(1)


def test_one_head_is_not_told_from_itself() -> None:
    assert said.where(said.resampled(table(heads=1, layers=1))).endswith(
        "; a single head has no others to be told from."
    )


def test_more_sequences_are_asked_for_only_where_more_are_needed() -> None:
    text = said.where(said.resampled(table()))
    assert int(text.split("about ")[1].split()[0]) > 20


@pytest.mark.parametrize("case", ["hidden", "no slope"])
def test_what_is_not_known_is_said_without_a_number(case: str) -> None:
    everyone = [(layer, head) for layer in range(2) for head in range(4)]
    rows = table(hidden=everyone) if case == "hidden" else table(score_square=0.0)
    found = said.resampled(rows)
    texts = [said.where(found), said.routing_or_content(found), said.writes(found, edges("L0H0"), None)]
    assert "nan" not in " ".join(texts)
    assert "no layer or head can be singled out" in texts[0]
    assert "not known" in texts[1]
    assert case != "hidden" or "not known" in texts[2]


def test_heads_without_a_number_are_not_counted_as_told() -> None:
    assert " of 6 heads" in said.routing_or_content(said.resampled(table(hidden=[(0, 0), (1, 3)])))


def test_an_interval_that_holds_one_is_not_called_equal() -> None:
    assert "it is not told on which the loss pulls harder" in said.routing_or_content(said.resampled(table()))
    assert "harder on routing" in said.routing_or_content(said.resampled(table(score_square=1e4)))
    assert "harder on content" in said.routing_or_content(said.resampled(table(score_square=1e-4)))


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
    assert "no number here is checked; no head is without remark, 2 received no gradient" in text
