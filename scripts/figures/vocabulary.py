#!/usr/bin/env python3
"""Which tokens the heads of Gemma 3 270M are pushed to say, on the Declaration of Independence: the README's table.

Per layer asked for: every head's mean update direction through W_O, norms and unembedding, its first tokens each way, and
random directions of the same norm beside them. Heads whose first token goes further than 95 % of random directions do are
counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from advantage_probe.analyses.inputs.corpus import Batch, batches
from advantage_probe.analyses.inputs.examples import gemma, text_file
from advantage_probe.analyses.inputs.loading import load
from advantage_probe.analyses.manifolds.pictures import number
from advantage_probe.analyses.pictures import plots
from advantage_probe.analyses.pictures.figures import Caption, save
from advantage_probe.analyses.runs.analyze import cross_entropy, cut
from advantage_probe.analyses.weights.vocabulary import vocabulary


def main() -> None:
    """Print the table; with --picture also draw one head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", type=int, action="append")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--picture", type=Path, help="name without ending: PNG, SVG, PDF, data and caption")
    given = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(str(gemma()))
    text = text_file("declaration.txt").read_text(encoding="utf-8")
    items = cut([("declaration.txt", text)], loaded.model, loaded.tokenizer, length=128, most=given.tokens)

    def loss(batch: Batch) -> Callable[[], torch.Tensor]:
        return lambda: cross_entropy(
            loaded.model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits, batch.targets
        )

    layers = given.layer or [0, 17]
    losses = [loss(batch) for batch in batches(items, 2, 0)]
    found = vocabulary(loaded.model, losses, loaded.tokenizer, layers=layers, top=3, keys=1)
    table = found.tokens.copy()
    table["token"], table["key"] = table["token"].map(ascii), table["key"].map(ascii)
    print(table.to_string(index=False, float_format=number))
    first = table[(table["rank"] == 1) & (table["key"] == "''")]
    print(f"\nfirst tokens beyond 95 % of random directions: {(first['p'] <= 0.05).sum()} of {len(first)}")
    if given.picture is not None:
        head = str(first.sort_values("p")["head"].iloc[0])
        caption = Caption(
            f"What the values of {head} are pushed to say on the Declaration of Independence: mean update direction.",
            f"{given.tokens} tokens",
            "change of the logit, centred over the vocabulary, per unit step",
            null="dotted: 95 % point of the largest token of random directions of the same norm",
            command=" ".join(["scripts/figures/vocabulary.py", *sys.argv[1:]]),
        )
        shown = found.tokens[(found.tokens["head"] == head) & (found.tokens["key"] == "")]
        for path in save(plots.vocabulary(found.tokens, head), given.picture, shown, caption):
            print(path)


if __name__ == "__main__":
    main()
