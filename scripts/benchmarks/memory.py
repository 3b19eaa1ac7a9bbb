"""How the memory of a watch grows with the length of the sequence: peak resident memory, watched less unwatched.

One layer, GPT-2 small's width, one step per process; the exponent is the slope of log(extra) over log(T).

    python scripts/benchmarks/memory.py --lengths 1024 2048 4096 8192 16384
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

SCRIPT = Path(__file__).with_name("overhead.py")


def peaks(length: int, detail: str, threads: int) -> dict[str, float]:
    """Peak resident memory in MiB, unwatched and watched, at one length."""
    command = [sys.executable, str(SCRIPT), "--json", "--length", str(length), "--layers", "1", "--vocabulary", "800"]
    command += ["--rounds", "1", "--threads", str(threads), "--contenders", "unwatched", detail]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(result.stdout)["rows"]
    return {name: row["peak_mib"] for name, row in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--detail", choices=["heads", "tokens", "edges"], default="heads")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if len(options.lengths) < 2 or min(options.lengths) < 1:
        parser.error("give at least two positive lengths")
    print("| T | unwatched MiB | watched MiB | extra MiB |\n|---|---|---|---|")
    extra = []
    for length in options.lengths:
        found = peaks(length, options.detail, options.threads)
        extra.append(found[options.detail] - found["unwatched"])
        print(f"| {length} | {found['unwatched']:.0f} | {found[options.detail]:.0f} | {extra[-1]:.0f} |", flush=True)
    if min(extra) > 0:
        # the libraries that the probe itself loads are a constant: growth is what comes on top of the shortest length
        slope = np.polyfit(np.log(options.lengths), np.log(extra), 1)[0]
        print(f"exponent of the extra memory in T, by least squares on logarithms: {slope:.2f}")
    else:
        print("exponent: not defined, the extra memory is within the noise at the shortest length")


if __name__ == "__main__":
    main()
