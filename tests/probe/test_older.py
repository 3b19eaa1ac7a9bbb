"""What earlier versions wrote is read as what the columns mean today, and never mixed with it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.stats
import sums
import zoo

import advantage_probe as ap
from advantage_probe.analyses.runs.convert import convert
from advantage_probe.analyses.runs.stored import open_run
from advantage_probe.probe import bootstrap
from advantage_probe.probe.columns import HEADS, SUMS, columns
from advantage_probe.probe.history import read_history
from advantage_probe.probe.tables import HISTORY


def old_history(folder: Path, model: str = "a model") -> None:
    """Two steps of one head over 4 and 9 rows, as version 1 wrote them: Σ D² is 4 and 9, Σ ‖m‖² the same."""
    rows = pd.DataFrame({name: [0.0, 0.0] for name in HISTORY})
    rows = rows.assign(step=[0, 1], module="m", label="L0H0", status="ok", queries=[4, 9], layer=0, head=0, use=0)
    rows["backward"] = 0
    for name in ("routing_pressure", "content_pressure", "content_relative"):
        rows[name] = [2.0, 3.0]
    for name in ("score_slope", "value_slope", "kv_value_slope"):
        rows[name] = [-4.0, -9.0]
    rows["alignment"] = [0.25, 0.5]
    folder.mkdir()
    table = pa.Table.from_pandas(rows, preserve_index=False)
    told = json.dumps({"format": 1, "model": model, "columns": list(HISTORY)}).encode()
    table = table.replace_schema_metadata({**table.schema.metadata, b"advantage_probe": told})
    pq.write_table(table, folder / "part-000000000000.parquet")


def test_an_old_history_is_read_divided_by_its_rows(tmp_path: Path) -> None:
    old_history(tmp_path / "history")
    (rows,), model = read_history(tmp_path / "history")
    assert model == "a model"
    for name in ("routing_pressure", "content_pressure", "content_relative"):
        assert rows[name].tolist() == [1.0, 1.0]
    for name in ("score_slope", "value_slope", "kv_value_slope"):
        assert rows[name].tolist() == [-1.0, -1.0]
    assert rows["alignment"].tolist() == [0.25, 0.5]


def test_an_old_history_is_gone_on_with_only_when_it_was_converted(tmp_path: Path) -> None:
    model = zoo.llama()
    named = f"LlamaForCausalLM with {sum(part.numel() for part in model.parameters()):,} parameters"
    folder = tmp_path / "history"
    old_history(folder, named)
    with pytest.raises(ap.BadInput, match="run `advantage-probe convert"):
        ap.watch(model, history=folder)
    before, _ = read_history(folder)
    assert "1 files rewritten" in convert(folder)
    assert "already" in convert(folder)
    after, _ = read_history(folder)
    pd.testing.assert_frame_equal(before[0], after[0])
    with ap.watch(model, history=folder) as watch:
        watch.seek(2)
        model(**zoo.batch("llama")).loss.backward()
        watch.step(loss_weight=1 / 16)
    table = watch.history()
    assert table["step"].unique().tolist() == [0, 1, 2]
    assert table.loc[table["step"] == 1, "routing_pressure"].tolist() == [1.0]


def old_run(folder: Path) -> pd.DataFrame:
    """A run of format 2: columns from sums without the division; returns its sequences."""
    sequences = sums.table(sequences=20)
    keys = ["module", "use", "head", "label", "layer", "stack", "kind"]
    total = sequences.groupby(keys, sort=False)[list(SUMS)].sum().reset_index()
    heads = total[keys].assign(status="ok", kv_head=0)
    for name, values in columns(total[list(SUMS)].to_numpy()).items():
        heads[name] = values
    n = total["queries"]
    for name, stored in (("routing_pressure", "score_square"), ("content_pressure", "value_gradient_square")):
        heads[name] = np.sqrt(total[stored])
    heads["content_relative"] = np.sqrt(total["value_gradient_square"] * total["value_square"] / total["keys"])
    heads["score_slope"] = -total["score_square"]
    assert (n == 200).all()
    heads = heads.assign(routing_pressure_low=1.0, routing_pressure_high=2.0)
    folder.mkdir()
    heads.to_parquet(folder / "heads.parquet")
    sequences.to_parquet(folder / "sequences.parquet")
    pd.DataFrame({name: [] for name in ("side", "sequence", "position", "token_id")}).to_parquet(
        folder / "tokens.parquet"
    )
    pd.DataFrame({name: [] for name in ("label", "update_norm")}).to_parquet(folder / "updates.parquet")
    names = ("direction", "rank", "query_position", "key_position", "score_gradient", "compatibility")
    pd.DataFrame({name: [] for name in names}).to_parquet(folder / "edges.parquet")
    (folder / "run.json").write_text(json.dumps({"format": 2, "model": "a model", "advantage_probe": "0.1.0"}))
    return sequences


def test_an_old_run_opens_as_what_its_sums_say_today_intervals_included(tmp_path: Path) -> None:
    sequences = old_run(tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.record["converted_from"] == 2
    first = sequences[sequences["label"] == "L0H0"]
    by_hand = math.sqrt(first["score_square"].sum() / first["queries"].sum())
    row = run.heads.set_index("label").loc["L0H0"]
    assert row["routing_pressure"] == pytest.approx(by_hand, rel=1e-12)
    assert row["score_slope"] == pytest.approx(-(by_hand**2), rel=1e-12)
    # the interval: every replicate of the corpus divided by its own number of rows
    weights = bootstrap.weights([int(name, 16) for name in first["sequence"]]).numpy()
    drawn = np.log((weights @ first["score_square"].to_numpy()) / (weights @ first["queries"].to_numpy())) / 2
    half = scipy.stats.t.ppf(0.975, 19) * np.sqrt(20 / 19) * drawn.std(ddof=1)
    low, high = by_hand * np.exp(-half), by_hand * np.exp(half)
    assert row["routing_pressure_low"] == pytest.approx(low, rel=1e-9)
    assert row["routing_pressure_high"] == pytest.approx(high, rel=1e-9)


def test_a_converted_run_holds_the_same_numbers_and_is_of_this_version(tmp_path: Path) -> None:
    old_run(tmp_path / "run")
    before = open_run(tmp_path / "run").heads
    assert "heads rewritten" in convert(tmp_path / "run")
    after = open_run(tmp_path / "run")
    assert after.record["format"] == 3
    pd.testing.assert_frame_equal(before, after.heads)
    with pytest.raises(ap.BadInput, match="neither a history nor a run"):
        convert(tmp_path)


def test_the_columns_that_were_divided_are_those_that_are_today() -> None:
    from advantage_probe.probe.columns import COLUMNS
    from advantage_probe.probe.older import ROOTS, SLOPES

    means = {name for name in HEADS if "queries" in COLUMNS[name].sums}
    assert set(ROOTS) | set(SLOPES) <= means
