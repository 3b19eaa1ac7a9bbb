"""Print the coverage table: per family the captured calls and the worst residual against autograd, or the refusal.

    .venv/bin/python scripts/figures/coverage_table.py            the table, in Markdown
    .venv/bin/python scripts/figures/coverage_table.py Falcon T5  some families only

Every model is tiny, random and made from its config; nothing is downloaded.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import census


def main(names: list[str]) -> int:
    """Print one row per family; returns how many yielded neither numbers nor a refusal."""
    faults = numbers = 0
    print("| family | attention calls | worst residual | refused because |")
    print("|---|---|---|---|")
    for name in census.FAMILIES:
        if names and not any(wanted.lower() in name.lower() for wanted in names):
            continue
        found = census.examine(name)
        residual = "" if found.refusal else f"{found.residual:.0e}"
        reason = f"`{found.refusal}`: {found.message.split(';')[0]}" if found.refusal else found.fault
        if found.silent:
            reason = (reason + "; " if reason else "") + f"no softmax attention in {', '.join(found.silent)}"
        print(f"| {name} | {found.calls or ''} | {residual} | {reason} |", flush=True)
        faults += found.outcome == "fault"
        numbers += found.outcome == "numbers"
    print(f"\n{numbers} families give numbers, every other one its refusal; {faults} give neither.")
    return faults


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
