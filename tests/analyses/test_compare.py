"""Runs against each other: false discoveries stay rare, real changes are found, and unlike runs are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from advantage_probe.analyses.intervals import compare as compare_module
from advantage_probe.analyses.intervals.compare import FEWEST, compare, halves
from advantage_probe.analyses.runs.maps import Maps
from advantage_probe.analyses.runs.run import Run
from advantage_probe.analyses.runs.stored import FORMAT, FRAMES, open_run
from advantage_probe.hooks.errors import BadInput
from advantage_probe.probe.columns import INDEX, SUMS, columns, columns_of

HEADS = 12
RECORD = {
    "format": FORMAT,
    "loss_kind": "ce",
    "loss_targets": "all",
    "loss_weight": "varied",
    "texts_digest": "a",
    "tokenizer_digest": "b",
}


def drawn(sequences: int, seed: int) -> np.ndarray:
    """Sums (N,H,C) with the heavy tails and shared ups and downs that sequences have."""
    generator = np.random.default_rng(seed)
    shared = generator.lognormal(0, 0.7, (sequences, 1, 1))
    sums = shared * generator.lognormal(0, 0.5, (sequences, HEADS, len(SUMS)))
    sums[..., INDEX["queries"]] = 32
    sums[..., INDEX["hidden_queries"]] = 0
    for signed in ("alignment", "over_uniform", "cosine_sum"):
        sums[..., INDEX[signed]] *= generator.choice([-1, 1], (sequences, HEADS))
    return sums


def stored(sums: np.ndarray, **record) -> Run:
    count, empty = len(sums), pd.DataFrame()
    rows = pd.DataFrame(sums.reshape(-1, len(SUMS)), columns=list(SUMS))
    keys = {
        "sequence": np.repeat([f"{number:016x}" for number in range(count)], HEADS),
        "module": "m",
        "use": 0,
        "head": np.tile(np.arange(HEADS), count),
        "label": np.tile([f"L0H{head}" for head in range(HEADS)], count),
    }
    return Run(empty, empty, empty, empty, rows.assign(**keys), {**RECORD, **record}, Maps(), {}, Path("run"))


@pytest.mark.parametrize("sequences", [12, 40])
def test_halves_of_one_corpus_name_a_head_in_at_most_five_per_cent_of_trials(sequences: int) -> None:
    """At most 5 % in truth: of 100 trials 10 or fewer, which a test at 5 % exceeds in 1 % of all sets of trials."""
    false = 0
    for trial in range(100):
        result = halves(stored(drawn(sequences, trial)), draws=200, seed=trial)
        false += bool(result.table["changed"].any())
    assert false <= 10


def test_pairing_names_no_head_of_two_runs_that_differ_by_noise_alone() -> None:
    false = 0
    for trial in range(60):
        sums = drawn(16, trial)
        noise = np.random.default_rng(1_000 + trial).lognormal(0, 0.1, (2, *sums.shape))
        noise[..., INDEX["queries"]] = 1
        false += bool(compare(stored(sums * noise[0]), stored(sums * noise[1]), draws=200).table["changed"].any())
    assert false <= 7


def test_a_head_that_changed_is_found_and_no_other() -> None:
    sums = drawn(30, 3)
    changed = sums.copy()
    changed[:, 4, INDEX["score_square"]] *= 2.0
    noise = np.random.default_rng(0).lognormal(0, 0.1, sums.shape)
    noise[..., INDEX["queries"]] = 1
    result = compare(stored(sums), stored(changed * noise))
    found = result.table[result.table["changed"]]
    assert found[["label", "column"]].values.tolist() == [["L0H4", "routing_pressure"]]
    assert "1 heads changed" in result.sentence()
    row = found.iloc[0]
    before, after = (columns(part.sum(0))["routing_pressure"][4] for part in (sums, changed * noise))
    assert row["first"] == pytest.approx(before)
    assert row["difference"] == pytest.approx(after - before)
    assert row["difference_low"] > 0
    assert row["p"] >= 1 / 1000


def test_the_simultaneous_limit_is_wider_than_one_heads_own() -> None:
    result = compare(stored(drawn(30, 1)), stored(drawn(30, 2)))
    width = (result.table["difference_high"] - result.table["difference_low"]) / 2
    assert len(result.table) == HEADS * len(columns_of("compared"))
    spread = width / (width / 1.0)  # per row: limit × spread; the limit is one number
    assert np.isfinite(spread).all()
    inside = (result.table["difference"].abs() <= width) | result.table["changed"]
    assert inside.all()


def test_too_few_sequences_say_how_many_are_needed() -> None:
    sums = drawn(FEWEST - 1, 0)
    result = compare(stored(sums), stored(3 * sums))
    assert not result.table["changed"].any()
    assert f"Not distinguishable with {FEWEST - 1} sequences; at least {FEWEST}" in result.sentence()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("loss_kind", "logit-diff", "differ in the loss"),
        ("loss_targets", "last", "differ in the targets"),
        ("texts_digest", "z", "differ in the texts"),
        ("tokenizer_digest", "z", "differ in the tokenizer"),
        ("loss_weight", "unknown", "does not say the loss weight"),
        ("texts_digest", None, "does not say the texts"),
    ],
)
def test_runs_that_do_not_mean_the_same_are_refused_by_name(key: str, value: object, message: str) -> None:
    one = stored(drawn(8, 0))
    with pytest.raises(BadInput, match=message):
        compare(one, stored(drawn(8, 0), **{key: value}))
    fewer = replace(one, sequences=one.sequences[one.sequences["head"] != 5])
    with pytest.raises(BadInput, match="Only one of the runs has the head L0H5"):
        compare(one, fewer)
    other = one.sequences.assign(sequence="f" + one.sequences["sequence"].str[1:])
    with pytest.raises(BadInput, match="share no sequence"):
        compare(one, replace(one, sequences=other))
    with pytest.raises(BadInput, match="two halves need at least four"):
        halves(stored(drawn(3, 0)))


def test_folders_that_are_no_whole_run_of_this_version_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        open_run(tmp_path / "none")
    with pytest.raises(BadInput, match=r"has no run\.json"):
        open_run(tmp_path)
    record = tmp_path / "run.json"
    for text, message in (
        ("{", "is damaged"),
        (json.dumps({"format": 1, "advantage_probe": "0.0.9"}), "written by version 0.0.9.*analyse the text again"),
        (json.dumps({"format": 99}), "install a newer version"),
        (json.dumps(RECORD), r"has no heads\.parquet"),
    ):
        record.write_text(text)
        with pytest.raises(BadInput, match=message):
            open_run(tmp_path)
    for name in FRAMES:
        (tmp_path / f"{name}.parquet").write_bytes(b"nothing")
    with pytest.raises(BadInput, match=r"heads\.parquet' is damaged"):
        open_run(tmp_path)
    pd.DataFrame({"module": []}).to_parquet(tmp_path / "heads.parquet")
    with pytest.raises(BadInput, match="lacks the column 'head'"):
        open_run(tmp_path)


def test_the_null_of_pairs_is_every_exchange_of_their_sides() -> None:
    """With three pairs there are eight; the spread of a difference over many draws is that of the eight."""
    sums = [drawn(3, seed) for seed in (0, 1)]
    heads, sides = compare_module._sums(stored(sums[0]).sequences, stored(sums[1]).sequences)
    result = compare_module._compared(heads, *sides, paired=True, draws=4_000, seed=0)
    exact = []
    for choice in range(8):
        swap = np.array([choice >> bit & 1 for bit in range(3)], dtype=bool)[:, None, None]
        one, other = np.where(swap, sums[1], sums[0]).sum(0), np.where(swap, sums[0], sums[1]).sum(0)
        exact.append(columns(other)["coherence"] - columns(one)["coherence"])
    spread = np.sqrt(np.mean(np.square(exact), 0))
    rows = result.table[result.table["column"] == "coherence"]
    width = (rows["difference_high"] - rows["difference_low"]).to_numpy() / 2
    np.testing.assert_allclose(width / width[0], spread / spread[0], rtol=0.05)


def test_many_heads_are_compared_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = stored(drawn(8, 0)), stored(drawn(8, 1))
    whole = compare(first, second).table
    monkeypatch.setattr(compare_module, "BLOCK", 1000)
    pd.testing.assert_frame_equal(compare(first, second).table, whole, rtol=1e-9)
