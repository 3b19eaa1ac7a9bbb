"""Building the operator: once per machine, for what torch runs with, never trusted blindly; else one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import zoo
from calls import operator

import advantage_probe as ap
from advantage_probe.hooks.errors import UnsupportedKernel
from advantage_probe.probe.operator import build


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache folder, and a process that has loaded nothing."""
    monkeypatch.setenv("ADVANTAGE_PROBE_CACHE", str(tmp_path))
    monkeypatch.delenv("ADVANTAGE_PROBE_NO_BUILD", raising=False)
    build.library.cache_clear()
    build.available.cache_clear()
    yield tmp_path
    build.library.cache_clear()
    build.available.cache_clear()


@pytest.fixture
def pretended(monkeypatch, fresh):
    """Builds are noted and write a few bytes, and loading gives the file's path: what is tested is the cache."""
    made: list[Path] = []

    def make(tool: str, path: Path) -> None:
        made.append(path)
        path.write_bytes(b"machine code")
        build._noted(path).write_text(build.hashlib.sha256(b"machine code").hexdigest())
        for file in (path, build._noted(path)):
            file.chmod(0o600)

    class Loaded:
        def __getattr__(self, name: str):
            return type("Function", (), {})()

    monkeypatch.setattr(build, "_build", make)
    monkeypatch.setattr(build, "compiler", lambda: sys.executable)
    monkeypatch.setattr(build.ctypes, "CDLL", lambda path: Loaded())
    monkeypatch.setattr(build, "refusal", lambda: None)
    return made


def again() -> None:
    build.library.cache_clear()
    build.library()


def test_what_was_built_is_found_by_later_processes(pretended) -> None:
    build.library()
    again()
    assert len(pretended) == 1
    assert pretended[0].parent.stat().st_mode & 0o777 == 0o700


def test_another_capability_or_compiler_is_another_build(pretended, monkeypatch) -> None:
    build.library()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "OTHER")
    again()
    monkeypatch.setattr(torch, "__version__", "0.0")
    again()
    assert len({path.name for path in pretended}) == 3


@pytest.mark.parametrize("damage", ["empty", "one byte", "no note"])
def test_a_damaged_build_is_made_again_and_never_loaded(damage: str, pretended) -> None:
    build.library()
    if damage == "no note":
        build._noted(pretended[0]).unlink()
    else:
        pretended[0].write_bytes({"empty": b"", "one byte": b"Machine code"}[damage])
    again()
    assert len(pretended) == 2


def test_a_folder_or_file_that_others_can_write_to_is_refused(pretended, fresh) -> None:
    build.library()
    folder = pretended[0].parent
    folder.chmod(0o777)
    with pytest.raises(UnsupportedKernel, match="can be written by others"):
        again()
    folder.chmod(0o700)
    pretended[0].chmod(0o666)
    with pytest.raises(UnsupportedKernel, match="can be written by others"):
        again()
    pretended[0].chmod(0o600)
    elsewhere = fresh / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    with pytest.raises(UnsupportedKernel, match="is a link"):
        again()


def said(monkeypatch) -> list[str]:
    """What a watch says when it opens, twice; its numbers come all the same."""
    model, batch = zoo.gpt2(), zoo.batch("gpt2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with ap.watch(model) as watch:
                model(**batch).loss.backward()
            assert set(watch.modules()["way"]) == {"blocks in Python"}
            assert (watch.heads()["status"] == "ok").all()
    return [str(one.message) for one in caught if "C++ operator" in str(one.message)]


def test_without_a_compiler_one_sentence_is_said_and_the_numbers_come_from_python(fresh, monkeypatch) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)
    (sentence,) = said(monkeypatch)
    assert "no C++ compiler was found" in sentence


def test_a_compiler_that_fails_or_hangs_is_one_sentence_too(fresh, monkeypatch) -> None:
    for script, words in (("echo 'error: nothing works' >&2; exit 1", "nothing works"), ("sleep 9", "longer than")):
        tool = fresh / "compiler"
        tool.write_text(f'#!/bin/sh\ncase "$1" in --version) echo 1;; *) {script};; esac\n')
        tool.chmod(0o700)
        monkeypatch.setenv("CXX", str(tool))
        monkeypatch.setattr(build, "SECONDS", 0.3)
        build.library.cache_clear()
        build.available.cache_clear()
        if build.refusal() is None:
            (sentence,) = said(monkeypatch)
            assert words in sentence


def test_a_cache_that_cannot_be_written_is_one_sentence(fresh, monkeypatch) -> None:
    (fresh / "file").write_text("")
    monkeypatch.setenv("ADVANTAGE_PROBE_CACHE", str(fresh / "file"))
    monkeypatch.setattr(build, "compiler", lambda: sys.executable)
    monkeypatch.setattr(build, "refusal", lambda: None)
    assert len(said(monkeypatch)) == 1


def test_whoever_asks_for_no_build_is_told_nothing(fresh, monkeypatch) -> None:
    monkeypatch.setenv("ADVANTAGE_PROBE_NO_BUILD", "1")
    assert said(monkeypatch) == []
    assert not list(fresh.iterdir())


def test_a_torch_that_runs_with_less_is_refused(monkeypatch) -> None:
    monkeypatch.delenv("ADVANTAGE_PROBE_NO_BUILD", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert build.refusal() is not None


_CHECK = """
import warnings, torch, zoo
warnings.simplefilter("ignore")
import advantage_probe as ap
model, batch = zoo.gpt2(), zoo.batch("gpt2", length=40)
model(**batch).loss.backward()
plain = [parameter.grad.clone() for parameter in model.parameters()]
for _ in range(2):
    model.zero_grad()
    with ap.watch(model) as watch:
        model(**batch).loss.backward()
assert all(torch.equal(one, parameter.grad) for one, parameter in zip(plain, model.parameters()))
print(torch.backends.cpu.get_cpu_capability(), *set(watch.modules()["way"]))
"""


@operator
@pytest.mark.parametrize(("capability", "way"), [("avx2", "one pass"), ("default", "blocks in Python")])
def test_a_narrower_torch_gets_its_own_build_or_none(capability: str, way: str) -> None:
    if build.refusal() is not None:
        pytest.skip("the operator is not made for this machine")
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
    ran = subprocess.run([sys.executable, "-c", _CHECK], capture_output=True, text=True, env=environment, check=True)
    assert ran.stdout.split(maxsplit=1)[1].strip() == way
