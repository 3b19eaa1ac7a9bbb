"""Files of a run, written so that a kill at any moment leaves the previous or the next one whole, never a torn one.

A run's folder holds `run.pt` (weights, optimiser, step, curve: what resuming needs) and, once finished,
`model.safetensors` with `card.json` beside it (what reading needs: tunnel, recipe, shape, command and log figures).
"""

import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from ..errors import UnusableCheckpoint

RUN, WEIGHTS, CARD = "run.pt", "model.safetensors", "card.json"
HISTORY = "history"  # the folder in a run's folder that holds what became of its heads, where they were watched


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file beside `path`, flush it to disk, then put it in place in one rename; raises
    `UnusableCheckpoint` where the disk refuses.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        with partial.open("rb+") as handle:
            os.fsync(handle.fileno())
        partial.replace(path)
    except OSError as error:
        raise UnusableCheckpoint(
            f"{path} could not be written ({error.strerror or error}): what was saved before is whole; make room, and the "
            "run can go on from there"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def make_way(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Ready a folder for a run: one that holds a run is continued, replaced or refused, anything else in it is left alone.

    Raises:
        UnusableCheckpoint: when it is a file, holds a run and neither was asked for, both were, or it cannot be written.
    """
    if resume and overwrite:
        raise UnusableCheckpoint("--resume continues a run and --overwrite starts it again: give one of the two")
    held = [folder / name for name in (RUN, WEIGHTS, CARD) if (folder / name).exists()]
    if held and not (resume or overwrite):
        raise UnusableCheckpoint(
            f"{folder} holds a run: continue it with --resume, replace it with --overwrite, or give another --out"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        for path in held if overwrite else ():
            path.unlink()
        if held and overwrite:
            shutil.rmtree(folder / HISTORY, ignore_errors=True)
    except OSError as error:
        raise UnusableCheckpoint(f"{folder} cannot be written ({error.strerror}): give another --out") from error


def save_state(state: dict[str, Any], path: Path) -> None:
    """`torch.save`, written by Python, so that a full disk says what it is."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path.write_bytes(buffer.getbuffer())


def save_run(folder: Path, state: dict[str, Any]) -> None:
    """Write the resumable state."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RUN, lambda path: save_state(state, path))


def load_run(folder: Path) -> dict[str, Any] | None:
    """The resumable state, or None where no interval was finished; raises `UnusableCheckpoint` if it cannot be read."""
    path = folder / RUN
    if not path.exists():
        return None
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise UnusableCheckpoint(f"{path} cannot be read ({error}): remove it to start the run again") from error


def save_model(folder: Path, model: nn.Module, card: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
    """Write the weights (tied ones once, stored as `dtype`) and the card."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {
        name: parameter.detach().to("cpu", dtype).contiguous() for name, parameter in model.named_parameters()
    }
    write_atomically(folder / WEIGHTS, lambda path: _write_bytes(path, save(tensors, {"format": "pt"})))
    text = json.dumps(card, indent=1, ensure_ascii=False) + "\n"
    write_atomically(folder / CARD, lambda path: _write_text(path, text))


def load_card(folder: Path) -> dict[str, Any]:
    """The card of a finished run; raises `UnusableCheckpoint` where there is none."""
    try:
        return json.loads((folder / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnusableCheckpoint(f"{folder} holds no readable {CARD}: train a tunnel into it first") from error


def load_weights(folder: Path, model: nn.Module) -> None:
    """Fill `model` from the folder's weights; every parameter must be there with its shape."""
    try:
        tensors = load_file(folder / WEIGHTS)
    except Exception as error:
        raise UnusableCheckpoint(f"{folder / WEIGHTS} cannot be read: {error}") from error
    parameters = dict(model.named_parameters())
    if parameters.keys() != tensors.keys():
        odd = sorted(parameters.keys() ^ tensors.keys())
        raise UnusableCheckpoint(f"{folder}: the weights are of another model ({', '.join(odd[:3])} …)")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != tensors[name].shape:
                raise UnusableCheckpoint(
                    f"{folder}: {name} is {tuple(tensors[name].shape)}, not {tuple(parameter.shape)}"
                )
            parameter.copy_(tensors[name])


def _write_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
