"""The command line: one sentence and exit code 2 for bad input, 1 for a failed check, no heavy import before."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from advantage_probe.analyses.wind_tunnels import shipped
from advantage_probe.analyses.wind_tunnels.commands import app


def run(*words: str):
    return CliRunner().invoke(app, list(words))


def test_the_module_loads_without_torch_or_transformers():
    code = (
        "import sys; import advantage_probe.analyses.wind_tunnels.commands;"
        "print([name for name in ('torch', 'transformers', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_list_names_every_tunnel_and_marks_the_shipped_ones():
    result = run("list")
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert {"bijection-repeats", "hmm", "mess3", "rrxor", "selection", "coin", "noisy-chain"} <= lines.keys()
    assert "shipped" in lines["bijection-repeats"]
    assert "shipped" not in lines["coin"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("train", "nowhere"), "no tunnel is named 'nowhere'"),
        (("train", "coin", "--preset", "huge"), "no preset is named 'huge'"),
        (("train", "coin", "--device", "abacus", "--out", "unused"), "no device 'abacus' can be used here"),
        (("evaluate", "nowhere"), "neither a shipped model"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_two(words, says):
    result = run(*words)
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_a_run_of_ones_own_is_trained_evaluated_and_resumed(tmp_path, monkeypatch):
    from advantage_probe.analyses.wind_tunnels import recipes
    from advantage_probe.analyses.wind_tunnels.models import Shape

    small = recipes.Recipe(Shape("gpt2", 1, 2, 16), steps=20, batch=8, warm_up=4)
    monkeypatch.setitem(recipes.PRESETS, "tiny", small)
    folder = tmp_path / "coin"
    first = run("train", "coin", "--out", str(folder))
    assert first.exit_code == 0, first.stderr
    card = json.loads((folder / "card.json").read_text())
    assert card["command"] == f"advantage-probe tunnel train coin --preset tiny --out {folder}"
    assert card["curve"][-1]["step"] == 20
    again = run("train", "coin", "--out", str(folder), "--resume")
    assert again.exit_code == 0
    assert json.loads((folder / "card.json").read_text())["curve"] == card["curve"]
    judged = run("evaluate", str(folder), "--sequences", "64", "--positions")
    assert judged.exit_code == 0
    rows = [line.split()[0] for line in judged.stdout.splitlines() if line]
    assert rows.index("uniform") < rows.index("model")
    other = run("train", "coin", "--out", str(folder), "--resume", "--distilled")
    assert other.exit_code == 2
    assert "other settings" in other.stderr


def test_a_failed_check_is_exit_code_one(monkeypatch):
    def failing(*_):
        return [shipped.Check("made to fail", 0.2, 0.1)], None

    monkeypatch.setitem(shipped._OWN_CHECKS, "bijection-repeats", failing)
    result = run("evaluate", "bijection-repeats", "--sequences", "64")
    assert result.exit_code == 1
    assert "FAILED: made to fail: 0.20000 ≤ 0.10000" in result.stdout


def test_a_broken_folder_is_refused(tmp_path):
    (tmp_path / "card.json").write_text("{}")
    result = run("evaluate", str(tmp_path))
    assert result.exit_code == 2
    assert "lacks tunnel" in result.stderr
