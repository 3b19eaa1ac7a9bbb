"""The dynamics of any training run that saved models as it went (folders `checkpoint-N`, as a Trainer leaves them).

No optimizer, no data stream and no exact posterior are known here, so what can be said is less: attention maps, pressures
and loss on a text at every saved model. Precision is the loss above the last model's own, which is zero at the end by
construction, and nothing is said about which of the two comes first.

Shapes: n windows, H heads of all layers, T tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from ...hooks.errors import BadInput
from ...probe.watch import watch
from ..files.export import TABLES, write_frame, write_json
from ..inputs.corpus import batches
from ..inputs.loading import load
from ..runs.analyze import cross_entropy, cut
from . import frame
from .attention_calls import heads
from .pictures import write_saved

CUTS = {"whole": 1, "half": 2, "quarter": 4}
WINDOW, WINDOWS = 64, 64  # full maps are held, so windows are short and few
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class Saved:
    """One run on one text.

    Attributes:
        checkpoints: step; loss (nats per target); frame_whole, frame_half, frame_quarter.
        pressures: step, layer, head, routing_pressure, content_relative, ratio.
        times: cut → the four 90 % times in steps, NaN where a cut holds fewer than three models.
        targets: how many tokens were predicted.
    """

    checkpoints: pd.DataFrame
    pressures: pd.DataFrame
    times: dict[str, dict[str, float]]
    targets: int


def models_in(folder: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the saved models, in order; empty where there are none."""
    found = []
    for path in folder.glob("checkpoint-*") if folder.is_dir() else ():
        number = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if number and path.is_dir():
            found.append((int(number[1]), path))
    return sorted(found)


def examine_saved(folder: Path, texts: Sequence[tuple[str, str]], progress: Progress | None = None) -> Saved:
    """Every `checkpoint-N` in `folder` on the first windows of `texts` (name, text).

    Raises:
        BadInput: where there are fewer than three models, or one cannot be loaded or read the text.
    """
    found = models_in(folder)
    if len(found) < 3:
        raise BadInput(f"{str(folder)!r} holds {len(found)} models named checkpoint-N; a course needs three or more.")
    steps = [step for step, _ in found]
    ends = {
        name: max((step for step in steps if step <= steps[-1] / part), default=steps[0]) for name, part in CUTS.items()
    }
    last = {step: _look(path, texts)[0] for step, path in found if step in set(ends.values())}
    rows, pressures, targets = [], [], 0
    for place, (step, path) in enumerate(found):
        maps, table, loss, targets = _look(path, texts)
        row: dict[str, Any] = {"step": step, "loss": loss}
        for name, end in ends.items():
            same = step <= end and maps.shape == last[end].shape
            row[f"frame_{name}"] = float(frame.divergence(maps, last[end]).mean()) if same else math.nan
        rows.append(row)
        table.insert(0, "step", step)
        pressures.append(table)
        if progress is not None:
            progress(place + 1, len(found), path.name)
    curve, times = pd.DataFrame(rows), {}
    for name, end in ends.items():
        column = f"frame_{name}"
        first = float(curve[column].iloc[0])
        curve[column] /= first if first else math.nan
        inside = curve[curve["step"] <= end]
        above = inside["loss"] - float(inside["loss"].iloc[-1])
        enough = len(inside) >= 3
        own = frame.times(inside["step"].tolist(), inside[column].tolist(), above.tolist())
        times[name] = {which: value if enough else math.nan for which, value in own.items()}
    return Saved(curve, pd.concat(pressures, ignore_index=True), times, targets)


def _look(path: Path, texts: Sequence[tuple[str, str]]) -> tuple[Tensor, pd.DataFrame, float, int]:
    """Maps (n,H,T,T) of full windows, pressures, loss per target and targets of one saved model."""
    loaded = load(str(path))
    items = cut(texts, loaded.model, loaded.tokenizer, length=None, most=WINDOW * WINDOWS)
    longest = min(WINDOW, max(len(window.ids) for window in items))
    items = cut(texts, loaded.model, loaded.tokenizer, length=longest, most=WINDOW * WINDOWS)
    items = [window for window in items if len(window.ids) == longest]
    batch = next(batches(items, len(items), 0))
    value: list[float] = []

    def loss(model: nn.Module) -> Tensor:
        summed = cross_entropy(model(input_ids=batch.ids, use_cache=False).logits, batch.targets)
        value.append(float(summed.detach()))
        return summed

    with watch(loaded.model) as seen:
        maps = torch.cat([head.attention.float() for head in heads(loaded.model, loss).values()], 1)
        seen.step(loss_weight=1.0)
    table = seen.heads()[["layer", "head", "routing_pressure", "content_relative"]].copy()
    table["ratio"] = table["routing_pressure"] / table["content_relative"]
    return maps, table, value[0] / batch.count, batch.count


def summary(saved: Saved) -> dict[str, Any]:
    """One object for `--json`: nats, steps."""
    return {
        "checkpoints": len(saved.checkpoints),
        "targets": saved.targets,
        "precision": "loss above the last model's own; no exact posterior is known",
        "times": saved.times,
        "curve": saved.checkpoints.to_dict("records"),
        "pressures": saved.pressures.to_dict("records"),
        "wording": "Which of frame and precision comes first is not said: nothing was continued with either frozen.",
    }


def text(saved: Saved) -> str:
    """Everything for a terminal."""
    steps = saved.checkpoints["step"]
    squares = saved.pressures.assign(
        routing=saved.pressures["routing_pressure"] ** 2, content=saved.pressures["content_relative"] ** 2
    )
    curve = saved.checkpoints.set_index("step")
    curve[["routing", "content"]] = squares.groupby("step")[["routing", "content"]].mean() ** 0.5
    curve["ratio"] = curve["routing"] / curve["content"]
    return "\n".join(
        [
            f"{len(steps)} saved models, steps {steps.iloc[0]:,} to {steps.iloc[-1]:,}, {saved.targets:,} targets",
            curve.to_string(float_format=lambda number: f"{number:.4g}"),
            "",
            "90 % times in steps, no finer than the spacing of the models, by scale and cut of the run",
            pd.DataFrame(saved.times).T.to_string(),
            "",
            summary(saved)["wording"],
        ]
    )


def write(saved: Saved, folder: Path, formats: Sequence[str] = TABLES, command: str = "") -> None:
    """Figure with data and caption, tables in `formats` and the JSON object into `folder`."""
    tables = {"checkpoints": saved.checkpoints, "pressures": saved.pressures}
    write_saved(tables, saved.targets, folder, command)
    for name, frame_of in tables.items():
        write_frame(frame_of, folder / name, formats)
    write_json(summary(saved), folder / "run.json")
