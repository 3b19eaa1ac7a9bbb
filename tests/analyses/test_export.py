"""Files: tables come back exactly, folders and files appear whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from advantage_probe.analyses.files import export, folders
from advantage_probe.hooks.errors import BadInput, BadRequest

NASTY = [
    *("NA", "null", "None", "nan", "NaN", "", " ", "'", "''", '"', '""', "'=1", "a'b", ",", ";", "\\", "x"),
    *("\n", "\r", "\r\n", "a\rb", "x\r\ny", "\t", "\0", "a\0b", "\u2028", "\ufeff", "\u202eevil", "😀"),
    *("=1+1", "+1", "-1", "@x", "=cmd|' /C calc'!A0", "1", "02", "1e5", "-0.0", "inf", "True", "false"),
    *("Ġthe", "Ã©", "▁the", "<0x0A>", "\\ud83d", "</script>"),
]
BROKEN = ["\ud83d", "x\udfffy", "\udce9"]


def numbers(count: int = 4_000) -> np.ndarray:
    """Every kind of float64: random bits, so all exponents, denormals, infinities and NaN."""
    bits = np.frombuffer(np.random.default_rng(0).bytes(8 * count), dtype="float64").copy()
    bits[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324]
    bits[6:10] = [0.1, 1 / 3, 1.7976931348623157e308, 2.0**53 + 2]
    return bits


@pytest.mark.parametrize("kind", export.FORMATS)
@pytest.mark.parametrize("name", ["token", "note"])
def test_every_string_comes_back_from_every_format(kind: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / f"table.{kind}"
    for word in NASTY:
        for beside in ([], [word], ["x"], ["1"], [""], [pd.NA], NASTY):
            given = pd.DataFrame({name: pd.array([word, *beside], dtype="string"), "place": range(1 + len(beside))})
            export.write_table(given, file)
            found = export.read_table(file)
            assert found[name].dtype == "string"
            assert found[name].fillna("∅").tolist() == given[name].fillna("∅").tolist(), (word, beside)


@pytest.mark.parametrize("kind", export.FORMATS)
def test_every_float_comes_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    file, given = tmp_path / f"table.{kind}", numbers()
    export.write_table(pd.DataFrame({"value": given}), file)
    found = export.read_table(file)["value"].to_numpy(dtype="float64", na_value=np.nan)
    real = ~np.isnan(given)
    assert (np.isnan(found) == ~real).all()
    assert (found[real].view("int64") == given[real].view("int64")).all()


def typed() -> pd.DataFrame:
    """A column of every dtype that tables here have, and of some that they might."""
    values = pd.arrays.FloatingArray(np.array([1.5, np.nan, np.inf, 0.0]), np.array([False, False, False, True]))
    return pd.DataFrame(
        {
            "label": pd.Categorical(["L0H1", "L0H0", None, "L0H1"], ["L0H0", "L0H1", "never"], ordered=True),
            "layer": pd.array([0, None, 2**62 + 1, -1], dtype="Int64"),
            "nullable": values,
            "flag": pd.array([True, None, False, True], dtype="boolean"),
            "seen": [True, False, True, False],
            "big": np.array([2**64 - 1, 0, 1, 2], dtype="uint64"),
            "single": np.array([0.1, np.nan, np.inf, -0.0], dtype="float32"),
            "half": np.array([0.1, 1.0, 2.0, 3.0], dtype="float16"),
            "numbered": pd.Categorical([3, 1, None, 3]),
            "text": pd.array(["a", None, "", "NA"], dtype="string"),
            "plain": pd.Series(["a", None, "", "NA"], dtype="str"),
        }
    )


@pytest.mark.parametrize("rows", [4, 1, 0])
def test_json_keeps_every_dtype_and_what_is_missing_apart_from_what_is_no_number(rows: int, tmp_path: Path) -> None:
    given = typed().iloc[:rows]
    export.write_table(given, tmp_path / "table.json")
    found = export.read_table(tmp_path / "table.json")
    pd.testing.assert_frame_equal(found, given, check_exact=True)
    if rows == 4:
        assert found["nullable"].array._mask.tolist() == [False, False, False, True]
        assert np.isnan(found["nullable"].array._data[1])
        assert np.signbit(found["single"][3])


def test_json_is_what_every_reader_accepts(tmp_path: Path) -> None:
    def refuse(name: str) -> Any:
        raise AssertionError(name)

    export.write_table(typed(), tmp_path / "table.json")
    raw = (tmp_path / "table.json").read_bytes()
    found = json.loads(raw.decode("ascii"), parse_constant=refuse)
    assert found["columns"]["single"][1:3] == [None, "Infinity"]
    assert found["columns"]["nullable"] == [1.5, "NaN", "Infinity", None]
    plain = pd.DataFrame(found["columns"])
    assert plain["label"].tolist()[:2] == ["L0H1", "L0H0"]
    assert found["types"]["label"]["categories"] == ["L0H0", "L0H1", "never"]


def test_broken_utf8_comes_back_from_json_and_is_refused_by_name_elsewhere(tmp_path: Path) -> None:
    words = pd.Series([*BROKEN, None, *NASTY], dtype=object)
    codes = [0, 1, 2, -1, *range(3, 3 + len(NASTY))]
    kinds = pd.Categorical.from_codes(codes, pd.Index([*BROKEN, *NASTY], dtype=object))
    given = pd.DataFrame({"token": words, "kind": kinds})
    export.write_table(given, tmp_path / "table.json")
    found = export.read_table(tmp_path / "table.json")
    assert found["token"].tolist() == words.tolist()
    assert found["kind"].cat.categories.tolist() == [*BROKEN, *NASTY]
    assert found["kind"].cat.codes.tolist() == codes
    for kind in ("csv", "parquet"):
        with pytest.raises(BadRequest, match="lone surrogate"):
            export.write_table(given[["token"]], tmp_path / f"table.{kind}")
        assert not (tmp_path / f"table.{kind}").exists()


def test_what_json_cannot_hold_exactly_is_refused(tmp_path: Path) -> None:
    times = pd.DataFrame({"when": pd.to_datetime(["2024-01-01"])})
    mixed = pd.DataFrame({"odd": pd.Series([["a"], 1], dtype=object)})
    twice = pd.DataFrame([[1, 2]], columns=["a", "a"])
    for table, word in ((times, "datetime"), (mixed, "'odd'"), (twice, "name"), (pd.DataFrame([[1]]), "name")):
        with pytest.raises(BadRequest, match=word):
            export.write_table(table, tmp_path / "table.json")
    with pytest.raises(BadRequest, match=r"\.csv, \.parquet or \.json"):
        export.write_table(typed(), tmp_path / "table.xls")
    assert list(tmp_path.iterdir()) == []


def test_damaged_tables_are_refused_by_name(tmp_path: Path) -> None:
    for kind in export.FORMATS:
        file = tmp_path / f"table.{kind}"
        with pytest.raises(BadInput, match="does not exist"):
            export.read_table(file)
        export.write_table(typed()[["layer", "single", "label"]], file)
        whole = file.read_bytes()
        for torn in (b"", whole[: len(whole) // 2]):
            file.write_bytes(torn)
            if kind != "csv" or not torn:  # half a CSV is a shorter CSV
                with pytest.raises(BadInput, match=rf"table\.{kind}"):
                    export.read_table(file)
    file = tmp_path / "table.json"
    file.write_text('{"table": 99}', encoding="utf-8")
    with pytest.raises(BadInput, match="version 99"):
        export.read_table(file)
    file.write_text('{"table": 1, "rows": 2, "types": {"a": "int64"}, "columns": {"a": [1]}}', encoding="utf-8")
    with pytest.raises(BadInput, match="do not agree"):
        export.read_table(file)


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted() -> None:
    raise KeyboardInterrupt


def filled(out: Path, word: str) -> None:
    with folders.new_folder(out, overwrite=True) as folder:
        for name in ("run.json", "one", "two"):
            (folder / name).write_text(word, encoding="utf-8")


def test_an_existing_empty_folder_stays_empty_until_the_run_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for failure in (full, interrupted):
        with pytest.raises((BadInput, KeyboardInterrupt)), folders.new_folder(out) as folder:
            (folder / "one").write_text("one", encoding="utf-8")
            assert list(out.iterdir()) == []
            failure()
        assert [path.name for path in tmp_path.rglob("*")] == ["out"]
    replace, calls = os.replace, []

    def last(source: Any, target: Any) -> None:
        calls.append(sorted(path.name for path in Path(source).iterdir()))
        assert list(out.iterdir()) == []
        if len(calls) == 1:
            full()
        replace(source, target)

    monkeypatch.setattr(os, "replace", last)
    with pytest.raises(BadInput, match="nothing was left there"):
        filled(out, "first")
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]
    filled(out, "second")
    assert calls == [["one", "run.json", "two"]] * 2  # one call puts everything in place
    assert sorted(path.name for path in out.iterdir()) == ["one", "run.json", "two"]


def test_a_reader_finds_the_earlier_result_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, seen, stop = tmp_path / "out", set(), threading.Event()
    filled(out, "0")
    if not folders._traded(*(Path(shutil.copytree(out, tmp_path / name)) for name in ("a", "b"))):
        pytest.skip("this file system cannot let two folders trade names")
    monkeypatch.setattr(folders.shutil, "rmtree", lambda *_, **__: None)  # what a reader holds open is not the question

    def read() -> None:
        while not stop.is_set():
            try:
                seen.add(len(set(os.listdir(out))))
            except OSError as error:
                seen.add(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(1, 80):
            filled(out, str(number))
    finally:
        stop.set()
        reader.join()
    assert seen == {3}
    assert (out / "two").read_text(encoding="utf-8") == "79"


@pytest.mark.parametrize("trades", [True, False])
def test_a_run_that_cannot_be_replaced_stays_where_it_was(
    trades: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    filled(out, "first")
    rename = Path.rename

    def last(path: Path, target: Path) -> Path:
        return full() if target == out and path.name != "run" else rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(folders, "_traded", full if trades else lambda *_: False)
        patch.setattr(Path, "rename", last)
        with pytest.raises(BadInput, match="what was there is unchanged"):
            filled(out, "second")
    assert (out / "run.json").read_text(encoding="utf-8") == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    monkeypatch.setattr(folders, "_traded", lambda *_: False)
    filled(out, "third")
    assert (out / "run.json").read_text(encoding="utf-8") == "third"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_links_and_home_folders_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    filled(tmp_path / "link", "first")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "one").read_text(encoding="utf-8") == "first"
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "volume")
    (tmp_path / "volume").mkdir()
    with pytest.raises(BadInput, match=r"mount point.*inside it"):
        filled(tmp_path / "volume", "first")
    monkeypatch.setenv("HOME", str(tmp_path / "real"))
    with pytest.raises(BadInput, match="not replaced"):
        filled(tmp_path / "real", "second")


def test_a_full_disk_is_told_with_the_name_that_the_user_gave(tmp_path: Path) -> None:
    class Wrapped(Exception):
        """As safetensors words it."""

    for error in (Wrapped("I/O error: No space left on device (os error 28)"), OSError(28, "No space left on device")):
        with (
            pytest.raises(BadInput, match=r"run' could not be written .*No space left.*nothing was left there"),
            folders.new_folder(tmp_path / "run"),
        ):
            raise error
    with (
        pytest.raises(BadInput, match=r"run' could not be written .*No space"),
        folders.new_folder(tmp_path / "run") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(os, "replace", full)
        export.write_text("x", folder / "inside.txt")
    with pytest.raises(RuntimeError), folders.new_folder(tmp_path / "run"):
        raise RuntimeError("a mistake of ours stays what it is")
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_run_can_be_read_by_others(tmp_path: Path) -> None:
    with folders.new_folder(tmp_path / "run") as folder:
        (folder / "bases").mkdir(mode=0o700)
        (folder / "bases" / "secret").touch(mode=0o600)
    assert (tmp_path / "run" / "bases").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "run" / "bases" / "secret").stat().st_mode & 0o777 == 0o644


def test_a_full_disk_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "table.csv"
    export.write_table(typed()[["layer"]], file)
    before = file.read_bytes()
    monkeypatch.setattr(pd.DataFrame, "to_csv", full)
    with pytest.raises(BadInput, match="No space left"):
        export.write_table(typed()[["layer"]], file)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]
