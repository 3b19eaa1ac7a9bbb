"""`manifold`, `geometry` and `in-context` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import zoo
from terminal import command
from terminal import refused as checked

from advantage_probe.analyses.files.export import read_csv
from advantage_probe.analyses.vectors.pca import Manifold

WORDS = tuple("abcdefghijklmnopqrstuvw")


def run(*arguments: object) -> tuple[int, str, str]:
    """Exit code, output and errors of a command in this process."""
    result = command(*arguments)
    return result.returncode, result.stdout, result.stderr


def refused(*arguments: object) -> str:
    """The one sentence with which bad input is refused."""
    result = command(*arguments)
    checked(result)
    return result.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("model")
    zoo.llama().save_pretrained(place)
    known = ["?", ".", ",", ":", "foo", "bar", "red", "blue", *WORDS]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="?", pad_token="?").save_pretrained(place)
    (place / "ORIGIN.json").write_text('{"note": "de-quantised from Q4_K_M"}')
    return place


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "own.txt"
    parts = [" ".join(WORDS[(start * step) % len(WORDS)] for step in range(12)) + " ." for start in range(1, 16)]
    file.write_text("\n\n".join(parts))
    return file


def test_manifold_reads_a_model_and_leaves_bases_that_load(folder: Path, own: Path, tmp_path: Path) -> None:
    out = tmp_path / "m"
    code, printed, err = run("manifold", folder, "--prompts", own, "--length", 12, "--out", out)
    assert code == 0, err
    assert "p: at most" in printed
    assert "de-quantised" in printed
    assert "15 sequences say little" in printed
    table = pd.read_parquet(out / "manifold.parquet")
    assert table["site"].unique().tolist() == ["L0", "L1"]
    assert table["p"].dropna().ge(1 / 201 - 1e-12).all()
    assert read_csv(out / "manifold.csv")["figure"].tolist() == table["figure"].tolist()
    assert json.loads((out / "run.json").read_text())["prompts"] == 15
    basis = Manifold.load(out / "bases" / "L1.safetensors")
    assert (basis.width, basis.count) == (16, 15)
    assert basis.source.endswith("L1, value")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in page
    assert "http" not in page.split("<body", 1)[0]
    assert "is not empty" in refused("manifold", folder, "--out", out)


def test_manifold_reads_every_site_by_head_layer_and_model(folder: Path, own: Path) -> None:
    given = ("--prompts", own, "--length", 12, "--json")
    for site, by, expected in (
        ("output", "head", [f"L{layer}H{head}" for layer in range(2) for head in range(4)]),
        ("key", "layer", ["L0", "L1"]),
        ("residual", "model", ["model"]),
    ):
        code, printed, err = run("manifold", folder, "--site", site, "--by", by, *given)
        assert code == 0, err
        table = pd.DataFrame(json.loads(printed)["manifold"])
        assert table["site"].unique().tolist() == expected


def test_geometry_says_what_its_nulls_pass_as_well(folder: Path, own: Path, tmp_path: Path) -> None:
    out = tmp_path / "g"
    code, printed, err = run("geometry", folder, "--prompts", own, "--length", 12, "--copies", 1, "--out", out)
    assert code == 0, err
    assert "rules passed" in printed
    assert "1 copies with rounding noise" in printed
    for name in ("keys", "attention", "manifolds", "rules", "copies"):
        assert (out / f"{name}.parquet").is_file()
        assert (out / f"{name}.csv").is_file()


def test_in_context_prints_rivals_and_marks_what_is_not_predicted(folder: Path) -> None:
    code, printed, err = run("in-context", folder, "--per", 10)
    assert code == 0, err
    for word in (
        "best constant per k",
        "copy the last label",
        "0.287",
        "remapped",
        "shuffled",
        "ablated",
        "not what is",
    ):
        assert word in printed


def test_bad_input_is_one_sentence(folder: Path, own: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert "empty" in refused("geometry", folder, "--prompts", empty)
    assert "does not exist" in refused("manifold", folder, "--prompts", tmp_path / "none.txt")
    assert "15 passages have 40 tokens" in refused("manifold", folder, "--prompts", own, "--length", 40)
    assert "there is no 7" in refused("manifold", folder, "--prompts", own, "--length", 12, "--layer", 7)
    assert "single tokens" in refused("in-context", folder, "--labels", "positive,bar")
    assert "Two different labels" in refused("in-context", folder, "--labels", "foo")
    assert "makes its own episodes" in refused("manifold", "--example", "bijection-repeats", "--layer", 1)
    assert "context is 64" in refused("geometry", folder, "--length", 900)
    file = tmp_path / "file"
    file.write_text("x")
    assert "is a file" in refused("in-context", folder, "--out", file)
    assert run("manifold", folder, "--site", "nonsense")[0] == 2
    (tmp_path / "card.json").write_text("{}")
    assert "lacks tunnel" in refused("manifold", tmp_path)
