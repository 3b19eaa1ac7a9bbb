"""Hooks into training loops give the history that a loop written by hand gives, and change nothing of the run."""

import copy
import pickle
from pathlib import Path

import accelerate
import lightning.pytorch as lightning
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from zoo import gpt2, llama

import advantage_probe as ap
from advantage_probe.hooks.training import loss_names, shifts_labels, takes_items

STEPS, ACCUMULATION, BATCH, LENGTH, SAVED, KILLED = 64, 2, 2, 12, 40, 47


def rows(count: int = STEPS * ACCUMULATION * BATCH) -> list[dict[str, torch.Tensor]]:
    """Sequences with labels left out at their end, so that micro-batches differ in targets."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(count):
        ids = torch.randint(1, 40, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[LENGTH - number % 7 :] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


DATA = rows()


def made(**dropout: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = (gpt2 if dropout else llama)(vocab_size=40, **dropout).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def stacked(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def by_hand(per_batch: bool = False, every: int = 1, **options) -> tuple[pd.DataFrame, list[float], nn.Module]:
    """The loop that every hook must reproduce: accumulation, clipping, one step() per optimizer step.

    per_batch: each micro-batch's loss is its own mean over the number of micro-batches; else the sum over all targets of
    the step.
    """
    model, optimizer = made()
    losses = []
    with ap.watch(model, every=every, **options) as watch:
        for start in range(0, len(DATA), BATCH * ACCUMULATION):
            parts = [stacked(DATA[start + BATCH * k : start + BATCH * (k + 1)]) for k in range(ACCUMULATION)]
            counts = [int(part["labels"][:, 1:].ne(-100).sum()) for part in parts]
            total = 0.0
            for part, count in zip(parts, counts, strict=True):
                logits = model(input_ids=part["input_ids"]).logits[:, :-1]
                summed = F.cross_entropy(logits.flatten(0, 1), part["labels"][:, 1:].flatten(), reduction="sum")
                weight = 1 / (count * ACCUMULATION) if per_batch else 1 / sum(counts)
                watch.weigh(weight)
                (weight * summed).backward()
                total += weight * summed.item()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            watch.step()
            losses.append(total)
    return watch.history(), losses, model


@pytest.fixture(scope="module")
def reference() -> tuple[pd.DataFrame, list[float], nn.Module]:
    return by_hand()


class InOrder(Trainer):
    def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(DATA)


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == KILLED:
            raise KeyboardInterrupt


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.found: dict[int, float] = {}

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            self.found[state.global_step] = logs["loss"]


def trainer(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *hooks: TrainerCallback, **more
) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        max_grad_norm=0.5,
        num_train_epochs=1,
        save_steps=SAVED,
        eval_strategy="steps",
        eval_steps=20,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **more,
    )
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return InOrder(
        model,
        arguments,
        train_dataset=DATA,
        eval_dataset=DATA[:6],
        optimizers=(optimizer, constant),
        callbacks=list(hooks),
    )


def same_history(found: pd.DataFrame, expected: pd.DataFrame, tolerance: float = 1e-6) -> None:
    assert found["step"].tolist() == expected["step"].tolist()
    assert found["module"].astype(str).tolist() == expected["module"].astype(str).tolist()
    assert found["status"].astype(str).tolist() == expected["status"].astype(str).tolist()
    numbers = [name for name in expected.select_dtypes("float64").columns if name != "law_residual"]
    assert len(numbers) > 15
    for name in numbers:
        scale = float(expected[name].abs().max() or 1.0)
        np.testing.assert_allclose(found[name] / scale, expected[name] / scale, rtol=0, atol=tolerance, err_msg=name)


def test_a_trainer_that_is_killed_and_resumed_gives_the_history_of_the_hand_written_loop(tmp_path, reference):
    expected, losses, trained = reference
    model, optimizer = made()
    watch, seen = ap.watch(model, history=tmp_path / "history"), Losses()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "run", model, optimizer, ap.TrainerHook(watch), seen, Kill()).train()
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    watch.flush()
    assert watch.history()["step"].max() == KILLED - 1
    watch.close()
    assert hooks == 1
    assert not any(module._forward_pre_hooks for module in model.modules())
    model, optimizer = made()
    with ap.watch(model, history=tmp_path / "history") as watch:
        trainer(tmp_path / "run", model, optimizer, ap.TrainerHook(watch), seen).train(resume_from_checkpoint=True)
        assert watch.heads()["queries"].notna().all()
    same_history(watch.history(), expected)
    same_history(pd.read_parquet(tmp_path / "history").astype({"module": "category"}), expected)
    assert watch.loss_weight == "varied"
    found = [seen.found[step] for step in sorted(seen.found)]
    np.testing.assert_allclose(found, losses, rtol=2e-5, atol=1e-4)
    for ours, theirs in zip(model.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_trainer_whose_loss_is_a_mean_per_micro_batch_is_weighed_micro_batch_by_micro_batch(tmp_path):
    class Plain(nn.Module):
        """Takes no loss arguments, so that the Trainer divides by the number of micro-batches."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.config, self.loss_type = inner, inner.config, inner.loss_type

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.inner(input_ids=input_ids, labels=labels).loss}

    expected, _, _ = by_hand(per_batch=True)
    model, optimizer = made()
    with ap.watch(model) as watch:
        run = trainer(tmp_path, Plain(model), optimizer, ap.TrainerHook(watch), max_steps=10)
        assert not run.model_accepts_loss_kwargs
        run.args.eval_strategy = "no"
        run.train()
    same_history(watch.history(), expected[expected["step"] < 10])


