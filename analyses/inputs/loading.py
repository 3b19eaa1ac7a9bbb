"""Loading a model and its tokenizer, from a folder or by hub name, with errors that say what was tried."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...hooks.errors import BadInput

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True, eq=False)
class Loaded:
    """A causal language model, its tokenizer, and what the run's record says about them."""

    model: nn.Module
    tokenizer: Any
    name: str
    revision: str | None


def dtype_of(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise BadInput(f"--dtype must be one of {', '.join(_DTYPES)}, not {name!r}.")
    return _DTYPES[name]


def device_of(name: str) -> torch.device:
    """The device called `name`.

    Raises:
        BadInput: when it is not there.
    """
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except Exception as error:
        raise BadInput(f"Device {name!r} is not available here ({_line(error)}); try --device cpu.") from error
    return device


def is_path(name: str) -> bool:
    """True for what can only be a path: it exists, or is spelled like one."""
    return Path(name).exists() or name.startswith((".", "/", "~", "\\")) or "\\" in name or name.count("/") > 1


def load(
    name: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    revision: str | None = None,
    implementation: str | None = None,
) -> Loaded:
    """A causal language model in evaluation mode with all parameters frozen, and its tokenizer.

    Args:
        name: a local folder, or the name of a hub repository ("owner/name" or "name").

    Raises:
        BadInput: for anything that cannot be loaded; nothing is retried for long.
    """
    wanted, place = dtype_of(dtype), device_of(device)
    options: dict[str, Any] = {"revision": revision} if revision else {}
    if is_path(name):
        folder = Path(name).expanduser()
        _check_folder(folder)
        source = str(folder)
    else:
        source = name
        options["local_files_only"] = not _reachable(name, revision)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(source, **options)
    except Exception as error:
        raise BadInput(f"The configuration of {name!r} could not be read: {_line(error)}.") from error
    if getattr(config, "is_encoder_decoder", False) or type(config) not in AutoModelForCausalLM._model_mapping:
        raise BadInput(
            f"{name!r} is a {config.model_type!r} model, not a causal language model; "
            "use the Python interface, advantage_probe.watch(model), with a loss of your own."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:
        raise BadInput(f"No tokenizer could be loaded from {name!r}: {_line(error)}.") from error
    if implementation is not None:
        options["attn_implementation"] = implementation
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=wanted, **options)
    except Exception as error:
        raise BadInput(f"The weights of {name!r} could not be loaded: {_line(error)}.") from error
    model = model.eval().requires_grad_(False).to(place)
    return Loaded(model, tokenizer, name, getattr(config, "_commit_hash", None) or revision)


def _line(error: BaseException) -> str:
    """The first line of an error, short enough for a sentence."""
    text = re.sub(r"\s+", " ", (str(error).strip() or type(error).__name__).splitlines()[0])
    return (text[:240] + "…" if len(text) > 240 else text).rstrip(".")


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise BadInput(f"The folder {str(folder)!r} {what}; give a folder with config.json, weights and a tokenizer.")
    if not (folder / "config.json").is_file():
        raise BadInput(f"The folder {str(folder)!r} has no config.json; give a folder written by save_pretrained().")
    weights = [path for pattern in _WEIGHTS for path in sorted(folder.glob(pattern))]
    if not weights:
        raise BadInput(f"The folder {str(folder)!r} has no weights (model.safetensors); save the model there first.")
    from safetensors import safe_open

    for path in weights:
        if path.suffix == ".safetensors":
            try:
                with safe_open(path, framework="pt") as handle:
                    handle.keys()
            except Exception as error:
                raise BadInput(f"{str(path)!r} is damaged ({_line(error)}); replace it by a fresh copy.") from error


def _reachable(name: str, revision: str | None) -> bool:
    """True when the hub answers for this model, False when only a local copy can serve.

    Raises:
        BadInput: within seconds, when it cannot be had at all.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.\-]*(/[\w.\-]+)?", name):
        raise BadInput(f"{name!r} is neither a folder that exists nor a hub name such as 'openai-community/gpt2'.")
    from huggingface_hub import HfApi, try_to_load_from_cache

    cached = isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
    tried = f"{name!r} was not found: no such folder exists here, it is not in the local cache"
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        if cached:
            return False
        raise BadInput(f"{tried}, and HF_HUB_OFFLINE forbids asking the hub; unset it, or give a folder.")
    try:
        HfApi().model_info(name, revision=revision, timeout=5.0)
    except Exception as error:
        if cached:
            return False
        kind = type(error).__name__
        if kind in ("RepositoryNotFoundError", "RevisionNotFoundError", "GatedRepoError"):
            raise BadInput(f"{tried}, and the hub answered: {_line(error)}.") from error
        raise BadInput(f"{tried}, and the hub cannot be reached ({kind}); give a local folder.") from error
    return True
