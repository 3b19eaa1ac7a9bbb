#!/usr/bin/env python3
"""Figures of the README's section on interventions, for a shipped tunnel model (default: bijection-repeats).

Three tables: the entropy axis of every layer's values and outputs, decoded and intervened on; the strongest head; and how
far the law's first order reaches, beside one step of AdamW at the learning rate with which the model's training ended.
"""

from __future__ import annotations

import argparse

import pandas as pd
import torch

from advantage_probe.analyses.interventions.decodable import decodable_and_used, sequence_loss
from advantage_probe.analyses.interventions.edits import strongest_head
from advantage_probe.analyses.interventions.predicted import reach
from advantage_probe.analyses.manifolds.pictures import number
from advantage_probe.analyses.vectors.collecting import collect
from advantage_probe.analyses.wind_tunnels import load
from advantage_probe.analyses.wind_tunnels.truth.against_truth import batches


def show(title: str, table: pd.DataFrame) -> None:
    print(f"\n{title}\n{table.to_string(index=False, float_format=number, na_rep='–')}", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="bijection-repeats")
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--draws", type=int, default=200)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tunnel, model, card = load(given.name)
    model = model.eval().requires_grad_(False)
    layers = int(card["recipe"]["shape"]["layers"])
    for layer in range(layers):
        table = decodable_and_used(tunnel, model, layer, episodes=given.episodes, draws=given.draws)
        show(
            f"{given.name}, entropy axis of layer {layer}'s values: effect in nats per target, n held-out episodes",
            table,
        )
    drawn = tunnel.sample(given.episodes, torch.Generator().manual_seed(1))
    parts = list(batches(drawn, 64))
    seen = collect(model, parts, "output", "all").vectors
    outputs = {int(layer[1:]): part.reshape(-1, *part.shape[2:]) for layer, part in seen.items()}
    found = strongest_head(model, sequence_loss(model, parts), outputs, draws=given.draws)
    show("strongest head, picked on one half of the episodes and estimated on the other, nats per target", found)
    rate = float(card["recipe"]["learning_rate"]) * 0.02
    batch = next(batches(tunnel.sample(32, torch.Generator().manual_seed(2)), 32))
    table = reach(model, batch, lambda weights: torch.optim.AdamW(weights, lr=rate, weight_decay=0.01))
    show(f"linear radius (η) beside one fresh AdamW step at {rate:g}, 32 episodes, float64", table)


if __name__ == "__main__":
    main()
