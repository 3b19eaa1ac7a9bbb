"""The page and the files: self-contained, escaped, and the same when read back."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pandas as pd
import pytest
import torch
import zoo

from advantage_probe.analyses.files import export, folders, latex
from advantage_probe.analyses.inputs.corpus import Window
from advantage_probe.analyses.page.report import html
from advantage_probe.analyses.runs.analyze import analyze
from advantage_probe.hooks.errors import BadInput, BadRequest
from advantage_probe.probe.columns import SUMS
from advantage_probe.probe.tables import spell

EVIL = [
    "</script><script>alert(1)</script>",
    "<b>",
    "&amp;",
    '"quoted"',
    "NA",
    "",
    "=1+1",
    "'x",
    "\tx",
    "é",
    "☃",
    "$x$",
]


class Tokenizer:
    """Tokens that try to be something else."""

    pad_token_id = 0

    def decode(self, ids: list[int]) -> str:
        return EVIL[ids[0] % len(EVIL)]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [EVIL[number % len(EVIL)] for number in ids]


@pytest.fixture(scope="module")
def result():
    ids = torch.randint(0, zoo.VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0)).tolist()
    items = [Window(tuple(row), "text", 12 * place) for place, row in enumerate(ids)]
    return analyze(zoo.llama().requires_grad_(False), Tokenizer(), items, name="<i>model</i>")


def test_the_page_is_one_file_that_fetches_nothing(result) -> None:
    page = html(result)
    assert not re.search(r"(src|href)\s*=|https?://|@import|url\(", page)
    assert '<meta charset="utf-8">' in page


def test_the_record_says_what_was_captured_and_the_page_without_it_does_not_guess(result) -> None:
    assert result.record["not_captured"] == {}
    assert "every attention module was captured." in html(result)
    old = replace(result, record={name: value for name, value in result.record.items() if name != "not_captured"})
    assert "which modules were not captured is not on its record." in html(old)


def test_strings_stay_text(result) -> None:
    page = html(result)
    assert page.count("<script") == 3  # data, plotly's packed source, the page's own
    assert "<i>model" not in page
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.S).group(1))
    shown = {part for head in data["edges"].values() for rows in head.values() for row in rows for part in row[:2]}
    assert "</script><script>alert(1)</script>" in shown


def test_the_page_holds_every_head_and_valid_json(result) -> None:
    page = html(result)
    raw = re.search(r'type="application/json">(.*?)</script>', page, re.S).group(1)
    assert "NaN" not in raw
    assert "Infinity" not in raw
    data = json.loads(raw)
    assert data["heads"]["label"] == list(result.heads["label"])
    assert data["rows"] == ["L0", "L1"]
    assert data["heads"]["row"] == [0] * 4 + [1] * 4
    status = data["heads"]["status"]
    assert [status["texts"][code] for code in status["codes"]] == list(result.heads["status"])


def test_frames_come_back_as_they_were(result, tmp_path) -> None:
    for name, frame in result.frames.items():
        export.write_frame(frame, tmp_path / name)
        parquet = pd.read_parquet(tmp_path / f"{name}.parquet")
        pd.testing.assert_frame_equal(parquet, frame, check_categorical=False, check_dtype=False)
        text = export.read_csv(tmp_path / f"{name}.csv")
        for column in frame.columns:
            if pd.api.types.is_numeric_dtype(frame[column].dtype):
                one = frame[column].astype("float64").to_numpy(na_value=float("nan"))
                other = text[column].astype("float64").to_numpy(na_value=float("nan"))
                assert ((one == other) | ((one != one) & (other != other))).all(), column
            else:
                assert frame[column].astype("string").fillna("∅").tolist() == (
                    text[column].astype("string").fillna("∅").tolist()
                ), column


def test_no_cell_of_the_csv_is_a_formula(result, tmp_path) -> None:
    import csv

    export.write_frame(result.edges, tmp_path / "edges")
    with (tmp_path / "edges.csv").open(encoding="utf-8", newline="") as handle:
        for row in csv.DictReader(handle):
            for name in ("query_token", "key_token", "label", "module"):
                assert not row[name].startswith(("=", "+", "-", "@", "\t", "\r"))


def test_broken_unicode_is_spelled_readably(tmp_path) -> None:
    class Broken(Tokenizer):
        def decode(self, ids: list[int]) -> str:
            return "x\ud83dy"

    assert spell(Broken(), [1]) == ["x\\ud83dy"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RuntimeError), folders.new_folder(out) as folder:
        (folder / "half").write_text("half", encoding="utf-8")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with folders.new_folder(out) as folder:
        (folder / "whole").write_text("whole", encoding="utf-8")
        assert not out.exists()
    assert [path.name for path in out.iterdir()] == ["whole"]
    with pytest.raises(BadInput, match="not empty"), folders.new_folder(out):
        pass


def test_json_has_no_numbers_that_json_does_not_know() -> None:
    assert export.jsonable({"a": float("nan"), "b": [float("inf"), 1], "c": pd.NA}) == {
        "a": None,
        "b": ["Infinity", 1],
        "c": None,
    }


def test_strings_that_look_like_numbers_or_hold_carriage_returns_come_back_from_csv(tmp_path) -> None:
    for tokens in (["1", "02"], ["True", "False"], ["1e5", "\r"], ["a\rb", "x\r\ny"], ["\n", " "]):
        frame = pd.DataFrame({"token": pd.array(tokens, dtype="string"), "position": [0, 1]})
        export.write_frame(frame, tmp_path / "tokens")
        assert export.read_csv(tmp_path / "tokens.csv")["token"].tolist() == tokens
    rows = pd.DataFrame({"sequence": ["0000000000000012", "12e4567890123456"], **dict.fromkeys(SUMS, 1.0)})
    export.write_frame(rows.astype({"sequence": "category"}), tmp_path / "sequences")
    assert export.read_csv(tmp_path / "sequences.csv")["sequence"].tolist() == rows["sequence"].tolist()


def test_a_latex_table_prints_infinities_and_refuses_heads_that_are_not_there(result) -> None:
    heads = result.heads.assign(routing_pressure=float("-inf"))
    assert r"$-\infty$" in latex.heads_table(heads, ["L0H1"], "x")
    for table, label in ((heads, "L9H9"), (pd.concat([heads, heads]), "L0H0")):
        with pytest.raises(BadRequest, match=f"heads named '{label}'"):
            latex.heads_table(table, [label], "x")
