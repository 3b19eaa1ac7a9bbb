"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from advantage_probe.analyses.wind_tunnels import registry
from advantage_probe.probe.statistics import COLUMNS

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_every_python_block_runs_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # where the page of the training loop goes
    # the README registers a tunnel of its own, which other tests do too
    monkeypatch.delitem(registry._factories, "loaded-die", raising=False)
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert len(names["heads"]) == 8
    assert names["history"]["step"].unique().tolist() == [0, 2]
    assert "Over training" in (tmp_path / "training.html").read_text(encoding="utf-8")
    assert names["page"].is_file()


def test_every_column_is_explained() -> None:
    table = README.split("## Reading the heads table")[1].split("\n## ")[0]
    explained = {name.strip() for line in re.findall(r"^\| ([a-z_, ]+) \|", table, re.M) for name in line.split(",")}
    assert explained - {"column", "status"} == set(COLUMNS)


def test_every_named_exception_has_its_remedy() -> None:
    import advantage_probe as ap

    named = set(re.findall(r"^\| `(\w+)` \|", README.split("## Exceptions and their remedies")[1], re.M))
    exported = {name for name in ap.__all__ if isinstance(getattr(ap, name), type)}
    assert named == {name for name in exported if issubclass(getattr(ap, name), ap.ProbeError)} - {"ProbeError"}
