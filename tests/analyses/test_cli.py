"""The command line as a user meets it: results where they should be, and one sentence for every bad input."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
import zoo
from terminal import command as run
from terminal import refused

from advantage_probe.analyses.files.export import read_table
from advantage_probe.analyses.runs.stored import FORMAT, FRAMES
from advantage_probe.hooks.adapters import huggingface as attention_registry


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer, as save_pretrained() leaves it."""
    place = tmp_path_factory.mktemp("model")
    zoo.llama().save_pretrained(place)
    zoo.tokenizer(zoo.VOCABULARY).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("text") / "words.txt"
    ids = torch.randint(1, zoo.VOCABULARY, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    place.write_text(" ".join(f"w{number}" for number in ids), encoding="utf-8")
    return place


def test_help_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, runpy; sys.argv = ['advantage-probe', '--help']\n"
        "try:\n    runpy.run_module('advantage_probe.analyses.cli', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers', 'pandas', 'matplotlib') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert "analyze" in result.stdout
    assert result.stdout.strip().splitlines()[-1] == "[]"


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, advantage_probe as ap; light = [n for n in ('torch', 'transformers', 'pandas') if n in sys.modules]\n"
        "ap.watch; print(light, [n for n in ('transformer_lens', 'matplotlib', 'transformers') if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert result.stdout.strip() == "[] []", result.stderr


def test_a_users_own_hooks_module_stays_his(tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text("mine = 1\n", encoding="utf-8")
    code = "import hooks, advantage_probe as ap; ap.watch; print(hooks.mine, 'probe' in __import__('sys').modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", cwd=tmp_path)
    assert result.stdout.strip() == "1 False", result.stderr


def test_analyze_writes_tables_a_record_and_a_report(folder: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run("analyze", folder, "--text", text, "--out", out, "--window", 32)
    assert result.returncode == 0, result.stderr
    assert "L1H3" in result.stdout
    assert str(out / "report.html") in result.stdout
    names = {
        f"{table}.{kind}"
        for table in (
            "heads",
            "tokens",
            "edges",
            "updates",
            "sequences",
            "agreement",
            "manifold",
            "vocabulary",
            "checked",
        )
        for kind in ("parquet", "csv")
    }
    assert {path.name for path in out.iterdir()} == names | {
        "run.json",
        "report.html",
        "heads.tex",
        "maps.safetensors",
    }
    heads = pd.read_parquet(out / "heads.parquet")
    assert len(heads) == 8
    assert (heads["status"] == "ok").all()
    assert heads["law_residual"].max() < 1e-6
    assert heads["queries"].unique().tolist() == [150]
    assert heads["interval"].str.startswith("none").all()  # five windows bear none
    assert heads["routing_pressure_low"].isna().all()
    record = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert record["windows"] == 5
    assert record["targets"] == 145
    assert record["versions"]["torch"]
    tokens = pd.read_parquet(out / "tokens.parquet")
    assert set(tokens["token"].dropna()) <= {f"w{number}" for number in range(zoo.VOCABULARY)}


def test_a_shipped_tunnel_is_an_example_like_any_other(tmp_path: Path, text: Path) -> None:
    result = run("analyze", "--example", "bijection-repeats", "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert "against the exact posterior" in result.stdout
    assert {"truth.csv", "truth.parquet", "report.html"} <= {path.name for path in (tmp_path / "run").iterdir()}
    refused(run("analyze", "--example", "bijection-repeats", "--text", text, "--out", tmp_path / "o"), "--text")
    assert "bijection-repeats" in run("tunnel", "list").stdout


def test_numbers_do_not_depend_on_the_batch_size(folder: Path, text: Path) -> None:
    results = []
    for size in (1, 5):
        with tempfile.TemporaryDirectory() as place:
            result = run(
                "analyze", folder, "--text", text, "--out", f"{place}/o", "--window", 32, "--batch-size", size, "--json"
            )
            results.append(pd.DataFrame(json.loads(result.stdout)["heads"]).select_dtypes("float64"))
    difference = (results[0] - results[1]).abs() / results[0].abs().max().clip(lower=1e-30)
    residual = [name for name in difference if name.startswith("law_residual")]
    assert difference.drop(columns=residual).max().max() < 1e-4


def test_verify_prints_residuals_and_succeeds(folder: Path, text: Path) -> None:
    result = run("verify", folder, "--text", text)
    assert result.returncode == 0, result.stderr
    assert "both laws hold" in result.stdout
    found = json.loads(run("verify", folder, "--text", text, "--json").stdout)
    assert found["failed"] == 0
    assert found["worst"] < 1e-5


def test_verify_exits_with_one_when_the_law_fails(folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention_registry.read
    monkeypatch.setattr(
        attention_registry, "read", lambda *given: replace(right(*given), scale=right(*given).scale * 1.01)
    )
    result = run("verify", folder, "--text", text)
    assert result.returncode == 1, result.stderr
    assert "FAILS" in result.stdout


def test_models_that_cannot_be_had_are_refused_at_once(folder: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(run("analyze", "no/such-model", "--text", text, "--out", out), "no/such-model", "HF_HUB_OFFLINE")
    refused(run("analyze", "./nope", "--text", text, "--out", out), "./nope" if os.sep == "\\" else "nope", "exist")
    refused(run("analyze", "what is this", "--text", text, "--out", out), "neither")
    refused(run("analyze", "--out", out), "--example")
    refused(run("analyze", folder, "--example", "gemma", "--out", out), "not both")
    refused(run("analyze", "--example", "opus", "--out", out), "gemma")
    refused(run("analyze", folder, "--text", text, "--out", out, "--device", "cuda:7"), "--device cpu")
    refused(run("analyze", folder, "--text", text, "--out", out, "--dtype", "int8"), "float32")
    assert not out.exists()


def test_folders_that_hold_no_usable_model_are_refused(folder: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(run("analyze", empty, "--text", text, "--out", out), "config.json")
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "model.safetensors").unlink()
    refused(run("analyze", bare, "--text", text, "--out", out), "no weights")
    for content in ((folder / "model.safetensors").read_bytes()[:2000], b"", b"a text file"):
        (bare / "model.safetensors").write_bytes(content)
        refused(run("analyze", bare, "--text", text, "--out", out), "model.safetensors", "fresh copy")
    marker = tmp_path / "marker"
    (bare / "model.safetensors").unlink()
    (bare / "pytorch_model.bin").write_bytes(f"cos\nsystem\n(S'touch {marker}'\ntR.".encode())
    refused(run("analyze", bare, "--text", text, "--out", out), "weights")
    assert not marker.exists()
    assert not out.exists()


def test_encoders_and_models_without_attention_are_refused(text: Path, tmp_path: Path) -> None:
    import transformers

    encoder = tmp_path / "encoder"
    zoo.t5().save_pretrained(encoder)
    zoo.tokenizer(zoo.VOCABULARY).save_pretrained(encoder)
    refused(run("analyze", encoder, "--text", text, "--out", tmp_path / "out"), "causal")
    mamba = tmp_path / "mamba"
    config = transformers.MambaConfig(vocab_size=zoo.VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4)
    transformers.MambaForCausalLM(config).save_pretrained(mamba)
    zoo.tokenizer(zoo.VOCABULARY).save_pretrained(mamba)
    refused(run("analyze", mamba, "--text", text, "--out", tmp_path / "out"), "no attention call")
    assert not (tmp_path / "out").exists()


def test_a_kernel_that_cannot_be_read_is_refused_by_name(folder: Path, text: Path, tmp_path: Path) -> None:
    words = (folder, "--text", text, "--attention", "flex_attention")
    refused(run("analyze", *words, "--out", tmp_path / "out"), "flex attention", "sdpa")
    refused(run("verify", *words), "flex attention", "sdpa")
    refused(run("verify", folder, "--text", text, "--attention", "nonsense"), "nonsense")


def test_texts_that_cannot_be_analysed_are_refused(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    cases = {
        b"": "empty",
        b" \n\t": "blank",
        b"\x89PNG\r\n\x1a\n\0\0\0": "binary",
        "café".encode("latin-1"): "UTF-8",
        b"w1": "1 token",
    }
    for number, (content, word) in enumerate(cases.items()):
        file = tmp_path / f"text{number}"
        file.write_bytes(content)
        refused(run("analyze", folder, "--text", file, "--out", out), word)
    refused(run("analyze", folder, "--text", tmp_path / "missing", "--out", out), "does not exist")
    refused(run("analyze", folder, "--text", tmp_path, "--out", out), "folder")
    refused(run("analyze", folder, "--text", "-", "--out", out), "empty")
    assert not out.exists()


def test_a_tokenizer_that_is_larger_than_the_model_is_named(folder: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(folder, wrong)
    zoo.tokenizer(40).save_pretrained(wrong)
    file = tmp_path / "text"
    file.write_text("w1 w2 w39 w3", encoding="utf-8")
    refused(run("analyze", wrong, "--text", file, "--out", tmp_path / "out"), "w39", "31", "40")
    file.write_text("w1 w2 w9 w3", encoding="utf-8")
    assert run("analyze", wrong, "--text", file, "--out", tmp_path / "out").returncode == 0


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"\xef\xbb\xbfw1 w2\r\nw3 w4")
    out = tmp_path / "out"
    assert run("analyze", folder, "--text", file, "--out", out).returncode == 0
    assert pd.read_parquet(out / "heads.parquet")["queries"].unique().tolist() == [4]


def test_a_result_is_never_overwritten_unasked(folder: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine", encoding="utf-8")
    refused(run("analyze", folder, "--text", text, "--out", out), "not empty", "--overwrite")
    refused(run("analyze", folder, "--text", text, "--out", out, "--overwrite"), "no earlier result")
    assert (out / "mine.txt").read_text(encoding="utf-8") == "mine"
    refused(run("analyze", folder, "--text", text, "--out", out / "mine.txt"), "is a file")
    refused(run("analyze", folder, "--text", text, "--out", "/proc/nowhere/out"), "cannot be written")
    result = tmp_path / "result"
    assert run("analyze", folder, "--text", text, "--out", result, "--top", 1).returncode == 0
    first = (result / "run.json").read_text(encoding="utf-8")
    refused(run("analyze", folder, "--text", text, "--out", result), "--overwrite")
    assert run("analyze", folder, "--text", text, "--out", result, "--overwrite", "--window", 20).returncode == 0
    assert (result / "run.json").read_text(encoding="utf-8") != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "result"]


def test_an_empty_folder_is_filled_and_the_one_one_stands_in_is_not(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir(mode=0o700)
    assert run("analyze", folder, "--text", text, "--out", here, "--tables", "json").returncode == 0
    assert (here / "report.html").is_file()
    assert here.stat().st_mode & 0o777 == 0o700
    assert {path.suffix for path in here.glob("heads.*")} == {".parquet", ".json", ".tex"}
    pd.testing.assert_frame_equal(read_table(here / "heads.json"), pd.read_parquet(here / "heads.parquet"))
    refused(run("analyze", folder, "--text", text, "--out", here, "--tables", "xls"), "parquet, csv, json", "'xls'")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    refused(run("analyze", folder, "--text", text, "--out", "."), "the folder you are in")


def test_runs_that_cannot_be_read_are_refused_by_every_command(folder: Path, text: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assert run("analyze", folder, "--text", text, "--out", whole, "--window", 20).returncode == 0
    place = tmp_path / "run"

    def spoilt(spoil: Callable[[Path], object], *words: str) -> None:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(whole, place)
        spoil(place)
        for command in (("cite", place), ("report", place), ("compare", place, "--null"), ("compare", whole, place)):
            refused(run(*command), *words)

    def of_format(number: object) -> Callable[[Path], object]:
        record = json.loads((whole / "run.json").read_text(encoding="utf-8"))
        return lambda at: (at / "run.json").write_text(json.dumps({**record, "format": number}), encoding="utf-8")

    spoilt(of_format(FORMAT + 1), f"format {FORMAT + 1}", "install a newer version")
    spoilt(of_format(FORMAT - 2), f"format {FORMAT - 2}", "analyse the text again")
    spoilt(of_format(None), "format None", "analyse the text again")
    spoilt(lambda at: (at / "run.json").write_text("[]"), "run.json", "damaged")
    spoilt(lambda at: (at / "run.json").write_text('{"format": '), "run.json", "damaged")
    spoilt(lambda at: (at / "run.json").unlink(), "no run.json")
    for name in (*FRAMES, "manifold", "vocabulary", "agreement"):
        file = f"{name}.parquet"
        spoilt(lambda at, file=file: (at / file).write_bytes(b"PAR1"), file, "damaged")
        if name in FRAMES:
            spoilt(lambda at, file=file: (at / file).unlink(), file, "analyse again")
    for name, column in (("heads", "routing_pressure"), ("sequences", "queries"), ("manifold", "entropy")):
        table = pd.read_parquet(whole / f"{name}.parquet").drop(columns=column)
        spoilt(lambda at, name=name, table=table: table.to_parquet(at / f"{name}.parquet"), name, f"{column!r}")
    refused(run("cite", whole / "run.json"), "is a file")
    refused(run("cite", tmp_path / "nowhere"), "does not exist")


def test_folders_that_cannot_be_written_are_refused_before_any_work(folder: Path, text: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine", encoding="utf-8")
    for words in (
        ("analyze", folder, "--text", text),
        ("em",),
        ("dynamics",),
        ("manifold", folder),
        ("geometry", folder),
        ("in-context", folder),
    ):
        refused(run(*words, "--out", "/proc/nowhere/out"), "cannot be written", "--out")
        refused(run(*words, "--out", file), "is a file")
        refused(run(*words, "--out", file / "inside"), "file")
    refused(run("dynamics", "--keep", "/proc/nowhere"), "cannot be written", "--keep")
    refused(run("dynamics", "--keep", file), "file", "--keep")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_run_without_a_finite_number_can_be_opened_again(text: Path, tmp_path: Path) -> None:
    model = zoo.llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "model")
    zoo.tokenizer(zoo.VOCABULARY).save_pretrained(tmp_path / "model")
    assert run("analyze", tmp_path / "model", "--text", text, "--window", 20, "--out", tmp_path / "out").returncode == 0
    assert run("report", tmp_path / "out").returncode == 0
    assert "mean cross-entropy not finite." in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    refused(run("report", tmp_path / ("x" * 300)), "File name too long")


def test_names_with_markup_are_shown_as_they_are(folder: Path, text: Path, tmp_path: Path) -> None:
    odd = tmp_path / "m[red]x[bold]"
    shutil.copytree(folder, odd)
    result = run("analyze", odd, "--text", text, "--out", tmp_path / "o")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "o" / "report.html").is_file()


def test_a_model_that_sees_both_sides_is_refused(text: Path, tmp_path: Path) -> None:
    encoder = tmp_path / "encoder"
    zoo.bert().save_pretrained(encoder)
    zoo.tokenizer(zoo.VOCABULARY).save_pretrained(encoder)
    refused(run("analyze", encoder, "--text", text, "--out", tmp_path / "out"), "both sides")


def test_a_window_longer_than_the_context_is_refused(folder: Path, text: Path, tmp_path: Path) -> None:
    refused(run("analyze", folder, "--text", text, "--out", tmp_path / "o", "--window", 65), "64")
    refused(run("analyze", folder, "--text", text, "--out", tmp_path / "o", "--window", 1), "at least 2")
    refused(run("analyze", folder, "--text", text, "--out", tmp_path / "o", "--max-tokens", 1), "at least 2")


def test_the_console_may_be_ascii_and_the_files_are_utf8(folder: Path, text: Path, tmp_path: Path) -> None:
    settings = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "HF_HUB_OFFLINE": "1"}
    settings["PYTHONWARNDEFAULTENCODING"] = "1"
    words = ["analyze", folder, "--text", text, "--out", tmp_path / "o"]
    result = subprocess.run(
        [sys.executable, "-m", "advantage_probe.analyses.cli", *words],
        capture_output=True,
        env=settings,
        encoding="ascii",
    )
    assert result.returncode == 0, result.stderr
    assert "advantage_probe" not in "".join(line for line in result.stderr.splitlines() if "EncodingWarning" in line)
    assert "∂L/∂s" in (tmp_path / "o" / "report.html").read_text(encoding="utf-8")
