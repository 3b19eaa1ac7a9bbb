"""The example scripts do what the README says of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import zoo
from terminal import command

SCRIPTS = Path(__file__).parent.parent / "scripts"


def run(name: str, *words: object) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name), *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-1500:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    zoo.gpt2().save_pretrained(place)
    zoo.tokenizer(zoo.VOCABULARY).save_pretrained(place)
    ids = torch.randint(1, zoo.VOCABULARY, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    (place / "text.txt").write_text(" ".join(f"w{number}" for number in ids), encoding="utf-8")
    return place


def test_the_heads_of_a_gpt2_are_ranked_and_the_first_ones_pairs_shown(folder: Path) -> None:
    shown = run("examples/analyze_gpt2.py", folder, folder / "text.txt").splitlines()
    assert shown[0].split()[:2] == ["label", "routing_pressure"]
    pressures = [float(line.split()[1]) for line in shown[1:11]]
    assert pressures == sorted(pressures, reverse=True)
    assert any(line.strip().startswith("routed") for line in shown[12:])


def test_a_watched_training_resumes_without_repeating_a_step(tmp_path: Path) -> None:
    assert "step 200" in run("examples/train_with_probe.py", tmp_path)
    whole = pd.read_parquet(tmp_path / "history")
    assert "while it learned, at 20 observed steps" in (tmp_path / "report.html").read_text(encoding="utf-8")
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    torch.save({**saved, "step": 180}, tmp_path / "checkpoint.pt")
    run("examples/train_with_probe.py", tmp_path)
    again = pd.read_parquet(tmp_path / "history")
    assert again["step"].tolist() == whole["step"].tolist()
    early = whole["step"] < 180
    assert again.loc[early, "routing_pressure"].equals(whole.loc[early, "routing_pressure"])
    assert not again.loc[~early, "routing_pressure"].equals(whole.loc[~early, "routing_pressure"])


def test_a_run_is_exported_as_tables_and_a_figure_with_its_caption(folder: Path, tmp_path: Path) -> None:
    words = ("analyze", folder, "--text", folder / "text.txt", "--window", 20, "--out", tmp_path / "run")
    assert command(*words).returncode == 0
    run("examples/export_report.py", tmp_path / "run", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "layers.csv",
        *(f"{name}.{kind}" for name in ("routing", "head") for kind in ("png", "svg", "pdf", "csv", "txt")),
    }
    heads = pd.read_parquet(tmp_path / "run" / "heads.parquet")
    layers = pd.read_csv(tmp_path / "out" / "layers.csv")
    expected = heads[heads["layer"] == 1]["routing_pressure"].median()
    assert layers["routing_pressure"][1] == pytest.approx(expected)
    table = (tmp_path / "run" / "heads.tex").read_text(encoding="utf-8")
    assert table.count(r"\toprule") == table.count(r"\bottomrule") == 1
    body = table.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
    assert 1 <= len(body) <= 12
    assert all(line.startswith("L") and line.count(" & ") == 5 and line.endswith(r" \\") for line in body)