def test_losses_random_state_and_weights_of_a_trainer_are_what_they_are_without_a_hook(tmp_path):
    outcomes = []
    for watched in (False, True):
        seen = Losses()
        model, optimizer = made(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
        hooks: list[TrainerCallback] = [seen]
        if watched:
            watch = ap.watch(model, every=3, history=tmp_path / "history")
            hooks.append(ap.TrainerHook(watch))
        trainer(tmp_path / f"run{watched}", model, optimizer, *hooks, max_steps=9).train()
        outcomes.append((seen.found, torch.get_rng_state(), [p.detach().clone() for p in model.parameters()]))
    watch.close()
    assert watch.history()["step"].unique().tolist() == [0, 3, 6]
    without, with_hook = outcomes
    assert without[0] == with_hook[0]
    assert torch.equal(without[1], with_hook[1])
    assert all(torch.equal(a, b) for a, b in zip(without[2], with_hook[2], strict=True))


def test_a_trainer_goes_on_when_reading_breaks_later_and_stops_when_it_breaks_at_once(tmp_path):
    class Broken(TrainerCallback):
        """Lets the watch meet an error of its own at a chosen step."""

        def __init__(self, watch: ap.Watch, step: int) -> None:
            self.watch, self.step = watch, step

        def on_step_begin(self, args, state, control, **_):
            if state.global_step == self.step:
                self.watch.refuse(ap.UnsupportedKernel("no such kernel; choose another."))

    for step in (0, 2):
        model, optimizer = made()
        watch = ap.watch(model)
        run = trainer(tmp_path / str(step), model, optimizer, Broken(watch, step), ap.TrainerHook(watch), max_steps=5)
        if step == 0:
            with pytest.raises(ap.UnsupportedKernel, match="no such kernel"):
                run.train()
        else:
            with pytest.warns(UserWarning, match="training goes on: UnsupportedKernel") as reported:
                run.train()
            assert len([one for one in reported if "training goes on" in str(one.message)]) == 1
            assert run.state.global_step == 5
            with pytest.raises(ap.UnsupportedKernel):
                watch.history()
        watch.close()


def test_a_closed_watch_and_things_that_are_no_watch_are_refused_before_training(tmp_path):
    model, optimizer = made()
    with pytest.raises(ap.BadRequest, match="takes the watch that watch\\(model\\) returned"):
        ap.TrainerHook(model)
    watch = ap.watch(model)
    watch.close()
    with pytest.raises(ap.ClosedWatch, match="open a new one"):
        trainer(tmp_path, model, optimizer, ap.TrainerHook(watch), max_steps=2).train()


def test_whether_a_model_shifts_its_labels_is_read_off_its_loss():
    from transformers import T5Config, T5ForConditionalGeneration

    assert shifts_labels(made()[0])
    assert shifts_labels(gpt2())  # its class names no loss: the library takes the causal one
    assert (
        shifts_labels(T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)))
        is False
    )
    assert shifts_labels(nn.Linear(2, 2)) is None


def test_a_loss_weight_of_ones_own_is_taken_as_given(tmp_path):
    def run(told):
        model, optimizer = made()
        with ap.watch(model) as watch:
            trainer(tmp_path, model, optimizer, ap.TrainerHook(watch, told), max_steps=2).train()
        return watch

    single = run(0.25)
    assert single.loss_weight == 0.25
    counted = run(lambda inputs: 0.25 + 0 * len(inputs["labels"]))
    same_history(counted.history(), single.history(), 0.0)
    halved = run(0.5).history()
    np.testing.assert_allclose(halved["content_pressure"] * 2, single.history()["content_pressure"], rtol=1e-12)


