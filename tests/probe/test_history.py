"""The history on disk survives kills, resumes and wrong folders; loggers never stop a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import zoo

import advantage_probe as ap
from advantage_probe.probe import steps as steps_module
from advantage_probe.probe import tables as frames
from advantage_probe.probe.history import History


def run(folder: Path | None, first: int, last: int, *, seek: bool = True, model=None, **options) -> ap.Watch:
    """Steps first … last−1 of a run whose batch depends on the step alone."""
    model = model or zoo.llama()
    with ap.watch(model, history=folder, **options) as watch:
        if seek:
            watch.seek(first)
        for step in range(first, last):
            model(**zoo.batch("llama", seed=step)).loss.backward()
            watch.step(loss_weight=1 / 16)
    return watch


def test_the_folder_holds_what_memory_would_and_reads_as_one_table(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(steps_module, "FLUSH_STEPS", 2)
    kept = run(None, 0, 7)
    streamed = run(tmp_path / "history", 0, 7)
    pd.testing.assert_frame_equal(streamed.history(), kept.history())
    files = sorted((tmp_path / "history").iterdir())
    assert len(files) == 4
    assert all(pq.ParquetFile(file).num_row_groups == 1 for file in files)
    whole = pd.read_parquet(tmp_path / "history")
    assert whole["step"].tolist() == kept.history()["step"].tolist()
    assert not streamed._recorder.steps.waiting  # nothing but the pooled sums is kept in memory
    for step in (0, 3, 6):
        pd.testing.assert_frame_equal(streamed.heads(step=step), kept.heads(step=step))
    with pytest.raises(ap.BadRequest, match=r"Step 9 was not observed; observed steps: \[0, 1, 2, 3, 4\]…"):
        streamed.heads(step=9)


def test_a_killed_run_keeps_its_flushes_and_a_resumed_one_appends_without_duplicates(tmp_path) -> None:
    folder = tmp_path / "history"
    script = textwrap.dedent(
        f"""
        import os, sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        import zoo
        import advantage_probe as ap
        model = zoo.llama()
        watch = ap.watch(model, history={str(folder)!r})
        for step in range(9):
            model(**zoo.batch("llama", seed=step)).loss.backward()
            watch.step(loss_weight=1 / 16)
            if step == 5:
                watch.flush()
        os.kill(os.getpid(), 9)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, env=os.environ.copy())
    assert done.returncode == -9, done.stderr.decode()[-500:]
    assert pd.read_parquet(folder)["step"].unique().tolist() == [0, 1, 2, 3, 4, 5]
    resumed = run(folder, 4, 9)
    expected = run(None, 0, 9).history()
    pd.testing.assert_frame_equal(resumed.history(), expected)
    assert pd.read_parquet(folder).groupby(["step", "module", "head"], observed=True).size().eq(1).all()


def test_a_kill_in_the_middle_of_writing_leaves_no_half_file(tmp_path) -> None:
    folder = tmp_path / "history"
    run(folder, 0, 2)
    (folder / ".part-000000000002.parquet").write_bytes(b"PAR1 half")
    resumed = run(folder, 2, 4)
    assert resumed.history()["step"].unique().tolist() == [0, 1, 2, 3]
    assert all(path.name.startswith("part-") for path in folder.iterdir())


def test_a_full_disk_is_reported_once_and_rows_wait_for_the_next_flush(tmp_path, monkeypatch) -> None:
    from advantage_probe.probe.history import History

    monkeypatch.setattr(steps_module, "FLUSH_STEPS", 1)
    refusing = [True]
    append = History.append

    def full(self, rows):
        if refusing[0]:
            raise OSError(28, "No space left on device")
        append(self, rows)

    monkeypatch.setattr(History, "append", full)
    model = zoo.llama()
    with ap.watch(model, history=tmp_path / "history") as watch:
        with pytest.warns(UserWarning, match="could not be written .*No space") as reported:
            for step in range(3):
                model(**zoo.batch("llama", seed=step)).loss.backward()
                watch.step(loss_weight=1 / 16)
        assert len(reported) == 1
        refusing[0] = False
    pd.testing.assert_frame_equal(watch.history(), run(None, 0, 3).history())


