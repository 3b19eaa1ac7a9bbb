"""Files of a run, written so that a kill at any moment leaves the previous or the next one whole, never a torn one.

A run's folder holds `run.pt` (weights, optimizer, step, curve: what resuming needs) and, once finished,
`model.safetensors` with `card.json` beside it (what reading needs: tunnel, recipe, shape, command and log figures).
"""

import io
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from ....probe.whole_file import whole_file
from ...files.names import CARD, HISTORY
from ..errors import UnusableCheckpoint

RUN, WEIGHTS = "run.pt", "model.safetensors"


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file that takes the place of `path` in one rename, flushed to disk; raises `UnusableCheckpoint`
    where the disk refuses.
    """
    try:
        with whole_file(path, flushed=True) as partial:
            write(partial)
    except OSError as error:
        raise UnusableCheckpoint(
            f"{path} could not be written ({error.strerror or error}): what was saved before is whole; make room, and the "
            "run can go on from there"
        ) from error


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
    write_whole(folder / RUN, lambda path: save_state(state, path))


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
    write_whole(folder / WEIGHTS, lambda path: path.write_bytes(save(tensors, {"format": "pt"})))
    text = json.dumps(card, indent=1, ensure_ascii=False) + "\n"
    write_whole(folder / CARD, lambda path: path.write_text(text, encoding="utf-8"))


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
