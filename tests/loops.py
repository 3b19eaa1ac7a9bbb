"""A training loop written by hand, which every hook must reproduce, and the same run in a Trainer."""

from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from zoo import gpt2, llama

import advantage_probe as ap

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


def loader(data=DATA) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(data, batch_size=BATCH, collate_fn=stacked)


def targets(batch) -> int:
    return int(batch["labels"][:, 1:].ne(-100).sum())