def test_histories_of_other_runs_models_and_columns_are_refused(tmp_path) -> None:
    folder = tmp_path / "history"
    run(folder, 0, 3)
    with pytest.raises(ap.BadRequest, match=r"already holds steps up to 2; call watch\.seek\(step\)"):
        run(folder, 0, 1, seek=False)
    assert pd.read_parquet(folder)["step"].max() == 2  # nothing was lost
    with pytest.raises(ap.BadInput, match=r"belongs to LlamaForCausalLM with .* not to GPT2LMHeadModel"):
        ap.watch(zoo.gpt2(), history=folder)
    part = next(folder.iterdir())
    table = pq.read_table(part)
    told = table.schema.metadata[b"advantage_probe"]
    for old, new, message in (
        (b'"attention_entropy"', b'"another_column"', "other columns"),
        (b'"format": 3', b'"format": 9', "has format 9, this version reads 1 and 3"),
    ):
        changed = (
            told.replace(b'"attention_entropy"', b'"another_column"') if old == b'"entropy' else told.replace(old, new)
        )
        assert changed != told
        pq.write_table(table.replace_schema_metadata({b"advantage_probe": changed}), part)
        with pytest.raises(ap.BadInput, match=message):
            ap.watch(zoo.llama(), history=folder)
    part.write_bytes(b"no parquet")
    with pytest.raises(ap.BadInput, match="not part of a history"):
        ap.watch(zoo.llama(), history=folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ap.BadInput, match="is a file"):
        ap.watch(zoo.llama(), history=tmp_path / "file")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(ap.BadInput, match=r"holds 'thesis\.tex'"):
        ap.watch(zoo.llama(), history=tmp_path / "mine")


def test_a_step_counter_goes_forwards_only_and_reset_starts_anew(tmp_path) -> None:
    model = zoo.llama()
    with ap.watch(model, every=2, history=tmp_path / "history") as watch:
        for wrong in (-1, 1.0, True):
            with pytest.raises(ap.BadRequest, match="number of a step"):
                watch.seek(wrong)
        watch.seek(7)
        watch.seek(6)  # nothing was closed yet
        for step in range(6, 9):
            model(**zoo.batch("llama", seed=step)).loss.backward()
            watch.step()
        with pytest.raises(ap.BadRequest, match="went backwards, from 9 to 8"):
            watch.seek(8)
        assert watch.history()["step"].unique().tolist() == [6, 8]
        watch.reset()
        model(**zoo.batch("llama")).loss.backward()
        watch.step()
        assert watch.history()["step"].unique().tolist() == [0]
    with pytest.raises(ap.ClosedWatch):
        watch.seek(10)
    with pytest.raises(ap.ClosedWatch):
        watch.weigh(0.5)


def test_a_watch_that_was_not_to_observe_any_step_closes_in_peace() -> None:
    model = zoo.llama()
    with ap.watch(model, every=50) as watch:
        watch.seek(7)
        model(**zoo.batch("llama")).loss.backward()
        watch.step()
    with pytest.raises(ap.NoAttentionSeen):
        watch.history()


def test_weights_of_micro_batches_make_u_what_it_is_under_the_summed_loss() -> None:
    model = zoo.llama()
    first, second = zoo.batch("llama", seed=0), zoo.batch("llama", seed=1)

    def summed(batch, weight):
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        return weight * torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
        )

    with ap.watch(model) as told:
        for batch, weight in ((first, 0.3), (second, 0.01)):
            told.weigh(weight)
            summed(batch, weight).backward()
        told.step()
    with ap.watch(model) as plain:
        summed(first, 1.0).backward()
        summed(second, 1.0).backward()
        plain.step(loss_weight=1.0)
    numbers = plain.heads().select_dtypes("float64").columns.drop("law_residual")
    pd.testing.assert_frame_equal(told.heads()[numbers], plain.heads()[numbers], rtol=1e-4)
    assert told.history()["loss_weight"].unique().tolist() == pytest.approx([0.155])
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with ap.watch(model) as watch, pytest.raises(ap.BadRequest, match="loss_weight must be a positive number"):
            watch.weigh(wrong)


