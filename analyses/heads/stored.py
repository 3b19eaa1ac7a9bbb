"""A head on disk: its tensors as safetensors, its pairs as Parquet, and what it is as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...hooks.errors import BadInput
from .head import FACTS, TENSORS, Head


def load_head(folder: Any, tokenizer: Any = None) -> Head:
    """The head that `Head.save` wrote; without its model, so that `check` is not possible.

    Args:
        folder: what was given to `save`. tokenizer: spells tokens.

    Raises:
        BadInput: for a folder that holds no head, or a damaged one.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder)
    try:
        facts = json.loads((path / "head.json").read_text(encoding="utf-8"))
        tensors = load_file(path / "head.safetensors")
        parts: dict[str, Any] = {name: facts[name] for name in FACTS} | {name: tensors[name] for name in TENSORS}
        return Head(**parts, tokenizer=tokenizer)
    except FileNotFoundError:
        raise BadInput(f"{str(folder)!r} holds no head; name the folder that head.save() wrote.") from None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise BadInput(f"{str(folder)!r} holds a damaged head ({error}); save it again.") from error
