"""What commands share: a progress bar, and from what the user named to a model and its texts.

Nothing heavy is imported until a command runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr; plain lines, at most one per tenth, where stderr is no terminal."""
    if not sys.stderr.isatty():
        shown = [-1]

        def plain(done: int, whole: int, note: str) -> None:
            tenth = done * 10 // max(whole, 1)
            if tenth > shown[0]:
                shown[0] = tenth
                print(f"{title}: {done}/{whole} {note}", file=sys.stderr, flush=True)

        yield plain
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(
        *columns, TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=Console(stderr=True)
    ) as bar:
        task = bar.add_task(title, total=total, note="")

        def draw(done: int, whole: int, note: str) -> None:
            bar.update(task, completed=done, total=whole, note=note)

        yield draw


def model_and_texts(
    model: str | None, text: list[str] | None, example: str | None, *, needs_text: bool = True
) -> tuple[str, list[tuple[str, str]], str]:
    """What to load, the texts (name, text), and the name that the record shows."""
    from ..hooks.refusals import BadInput
    from ..probe.frames import readable
    from . import examples
    from .corpus import read_text

    name = model or ""
    files = list(text or [])
    if example is not None:
        if example not in examples.EXAMPLES:
            known = ", ".join((*examples.EXAMPLES, *tunnels()))
            raise BadInput(f"--example must be one of {known}, not {example!r}.")
        if model is not None:
            raise BadInput("Give a model or --example, not both.")
        with progress(f"preparing {example}") as note:
            if example == "gemma":
                folder, name = examples.gemma(note), "gemma-3-270m"
                files = files or [str(examples.text_file("declaration.txt"))]
            else:
                folder, name = examples.cache_folder() / "sticky-chain", "sticky-chain"
                if not (folder / "text.txt").is_file():
                    examples.sticky(folder, note)
                files = files or [str(folder / "text.txt")]
        model = str(folder)
    if model is None:
        raise BadInput("Name a model (a folder or a hub name), or say --example sticky or --example gemma.")
    if not files and needs_text:
        files = [str(examples.text_file("declaration.txt"))]
    texts = [(readable(Path(file).name) if file != "-" else "standard input", read_text(file)) for file in files]
    return model, texts, name


def tunnels() -> tuple[str, ...]:
    from .wind_tunnels.shipped import shipped_names

    return tuple(shipped_names())
