#!/usr/bin/env python3
"""What the loss on a text does to the heads of GPT-2: scripts/examples/analyze_gpt2.py [MODEL] [TEXT].

MODEL is a hub name or a folder (default: openai-community/gpt2). The same from the command line:
advantage-probe analyze openai-community/gpt2 --text book.txt
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import advantage_probe as ap

TEXT = Path(__file__).resolve().parents[2] / "analyses" / "inputs" / "texts" / "declaration.txt"


def main() -> None:
    """Prints the ten heads on whose routing the loss pulls hardest, and the strongest pairs of the first."""
    name = sys.argv[1] if len(sys.argv) > 1 else "openai-community/gpt2"
    text = Path(sys.argv[2]).read_text(encoding="utf-8") if len(sys.argv) > 2 else TEXT.read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name).requires_grad_(False).eval()
    ids = torch.tensor(tokenizer(text)["input_ids"])
    length = min(256, model.config.max_position_embeddings, len(ids))
    windows = ids[: len(ids) // length * length].view(-1, length)
    with ap.watch(model, detail="edges", tokenizer=tokenizer) as watch:
        for window in windows.split(4):
            model(input_ids=window, labels=window).loss.backward()
            watch.step(loss_weight=1 / (len(window) * (length - 1)))
    heads = watch.heads(intervals=True).sort_values("routing_pressure", ascending=False)
    columns = ["label", "routing_pressure", "routing_pressure_low", "routing_pressure_high", "alignment", "status"]
    print(heads[columns].head(10).to_string(index=False))
    pairs = watch.edges(top=5)
    columns = ["direction", "query_token", "key_token", "attention", "advantage", "score_gradient"]
    print(pairs[pairs["label"] == heads["label"].iloc[0]][columns].to_string(index=False))


if __name__ == "__main__":
    main()