class Module(lightning.LightningModule):
    """Mean loss per batch, which Lightning divides by the number of accumulated batches."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.optimizer = made()
        self.validated = 0

    def training_step(self, batch, number):
        return self.model(**batch).loss

    def validation_step(self, batch, number):
        self.validated += 1
        self.model(**batch)

    def train_dataloader(self):
        """Half of the data per epoch: Lightning resumes at the beginning of one."""
        half = len(DATA) // 2
        return loader(DATA[half:] if self.trainer.current_epoch else DATA[:half])

    def configure_optimizers(self):
        return self.optimizer


class KillLightning(lightning.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        if trainer.global_step == KILLED:
            raise RuntimeError("killed")


def loader(data=DATA) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(data, batch_size=BATCH, collate_fn=stacked)


def lightning_trainer(folder: Path, *hooks: lightning.Callback, **more) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        reload_dataloaders_every_n_epochs=1,
        accumulate_grad_batches=ACCUMULATION,
        gradient_clip_val=0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        callbacks=list(hooks),
        **more,
    )


def targets(batch) -> int:
    return int(batch["labels"][:, 1:].ne(-100).sum())


def test_a_lightning_run_that_is_killed_and_resumed_gives_the_history_of_the_hand_written_loop(tmp_path):
    expected, _, trained = by_hand(per_batch=True)
    keep = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, save_on_train_epoch_end=True)
    module = Module()
    watch = ap.watch(module.model, history=tmp_path / "history")
    validation = loader(DATA[:6])
    killed = lightning_trainer(tmp_path, ap.LightningHook(watch, targets), keep, KillLightning(), val_check_interval=20)
    with pytest.raises(RuntimeError, match="killed"):
        killed.fit(module, val_dataloaders=validation)
    assert pd.read_parquet(tmp_path / "history")["step"].max() == KILLED - 1  # flushed by the exception
    watch.close()
    module = Module()
    with ap.watch(module.model, history=tmp_path / "history") as watch:
        resumed = lightning_trainer(tmp_path, ap.LightningHook(watch, targets), keep, val_check_interval=20)
        resumed.fit(module, val_dataloaders=validation, ckpt_path=tmp_path / f"step={STEPS // 2}.ckpt")
        assert resumed.global_step == STEPS
    same_history(watch.history(), expected)
    for ours, theirs in zip(module.model.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_lightning_batches_that_do_not_name_their_targets_leave_the_weight_unknown(tmp_path):
    class Tuples(Module):
        def training_step(self, batch, number):
            return self.model(**batch[0]).loss

    module = Tuples()
    data = torch.utils.data.DataLoader(DATA[:8], batch_size=BATCH, collate_fn=lambda items: (stacked(items), 0))
    with ap.watch(module.model) as watch:
        hook = ap.LightningHook(watch)
        lightning_trainer(tmp_path, hook, enable_checkpointing=False, limit_val_batches=0).fit(module, data)
    assert watch.loss_weight == "unknown"
    assert watch.history()["step"].unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_five_lightning_batches_in_twos_are_three_steps_whatever_else_runs(tmp_path, precision):
    """The last group is incomplete, validation follows every batch, and sanity checks come first."""
    module = Module()
    with ap.watch(module.model) as watch:
        run = lightning.Trainer(
            accelerator="cpu",
            precision=precision,
            max_epochs=1,
            accumulate_grad_batches=2,
            val_check_interval=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(tmp_path),
            callbacks=[ap.LightningHook(watch, targets)],
        )
        run.fit(module, loader(DATA[:10]), loader(DATA[:4]))
    assert module.validated == 2 * (5 + 1)
    model, optimizer = made()
    with ap.watch(model) as plain:
        for parts in ((0, 1), (2, 3), (4,)):
            for part in parts:
                batch = stacked(DATA[2 * part : 2 * part + 2])
                plain.weigh(1 / (targets(batch) * 2))
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                    loss = model(**batch).loss
                (loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            plain.step()
    assert watch.history()["step"].unique().tolist() == [0, 1, 2]
    same_history(watch.history(), plain.history())


def test_an_accelerate_loop_gives_the_history_of_the_hand_written_loop():
    expected, _, _ = by_hand(per_batch=True)
    model, optimizer = made()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    prepared, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    with ap.watch(prepared) as watch:
        for batch in batches:
            with accelerator.accumulate(prepared):
                loss = prepared(**batch).loss
                watch.weigh(1 / (targets(batch) * ACCUMULATION))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                watch.step()
    same_history(watch.history(), expected)


class Own(InOrder):
    """A loss of the user's own: the model's mean, which the Trainer then leaves undivided."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss


