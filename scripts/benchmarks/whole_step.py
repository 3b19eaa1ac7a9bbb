"""What a watched training step costs on one thread, resolved to a few per cent: processor time, interleaved rounds.

Wall time on a shared machine moves by more than what is to be seen. Here every round times all arms one after the other on
the processor's own clock, an unwatched arm that runs again says how far two equal arms lie apart, and ratios are of medians
and of minima over the rounds. A watch is opened for several steps, as in a training; ids are new in every step, because a
sequence that was seen before costs no bootstrap draws.

    python scripts/benchmarks/whole_step.py
    python scripts/benchmarks/whole_step.py --shapes T=1024 --arms heads edges --rounds 9 --optimizer
    python scripts/benchmarks/whole_step.py --attention
    ADVANTAGE_PROBE_NO_BUILD=1 python scripts/benchmarks/whole_step.py    # without the C++ operator
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A GPT-2 of these sizes and its batch; `steps` under one watch."""

    length: int
    batch: int
    layers: int
    width: int
    heads: int
    vocabulary: int
    steps: int


SHAPES = {
    "T=32": Shape(32, 16, 3, 64, 4, 64, 24),
    "T=64": Shape(64, 16, 3, 64, 4, 64, 12),
    "T=128": Shape(128, 16, 3, 64, 4, 64, 6),
    "T=1024": Shape(1024, 1, 4, 768, 12, 800, 2),
    "T=1024, full": Shape(1024, 1, 12, 768, 12, 50257, 1),
    "T=4096": Shape(4096, 1, 2, 768, 12, 800, 1),
}
ARMS: dict[str, dict[str, Any] | None] = {
    "unwatched": None,
    "again": None,
    "heads": {},
    "tokens": {"detail": "tokens"},
    "edges": {"detail": "edges"},
}
ATTENTION = ((16, 4, 32, 16), (16, 4, 64, 16), (16, 4, 128, 16), (1, 12, 1024, 64), (1, 12, 4096, 64))


def step_of(shape: Shape, optimizer: bool) -> Callable[[dict[str, Any] | None], float]:
    """A function that runs `shape.steps` steps, watched with these options or not, and returns processor seconds a step."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import advantage_probe as ap

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.width,
        n_positions=shape.length,
        vocab_size=shape.vocabulary,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model, generator = GPT2LMHeadModel(config), torch.Generator().manual_seed(1)
    update = torch.optim.AdamW(model.parameters(), lr=1e-4) if optimizer else None

    def one(watch: Any) -> None:
        ids = torch.randint(0, shape.vocabulary, (shape.batch, shape.length), generator=generator)
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if update is not None:
            update.step()
        if watch is not None:
            watch.step(loss_weight=1 / (ids.numel() - shape.batch))

    def run(options: dict[str, Any] | None) -> float:
        with contextlib.nullcontext() if options is None else ap.watch(model, **options) as watch:
            one(watch)  # opening, and the first step of a watch, are not what a long training pays
            started = time.process_time()
            for _ in range(shape.steps):
                one(watch)
            return (time.process_time() - started) / shape.steps

    return run


def attention_of(batch: int, heads: int, length: int, width: int) -> dict[str, Callable[[], float]]:
    """Forward and backward of causal sdpa, unwatched and with the statistics: processor seconds."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attend

    import advantage_probe as ap

    class Attention(torch.nn.Module):
        def forward(self, query: Any, key: Any, value: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    model, times = Attention(), max(1, 2**21 // (batch * heads * length * length))
    draw = lambda: torch.randn(batch, length, heads, width).transpose(1, 2)  # noqa: E731
    inputs, upstream = [draw().requires_grad_() for _ in range(3)], draw()

    def timed(run: Callable[..., Any]) -> float:
        started = time.process_time()
        for _ in range(times):
            torch.autograd.grad(run(*inputs), inputs, upstream)
        return (time.process_time() - started) / times

    def plain() -> float:
        return timed(lambda *given: attend(*given, is_causal=True))

    def watched(**options: Any) -> float:
        with ap.watch(model, **options):
            return timed(model)

    return {"unwatched": plain, "again": plain, "heads": watched, "edges": lambda: watched(detail="edges")}


def rounds_of(arms: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every arm, round by round; one round beforehand is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name, run in arms.items():
            seconds = run()
            if number:
                taken[name].append(seconds)
    return taken


def told(title: str, taken: dict[str, list[float]]) -> dict[str, Any]:
    """Print a row of ratios; return them with the medians."""
    base = taken["unwatched"] + taken["again"]
    middle, least = statistics.median(base), min(base)
    record: dict[str, Any] = {"shape": title, "unwatched_ms": 1e3 * middle}
    words = []
    for name, seconds in taken.items():
        if name != "unwatched":
            of = statistics.median(taken["unwatched"]) if name == "again" else middle
            record[name] = {"median": statistics.median(seconds) / of, "minimum": min(seconds) / least}
            words.append(f"{name} {record[name]['median']:.3f} ({record[name]['minimum']:.3f})")
    print(f"{title:>24}  unwatched {1e3 * middle:9.2f} ms  " + "  ".join(words), flush=True)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["T=32", "T=64", "T=128", "T=1024"])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS)[2:], default=["heads"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--optimizer", action="store_true", help="AdamW steps as well")
    parser.add_argument("--attention", action="store_true", help="attention alone, forward and backward")
    parser.add_argument("--json", action="store_true", help="print the figures as one object at the end")
    options = parser.parse_args()

    import torch

    torch.set_num_threads(options.threads)
    print("ratio to unwatched of medians (of minima); processor time", flush=True)
    records = []
    if options.attention:
        for sizes in ATTENTION:
            records.append(told(str(sizes), rounds_of(attention_of(*sizes), options.rounds)))
    else:
        for name in options.shapes:
            run = step_of(SHAPES[name], options.optimizer)
            chosen = ["unwatched", *options.arms, "again"]
            arms = {arm: partial(run, ARMS[arm]) for arm in chosen}
            records.append(told(name, rounds_of(arms, options.rounds)))
    if options.json:
        print(json.dumps(records))


if __name__ == "__main__":
    main()
