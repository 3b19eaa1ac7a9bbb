#!/usr/bin/env python3
"""Print the README's table of shipped wind-tunnel models, every figure recomputed from the weights:
scripts/figures/tunnels.py.
"""

from advantage_probe.analyses.wind_tunnels.training.recorded import recorded_controls
from advantage_probe.analyses.wind_tunnels.truth.shipped import MODELS, evaluate, shipped_names

SEQUENCES = 2_000


def main() -> None:
    """One line per check, then per model the KL and entropy error beside those of the best trivial rival."""
    results = [evaluate(name, SEQUENCES) for name in shipped_names()]
    print("| model | figure | measured | held to |")
    print("|---|---|---|---|")
    for result in results:
        for check in result.checks:
            sign = "≥" if check.least else "≤"
            print(f"| `{result.name}` | {check.what} | {check.measured:.5f} | {sign} {check.bound:.5f} |")
    print("\n| model | positions | KL, bits | best rival | entropy error, bits | best rival |")
    print("|---|---|---|---|---|---|")
    for result in results:
        for title, figures in result.tables.items():
            if "model" not in figures.index:
                continue
            cells = []
            for column in ("kl", "entropy_error"):
                rivals = figures.drop(index="model")[column]
                cells.append(f"{figures.loc['model', column]:.5f} ± {figures.loc['model', f'{column}_ci']:.5f}")
                cells.append(f"{rivals.min():.5f} ({rivals.idxmin()})")
            print(f"| `{result.name}` | {title} | {' | '.join(cells)} |")
    print()
    controls()


def controls() -> None:
    """What networks without attention reached, from the records beside the models."""
    print("| model | control | KL, bits | entropy error, bits | fails at (KL > .05) | worst position |")
    print("|---|---|---|---|---|---|")
    for name in shipped_names():
        table = recorded_controls(MODELS / name)
        for kind, row in [] if table is None else table.iterrows():
            print(
                f"| `{name}` | {kind} | {row['kl']:.5f} | {row['entropy_error']:.5f} | {row['fails']} "
                f"| {row['worst']} ({row['kl_there']:.3f}) |"
            )


if __name__ == "__main__":
    main()
