"""What the pages show is what happens."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import zoo
from terminal import command

import advantage_probe as ap
from advantage_probe.analyses.dynamics import course, examined
from advantage_probe.analyses.wind_tunnels import errors
from advantage_probe.analyses.wind_tunnels.tasks import registry
from advantage_probe.analyses.wind_tunnels.training import recipes
from advantage_probe.analyses.wind_tunnels.training.models import Shape
from advantage_probe.probe.columns import HEADS, SUMS
from advantage_probe.probe.tables import HISTORY

ROOT = Path(__file__).parent.parent
PAGES = {
    str(page.relative_to(ROOT)): page.read_text(encoding="utf-8")
    for page in (ROOT / "README.md", *sorted(ROOT.glob("[a-z]*/**/README.md")))
    if not {".venv", "build"} & set(page.parts)
}
HEADS_PAGE, HOOKS_PAGE = PAGES["probe/README.md"], PAGES["hooks/README.md"]


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.S)


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if python_blocks(page)])
def test_every_python_block_of_a_page_runs_in_order(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # where the page of the training loop goes
    # a page registers a tunnel of its own, which other tests do too
    monkeypatch.delitem(registry._factories, "loaded-die", raising=False)
    names: dict[str, Any] = {}
    for block in python_blocks(PAGES[name]):
        exec(compile(block, name, "exec"), names)
    if name == "README.md":
        assert len(names["heads"]) == 8
        assert names["history"]["step"].unique().tolist() == [0, 2]
        assert "Over training" in (tmp_path / "training.html").read_text(encoding="utf-8")
    if name == "probe/README.md":
        assert names["page"].is_file()


def test_no_page_lost_its_blocks() -> None:
    assert sum(len(python_blocks(page)) for page in PAGES.values()) >= 12
    assert len(PAGES["README.md"].splitlines()) <= 350


def test_links_between_pages_and_pictures_lead_somewhere() -> None:
    for name, page in PAGES.items():
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page):
            assert (ROOT / name).parent.joinpath(target).exists(), f"{name}: {target}"


def test_every_script_that_a_page_names_is_there() -> None:
    for name, page in PAGES.items():
        for script in re.findall(r"scripts/[\w/-]+(?:\.\w+)?", page):
            assert (ROOT / script).exists(), f"{name}: {script}"


def test_the_table_of_the_columns_is_the_one_that_the_script_prints() -> None:
    printed = subprocess.run(
        [sys.executable, ROOT / "scripts" / "figures" / "columns_table.py"], capture_output=True, text=True, check=True
    ).stdout
    assert printed.count("\n") == len(HEADS) + 2
    assert printed in HEADS_PAGE


def test_every_named_exception_has_its_remedy() -> None:
    page = HOOKS_PAGE.split("## Exceptions and their remedies")[1]
    rows = dict(re.findall(r"^\| `(\w+)` \| .+? \| (.+?) \|$", page, re.M))
    raised = set()
    for file in (file for top in ("hooks", "probe", "analyses") for file in (ROOT / top).rglob("*.py")):
        classes = [node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.ClassDef)]
        raised |= {
            it.name for it in classes if re.search(r"\w*Error\b|\bException\b", " ".join(map(ast.unparse, it.bases)))
        }
    assert set(rows) == raised - {"ProbeError"}
    assert all(rows.values())
    assert all(issubclass(getattr(errors, name, getattr(ap, name, None)), ap.ProbeError) for name in rows)


def commands() -> list[str]:
    blocks = [block for page in PAGES.values() for block in re.findall(r"```bash\n(.*?)```", page, re.S)]
    return [line.split(" #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


# what makes a line of a page small enough for a test; nothing else of it is changed but the model's name
SMALLER = {
    "tunnel evaluate": "--sequences 64",
    "tunnel train": "",
    "tunnel list": "",
    "em": "--seeds 1,2 --steps 2",
    "dynamics": "--no-causal",
    "dynamics --seeds": "--seeds 3 --steps 40",
    "manifold": "--length 8 --count 10 --prompts passages.txt",
    "manifold --example bijection-repeats": "--sequences 16 --no-exchanged",
    "manifold --example bijection-repeats --group": "--sequences 64 --layer 1",
    "manifold --example bijection-repeats-4 --group": "--sequences 64 --layer 1",
    "manifold ./my-model --group": "--length 8 --prompts many.txt",
    "geometry --example": "--sequences 24",
    "ablate": "--sequences 12 --top 1 --directions 10",
    "geometry": "--length 8 --count 10 --prompts passages.txt",
    "in-context": "--per 10",
    "analyze": "--window 16",
    "analyze --example bijection-repeats": "",
    "verify": "",
    "report": "",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with everything that the pages' lines name, all of it tiny."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = tuple("abcdefghijklmnopqrstuvw")
    known = ["?", ".", ",", ":", "foo", "bar", "red", "blue", *words]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    for name in ("my-model", *(f"trainer-output/checkpoint-{step}" for step in (1, 2, 3))):
        zoo.llama().save_pretrained(tmp_path / name)
        PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="?", pad_token="?").save_pretrained(tmp_path / name)
    passages = [" ".join(words[start * step % len(words)] for step in range(12)) + " ." for start in range(1, 16)]
    for name in ("book.txt", "page.txt", "passages.txt"):
        (tmp_path / name).write_text("\n\n".join(passages), encoding="utf-8")
    many = [
        " ".join(words[(start * step + start // 22) % len(words)] for step in range(12)) + " ."
        for start in range(1, 80)
    ]
    (tmp_path / "many.txt").write_text("\n\n".join(many), encoding="utf-8")
    tiny = recipes.Recipe(Shape("llama", 1, 2, 16), steps=40, batch=4, warm_up=5)
    monkeypatch.setitem(recipes.PRESETS, "tiny", replace(tiny, steps=10))
    monkeypatch.setattr(examined, "SMALL", course.Course("bijection-repeats", tiny, {"symbols": 4, "pairs": 5}))
    monkeypatch.setattr(examined, "KINDS", ("own",))
    monkeypatch.setattr(examined, "SEQUENCES", 8)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_every_shell_line_runs(place: Path) -> None:
    lines = commands()
    assert len(lines) >= 15
    for line in lines:
        program, *words = line.split()
        if program != "advantage-probe":
            script = ROOT / program
            assert os.access(script, os.X_OK), line
            if script.suffix == ".py" and "FOLDER" not in words:
                done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr
            else:  # sets up an environment, or trains for minutes
                check = [sys.executable, "-m", "py_compile"] if script.suffix == ".py" else ["bash", "-n"]
                subprocess.run([*check, script], check=True)
            continue
        named = line.removeprefix("advantage-probe ").replace("--example gemma", "./my-model")
        named = named.replace("openai-community/gpt2", "./my-model")
        fitting = [start for start in SMALLER if named.startswith(start)]
        assert fitting, line
        smaller = SMALLER[max(fitting, key=len)]
        smaller += " --no-causal" if named.startswith("dynamics --seeds") else ""
        result = command(*named.split(), *("" if "trainer-output" in line else smaller).split())
        if named == "analyze --example bijection-repeats":  # the folder is there from the line before
            assert result.returncode == 2
            result = command(*named.split(), "--overwrite")
        assert result.returncode == 0, (line, result.stderr)
    every_table_is_explained(place)


def every_table_is_explained(place: Path) -> None:
    """The tables that those lines wrote have the columns that the page explains, no more and no fewer."""
    page = HEADS_PAGE.split("The columns of the other tables")[1].split("</details>")[0]
    identity = set(re.findall(r"`(\w+)`", page.split("Labels are")[0]))
    explained: dict[str, set[str]] = {}
    for table, names in re.findall(r"^\| (\w+) \| ([\w, …]+) \|", page, re.M)[1:]:
        if table not in ("sequences", "history"):
            explained.setdefault(table, set()).update(name.strip(" …") for name in names.split(","))
    folders = [place / "gpt2-book", place / "probe-report"]
    for table, names in explained.items():
        file = next(folder / f"{table}.parquet" for folder in folders if (folder / f"{table}.parquet").is_file())
        found = {name for name in pd.read_parquet(file).columns if not re.fullmatch(r"update_[1-9]\d*", name)}
        assert found - identity == names - identity, table
    heads = {re.sub("_(low|high)$", "", name) for name in pd.read_parquet(folders[0] / "heads.parquet").columns}
    assert heads - identity - {"status", "interval"} == set(HEADS)
    sums = pd.read_parquet(folders[0] / "sequences.parquet").columns
    assert set(sums) - identity - {"sequence"} == set(SUMS)
    told = set(re.search(r"^\| history \| ([\w, ]+) \|", page, re.M)[1].replace(" ", "").split(","))  # type: ignore[index]
    assert set(HISTORY) - identity - {"status"} - set(HEADS) == told
