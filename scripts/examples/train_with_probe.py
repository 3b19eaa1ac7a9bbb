#!/usr/bin/env python3
"""A training run that is watched: train_with_probe.py [FOLDER]. A minute on a laptop; resumes where it stopped.

A two-layer model learns key-value pairs; every tenth step goes to a history that pandas reads while the run goes on. At the
end FOLDER/report.html shows what became of every head.
"""

import sys
from pathlib import Path

import torch

import advantage_probe as ap
from advantage_probe.analyses.wind_tunnels import Bijection
from advantage_probe.analyses.wind_tunnels.training.models import Shape, build

STEPS, SAVED = 200, 100


def main() -> None:
    """Trains, saves every hundredth step, and prints how the pressures moved."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "watched-run")
    folder.mkdir(parents=True, exist_ok=True)
    tunnel = Bijection(symbols=6, pairs=8, repeats=0.5)
    model = build(Shape("gpt2", 2, 4, 32), tunnel, seed=0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.is_file():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    with ap.watch(model, every=10, history=folder / "history") as watch:
        if start:
            watch.seek(start)
        for step in range(start, STEPS):
            episodes = tunnel.sample(32, torch.Generator().manual_seed(step))
            loss = episodes.loss(model(input_ids=episodes.tokens, use_cache=False).logits)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss_weight=1 / int((episodes.targets >= 0).sum()))
            if (step + 1) % SAVED == 0:
                watch.flush()
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, checkpoint)
                print(f"step {step + 1}: loss {loss.item():.3f} nats", flush=True)
    print(ap.write_report(watch, folder / "report.html"))
    history = watch.history()
    print(history.pivot_table(index="step", columns="label", values="routing_pressure", observed=True).round(3).tail(5))


if __name__ == "__main__":
    main()
