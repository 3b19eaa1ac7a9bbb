"""Folders are whole or not there, whatever happens while they are filled, and killed runs leave nothing for long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import command

from advantage_probe.analyses.files.folders import new_folder, sweep
from advantage_probe.hooks.errors import BadInput

KILLED = """
import sys, time
from pathlib import Path
from advantage_probe.analyses.files.folders import new_folder
with new_folder(Path(sys.argv[1])) as work:
    (work / "half").write_text("x")
    print("begun", flush=True)
    time.sleep(120)
"""


def test_a_folder_that_appears_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="appeared while the run was on"), new_folder(tmp_path / "out") as work:
        (work / "new").write_text("new")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("kept")
    assert (tmp_path / "out" / "theirs").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as work:
        (work / "new").write_text("new")
    assert (tmp_path / "empty" / "new").read_text() == "new"


def test_a_result_that_was_replaced_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "run.json").write_text("{}")
    with pytest.raises(BadInput, match="was replaced by another"), new_folder(out, overwrite=True) as work:
        (work / "run.json").write_text("new")
        out.rename(tmp_path / "aside")
        out.mkdir()
        (out / "theirs").write_text("kept")
    assert (out / "theirs").read_text() == "kept"
    assert (tmp_path / "aside" / "run.json").read_text() == "{}"
    with new_folder(tmp_path / "aside", overwrite=True) as work:
        (work / "run.json").write_text("new")
    assert (tmp_path / "aside" / "run.json").read_text() == "new"
    assert not (tmp_path / "aside" / ".owner").exists()


def test_what_a_killed_run_left_is_swept_and_what_a_running_one_fills_is_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    processes = []
    try:
        for _ in range(2):
            process = subprocess.Popen([sys.executable, "-c", KILLED, str(out)], stdout=subprocess.PIPE, text=True)
            assert process.stdout.readline().strip() == "begun"
            processes.append(process)
        assert len(list(tmp_path.glob(".out-*"))) == 2
        processes[0].send_signal(signal.SIGKILL)
        processes[0].wait()
        with new_folder(out) as work:
            (work / "new").write_text("new")
        assert len(list(tmp_path.glob(".out-*"))) == 1  # the one whose run is on
        processes[1].send_signal(signal.SIGKILL)
        processes[1].wait()
        (tmp_path / ".mine-notes").mkdir()  # somebody's own
        os.symlink(tmp_path / ".mine-notes", tmp_path / ".out-link")
        result = command("doctor", "--clean", tmp_path)
        assert result.returncode == 0
        assert "removed" in result.stdout
        assert "nothing was left" in command("doctor", "--clean", tmp_path).stdout
        assert sweep(tmp_path) == []
    finally:
        for process in processes:
            process.kill()
            process.stdout.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine-notes", ".out-link", "out"]
