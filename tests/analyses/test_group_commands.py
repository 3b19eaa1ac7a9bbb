"""`manifold --group`, `ablate`, `interventions`, `vocabulary`; tunnels in `geometry` and `in-context`: for a user."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import zoo
from terminal import command
from terminal import refused as checked

from advantage_probe.analyses.wind_tunnels.truth.shipped import MODELS

WORDS = tuple("abcdefghijklmnopqrstuvw")


def run(*arguments: object) -> str:
    result = command(*arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def refused(*arguments: object) -> str:
    result = command(*arguments)
    checked(result)
    return result.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer of a few words, and passages for it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("model")
    zoo.llama().save_pretrained(place)
    known = ["?", ".", ",", ":", "foo", "bar", "red", "blue", *WORDS]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="?", pad_token="?").save_pretrained(place)
    parts = [" ".join(WORDS[(start * step) % len(WORDS)] for step in range(12)) + " ." for start in range(1, 61)]
    (place / "own.txt").write_text("\n\n".join(parts))
    return place


TINY = ("--sequences", 48, "--draws", 200)


def test_the_manifold_of_a_tunnel_is_one_picture_with_its_data_and_a_page(tmp_path: Path) -> None:
    out = tmp_path / "m"
    printed = run("manifold", "--example", "bijection-repeats", "--group", "count", *TINY, "--layer", 1, "--out", out)
    assert "told apart across positions only" in printed
    assert "The first key, which sees only itself, is left out" in printed
    assert {"manifold.png", "manifold.pdf", "manifold.svg", "manifold.csv", "manifold.txt"} <= {
        path.name for path in out.iterdir()
    }
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64") == 1
    assert not re.search(r"(src|href)=[\"']?https?:", page)
    record = json.loads((out / "run.json").read_text())
    assert record["group"] == "count"
    assert record["keys"] == "new"


def test_distinct_keys_cannot_tell_by_construction() -> None:
    found = json.loads(
        run("manifold", "--example", "bijection-distinct", "--group", "entropy", *TINY, "--layer", 1, "--json")
    )
    assert "cannot tell, by construction" in found["sentences"][0]
    assert all(row["r"] is None for row in found["order"])


def test_other_seeds_stand_beside_and_the_verdict_counts_them(tmp_path: Path) -> None:
    other = tmp_path / "again"
    shutil.copytree(MODELS / "bijection-repeats", other)
    found = json.loads(
        run(
            *("manifold", "--example", "bijection-repeats", "--group", "count", "--layer", 1),
            *("--sequences", 128, "--beside", other, "--json"),
        )
    )
    rows = {row["model"]: row["place"] for row in found["verdict"]}
    assert rows[str(other)] == rows["bijection-repeats"]
    assert "2 count; the rule asks 4 of 5 seeds" in found["sentences"][0]


def test_a_strip_follows_the_steps_of_a_training(tmp_path: Path) -> None:
    for step in (0, 20):
        shutil.copytree(MODELS / "bijection-repeats", tmp_path / "strip" / f"step-{step:07d}")
    out = tmp_path / "m"
    printed = run(
        *("manifold", "--example", "bijection-repeats", "--group", "count", *TINY, "--layer", 1),
        *("--strip", tmp_path / "strip", "--out", out),
    )
    assert "Over training, L1" in printed
    assert (out / "training.pdf").is_file()


def test_a_pretrained_model_is_grouped_by_its_own_entropy(folder: Path) -> None:
    found = json.loads(
        run(
            *("manifold", folder, "--prompts", folder / "own.txt", "--length", 8, "--group", "entropy", "--json"),
        )
    )
    values = {row["group"] for row in found["curves"] if row["network"] == "trained"}
    assert 3 <= len(values) <= 5
    assert {row["network"] for row in found["shares"]} == {"trained", "untrained"}
    assert not found.get("verdict")


def test_bad_groups_are_one_sentence_each(folder: Path, tmp_path: Path) -> None:
    base = ("manifold", "--example", "bijection-repeats", "--group", "count")
    assert "counts no used symbols" in refused("manifold", "--example", "mess3", "--group", "count")
    assert "there is no 7" in refused(*base, *TINY, "--layer", 7)
    assert "12 episodes" in refused(*base, "--sequences", 10)
    assert "repeats no key" in refused(
        "manifold", "--example", "bijection-distinct", "--group", "entropy", "--keys", "repeated"
    )
    assert "go with --group" in refused("manifold", "--example", "bijection-repeats", "--keys", "new")
    assert "no step-N folders" in refused(*base, *TINY, "--strip", tmp_path)
    assert "choose --group entropy" in refused(
        "manifold", folder, "--prompts", folder / "own.txt", "--length", 8, "--group", "count"
    )
    assert "was trained on mess3" in refused(*base, *TINY, "--beside", "mess3")
    assert "can be cut" in refused(*base, *TINY, "--site", "residual", "--cut")


def test_ablate_takes_tunnels_and_texts(folder: Path, tmp_path: Path) -> None:
    found = json.loads(
        run("ablate", "--example", "bijection-repeats", "--sequences", 24, "--top", 1, "--directions", 10, "--json")
    )
    assert {row["what"] for row in found["ablations"]} == {"head", "layer"}
    out = tmp_path / "a"
    printed = run(
        *("ablate", folder, "--text", folder / "own.txt", "--window", 16, "--top", 1, "--directions", 10, "--out", out)
    )
    assert "windows of 16 tokens of own.txt" in printed
    assert (out / "report.html").is_file()
    assert "of 12" in refused("ablate", "--example", "bijection-repeats", "--sequences", 11)
    assert "leave --text out" in refused("ablate", "--example", "mess3", "--text", folder / "own.txt")


def test_vocabulary_and_interventions_are_commands(folder: Path) -> None:
    found = json.loads(
        run("vocabulary", folder, "--text", folder / "own.txt", "--window", 16, "--layer", 1, "--top", 2, "--json")
    )
    assert {row["head"][:2] for row in found["vocabulary"]} == {"L1"}
    assert "95 % of random directions" in found["sentences"][0]
    assert "there is no 9" in refused("vocabulary", folder, "--text", folder / "own.txt", "--layer", 9)
    assert "is neither a shipped model" in refused("interventions", "--example", "nothing")


@pytest.mark.parametrize("name", ["bijection-repeats", "bijection-distinct", "mess3"])
def test_geometry_and_in_context_take_tunnels(name: str) -> None:
    found = json.loads(run("geometry", "--example", name, "--sequences", 24, "--json"))
    assert {"keys", "read_out"} <= set(found)
    assert ("alignment" in found) == (name != "bijection-distinct")  # where no token comes again nothing can be aligned
    assert "First-layer keys" in found["sentences"][0]
    context = json.loads(run("in-context", "--example", name, "--sequences", 64, "--json"))
    assert context["all_supervised_positions"][-1]["who"] == "model"


def test_a_revision_is_handed_to_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from advantage_probe.analyses.inputs import loading

    asked: list[str | None] = []
    original = loading.load

    def spy(source: str, **settings: object) -> object:
        asked.append(settings.pop("revision", None))  # type: ignore[arg-type]
        return original(source, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "load", spy)
    run("geometry", folder, "--prompts", folder / "own.txt", "--length", 8, "--revision", "v1")
    run("analyze", folder, "--text", folder / "own.txt", "--revision", "v2", "--out", folder / "run")
    assert asked == ["v1", "v2"]


def test_the_four_layer_model_is_within_its_bound() -> None:
    from advantage_probe.analyses.wind_tunnels.truth.calibration import calibrate
    from advantage_probe.analyses.wind_tunnels.truth.shipped import load

    task, model, card = load("bijection-repeats-4")
    assert card["recipe"]["shape"]["layers"] == 4
    excess = calibrate(task, {"model": model}, 500, seed=11).loc["model", "kl"] * torch.log(torch.tensor(2.0)).item()
    assert excess <= 0.02
