#!/usr/bin/env python3
"""Do two revisions give the same tables, bit for bit? scripts/benchmarks/columns.py REVISION [REVISION]

Six tiny models (causal, grouped heads, caps and windows, relative biases with cross attention, two-sided, plain PyTorch)
are watched in a process of each revision, with padding, accumulation and every detail; all columns of all tables that both
have are compared exactly. The second revision is the working tree unless one is named.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 60}


def models() -> Iterator[tuple[str, Any, Callable[[Any, Any, Any], Any]]]:
    """Name, model, and its summed loss of (model, ids, mask)."""
    import torch
    import transformers as tf
    from torch import nn
    from torch.nn import functional
    from torch.nn.functional import cross_entropy

    def causal(model: Any, ids: Any, mask: Any) -> Any:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        targets = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
        return cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")

    def seq2seq(model: Any, ids: Any, mask: Any) -> Any:
        logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids.flip(1)).logits
        return cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")

    def masked(model: Any, ids: Any, mask: Any) -> Any:
        logits = model(input_ids=ids, attention_mask=mask).logits
        return cross_entropy(logits.flatten(0, 1), ids.masked_fill(mask == 0, -100).flatten(), reduction="sum")

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner, self.out = nn.Embedding(60, 32), nn.Linear(32, 96), nn.Linear(32, 60)

        def forward(self, ids: Any) -> Any:
            parts = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.inner(self.embed(ids)).chunk(3, -1))
            return self.out(functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))

    def plain(model: Any, ids: Any, mask: Any) -> Any:
        return cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")

    grouped = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48}
    builders: dict[str, tuple[Callable[[], Any], Callable[[Any, Any, Any], Any]]] = {
        "gpt2": (lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=60)), causal),
        "llama": (lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**grouped, pad_token_id=0)), causal),
        "gemma2": (
            lambda: tf.Gemma2ForCausalLM(
                tf.Gemma2Config(
                    **grouped, head_dim=8, sliding_window=6, attn_implementation="eager", query_pre_attn_scalar=8
                )
            ),
            causal,
        ),
        "t5": (
            lambda: tf.T5ForConditionalGeneration(
                tf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=60)
            ),
            seq2seq,
        ),
        "bert": (lambda: tf.BertForMaskedLM(tf.BertConfig(**SIZES, intermediate_size=48)), masked),
        "plain": (Plain, plain),
    }
    for name, (build, loss) in builders.items():
        torch.manual_seed(0)
        yield name, build().eval(), loss


def dump(target: Path) -> None:
    """Every table of every model, as the revision on the path gives it."""
    import torch

    import advantage_probe as ap

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, model, loss in models():
        generator = torch.Generator().manual_seed(1)
        with ap.watch(model, detail="edges", edges=8, singly=True) as watch:
            for _ in range(2):
                for _ in range(2):
                    ids = torch.randint(1, 60, (3, 12), generator=generator)
                    mask = torch.ones_like(ids)
                    if name != "plain":
                        mask[0, 9:] = 0
                    (loss(model, ids, mask) / 7).backward()
                watch.step(loss_weight=1 / 7)
        tables = {
            "heads": watch.heads(intervals=True),
            "tokens": watch.tokens(),
            "edges": watch.edges(8),
            "updates": watch.updates(),
            "sequences": watch.sequences(),
            "history": watch.history(),
            "modules": watch.modules(),
        }
        found |= {f"{name}/{table}": frame for table, frame in tables.items()}
    target.write_bytes(pickle.dumps(found))


def of(source: Path, work: Path, name: str) -> dict[str, Any]:
    """The tables of the package that lies at `source`, from a process of its own."""
    link = work / f"{name}-path" / "advantage_probe"
    link.parent.mkdir()
    link.symlink_to(source)
    target = work / f"{name}.pickle"
    command = [sys.executable, str(Path(__file__).resolve()), "--dump", str(target)]
    environment = {**os.environ, "PYTHONPATH": str(link.parent), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, env=environment, check=True)
    return pickle.loads(target.read_bytes())


def main() -> int:
    """Compare; exit code 1 where a column differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revisions", nargs="*", help="the older one, and the newer one (default: the working tree)")
    parser.add_argument("--dump", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.dump is not None:
        dump(given.dump)
        return 0
    if not 1 <= len(given.revisions) <= 2:
        parser.error("name one revision or two")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        sources = []
        for place, revision in enumerate(given.revisions):
            tree = work / f"tree-{place}"
            subprocess.run(["git", "worktree", "add", "-q", "--detach", str(tree), revision], cwd=ROOT, check=True)
            sources.append(tree)
        try:
            before, after = (of(source, work, str(place)) for place, source in enumerate([*sources, ROOT][:2]))
        finally:
            for tree in sources:
                subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    columns = different = 0
    for name, old in before.items():
        new = after[name]
        lost = [column for column in old if column not in new]
        if lost or len(old) != len(new):
            print(f"{name}: {len(old)} rows are {len(new)}; columns that are gone: {lost}")
            different += 1
        for column in (column for column in old if column in new and len(old) == len(new)):
            columns += 1
            if not old[column].astype(object).equals(new[column].astype(object)):
                different += 1
                print(f"{name}: {column} differs")
    print(f"{len(before)} tables, {columns} columns, {different} differ")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
