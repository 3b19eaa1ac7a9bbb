"""The compiled part of the block pass gives its numbers for the calls that it takes, and leaves the others alone."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calls import CASES, call_of, compared, compiler

import advantage_probe as ap
from advantage_probe.hooks.visibility import Structure
from advantage_probe.probe.law import blocks as blockwise
from advantage_probe.probe.law import compiled_block as inductor
from advantage_probe.probe.law import definition as law

pytestmark = compiler


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("case", CASES)
def test_every_number_is_that_of_the_passes(case: str, padded: bool) -> None:
    call = call_of(case, torch.float64, padded=padded)
    for entries in (1 << 19, 500):
        compared(blockwise.vectors(call, compiled=True, entries=entries), blockwise.vectors(call), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_are_summed_in_float32(dtype: torch.dtype) -> None:
    call = call_of("grouped", dtype)
    found = blockwise.vectors(call, compiled=True)
    assert found.entropy.dtype == torch.float32
    compared(found, blockwise.vectors(call), 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("shape", ["(B,1,Q,S)", "(1,1,Q,S)", "(B,H,Q,S)"])
def test_masks_of_every_shape_are_read(shape: str) -> None:
    call = call_of("two-sided", torch.float64)
    batch, heads, queries, _ = call.query.shape
    size = {"(B,1,Q,S)": (batch, 1), "(1,1,Q,S)": (1, 1), "(B,H,Q,S)": (batch, heads)}[shape]
    mask = torch.rand(*size, queries, queries, generator=torch.Generator().manual_seed(1)) > 0.4
    mask |= torch.eye(queries, dtype=torch.bool)
    call = call_of("two-sided", torch.float64, mask=mask)
    compared(blockwise.vectors(call, compiled=True, entries=3000), blockwise.vectors(call), 1e-12)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_mask_that_hides_whole_rows_is_read_as_the_definition_reads_it(compiled: bool) -> None:
    mask = torch.ones(2, 1, 40, 1, dtype=torch.bool)
    mask[0, 0, -5:] = False
    call = call_of("two-sided", torch.float64, mask=mask)
    compared(blockwise.vectors(call, compiled=compiled), law.vectors(call), 1e-12)


def test_a_mask_that_is_off_by_one_would_be_seen() -> None:
    call = call_of("window", torch.float64)
    wider = replace(call, visibility=replace(call.visibility, structure=Structure(causal=True, window=10)))
    with pytest.raises(AssertionError):
        compared(blockwise.vectors(wider, compiled=True), blockwise.vectors(call), 1e-12)


def test_a_default_device_of_the_user_moves_nothing() -> None:
    inductor.strip.cache_clear()
    inductor._short.cache_clear()
    with torch.device("meta"):
        assert inductor.window(Structure(causal=True), 3, 4, 8, 8, 8, torch.float64).sum() == 4 + 5 + 6 + 7


def test_a_machine_that_cannot_compile_is_told(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    inductor.compiled.cache_clear()
    try:
        missing = torch._inductor.config.patch({"cpp.cxx": ("/no/such/compiler",)})
        with missing, pytest.raises(ap.BadRequest, match="compiled=True needs a C\\+\\+ compiler"):
            inductor.compiled(torch.float32, True, False)
    finally:
        inductor.compiled.cache_clear()
    assert not list(tmp_path.rglob("*.pt2"))


def packed(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as package:
        package.writestr("model", bytes(range(256)))


@pytest.mark.parametrize("damage", ["empty", "cut", "one byte"])
def test_a_damaged_file_is_made_again_and_never_run(damage: str, monkeypatch, tmp_path) -> None:
    made: list[Path] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(inductor, "_compile", lambda path, *_: (made.append(path), packed(path)))
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: Path(path).read_bytes())
    inductor.compiled.cache_clear()
    whole = inductor.compiled(torch.float32, True, False)
    cut = {"empty": b"", "cut": whole[:100], "one byte": whole.replace(b"\x07\x08", b"\x07\x09")}[damage]
    made[0].write_bytes(cut)
    inductor.compiled.cache_clear()
    assert inductor.compiled(torch.float32, True, False)[30:] == whole[30:]  # the head has the time
    assert len(made) == 2
    inductor.compiled.cache_clear()


def test_what_cannot_be_loaded_is_said_with_its_file(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(inductor, "_compile", lambda path, *_: packed(path))
    inductor.compiled.cache_clear()
    with pytest.raises(ap.BadRequest, match=r"sweep-\w+\.pt2' cannot be loaded .*; delete the file"):
        inductor.compiled(torch.float32, True, False)
    inductor.compiled.cache_clear()


def test_what_was_compiled_is_kept_for_later_processes(monkeypatch, tmp_path) -> None:
    made: list[Path] = []
    (tmp_path / "advantage-probe").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(inductor, "_compile", lambda path, *_: (made.append(path), packed(path)))
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: path)
    inductor.compiled.cache_clear()
    first = inductor.compiled(torch.float32, True, False)
    inductor.compiled.cache_clear()  # as another process
    assert inductor.compiled(torch.float32, True, False) == first == str(made[0])
    assert len(made) == 1
    assert inductor.compiled(torch.float64, True, False) != first
    inductor.compiled.cache_clear()
