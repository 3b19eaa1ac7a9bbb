"""The repository is the package: what is shipped is what is there."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_package_folder_is_listed_and_nothing_else() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(settings["tool"]["setuptools"]["packages"])
    found = {"advantage_probe"}
    for top in ("hooks", "probe", "analyses"):
        for file in (ROOT / top).rglob("__init__.py"):
            found.add(".".join(("advantage_probe", *file.parent.relative_to(ROOT).parts)))
    assert listed == found


def test_imports_point_downwards_only() -> None:
    floors = {"hooks": 0, "probe": 1, "analyses": 2}
    for top, floor in floors.items():
        for file in (ROOT / top).rglob("*.py"):
            depth = len(file.relative_to(ROOT).parts) - 1
            for line in file.read_text(encoding="utf-8").splitlines():
                words = line.split()
                if len(words) > 3 and words[0] == "from" and words[1].startswith("." * (depth + 1)):
                    target = words[1].lstrip(".").split(".")[0]
                    assert floors.get(target, -1) <= floor, f"{file.relative_to(ROOT)}: {line.strip()}"


def test_everything_that_is_installed_is_pinned_and_torch_first() -> None:
    lines = (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert pins["torch"] == "2.13.0"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *settings["dependencies"],
        *(name for extra in settings["optional-dependencies"].values() for name in extra),
    ]
    known = {name.lower().replace("_", "-") for name in pins}
    for requirement in wanted:
        name = requirement.split(">")[0].split("[")[0].strip().lower().replace("_", "-")
        assert name in known, name


def test_every_shipped_text_is_packed_and_they_stay_small() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["advantage_probe.analyses.inputs"]
    packed = {path for pattern in patterns for path in (ROOT / "analyses" / "inputs").glob(pattern)}
    texts = set((ROOT / "analyses" / "inputs" / "texts").rglob("*.*"))
    assert len([path for path in texts if path.name.startswith("passages-")]) == 5
    assert texts <= packed
    assert sum(path.stat().st_size for path in texts) < 2_000_000
    notes = (ROOT / "analyses" / "inputs" / "texts" / "README.md").read_text(encoding="utf-8")
    assert all(path.name in notes for path in texts if path.name.startswith("passages-"))
