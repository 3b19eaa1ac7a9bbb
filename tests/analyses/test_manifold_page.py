"""The page on manifolds: its Python runs in order, its commands parse and finish on few episodes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from terminal import command

PAGE = Path(__file__).parents[2] / "analyses" / "manifolds" / "README.md"
TEXT = PAGE.read_text(encoding="utf-8")
LINES = [
    line.split(" #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.S)
    for line in block.splitlines()
    if line.startswith("advantage-probe")
]
# what needs weights of its own, or runs of other seeds, is only parsed
WHOLE = {"manifold": ("--sequences", "64", "--layer", "1"), "geometry": ("--sequences", "24"), "ablate": ("--top", "1")}


def test_every_python_block_runs_in_order() -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["answer"].word == "count"


@pytest.mark.parametrize("line", LINES)
def test_every_command_is_one(line: str) -> None:
    _, name, *words = line.split()
    named = {word for word in words if word.startswith("--")}
    if {"--beside", "--strip"} & named or "gemma" in words:
        known = command(name, "--help").stdout
        assert all(word in known for word in named), line
        return
    out = words.index("--out") if "--out" in words else len(words)
    short = [*words[:out], *words[out + 2 :], *WHOLE[name]]
    result = command(name, *short, "--json")
    assert result.returncode == 0, (line, result.stderr)
