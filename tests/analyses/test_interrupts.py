"""Ctrl-C in the middle of a command: code 130, one sentence on how to go on, nothing half-written, and going on works."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import zoo
from terminal import command, refused

from advantage_probe.analyses.dynamics import course, examined
from advantage_probe.analyses.em import experiment
from advantage_probe.analyses.files import export
from advantage_probe.analyses.intervals import compare
from advantage_probe.analyses.manifolds import report as manifold_report
from advantage_probe.analyses.pretrained import geometry, in_context
from advantage_probe.analyses.runs import analyze
from advantage_probe.analyses.wind_tunnels.training import checkpoints, recipes
from advantage_probe.analyses.wind_tunnels.training import runner as training
from advantage_probe.analyses.wind_tunnels.training.models import Shape


def ctrl_c(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
    raise AssertionError("the signal did not stop the command")


def on_call(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """`function`, interrupted when it is called for the `count`-th time."""
    calls = []

    def stand_in(*given: Any, **named: Any) -> Any:
        calls.append(0)
        return ctrl_c() if len(calls) == count else function(*given, **named)

    return stand_in


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    zoo.llama().save_pretrained(place)
    zoo.tokenizer(zoo.VOCABULARY).save_pretrained(place)
    ids = torch.randint(1, zoo.VOCABULARY, (900,), generator=torch.Generator().manual_seed(0)).tolist()
    (place / "text.txt").write_text(" ".join(f"w{number}" for number in ids), encoding="utf-8")
    passages = [" ".join(f"w{number}" for number in ids[start : start + 20]) for start in range(0, 900, 30)]
    (place / "passages.txt").write_text("\n\n".join(passages), encoding="utf-8")
    return place


def stopped(result: Any, *words: str) -> None:
    assert result.returncode == 130, result.stderr
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("advantage-probe: interrupted; ")
    for word in words:
        assert word in line
    assert "Traceback" not in result.stderr


WORK = {
    "analyze": (analyze, "collect"),
    "em": (experiment, "run"),
    "dynamics": (examined, "trained"),
    "manifold": (manifold_report, "pretrained_report"),
    "geometry": (geometry, "geometry"),
    "in-context": (in_context, "in_context"),
}


@pytest.mark.parametrize("name", WORK)
def test_an_interrupt_at_work_leaves_nothing(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*WORK[name], ctrl_c)
    words = [name] if name in ("em", "dynamics") else [name, folder]
    words += ["--text", folder / "text.txt"] if name == "analyze" else []
    words += (
        ["--prompts", folder / "passages.txt", "--length", 8, "--count", 10] if name in ("manifold", "geometry") else []
    )
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    result = command(*words, "--out", tmp_path / "out")
    stopped(result, "--keep DIR" if name == "dynamics" else "nothing was written")
    assert list(tmp_path.iterdir()) == []
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("made", ["", "empty", "run"])
def test_an_interrupt_while_files_are_written_leaves_what_was_there(
    made: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = ("analyze", folder, "--text", folder / "text.txt", "--window", 20, "--max-tokens", 100, "--out", out)
    if made:
        out.mkdir()
    if made == "run":
        assert command(*words).returncode == 0
    there = {path.name: path.read_bytes() for path in out.iterdir()} if made else None
    monkeypatch.setattr(export, "write_json", ctrl_c)  # the tables are written by then
    stopped(command(*words, "--overwrite"), "the same line starts again")
    assert [path.name for path in tmp_path.iterdir()] == ([out.name] if made else [])
    if made:
        assert {path.name: path.read_bytes() for path in out.iterdir()} == there
    monkeypatch.undo()
    assert command(*words, "--overwrite").returncode == 0
    refused(command(*words), "--overwrite")


def test_an_interrupted_comparison_writes_no_table(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert command("analyze", folder, "--text", folder / "text.txt", "--window", 20, "--out", run).returncode == 0
    monkeypatch.setattr(compare, "halves", ctrl_c)
    stopped(command("compare", run, "--null", "--out", tmp_path / "changed.csv"), "nothing was written")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_interrupted_training_goes_on_as_the_message_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = recipes.Recipe(Shape("gpt2", 1, 2, 16), steps=20, batch=8, warm_up=4)
    monkeypatch.setitem(recipes.PRESETS, "tiny", small)
    words = ("tunnel", "train", "coin", "--out", tmp_path / "coin")
    with monkeypatch.context() as patch:
        patch.setattr(training, "held_out_error", on_call(training.held_out_error, 9))
        result = command(*words)
    stopped(
        result, f"continue with: advantage-probe tunnel train coin --preset tiny --out {tmp_path / 'coin'} --resume"
    )
    assert [path.name for path in (tmp_path / "coin").iterdir()] == [checkpoints.RUN]
    refused(command(*words), "--resume", "--overwrite")
    go_on = result.stderr.split("advantage-probe tunnel")[1].strip().rstrip(".").split()
    assert command("tunnel", *go_on).returncode == 0
    assert command("tunnel", "train", "coin", "--out", tmp_path / "whole").returncode == 0
    curves = [json.loads((tmp_path / name / "card.json").read_text())["curve"] for name in ("coin", "whole")]
    assert curves[0] == curves[1]
    assert len(curves[0]) == 20


def test_kept_runs_go_on_with_the_same_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipes.Recipe(Shape("llama", 1, 2, 16), steps=40, batch=4, warm_up=5)
    small = course.Course("bijection-repeats", recipe, {"symbols": 4, "pairs": 5})
    monkeypatch.setattr(examined, "SMALL", small)
    monkeypatch.setattr(examined, "KINDS", ("own",))
    monkeypatch.setattr(examined, "SEQUENCES", 8)
    words = (
        "dynamics",
        "--seeds",
        "3",
        "--no-causal",
        "--keep",
        tmp_path / "kept",
        "--out",
        tmp_path / "out",
        "--json",
    )
    with monkeypatch.context() as patch:
        patch.setattr(course.Runner, "advance", on_call(course.Runner.advance, 30))
        stopped(command(*words), "what was trained is kept", "the same line goes on")
    kept = {path.name for path in (tmp_path / "kept" / "seed-3").iterdir()}
    assert kept == {f"step-{step:07d}.pt" for step in replace(small, recipe=replace(recipe, seed=3)).kept if step <= 29}
    assert not (tmp_path / "out").exists()
    counted = []
    advance = course.Runner.advance
    monkeypatch.setattr(course.Runner, "advance", lambda *given: (counted.append(0), advance(*given))[1])
    result = command(*words)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out" / "dynamics.png").is_file()
    assert len(counted) < 40  # what was kept was not trained again


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_from_outside_end_a_process_and_its_workers(number: signal.Signals, tmp_path: Path) -> None:
    words = ["em", "--steps", "200000", "--out", str(tmp_path / "em")]
    process = subprocess.Popen(
        [sys.executable, "-m", "advantage_probe", *words], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        children: list[str] = []
        began = time.monotonic()
        while len(children) < 2 and time.monotonic() - began < 60:
            listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            children = listed.read_text().split() if listed.is_file() else []
            time.sleep(0.1)
        time.sleep(0.5)
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number, errors
    assert errors.strip().splitlines()[-1].startswith("advantage-probe: interrupted; nothing was written")
    assert "Traceback" not in errors
    until = time.monotonic() + 20
    while any(map(_alive, children)) and time.monotonic() < until:
        time.sleep(0.1)
    assert [child for child in children if _alive(child)] == []
    assert list(tmp_path.iterdir()) == []


def _alive(child: str) -> bool:
    try:
        return Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_full_disk_costs_the_files_and_not_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full)
    result = command("em", "--seeds", "1,2", "--steps", "2", "--out", tmp_path / "em", "--json")
    refused(result, "No space left on device", "nothing was left there")
    assert json.loads(result.stdout)["seeds"] == [1, 2]
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_in_the_middle_of_a_training_keeps_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = recipes.Recipe(Shape("gpt2", 1, 2, 16), steps=20, batch=8, warm_up=4)
    monkeypatch.setitem(recipes.PRESETS, "tiny", small)
    write, saved = Path.write_bytes, []

    def filling(path: Path, data: Any) -> int:
        saved.append(path)
        if len(saved) > 7:
            write(path, bytes(data)[:100])
            raise OSError(28, "No space left on device")
        return write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", filling)
        result = command("tunnel", "train", "coin", "--out", tmp_path / "coin")
    refused(result, "run.pt", "No space left on device", "can go on")
    assert [path.name for path in (tmp_path / "coin").iterdir()] == [checkpoints.RUN]
    assert checkpoints.load_run(tmp_path / "coin")["step"] == 7
    assert command("tunnel", "train", "coin", "--out", tmp_path / "coin", "--resume").returncode == 0
