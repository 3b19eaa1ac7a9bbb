"""The repository is the package: what is shipped is what is there, and its rooms depend on one another one way only."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import advantage_probe as ap

ROOT = Path(__file__).parent.parent
FLOORS = {"hooks": 0, "probe": 1, "analyses": 2}


def modules() -> dict[str, Path]:
    """Every module of the package by its name below the package."""
    files = (file for top in FLOORS for file in (ROOT / top).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imports(name: str, file: Path, known: dict[str, Path]) -> Iterator[tuple[str, bool]]:
    """The modules of the package that a module imports, and whether it does so as soon as it is loaded."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    late: set[ast.AST] = set()
    for node in ast.walk(tree):
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or typing:
            late |= set(ast.walk(node))
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *([node.module] if node.module else [])]
            for entry in node.names:
                for target in (".".join([*base, entry.name]), ".".join(base)):
                    if target in known:
                        yield target, node not in late
                        break


def room(name: str) -> str:
    """hooks and probe are a room each; every folder of analyses is one."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "analyses" else parts[0]


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """Some circle of a directed graph, or nothing."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return path[path.index(node) :]
        if node in done:
            return []
        found = next((way for other in sorted(arrows.get(node, ())) if (way := walk(other, [*path, node]))), [])
        done.add(node)
        return found

    return next((way for node in sorted(arrows) if (way := walk(node, []))), [])


def test_imports_point_downwards_only() -> None:
    known = modules()
    for name, file in known.items():
        for target, _ in imports(name, file, known):
            assert FLOORS[target.split(".")[0]] <= FLOORS[name.split(".")[0]], f"{name} imports {target}"


def test_no_module_and_no_room_stands_in_a_circle() -> None:
    known = modules()
    between_modules: dict[str, set[str]] = {}
    between_rooms: dict[str, set[str]] = {}
    for name, file in known.items():
        for target, _ in imports(name, file, known):
            if file.name != "__init__.py":  # a room's front door names what lies in it
                between_modules.setdefault(name, set()).add(target)
            if room(name) != room(target):
                between_rooms.setdefault(room(name), set()).add(room(target))
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]  # the search finds what there is
    assert circle(between_modules) == []
    assert circle(between_rooms) == []


def test_nothing_lies_loose_in_analyses_but_the_command_line() -> None:
    assert {file.name for file in (ROOT / "analyses").glob("*.py")} == {"__init__.py", "cli.py"}


def test_every_package_folder_is_found_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "shipping"))
    listed = importlib.import_module("packages").packages(str(ROOT))
    below = (file for top in FLOORS for file in (ROOT / top).rglob("__init__.py"))
    found = {".".join(("advantage_probe", *file.parent.relative_to(ROOT).parts)) for file in below}
    assert set(listed) == {"advantage_probe", *found}
    assert len(listed) == len(set(listed))


@pytest.mark.slow
def test_a_wheel_holds_every_module_text_and_model_and_runs_from_elsewhere(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    subprocess.run([*build], cwd=ROOT, check=True, capture_output=True)
    wheel = next(tmp_path.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    tracked = subprocess.run(["git", "ls-files", *FLOORS], cwd=ROOT, capture_output=True, text=True, check=True)
    needed = {f"advantage_probe/{name}" for name in tracked.stdout.split() if not name.endswith("README.md")}
    assert needed - held == set()
    assert not any(name.startswith(("hooks/", "probe/", "analyses/", "tests/", "scripts/")) for name in held)
    code = "import advantage_probe as ap; from advantage_probe.analyses.cli import main; print(ap.__file__); main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "tunnel", "list"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "installed"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "installed"))
    assert "bijection-repeats" in done.stdout


def test_names_of_the_last_release_still_import_and_say_where_they_went() -> None:
    for old, new in ap._MOVED.items():
        with pytest.warns(DeprecationWarning, match=f"is now advantage_probe.{new}"):
            sys.modules.pop(f"advantage_probe.{old}", None)
            found = importlib.import_module(f"advantage_probe.{old}")
        assert found is importlib.import_module(f"advantage_probe.{new}")
        assert found.__spec__ is not None
        assert found.__spec__.name == f"advantage_probe.{new}"


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


def test_every_shipped_text_is_described_and_they_stay_small() -> None:
    texts = set((ROOT / "analyses" / "inputs" / "texts").rglob("*.*"))
    assert len([path for path in texts if path.name.startswith("passages-")]) == 5
    assert sum(path.stat().st_size for path in texts) < 2_000_000
    notes = (ROOT / "analyses" / "inputs" / "texts" / "README.md").read_text(encoding="utf-8")
    assert all(path.name in notes for path in texts if path.name.startswith("passages-"))
