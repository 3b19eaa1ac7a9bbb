"""The main job: what the loss on a text is doing to every head of a causal language model.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ... import __version__
from ...hooks.errors import BadInput, NoGradientReached
from ...probe.tables import CAPTURED
from ...probe.watch import Watch, watch
from ..heads.masked import checked
from ..inputs.corpus import Batch, Window, batches, context_of, encode, start_token, windows
from ..inputs.objective import NEXT_TOKEN, Objective
from ..weights.attribution import attributed
from .extras import extras
from .maps import Maps, Place, maps
from .run import Run
from .stored import FORMAT

WINDOW = 256  # tokens in a window unless asked otherwise: enough sequences for an interval, from a page of text
LOGITS = 1 << 27  # logits held at once
FINE_HEADS = 4  # heads that are mapped in finer cells
MANIFOLDS = 6  # heads whose values the page draws: the strongest of a layer each

Progress = Callable[[int, int, str], None]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed next-token cross-entropy, nats, of logits (B,T,V) under targets (B,T), −100 unused."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def cut(
    texts: Sequence[tuple[str, str]], model: nn.Module, tokenizer: Any, *, length: int | None, most: int | None
) -> list[Window]:
    """Windows of all texts (name, text), at most `most` tokens in all.

    Raises:
        BadInput: for texts that are too short, a window that is longer than the context, or nothing left.
    """
    context = context_of(model)
    if length is not None and length < 2:
        raise BadInput(f"--window must be at least 2 tokens, not {length}.")
    if length is not None and context is not None and length > context:
        raise BadInput(f"--window {length} is longer than the model's context of {context} tokens.")
    if most is not None and most < 2:
        raise BadInput(f"--max-tokens must be at least 2, not {most}.")
    length = length or min(WINDOW, context or WINDOW)
    first = start_token(tokenizer)
    found: list[Window] = []
    left = most
    for name, text in texts:
        ids = encode(text, name, tokenizer, model)
        if left is not None:
            ids = ids[:left]
            left -= len(ids)
        found.extend(windows(ids, name, length, first))
        if left is not None and left < 2:
            break
    if not found:
        raise BadInput("No text is left to analyse; give a longer one, or raise --max-tokens.")
    return found


def analyze(
    model: nn.Module,
    tokenizer: Any,
    items: Sequence[Window],
    *,
    name: str,
    batch_size: int | None = None,
    edges: int = 64,
    check: int = 0,
    asked: Objective = NEXT_TOKEN,
    progress: Progress | None = None,
    record: dict[str, Any] | None = None,
) -> Run:
    """Run the model over windows of text and collect every head.

    Args:
        model: a causal language model; it is not changed, and best frozen (no weight gradients).
        items: windows of `cut`.
        batch_size: windows at once (default: as many as keep the logits small).
        check: how many of the edges that are worth most are removed for real, to hold the loss against the prediction.
        asked: the loss, and the positions that it is taken at; mean cross-entropy of every next token by default.
        progress: told (windows done, windows in all, note).

    Raises:
        Whatever the watch refuses; NoGradientReached when no head received a gradient.
    """
    offset = int(start_token(tokenizer) is not None)
    # a window without a target would be counted with those it happens to be batched with
    items = [window for window in items if asked.within(window, offset)]
    vocabulary = int(model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    longest = max(len(window.ids) for window in items)
    size = batch_size or max(1, min(16, LOGITS // (vocabulary * longest)))
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    found = {"texts": sorted({window.source for window in items}), "window_tokens": longest, "batch_size": size}
    groups = [
        asked.apply(batch, items[place * size : (place + 1) * size], offset)
        for place, batch in enumerate(batches(items, size, padding))
    ]
    told = {**found, **identified(items, tokenizer), **(record or {})}
    run = collect(
        model,
        [group for group in groups if group[0].count],
        len(items),
        tokenizer=tokenizer,
        name=name,
        edges=edges,
        check=check,
        asked=asked,
        progress=progress,
        record=told,
    )
    if (run.heads["kind"] == "encoder_self").any():
        raise BadInput(
            f"{name} attends to both sides, so its next-token loss sees its own answer; use the Python interface, "
            "advantage_probe.watch(model), with the loss it was trained on."
        )
    return run


def identified(items: Sequence[Window], tokenizer: Any) -> dict[str, str]:
    """What tells texts and tokenizers apart: digests of the token ids and of the vocabulary."""
    ids = hashlib.sha256(repr(sorted((window.source, window.start, window.ids) for window in items)).encode())
    told = {"texts_digest": ids.hexdigest()[:16]}
    if hasattr(tokenizer, "get_vocab"):
        told["tokenizer_digest"] = hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]
    return told


def collect(
    model: nn.Module,
    groups: Iterable[tuple[Batch, Tensor | None]],
    windows: int,
    *,
    tokenizer: Any,
    name: str,
    edges: int = 64,
    check: int = 0,
    asked: Objective = NEXT_TOKEN,
    entropy: NDArray[np.float64] | None = None,
    progress: Progress | None = None,
    record: dict[str, Any] | None = None,
) -> Run:
    """Watch every head over batches whose targets are aligned with the output, each with what its targets are held
    against; see `analyze`. `entropy` (n,T): exact posterior entropy at every position, bits, for the page's manifold.
    """
    device = next(model.parameters()).device
    began = time.monotonic()
    groups = list(groups)
    total, targets, tokens, done = 0.0, 0, 0, 0
    with watch(model, detail="edges", edges=edges, tokenizer=tokenizer, singly=True) as seen:
        for batch, against in groups:
            ids, mask = batch.ids.to(device), batch.mask.to(device)
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            if seen.error is not None:  # before a backward that the kernel may not have
                raise seen.error
            loss = asked.summed(logits, batch.targets.to(device), against)
            if loss.requires_grad:  # else no attention was seen, and the step says so
                (loss / batch.count).backward()
            seen.step(loss_weight=1 / batch.count)
            total, targets, done = total + loss.item(), targets + batch.count, done + len(ids)
            tokens += int(batch.mask.sum())
            if progress is not None:
                progress(done, windows, f"loss {total / targets:.3f} {asked.unit.split()[0]}")
    heads = seen.heads(intervals=True)
    if (heads["status"].astype(str).str.startswith("no gradient")).all():
        raise NoGradientReached("No gradient reached any head; the loss does not depend on attention.")
    ranked = heads.assign(layer=heads["layer"].fillna(-1)).sort_values("routing_pressure", ascending=False)
    first = ranked.drop_duplicates("layer").head(MANIFOLDS)
    shown_first = dict(zip(first["label"].astype(str), first["kv_head"].astype(int), strict=True))
    strongest = [(str(row.module), int(row.use), int(row.head)) for row in ranked.head(FINE_HEADS).itertuples()]
    layers = [int(layer) for layer in first["layer"].head(1) if layer >= 0]
    more, missing = extras(model, groups, shown_first, layers, tokenizer, asked.summed, entropy)
    order = list(seen.state().sequences)
    pairs, more["agreement"] = attributed(
        model, groups, seen.edges(edges), order, lambda why: missing.update(direct_logit=why)
    )
    if check:
        more["checked"] = checked(model, groups, pairs, order, asked, check)
    return Run(
        heads,
        seen.tokens(),
        pairs,
        seen.updates(),
        seen.sequences(),
        {
            **recorded(seen, name),
            "windows": windows,
            "tokens": tokens,
            "targets": targets,
            "loss": total / targets,
            "loss_kind": asked.loss,
            "loss_targets": asked.told,
            "loss_unit": asked.unit,
            "loss_reduction": "mean over targets; u divided by 1/targets, so numbers are per summed loss",
            "seconds": round(time.monotonic() - began, 2),
            **({"left_out": missing} if missing else {}),
            **(record or {}),
        },
        _mapped(model, groups[0], strongest, asked, device),
        more,
    )


def _mapped(
    model: nn.Module, group: tuple[Batch, Tensor | None], strongest: list[Place], asked: Objective, device: torch.device
) -> Maps:
    """Maps of the first window: every head pooled, the strongest ones finer."""
    batch, against = group
    length = int(batch.mask[0].sum())
    ids, targets = batch.ids[:1, :length].to(device), batch.targets[:1, :length].to(device)
    rivals = None if against is None else against[:1, :length]
    return maps(
        model,
        lambda: asked.summed(model(input_ids=ids, use_cache=False).logits, targets, rivals),
        batch.ids[0, :length].tolist(),
        strongest,
    )


def recorded(seen: Watch, name: str | None = None) -> dict[str, Any]:
    """What a run on record says of the model that was watched, of the libraries, and of what was not captured."""
    model = seen.model
    libraries = ("torch", "transformers", "pandas", "numpy")
    config: Any = getattr(model, "config", None)
    first = next(model.parameters(), None)
    modules = seen.modules()
    missed = modules[modules["status"] != CAPTURED]
    return {
        "format": FORMAT,
        "advantage_probe": __version__,
        "versions": {"python": platform.python_version()} | {library: version(library) for library in libraries},
        "model": name if name is not None else seen.model_name,
        "architecture": type(model).__name__,
        "attention_implementation": getattr(config, "_attn_implementation", None),
        "dtype": None if first is None else str(first.dtype).removeprefix("torch."),
        "device": None if first is None else str(first.device),
        "threads": torch.get_num_threads(),
        "loss_weight": seen.loss_weight,
        "not_captured": dict(missed[["module", "status"]].astype(str).values.tolist()),
    }
