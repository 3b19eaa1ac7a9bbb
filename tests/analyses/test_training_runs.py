"""A training run becomes a page with what was kept of it, and says what was not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zoo
from terminal import command, refused

import advantage_probe as ap
from advantage_probe.analyses.page import training_sentences as said
from advantage_probe.analyses.page.courses import NUMBERS, STEPS, curve_lines, history_lines, thinned
from advantage_probe.analyses.page.report import run_of
from advantage_probe.analyses.page.sentences import sentences

STEP = 1 / (2 * 8)


def trained(history: Path | None = None, steps: int = 6, *, told: bool = True, **settings: Any) -> ap.Watch:
    """A watch, closed, of some steps of a tiny Llama, every second one observed."""
    model = zoo.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ap.watch(model, every=2, history=history, **settings) as watch:
        for step in range(steps):
            model(**zoo.batch("llama", seed=step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss_weight=STEP if told else None)
    return watch


def texts(page: str) -> list[str]:
    from html import unescape

    return [unescape(text) for text in re.findall(r"<p>(.*?)</p>", page.split('class="lead"')[1].split("</div>")[0])]


def data_of(page: str) -> dict[str, Any]:
    return json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.S).group(1))


def test_a_history_becomes_a_page_beside_it_and_stays_a_history(tmp_path: Path) -> None:
    watch = trained(tmp_path / "history")
    path = ap.write_report(tmp_path / "history")
    assert path == tmp_path / "history-report.html"
    page = path.read_text(encoding="utf-8")
    data, table = data_of(page), watch.history()
    last = table[table["step"] == 4].set_index("label")["routing_pressure"]
    shown = dict(zip(data["heads"]["label"], data["heads"]["routing_pressure"], strict=True))
    assert shown == pytest.approx(last.to_dict(), rel=1e-5)
    assert data["history"]["steps"] == [0, 2, 4]
    own = table[table["label"] == "L1H2"]["content_relative"].tolist()
    assert data["history"]["heads"]["L1H2"]["content_relative"] == pytest.approx(own, rel=1e-3)
    assert "of step 4" in page
    resumed = ap.watch(zoo.llama(), history=tmp_path / "history")  # refuses folders with strangers in them
    resumed.close()


def test_a_page_made_inside_a_history_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "history")
    monkeypatch.chdir(tmp_path / "history")
    assert ap.write_report(".") == tmp_path / "history-report.html"
    assert not list((tmp_path / "history").glob("*.html"))


def test_the_sentences_of_a_history_say_what_its_steps_say_and_what_they_cannot(tmp_path: Path) -> None:
    table = trained(tmp_path / "history").history()
    found = texts(ap.write_report(tmp_path).read_text(encoding="utf-8"))
    assert (tmp_path / "report.html").is_file()
    medians = table.groupby("step")["routing_pressure"].median()
    ratio = (table["content_relative"] / table["routing_pressure"]).groupby(table["step"]).median()
    assert re.match(
        r"Measured: 8 attention heads of LlamaForCausalLM with [\d,]+ parameters while it learned,", found[0]
    )
    assert found[0].endswith("at 3 observed steps from 0 to 4; numbers are per summed loss.")
    assert "24 of 24 rows (a head at a step) are without remark" in found[1]
    assert "which modules were not captured is not on its record" in found[1]
    assert f"from {medians[0]:.3g} at step 0 to {medians[4]:.3g} at step 4, in this one run" in found[2]
    assert "no layer or head is singled out, because the steps' sequences were not kept" in found[2]
    assert f"{ratio[0]:.2g} times as much" in found[3]
    assert "which of the two pulls harder is not said" in found[3]
    assert found[4].startswith("What it writes: not known, the steps' tokens and pairs were not kept")


def test_a_watch_that_kept_sequences_and_pairs_has_them_on_its_page(tmp_path: Path) -> None:
    watch = trained(steps=16, singly=True, detail="edges", tokenizer=zoo.tokenizer(zoo.VOCABULARY))
    path = ap.write_report(watch, tmp_path / "page.html")
    found, data = texts(path.read_text(encoding="utf-8")), data_of(path.read_text(encoding="utf-8"))
    assert "at 8 observed steps from 0 to 14" in found[0]
    assert "every attention module was captured." in found[1]
    assert "16 sequences" in found[2]
    assert "times as much as a unit change of its scores (" in found[3]
    assert re.search(r"attention from “\u2068w\d+\u2069”", found[4])
    assert len(data["edges"]) == 8
    heads = watch.heads().set_index("label")["routing_pressure"]
    shown = dict(zip(data["heads"]["label"], data["heads"]["routing_pressure"], strict=True))
    assert shown == pytest.approx(heads.to_dict(), rel=1e-5)
    assert "of all observed steps together" in path.read_text(encoding="utf-8")


def test_a_bare_watch_and_a_single_step_are_enough(tmp_path: Path) -> None:
    found = texts(ap.write_report(trained(steps=1), tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "at 1 observed step, step 0" in found[0]
    assert "a course takes two steps at which a head is known" in found[2]
    assert "without sequences no interval can be given" in found[3]


def test_a_second_gradient_of_a_step_is_not_mixed_into_the_first(tmp_path: Path) -> None:
    model, found = zoo.llama(), []
    with ap.watch(model, history=tmp_path / "history") as watch:
        for step in range(2):
            loss = model(**zoo.batch("llama", seed=step)).loss
            loss.backward(retain_graph=True)
            (100 * loss).backward()
            watch.step(loss_weight=STEP)
    for source in (tmp_path / "history", watch):
        run = run_of(source)
        found.append(said.moved(run.more["history"]))
    assert found[0] == found[1]


def test_a_course_compares_the_heads_that_are_known_at_both_ends(tmp_path: Path) -> None:
    trained(tmp_path / "history")
    model = zoo.llama()
    with ap.watch(model, history=tmp_path / "history", layers=[1]) as watch:
        watch.seek(10)
        model(**zoo.batch("llama")).loss.backward()
        watch.step(loss_weight=STEP)
    table = run_of(tmp_path / "history").more["history"]
    own = table[table["layer"] == 1].groupby("step")["routing_pressure"].median()
    words = (
        f"in the median head of the 4 that are known at both ends routing pressure went from {own[0]:.3g} at step 0 to "
    )
    assert words + f"{own[10]:.3g} at step 10" in said.moved(table)


@pytest.mark.parametrize(
    ("told", "words"), [((False, False), "was not told, so"), ((True, False), "at every step, so")]
)
def test_a_weight_that_was_not_told_is_said(told: tuple[bool, bool], words: str, tmp_path: Path) -> None:
    for part, known in enumerate(told):
        model = zoo.llama()
        with ap.watch(model, history=tmp_path / "history") as watch:
            watch.seek(part)
            model(**zoo.batch("llama")).loss.backward()
            watch.step(loss_weight=STEP if known else None)
    run = run_of(tmp_path)
    assert words in said.observed(run.record, run.more["history"])


def test_a_step_that_the_scaler_skipped_is_not_the_last_one(tmp_path: Path) -> None:
    trained(tmp_path / "history")
    part = next((tmp_path / "history").glob("part-*.parquet"))
    table, told = pq.read_table(part).to_pandas(), pq.read_schema(part).metadata
    status = table["status"].astype(str).where(table["step"] < 4, "skipped by the loss scaler")
    changed = pa.Table.from_pandas(table.assign(status=status), preserve_index=False)
    pq.write_table(changed.replace_schema_metadata({**changed.schema.metadata, **told}), part)
    run = run_of(tmp_path / "history")
    assert run.record["columns_of"] == "step 2"
    assert run.heads["step"].unique().tolist() == [2]


def test_the_command_draws_histories_and_refuses_what_is_none(tmp_path: Path) -> None:
    trained(tmp_path / "run" / "history")
    done = command("report", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"report: {tmp_path / 'run' / 'report.html'}"
    assert "Over training" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    refused(command("report", tmp_path / "nowhere"), "does not exist")
    refused(command("report", tmp_path), "no run.json")
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "part-000000000000.parquet").write_bytes(b"PAR1 and no more")
    refused(command("report", torn), "part-000000000000.parquet", "remove it")
    saved = tmp_path / "kept" / "seed-0"
    saved.mkdir(parents=True)
    (saved / "course.json").write_text("{}", encoding="utf-8")
    refused(command("report", tmp_path / "kept"), "dynamics --checkpoints")
    unstepped = ap.watch(zoo.llama())
    unstepped.model(**zoo.batch("llama")).loss.backward()
    unstepped.close()
    with pytest.raises(ap.BadRequest, match="No step was closed"):
        ap.write_report(unstepped, tmp_path / "page.html")
    with pytest.raises(ap.BadRequest, match="takes a folder, a watch or a run, not int"):
        ap.write_report(3)  # type: ignore[arg-type]


def test_a_watched_run_in_a_tunnel_becomes_a_page_with_its_curve(tmp_path: Path) -> None:
    from advantage_probe.analyses.wind_tunnels import Bijection
    from advantage_probe.analyses.wind_tunnels.training.models import Shape
    from advantage_probe.analyses.wind_tunnels.training.recipes import Recipe
    from advantage_probe.analyses.wind_tunnels.training.runner import train, train_watched

    tunnel, recipe = Bijection(symbols=4, pairs=4), Recipe(Shape("gpt2", 1, 2, 16), steps=8, batch=4, warm_up=2)
    plain, curve = train(tunnel, recipe, tmp_path / "plain", name="bijection", interval=2)
    with pytest.raises(ap.BadInput, match="were not watched; train it with `--watch N`"):
        run_of(tmp_path / "plain")
    model, _ = train_watched(tunnel, recipe, tmp_path / "run", 3, name="bijection", interval=2)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)  # watching changes nothing
    run = run_of(tmp_path / "run")
    assert run.more["history"]["step"].unique().tolist() == [0, 3, 6]
    assert run.record["loss_weight"] == pytest.approx(1 / (4 * 4))
    data = data_of(ap.write_report(tmp_path / "run").read_text(encoding="utf-8"))
    assert data["curves"][0]["name"] == "loss (nats)"
    assert data["curves"][0]["lines"][0]["values"] == pytest.approx([row["loss"] for row in curve], rel=1e-3)
    train_watched(tunnel, recipe, tmp_path / "run", 3, name="bijection", interval=2, resume=True)
    assert run_of(tmp_path / "run").more["history"]["step"].unique().tolist() == [0, 3, 6]


def test_the_tables_of_dynamics_become_a_page_that_keeps_seeds_apart(tmp_path: Path) -> None:
    rows = [
        {
            "step": step,
            "layer": layer,
            "head": head,
            "routing_pressure": 1.0 + step + seed,
            "content_relative": 2.0,
            "seed": seed,
        }
        for seed in (3, 4)
        for step in (0, 5, 20)
        for layer in (0, 1)
        for head in (0, 1)
    ]
    pd.DataFrame(rows).assign(content_relative=2.0).to_parquet(tmp_path / "pressures.parquet")
    curve = pd.DataFrame(
        [{"step": step, "excess": 1 / (1 + step), "seed": seed} for seed in (3, 4) for step in (0, 5, 20)]
    )
    curve.to_parquet(tmp_path / "checkpoints.parquet")
    (tmp_path / "run.json").write_text(
        json.dumps({"task": "bijection", "seeds": [3, 4], "wording": "It is not said of two runs."}), encoding="utf-8"
    )
    page = ap.write_report(tmp_path).read_text(encoding="utf-8")
    data, found = data_of(page), texts(page)
    assert data["heads"]["label"][::4] == ["seed 3 L0H0", "seed 4 L0H0"]
    assert data["rows"] == [f"seed {seed} L{layer}" for seed in (3, 4) for layer in (0, 1)]
    assert [line["run"] for line in data["curves"][0]["lines"]] == ["seed 3", "seed 4"]
    assert "went from 4.5 at step 0 to 24.5 at step 20, in these 2 runs together" in found[2]
    assert "these tables keep no residuals" in found[1]
    assert found[5:] == ["Frame or precision first: It is not said of two runs."]
    (tmp_path / "pressures.parquet").write_bytes(b"torn")
    with pytest.raises(ap.BadInput, match="is damaged"):
        run_of(tmp_path)


def test_courses_of_many_heads_are_thinned_to_the_strongest_and_the_page_says_so() -> None:
    steps, heads = 300, 500
    generator = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "step": np.repeat(np.arange(steps), heads),
            "label": np.tile([f"L{number // 10}H{number % 10}" for number in range(heads)], steps),
            "backward": 0,
            "routing_pressure": generator.random(steps * heads) + np.tile(np.arange(heads), steps),
            "coherence": generator.random(steps * heads),
        }
    )
    found = history_lines(table)
    numbers = len(found["steps"]) * len(found["heads"]) * 2
    assert NUMBERS / 2 < numbers <= NUMBERS
    assert len(found["steps"]) >= STEPS[0]
    assert found["steps"][0] == 0
    assert found["steps"][-1] == steps - 1
    assert found["of"] == [steps, heads]
    kept = {int(name[1:].split("H")[0]) * 10 + int(name.split("H")[1]) for name in found["heads"]}
    assert kept == set(range(heads - len(kept), heads))
    assert thinned(7, 10) == list(range(7))
    assert curve_lines(pd.DataFrame({"step": [1, 2], "loss": [np.inf, 2.0]}))[0]["lines"][0]["values"] == [None, 2.0]


def test_a_run_of_a_text_is_told_as_before(tmp_path: Path) -> None:
    run = run_of(trained(steps=2, singly=True, detail="edges"))
    record = {**run.record, "targets": 3, "windows": 2, "loss": 1.0}
    told = sentences(record, run.heads, run.edges, None, {})
    assert told[0].startswith("Measured: 8 attention heads of LlamaForCausalLM, on 3 targets in 2 windows of text;")
    assert "analyse the text again" in told[2]
