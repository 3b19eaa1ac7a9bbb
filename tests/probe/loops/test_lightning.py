"""The Lightning callback gives the history that a loop written by hand gives."""

from pathlib import Path

import lightning.pytorch as lightning
import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from loops import ACCUMULATION, BATCH, DATA, KILLED, STEPS, by_hand, loader, made, same_history, stacked, targets

import advantage_probe as ap


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
