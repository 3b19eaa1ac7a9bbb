"""What watching costs: time and peak memory of a training step, unwatched and watched, interleaved in one run.

Every contender runs in a process of its own on the same inputs; the rounds go round-robin, so that whatever else the
machine does falls on all of them. "ratio" is one of medians over the rounds; "ratio within rounds" is the median of each
round's own, which a machine that slows down for a while disturbs less. Prints a table and, with --json, the medians,
spread and ratios as one object.

    python scripts/benchmarks/overhead.py --length 1024 --layers 12 --vocabulary 50257
    python scripts/benchmarks/overhead.py --length 4096 --layers 2 --vocabulary 800 --contenders unwatched heads retained
    python scripts/benchmarks/overhead.py --model FOLDER --length 2048 --vocabulary 262144 --contenders unwatched heads
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from operator import truediv
from typing import Any

WATCHED: dict[str, dict[str, Any]] = {
    "heads": {},
    "tokens": {"detail": "tokens"},
    "edges": {"detail": "edges"},
    "every10": {"every": 10},
}
CONTENDERS = {
    "unwatched": "sdpa, nothing watching",
    "heads": 'watch, detail="heads"',
    "tokens": 'watch, detail="tokens"',
    "edges": 'watch, detail="edges"',
    "every10": "watch, every=10 (mean over steps)",
    "retained": "eager attention, weights kept with their gradient",
    "bridge": "TransformerLens bridge, hooks on pattern, v and z",
}


def model_of(options: argparse.Namespace, attention: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    if options.model:
        return AutoModelForCausalLM.from_pretrained(options.model, attn_implementation=attention, dtype=torch.float32)
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=options.layers,
        n_head=options.heads,
        n_embd=options.width,
        n_positions=options.length,
        vocab_size=options.vocabulary,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel._from_config(config, attn_implementation=attention)


def contender(name: str, options: argparse.Namespace) -> None:
    """A child: one step per line of standard input, its seconds on standard output, peak memory at the end."""
    import torch

    torch.set_num_threads(options.threads)
    model = model_of(options, "eager" if name == "retained" else "sdpa")
    ids = torch.randint(
        0, options.vocabulary, (options.batch, options.length), generator=torch.Generator().manual_seed(1)
    )
    targets = ids.numel() - options.batch
    watch = None
    if name in WATCHED:
        import advantage_probe as ap

        watch = ap.watch(model, **WATCHED[name])
    bridge = None
    if name == "bridge":
        bridge = bridged(model)

    def step() -> None:
        if bridge is not None:
            bridge(ids)
        elif name == "retained":
            result = model(input_ids=ids, labels=ids, output_attentions=True, use_cache=False)
            for attention in result.attentions:
                attention.retain_grad()
            result.loss.backward()
            kept = [attention.grad for attention in result.attentions]
            assert all(gradient is not None for gradient in kept)
        else:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        if watch is not None:
            watch.step(loss_weight=1 / targets)

    for line in sys.stdin:
        if line.strip() == "end":
            break
        began = time.perf_counter()
        step()
        print(time.perf_counter() - began, flush=True)
    if watch is not None:
        table = watch.heads()
        assert table["law_residual"].max() < 1e-5
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, flush=True)


def bridged(model: Any) -> Any:
    """One step through TransformerLens with the three tensors of every head hooked, forward and backward."""
    import tempfile

    import torch
    from tokenizers import Tokenizer, models
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        words = {str(number): number for number in range(model.config.vocab_size)}
        plain = Tokenizer(models.WordLevel(words, unk_token="0"))
        PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="0", pad_token="0").save_pretrained(folder)
        model.save_pretrained(folder)
        bridge = TransformerBridge.boot_transformers(folder, device="cpu")
    kept: dict[str, Any] = {}
    names = [
        f"blocks.{layer}.attn.{hook}"
        for layer in range(model.config.n_layer)
        for hook in ("hook_pattern", "hook_v", "hook_z")
    ]

    def keep(tensor: torch.Tensor, hook: Any) -> None:
        kept[hook.name] = tensor.detach()

    for name in names:
        bridge.add_hook(name, keep)
        bridge.add_hook(name, keep, dir="bwd")

    def step(ids: torch.Tensor) -> None:
        bridge(ids, return_type="loss").backward()
        bridge.zero_grad(set_to_none=True)
        kept.clear()

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument(
        "--model", help="folder of a pretrained model, instead of the GPT-2 shape; give its --vocabulary"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after one that is not")
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=["unwatched", "heads", "tokens", "edges"]
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.length, options.layers, options.batch, options.rounds, options.threads) < 1:
        parser.error("lengths, counts and rounds must be at least 1")
    if options.child:
        contender(options.child, options)
        return 0
    sizes = [f"--{name}={getattr(options, name)}" for name in _SIZES] + (
        [f"--model={options.model}"] if options.model else []
    )
    children = {}
    for name in options.contenders:
        command = [sys.executable, __file__, "--child", name, *sizes]
        children[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    times: dict[str, list[float]] = {name: [] for name in children}
    for turn in range(options.rounds + 1):
        for name, child in children.items():
            assert child.stdin is not None
            assert child.stdout is not None
            steps = 10 if name == "every10" or (name == "unwatched" and "every10" in children and turn) else 1
            for _ in range(steps):
                child.stdin.write("step\n")
                child.stdin.flush()
                seconds = float(child.stdout.readline())
                if turn:
                    times[name].append(seconds)
            print(f"round {turn}/{options.rounds}: {name}", file=sys.stderr, flush=True)
    memory = {}
    for name, child in children.items():
        out, _ = child.communicate("end\n")
        memory[name] = int(out.strip().splitlines()[-1]) / 1024
    report(options, times, memory)
    return 0


_SIZES = ("length", "layers", "heads", "width", "vocabulary", "batch", "threads")


def report(options: argparse.Namespace, times: dict[str, list[float]], memory: dict[str, float]) -> None:
    base = "unwatched" if "unwatched" in times else next(iter(times))
    rows = {}
    for name, seconds in times.items():
        middle = statistics.fmean if name == "every10" else statistics.median
        own, other = middle(seconds), middle(times[base])
        rows[name] = {
            "what": CONTENDERS[name],
            "milliseconds": 1000 * own,
            "spread": 1000 * (statistics.quantiles(seconds, n=4)[2] - statistics.quantiles(seconds, n=4)[0])
            if len(seconds) > 1
            else None,
            "ratio": own / other,
            "paired": own / other if name == "every10" else statistics.median(map(truediv, seconds, times[base])),
            "peak_mib": memory[name],
            "peak_ratio": memory[name] / memory[base],
            "steps": len(seconds),
        }
    if options.json:
        print(json.dumps({"settings": {name: getattr(options, name) for name in _SIZES}, "rows": rows}, indent=1))
        return
    print(f"{options.model or 'GPT-2 shape'}: {', '.join(f'{name} {getattr(options, name)}' for name in _SIZES)}")
    print(
        "| contender | ms per step | interquartile range | ratio | ratio within rounds | peak MiB | peak ratio |\n"
        "|---|---|---|---|---|---|---|"
    )
    for row in rows.values():
        spread = "–" if row["spread"] is None else f"{row['spread']:.0f}"
        print(
            f"| {row['what']} | {row['milliseconds']:.0f} | {spread} | {row['ratio']:.2f} | {row['paired']:.2f} "
            f"| {row['peak_mib']:.0f} | {row['peak_ratio']:.2f} |"
        )


if __name__ == "__main__":
    sys.exit(main())
