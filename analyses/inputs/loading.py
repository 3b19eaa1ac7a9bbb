"""Loading a model and its tokenizer, from a folder or by hub name, with errors that say what was tried."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...hooks.errors import BadInput

ADAPTER = "adapter_config.json"
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
        name: a local folder, of a model or of a PEFT adapter beside its model; or the name of a hub repository
            ("owner/name" or "name").

    Raises:
        BadInput: for anything that cannot be loaded; nothing is retried for long.
    """
    wanted, place = dtype_of(dtype), device_of(device)
    options: dict[str, Any] = {"revision": revision} if revision else {}
    adapter: Path | None = None
    if is_path(name):
        folder = Path(name).expanduser()
        if (folder / ADAPTER).is_file():
            adapter, folder = folder, _base_of(folder)
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
        read: Any = AutoModelForCausalLM.from_pretrained(source, dtype=wanted, output_loading_info=True, **options)
    except Exception as error:
        raise BadInput(f"The weights of {name!r} could not be loaded: {_line(error)}.") from error
    model, told = read
    _check_whole(name, told)
    if adapter is not None:
        model = _adapted(model, adapter)
    model = model.eval().requires_grad_(False).to(place)
    return Loaded(model, tokenizer, name, getattr(config, "_commit_hash", None) or revision)


def _check_whole(name: str, told: dict[str, Any]) -> None:
    """Refuse a checkpoint that lacks weights: they would be drawn anew, and give other numbers at each run. Tied
    weights are not missing.
    """
    missing = sorted(told.get("missing_keys") or ())
    mismatched = sorted(
        str(entry[0] if isinstance(entry, tuple) else entry) for entry in told.get("mismatched_keys") or ()
    )
    for what, keys in (("lacks", missing), ("has in another shape", mismatched)):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise BadInput(
                f"The checkpoint {name!r} {what} the weights {', '.join(keys[:3])}{more}, which would be drawn at random; "
                "give one of the whole model (a causal language model with its head)."
            )


def _base_of(folder: Path) -> Path:
    """The folder of the model that an adapter was made for.

    Raises:
        BadInput: where the adapter does not say, or the model is not at hand.
    """
    try:
        base = json.loads((folder / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError) as error:
        raise BadInput(f"{str(folder / ADAPTER)!r} is damaged ({_line(error)}); save the adapter again.") from error
    for place in (Path(str(base or "")).expanduser(), folder / str(base or "")):
        if base and place.is_dir():
            return place
    raise BadInput(f"The adapter {str(folder)!r} is for {base!r}, which is no folder here; put that model there first.")


def _adapted(model: nn.Module, folder: Path) -> nn.Module:
    """The model with the adapter's weights merged in, so that its modules keep their names."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise BadInput(
            f"{str(folder)!r} holds a PEFT adapter: pip install peft, or merge it into its model."
        ) from error
    try:
        joined: Any = PeftModel.from_pretrained(model, str(folder))
        merged: nn.Module = joined.merge_and_unload()
        return merged
    except Exception as error:
        raise BadInput(f"The adapter {str(folder)!r} could not be merged into its model: {_line(error)}.") from error


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