def test_loggers_are_told_flat_names_and_one_that_raises_is_dropped_and_reported_once() -> None:
    told: list[tuple[int, dict[str, float]]] = []

    def broken(values, step):
        raise ConnectionError("no route")

    model = zoo.llama()
    with ap.watch(model, every=2, logger=[broken, lambda values, step: told.append((step, values))]) as watch:
        with pytest.warns(
            UserWarning, match="logger broken raised ConnectionError: no route; training goes on"
        ) as seen:
            for step in range(5):
                model(**zoo.batch("llama", seed=step)).loss.backward()
                watch.step(loss_weight=1 / 16)
        assert len(seen) == 1
    assert [step for step, _ in told] == [0, 2, 4]
    history = watch.history()
    for step, values in told:
        rows = history[history["step"] == step].set_index("label")
        assert values["probe/L1H3/routing_pressure"] == rows.loc["L1H3", "routing_pressure"]
        assert len({name.split("/")[1] for name in values}) == 8
    with pytest.raises(ap.BadRequest, match="logger must be a callable"):
        ap.watch(model, logger="wandb")


def test_loggers_hear_nothing_of_a_step_that_the_scaler_skipped() -> None:
    class Scaler:
        scale = 4.0

        def get_scale(self) -> float:
            return self.scale

    told: list[int] = []
    model, scaler = zoo.llama(), Scaler()
    with ap.watch(model, scaler=scaler, logger=lambda values, step: told.append(step)) as watch:
        for step in range(3):
            (model(**zoo.batch("llama", seed=step)).loss * scaler.scale).backward()
            scaler.scale /= 2 if step == 1 else 1  # as GradScaler.update() does after an overflow
            watch.step(loss_weight=1 / 16)
    assert told == [0, 2]
    assert watch.history().groupby("step")["status"].first().astype(str).str.contains("skipped").tolist() == [
        False,
        True,
        False,
    ]


