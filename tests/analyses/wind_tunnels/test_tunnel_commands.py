"""The command line: one sentence and exit code 2 for bad input, 1 for a failed check, no heavy import before."""

import json
import subprocess
import sys

import pytest
from terminal import command, refused

from advantage_probe.analyses.wind_tunnels.training import checkpoints
from advantage_probe.analyses.wind_tunnels.truth import shipped


def run(*words: object):
    return command("tunnel", *words)


def test_the_module_loads_without_torch_or_transformers():
    code = (
        "import sys; import advantage_probe.analyses.commands.tunnels;"
        "print([name for name in ('torch', 'transformers', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_list_names_every_tunnel_and_marks_the_shipped_ones():
    result = run("list")
    assert result.returncode == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert {"bijection-repeats", "hmm", "mess3", "rrxor", "selection", "coin", "noisy-chain"} <= lines.keys()
    assert lines["bijection-repeats"].endswith("trained: bijection-repeats, bijection-repeats-4")
    assert "trained" not in lines["coin"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("train", "nowhere"), "no tunnel is named 'nowhere'"),
        (("train", "coin", "--preset", "huge"), "no preset is named 'huge'"),
        (("train", "coin", "--device", "abacus", "--out", "unused"), "no device 'abacus' can be used here"),
        (("evaluate", "nowhere"), "neither a shipped model"),
    ],
)
def test_bad_input_is_one_sentence_and_returncode_two(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*words)
    refused(result, says)
    assert not list(tmp_path.iterdir())  # not even an empty folder
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_a_run_of_ones_own_is_trained_evaluated_and_resumed(tmp_path, monkeypatch):
    from advantage_probe.analyses.wind_tunnels.training import recipes
    from advantage_probe.analyses.wind_tunnels.training.models import Shape

    small = recipes.Recipe(Shape("gpt2", 1, 2, 16), steps=20, batch=8, warm_up=4)
    monkeypatch.setitem(recipes.PRESETS, "tiny", small)
    folder = tmp_path / "coin"
    first = run("train", "coin", "--out", str(folder))
    assert first.returncode == 0, first.stderr
    card = json.loads((folder / "card.json").read_text())
    assert card["command"] == f"advantage-probe tunnel train coin --preset tiny --out {folder}"
    assert card["curve"][-1]["step"] == 20
    again = run("train", "coin", "--out", str(folder), "--resume")
    assert again.returncode == 0
    assert json.loads((folder / "card.json").read_text())["curve"] == card["curve"]
    judged = run("evaluate", str(folder), "--sequences", "64", "--positions")
    assert judged.returncode == 0
    rows = [line.split()[0] for line in judged.stdout.splitlines() if line]
    assert rows.index("uniform") < rows.index("model")
    other = run("train", "coin", "--out", str(folder), "--resume", "--distilled")
    refused(other, "other settings")
    refused(run("train", "coin", "--out", folder), "--resume", "--overwrite")
    refused(run("train", "coin", "--out", folder, "--resume", "--overwrite"), "one of the two")
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    anew = run("train", "coin", "--out", folder, "--overwrite", "--sampled", "--json")
    assert anew.returncode == 0, anew.stderr
    assert json.loads(anew.stdout)["curve"] == json.loads((folder / "card.json").read_text())["curve"]
    assert (folder / "notes.txt").is_file()
    refused(run("train", "coin", "--out", folder / "notes.txt"), "cannot be written")
    refused(run("train", "coin", "--out", "/proc/nowhere"), "cannot be written")


def test_an_overwritten_run_leaves_nothing_of_the_old_one_to_be_mistaken_for_it(tmp_path):
    for name in (checkpoints.RUN, checkpoints.WEIGHTS, checkpoints.CARD, "other"):
        (tmp_path / name).write_bytes(b"old")
    (tmp_path / checkpoints.HISTORY).mkdir()
    (tmp_path / checkpoints.HISTORY / "part.parquet").write_bytes(b"old")
    checkpoints.make_way(tmp_path, resume=True, overwrite=False)
    assert len(list(tmp_path.iterdir())) == 5
    checkpoints.make_way(tmp_path, resume=False, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_objects_hold_what_the_tables_show():
    listed = json.loads(run("list", "--json").stdout)["tunnels"]
    assert {model for row in listed for model in row["models"]} == set(shipped.shipped_names())
    assert all(row["shipped"] == bool(row["models"]) for row in listed)
    found = json.loads(run("evaluate", "mess3", "--sequences", "64", "--json").stdout)
    result = shipped.evaluate("mess3", 64)
    assert [row["kl"] for row in found["tables"]["all supervised positions"]] == pytest.approx(
        result.tables["all supervised positions"]["kl"].tolist()
    )
    assert [check["measured"] for check in found["checks"]] == pytest.approx([it.measured for it in result.checks])
    assert [row["reader"] for row in found["controls"]] == result.controls.index.tolist()


def test_a_failed_check_is_returncode_one(monkeypatch):
    def failing(*_):
        return [shipped.Check("made to fail", 0.2, 0.1)], None

    monkeypatch.setitem(shipped._OWN_CHECKS, "bijection-repeats", failing)
    result = run("evaluate", "bijection-repeats", "--sequences", "64")
    assert result.returncode == 1
    assert "FAILED: made to fail: 0.20000 ≤ 0.10000" in result.stdout


def test_a_broken_folder_is_refused(tmp_path):
    (tmp_path / "card.json").write_text("{}")
    result = run("evaluate", str(tmp_path))
    refused(result, "lacks tunnel")
