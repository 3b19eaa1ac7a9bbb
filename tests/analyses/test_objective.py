"""Which positions are asked, and what is asked there: gradients and refusals."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
import zoo
from terminal import command, refused

from advantage_probe.analyses.inputs.corpus import Batch, Window, batches
from advantage_probe.analyses.inputs.objective import Asked, Objective, objective
from advantage_probe.analyses.runs.analyze import analyze
from advantage_probe.hooks.errors import BadInput

WINDOWS = [Window((3, 5, 7, 9, 11), "a.txt", 0), Window((2, 4, 6), "a.txt", 5)]


def batch() -> Batch:
    return next(batches(WINDOWS, 2, 0))


def test_the_last_target_of_every_window_alone() -> None:
    chosen, against = Objective("ce", "last").apply(batch(), WINDOWS, 0)
    assert against is None
    assert chosen.targets.tolist() == [[-100, -100, -100, 11, -100], [-100, 6, -100, -100, -100]]


def test_named_positions_count_from_the_texts_first_token_whatever_the_windows() -> None:
    asked = (Asked("a.txt", 2), Asked("a.txt", 6, token=8, against=1), Asked("b.txt", 2))
    chosen, against = Objective("logit-diff", "file", asked).apply(batch(), WINDOWS, 0)
    assert chosen.targets.tolist() == [[-100, 7, -100, -100, -100], [8, -100, -100, -100, -100]]
    assert against is not None
    assert against.tolist() == [[-1, -1, -1, -1, -1], [1, -1, -1, -1, -1]]
    started = [Window((1, *window.ids), window.source, window.start) for window in WINDOWS]
    shifted, _ = Objective("ce", "file", (Asked("a.txt", 0), Asked("a.txt", 2))).apply(
        next(batches(started, 2, 0)), started, 1
    )
    assert shifted.targets[0].tolist() == [3, -100, 7, -100, -100, -100]


def test_the_losses_are_what_they_say_and_cross_entropy_is_torchs() -> None:
    logits = torch.randn(2, 5, 13, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    targets = torch.full((2, 5), -100)
    targets[0, 1], targets[1, 3] = 4, 9
    found = Objective("ce", "file").summed(logits, targets)
    expected = sum(-logits[place].log_softmax(-1)[token] for place, token in (((0, 1), 4), ((1, 3), 9)))
    torch.testing.assert_close(found, expected)
    against = torch.full((2, 5), -1)
    against[0, 1] = 2
    found = Objective("logit-diff", "file").summed(logits, targets, against)
    second = logits[1, 3].detach().clone()
    second[9] = -torch.inf
    rival = int(second.argmax())
    torch.testing.assert_close(found, -(logits[0, 1, 4] - logits[0, 1, 2] + logits[1, 3, 9] - logits[1, 3, rival]))
    (gradient,) = torch.autograd.grad(found, logits)
    assert gradient[0, 1, 4] == -1.0
    assert gradient[0, 1, 2] == 1.0
    assert gradient[1, 3, rival] == 1.0
    assert int((gradient != 0).sum()) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("position\n", "names no target"),
        ("place\n1\n", "needs a column position"),
        ("position,colour\n1,red\n", "it has colour"),
        ("position\nx\n", "line 2: position must be a whole number"),
        ("position,text\n1,b.txt\n", "no text is named 'b.txt'"),
        ("position\n0\n", "no window of 'a.txt' predicts position 0"),
        ("position\n99\n", "predicts position 99"),
        ("position,token\n1,w1 w2\n", "'w1 w2' is 2 tokens"),
    ],
)
def test_target_files_that_cannot_be_served_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "targets.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match=message):
        objective("ce", str(file), ["a.txt"], zoo.tokenizer(31), WINDOWS, 0)
    with pytest.raises(BadInput, match="does not exist"):
        objective("ce", str(tmp_path / "none.csv"), ["a.txt"], zoo.tokenizer(31), WINDOWS, 0)
    with pytest.raises(BadInput, match="--loss must be ce or logit-diff"):
        objective("mse", "all", ["a.txt"], zoo.tokenizer(31), WINDOWS, 0)


def test_a_run_with_other_targets_and_loss_can_be_compared_with_its_like_only(tmp_path: Path) -> None:
    """Also: rebuilt, cited, and held against itself; numbers of a file of all positions equal those of "all"."""
    folder = tmp_path / "model"
    zoo.llama().save_pretrained(folder)
    zoo.tokenizer(zoo.VOCABULARY).save_pretrained(folder)
    text = tmp_path / "words.txt"
    ids = torch.randint(1, zoo.VOCABULARY, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    text.write_text(" ".join(f"w{number}" for number in ids), encoding="utf-8")
    every = tmp_path / "every.csv"
    positions = [place for place in range(90) if place % 10]
    every.write_text("position\n" + "\n".join(map(str, positions)), encoding="utf-8")
    words = ("analyze", folder, "--text", text, "--window", 10)
    for name, more in (
        ("all", ()),
        ("named", ("--targets", every)),
        ("last", ("--targets", "last")),
        ("diff", ("--loss", "logit-diff")),
    ):
        result = command(*words, "--out", tmp_path / name, *more)
        assert result.returncode == 0, result.stderr
    tables = {name: pd.read_parquet(tmp_path / name / "heads.parquet") for name in ("all", "named", "last", "diff")}
    numbers = tables["all"].select_dtypes("float64").columns
    pd.testing.assert_frame_equal(tables["all"][numbers], tables["named"][numbers], rtol=1e-6)
    assert (tables["diff"]["routing_pressure"] != tables["all"]["routing_pressure"]).all()
    edges = pd.read_parquet(tmp_path / "all" / "edges.parquet")
    product = -edges["attention"] * edges["advantage"]
    assert (product - edges["score_gradient"]).abs().max() < 1e-6 * edges["score_gradient"].abs().max()
    assert (edges["alpha_b"] == edges["attention"] * edges["compatibility"]).all()
    refused(command("compare", tmp_path / "all", tmp_path / "last"), "differ in the targets")
    refused(command("compare", tmp_path / "all", tmp_path / "diff"), "differ in the loss")
    refused(command("compare", tmp_path / "all"), "two run folders")
    refused(
        command("compare", tmp_path / "all", tmp_path / "all", "--out", tmp_path / "x.docx"), ".csv, .parquet or .json"
    )
    same = command("compare", tmp_path / "all", tmp_path / "all", "--out", tmp_path / "same.csv")
    assert "No head changed beyond what 9 sequences" in same.stdout
    assert (pd.read_csv(tmp_path / "same.csv")["difference"] == 0).all()
    assert command("compare", tmp_path / "all", "--null", "--json").returncode == 0
    page = tmp_path / "all" / "report.html"
    before = page.read_text(encoding="utf-8")
    page.unlink()
    assert command("report", tmp_path / "all").returncode == 0
    assert page.read_text(encoding="utf-8") == before
    cited = command("cite", tmp_path / "all").stdout
    assert "2512.22473" in cited
    assert "81 targets in 9 windows of words.txt" in cited


def test_the_doctor_finds_every_adapter_well_and_says_when_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from advantage_probe.analyses.commands import doctor

    result = command("doctor")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" ok\n") == len(doctor.ADAPTERS) == 8

    def ill() -> doctor.Subject:
        return torch.nn.Linear(1, 1), {"input": torch.ones(1, 1)}

    monkeypatch.setattr(doctor, "ADAPTERS", {"nothing": ill})
    result = command("doctor")
    assert result.returncode == 1
    assert "refused: Linear made no attention call" in result.stdout


def test_a_position_that_is_asked_for_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "targets.csv"
    file.write_text("position,against\n1,w2\n2,w3\n1,w4\n", encoding="utf-8")
    with pytest.raises(BadInput, match=r"line 4: position 1 of 'a.txt' is asked for twice"):
        objective("logit-diff", str(file), ["a.txt"], zoo.tokenizer(31), WINDOWS, 0)


def test_numbers_of_named_targets_do_not_depend_on_which_windows_share_a_batch() -> None:
    ids = torch.randint(1, zoo.VOCABULARY, (6, 9), generator=torch.Generator().manual_seed(0)).tolist()
    items = [Window(tuple(row), "a.txt", 9 * place) for place, row in enumerate(ids)]
    asked = Objective("ce", "file", (Asked("a.txt", 20), Asked("a.txt", 22), Asked("a.txt", 40)))
    model, tokenizer = zoo.llama().requires_grad_(False), zoo.tokenizer(zoo.VOCABULARY)
    runs = [analyze(model, tokenizer, items, name="m", asked=asked, batch_size=size) for size in (1, 2, 6)]
    for run in runs:
        assert run.sequences["sequence"].nunique() == run.record["windows"] == 2
        assert any((one.score_gradient != 0).any() for one in run.maps.pooled.values())
        numbers = runs[0].heads.select_dtypes("float64").columns.drop("law_residual", errors="ignore")
        numbers = [name for name in numbers if not name.startswith("law_residual")]
        pd.testing.assert_frame_equal(run.heads[numbers], runs[0].heads[numbers], rtol=1e-4, atol=1e-6)


def test_runs_with_other_target_files_record_other_targets() -> None:
    one, same, other = (
        Objective("ce", "file", tuple(Asked("a.txt", place) for place in places)) for places in ((1, 2), (2, 1), (1, 3))
    )
    assert one.told == same.told
    assert one.told != other.told
    assert Objective().told == "all"