def test_tensorboard_and_wandb_receive_the_numbers(tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Run:
        def __init__(self) -> None:
            self.rows: list[dict] = []

        def log(self, row):
            self.rows.append(row)

    board, wandb = ap.TensorBoardLogger(tmp_path), Run()
    watch = run(None, 3, 5, logger=[board, ap.WandbLogger(wandb, columns=["coherence"])])
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    written = events.Scalars("probe/L0H1/routing_pressure")
    rows = watch.history().query("label == 'L0H1'")
    assert [event.step for event in written] == [3, 4]
    assert [event.value for event in written] == pytest.approx(rows["routing_pressure"].tolist(), rel=1e-6)
    assert "probe/L0H1/coherence" not in events.Tags()["scalars"]  # not among the usual columns
    assert [row["probe/step"] for row in wandb.rows] == [3, 4]
    assert len(wandb.rows[0]) == 1 + 8
    assert wandb.rows[1]["probe/L0H1/coherence"] == rows["coherence"].iloc[1]
    with pytest.raises(ap.BadRequest, match=r"call wandb\.init\(\) first"):
        ap.WandbLogger()


def test_a_run_that_goes_on_with_another_pace_keeps_no_row_from_where_it_goes_on(tmp_path) -> None:
    run(tmp_path / "history", 0, 8)
    resumed = run(tmp_path / "history", 5, 12, every=10)
    assert resumed.history()["step"].unique().tolist() == [0, 1, 2, 3, 4, 10]


def test_layers_that_appear_late_leave_the_folder_readable_as_one_table(tmp_path) -> None:
    rows = run(None, 0, 1).history()
    folder = History(tmp_path / "history", "model", frames.HISTORY)
    folder.append(rows)
    many = pd.concat([rows.assign(label=f"L{layer}" + rows["label"].astype(str)) for layer in range(40)])
    folder.append(many.assign(step=1).astype({"label": "category"}))
    whole = pd.read_parquet(tmp_path / "history")
    assert whole["label"].notna().all()
    assert whole["label"].nunique() == 41 * len(rows)


OTHER = """
import sys
sys.path.insert(0, {tests!r})
import time, zoo
import advantage_probe as ap
watch = ap.watch(zoo.llama(), history={folder!r})
print("open", flush=True)
time.sleep(120)
"""


def test_a_folder_that_another_process_writes_is_refused_by_its_name_and_free_when_that_is_killed(tmp_path) -> None:
    folder = tmp_path / "history"
    code = OTHER.format(tests=str(Path(__file__).parents[1]), folder=str(folder))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().strip() == "open"
        with pytest.raises(ap.BadRequest, match=rf"is being written by process {process.pid} on .* \(since "):
            ap.watch(zoo.llama(), history=folder)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert run(folder, 0, 2).history()["step"].unique().tolist() == [0, 1]
    assert not list(folder.glob(".*"))


def test_a_cell_that_is_run_again_closes_its_own_watch_and_another_model_is_refused(tmp_path) -> None:
    model, folder = zoo.llama(), tmp_path / "history"
    first = ap.watch(model, history=folder)
    model(**zoo.batch("llama")).loss.backward()
    first.step(loss_weight=1.0)
    second = ap.watch(model, history=folder)
    assert first.closed
    second.seek(1)
    model(**zoo.batch("llama")).loss.backward()
    second.step(loss_weight=0.5)
    with pytest.raises(ap.BadRequest, match="is being written by process"):
        ap.watch(zoo.llama(), history=folder)
    second.close()
    table = pd.read_parquet(folder)
    assert table.groupby("step")["loss_weight"].first().tolist() == [1.0, 0.5]
    ap.watch(zoo.llama(), history=folder).close()


def test_a_disk_that_refuses_ends_no_training_loses_no_row_and_is_tried_again_later(tmp_path, monkeypatch) -> None:
    folder, tries = tmp_path / "history", []
    real = History.append
    clock = [0.0]
    monkeypatch.setattr(steps_module.time, "monotonic", lambda: clock[0])

    def append(self, rows):
        tries.append(clock[0])
        if clock[0] < 500:
            raise OSError(28, "No space left on device")
        real(self, rows)

    monkeypatch.setattr(History, "append", append)
    model = zoo.llama()
    with ap.watch(model, history=folder) as watch:
        with pytest.warns(UserWarning, match="could not be written .*its rows wait in memory") as told:
            for step in range(30):
                clock[0] = 31.0 * step
                model(**zoo.batch("llama", seed=step)).loss.backward()
                watch.step(loss_weight=1.0)
        assert len(told) == 1
        assert tries == sorted(tries)
        refused = [when for when in tries if when < 500]
        assert len(refused) <= 5  # 31, then after 30, 60, 120, 240 seconds
        assert watch.history()["step"].nunique() == 30
    assert pd.read_parquet(folder)["step"].unique().tolist() == list(range(30))


def test_a_checkpoint_carries_the_rows_that_were_not_written(tmp_path) -> None:
    model, folder = zoo.llama(), tmp_path / "history"
    whole = run(None, 0, 8)
    lost = ap.watch(model, history=folder)
    for step in range(5):
        model(**zoo.batch("llama", seed=step)).loss.backward()
        lost.step(loss_weight=1 / 16)
        if step == 1:
            lost.flush()
    torch.save(lost.state_dict(), tmp_path / "checkpoint.pt")
    lost._recorder.steps.waiting.clear()  # killed before it could write
    lost.close()
    resumed = ap.watch(model, history=folder)
    resumed.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    for step in range(5, 8):
        model(**zoo.batch("llama", seed=step)).loss.backward()
        resumed.step(loss_weight=1 / 16)
    resumed.close()
    table = pd.read_parquet(folder)
    assert table["step"].unique().tolist() == list(range(8))
    assert not table.duplicated(["step", "module", "use", "head"]).any()
    assert len(table) == len(whole.history())
    with pytest.raises(ap.BadInput, match="what state_dict"):
        ap.watch(model).load_state_dict({})


def test_a_hole_that_a_resumed_run_leaves_is_said(tmp_path) -> None:
    model, folder = zoo.llama(), tmp_path / "history"
    run(folder, 0, 3, model=model)
    with ap.watch(model, history=folder) as watch:
        watch.seek(6)
        model(**zoo.batch("llama")).loss.backward()
        with pytest.warns(UserWarning, match="has no steps 3 to 5"):
            watch.step(loss_weight=1.0)


def test_an_interrupt_between_writing_and_forgetting_doubles_no_row(tmp_path, monkeypatch) -> None:
    model, folder = zoo.llama(), tmp_path / "history"
    real = History.append

    def interrupted(self, rows):
        real(self, rows)
        raise KeyboardInterrupt

    with ap.watch(model, history=folder) as watch:
        for step in range(3):
            model(**zoo.batch("llama", seed=step)).loss.backward()
            watch.step(loss_weight=1.0)
        monkeypatch.setattr(History, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            watch.flush()
        monkeypatch.setattr(History, "append", real)
        model(**zoo.batch("llama", seed=3)).loss.backward()
        watch.step(loss_weight=1.0)
    table = pd.read_parquet(folder)
    assert not table.duplicated(["step", "module", "use", "head"]).any()
    assert table["step"].unique().tolist() == [0, 1, 2, 3]


def test_a_folder_that_vanishes_or_is_replaced_is_noticed_and_nothing_is_lost(tmp_path) -> None:
    model, folder = zoo.llama(), tmp_path / "history"
    watch = ap.watch(model, history=folder)
    model(**zoo.batch("llama")).loss.backward()
    watch.step(loss_weight=1.0)
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(ap.BadRequest, match="was removed or replaced while it was written"):
        watch.flush()
    assert len(watch.history()) == 8
    assert list(folder.iterdir()) == []
    with pytest.raises(ap.BadRequest, match="was removed or replaced"):
        watch.close()


def test_a_forked_child_that_closes_the_watch_writes_nothing(tmp_path) -> None:
    model, folder = zoo.llama(), tmp_path / "history"
    watch = ap.watch(model, history=folder)
    model(**zoo.batch("llama")).loss.backward()
    watch.step(loss_weight=1.0)
    child = os.fork()
    if child == 0:
        try:
            watch.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert not list(folder.glob("part-*"))
    with pytest.raises(ap.BadRequest, match="is being written by"):
        ap.watch(zoo.llama(), history=folder)  # the child has not given the folder up
    watch.close()
    assert pd.read_parquet(folder)["step"].unique().tolist() == [0]


def test_a_merged_step_that_is_still_open_makes_the_loss_weight_unknown() -> None:
    model = zoo.llama()
    closed = run(None, 0, 1, model=model)
    with ap.watch(model) as still_open:
        model(**zoo.batch("llama", seed=1)).loss.backward()
    closed.merge(still_open)
    assert closed.loss_weight == "unknown"


def test_an_open_step_is_not_mixed_with_what_was_merged() -> None:
    model = zoo.llama()
    closed = run(None, 0, 1, model=model)
    with ap.watch(model) as other:
        other.merge(closed)
        model(**zoo.batch("llama", seed=1)).loss.backward()
        pd.testing.assert_frame_equal(other.heads(), closed.heads())


class Twice(torch.nn.Module):
    """Four attention modules: two whose names have no layer, and two in one layer."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.inner(x).chunk(3, -1))
            output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            return x + output.transpose(1, 2).flatten(2)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.Attention(), self.Attention()
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"near": self.Attention(), "far": self.Attention()})])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        return self.layers[0]["far"](self.layers[0]["near"](x))


def test_no_head_is_lost_to_a_logger_because_another_one_has_its_name() -> None:
    model, told = Twice(), []
    with ap.watch(model, logger=lambda values, step: told.append(values)) as watch:
        model(torch.randn(2, 5, 8)).sin().sum().backward()
        watch.step(loss_weight=1.0)
    names = sorted(name for name in told[0] if name.endswith("/routing_pressure"))
    assert len(names) == 8
    assert "probe/first.H0/routing_pressure" in names
    assert "probe/layers.0.near.H1/routing_pressure" in names