def mean_loss(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("own", ["compute_loss", "compute_loss_func"])
def test_the_weight_of_a_loss_of_ones_own_is_unknown_unless_it_is_told(tmp_path, own):
    model, optimizer = made()
    with ap.watch(model) as watch:
        run = trainer(tmp_path, model, optimizer, ap.TrainerHook(watch), max_steps=2, save_strategy="no")
        run.args.eval_strategy = "no"
        if own == "compute_loss":
            run.compute_loss = Own.compute_loss.__get__(run)
        else:
            run.compute_loss_func = mean_loss
        run.train()
    assert watch.loss_weight == "unknown"
    assert watch.history()["loss_weight"].isna().all()


def encoder_decoder() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 40,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
        "dropout_rate": 0.0,
    }
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).train()


def masked() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes, **none)).train()


@pytest.mark.parametrize("make", [encoder_decoder, masked])
def test_a_model_that_takes_the_number_of_items_and_ignores_it_is_weighed_by_its_own_mean(tmp_path, make):
    model = make()
    with ap.watch(model) as watch:  # the loss that every target sees, whatever the Trainer makes of the means
        for start in range(0, BATCH * ACCUMULATION, BATCH):
            batch = stacked(DATA[start : start + BATCH])
            watch.weigh(1 / int(batch["labels"].ne(-100).sum()))
            model(**batch).loss.backward()
        watch.step()
    expected = watch.history()
    model = make()
    with ap.watch(model) as watch:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = trainer(tmp_path, model, optimizer, ap.TrainerHook(watch), max_steps=1, save_strategy="no")
        run.args.eval_strategy = "no"
        assert run.model_accepts_loss_kwargs
        run.train()
    same_history(watch.history(), expected)


def test_adapters_are_looked_through_whoever_added_them():
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(made()[0], LoraConfig(target_modules=["q_proj"]))
    native = made()[0]
    native.peft_config = {"default": LoraConfig()}  # as `native.add_adapter` leaves it
    for model in (wrapped, native):
        assert shifts_labels(model)
        assert takes_items(model)
        assert "loss_function" in loss_names(model)


def test_a_class_name_alone_does_not_say_that_labels_are_shifted():
    from transformers import BartConfig, BartForCausalLM

    sizes = {"vocab_size": 40, "d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
    assert shifts_labels(BartForCausalLM(BartConfig(**sizes, is_encoder_decoder=False))) is None


def test_an_error_that_closes_the_watch_in_the_backward_is_raised_at_the_first_step(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ap.LawViolated("weights do not reproduce the output")

    model, optimizer = made()
    watch = ap.watch(model)
    monkeypatch.setattr(watch, "_add", fail)
    with pytest.raises(ap.LawViolated, match="do not reproduce"):
        trainer(tmp_path, model, optimizer, ap.TrainerHook(watch), max_steps=3).train()
    assert watch.closed


def test_a_model_is_copied_and_pickled_while_a_hook_is_on_it_and_the_copy_tells_the_watch_nothing(tmp_path):
    class Copies(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            self.found = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
            for other in self.found:
                other(**stacked(DATA[:2])).loss.backward()

    model, optimizer = made()
    with ap.watch(model) as watch:
        trainer(tmp_path, model, optimizer, ap.TrainerHook(watch), Copies(), max_steps=2).train()
    expected, _, _ = by_hand()
    same_history(watch.history(), expected[expected["step"] < 2])


def test_a_micro_batch_whose_weight_is_not_known_makes_the_weight_of_its_step_unknown():
    model, _ = made()
    with ap.watch(model) as watch:
        for known in (True, False):
            watch.weigh(1 / 8 if known else None)
            model(**stacked(DATA[:2])).loss.backward()
        watch.step()
    assert watch.loss_weight == "unknown"


def test_half_a_step_of_a_run_that_was_given_up_is_no_part_of_the_next_one(tmp_path):
    class GiveUp(TrainerCallback):
        def on_substep_end(self, args, state, control, **_):
            raise KeyboardInterrupt

    expected, _, _ = by_hand()
    model, optimizer = made()
    with ap.watch(model) as watch:
        with pytest.raises(KeyboardInterrupt):
            trainer(tmp_path / "first", model, optimizer, ap.TrainerHook(watch), GiveUp()).train()
        model.zero_grad()
        trainer(tmp_path / "second", model, optimizer, ap.TrainerHook(watch), max_steps=2).train()
    same_history(watch.history(), expected[expected["step"] < 2])
