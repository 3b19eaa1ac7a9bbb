#!/usr/bin/env python3
"""Throughput of exact posteriors: hidden Markov filtering beside hmmlearn's forward pass, then every tunnel.

Both filter the same 10,000 sequences of 50 symbols on one thread, hmmlearn through `lengths=`; the best of five runs
counts, and the total log-likelihoods must agree before a ratio is printed. Needs hmmlearn, which is a test-only
dependency.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from hmmlearn.hmm import CategoricalHMM

from advantage_probe.analyses.wind_tunnels import HiddenMarkov, tunnel, tunnel_names

SEQUENCES, LENGTH, STATES, SYMBOLS = 10_000, 50, 5, 5


def best_of(runs: int, work: Callable[[], object]) -> float:
    """Seconds of the fastest run."""
    spent = []
    for _ in range(runs):
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return min(spent)


def main() -> None:
    """Print the comparison, then positions per second of every tunnel's exact predictive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    model = HiddenMarkov(
        torch.tensor(rng.dirichlet(np.ones(STATES))),
        torch.tensor(rng.dirichlet(np.ones(STATES), STATES)),
        torch.tensor(rng.dirichlet(np.ones(SYMBOLS), STATES)),
    )
    observed = model.sample(SEQUENCES, torch.Generator().manual_seed(0), LENGTH).tokens
    column, lengths = observed.numpy().reshape(-1, 1), [LENGTH] * SEQUENCES
    ours = float(model.log_likelihood(observed)[:, -1].sum())
    here = best_of(runs, lambda: model.filter(observed))
    tokens = SEQUENCES * LENGTH
    print(f"{SEQUENCES} sequences of {LENGTH}, {STATES} states, one thread, best of {runs}")
    print(f"HiddenMarkov.filter  {here:8.4f} s  {tokens / here / 1e6:8.2f} million symbols a second")
    for implementation in ("log", "scaling"):  # "log" is hmmlearn's default
        other = CategoricalHMM(STATES, implementation=implementation)
        other.startprob_, other.transmat_ = model.initial.numpy(), model.transition.numpy()
        other.emissionprob_ = model.emission.numpy()
        theirs = other.score(column, lengths)
        if abs(ours - theirs) > 1e-10 * abs(theirs):
            raise SystemExit(f"the log-likelihoods disagree: {ours} and {theirs}")
        there = best_of(runs, lambda: other.score(column, lengths))  # noqa: B023
        print(
            f"hmmlearn {implementation:<11} {there:8.4f} s  {tokens / there / 1e6:8.2f} million symbols a second, "
            f"{there / here:.1f} times as long"
        )
    print("\nexact predictives, 1,000 sequences each")
    for name in tunnel_names():
        task = tunnel(name)
        inputs = task.sample(1_000, torch.Generator().manual_seed(0)).tokens
        spent = best_of(min(runs, 3), lambda: task.predictive(inputs))  # noqa: B023
        print(f"{name:<20} {1_000 * task.length / spent / 1e6:8.2f} million positions a second")


if __name__ == "__main__":
    main()
