"""What commands share: a progress bar, how an interrupt ends, how results are printed and written, and from what the user
named to a model and its texts.

Nothing heavy is imported until a command runs.
"""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Note = Callable[[int, int, str], None]


class Interrupted(BaseException):
    """Ctrl-C or a termination signal; `how` tells the user what is left and how to go on."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.how = "nothing was written; the same line starts again"


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into `Interrupted`, so that temporary folders vanish; a second one kills."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Interrupted(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def going_on(how: str) -> Iterator[None]:
    """What an interrupt of the block says instead of "nothing was written"."""
    try:
        yield
    except Interrupted as end:
        end.how = how
        raise


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Note]:
    """A bar on stderr, told (done, in all, note); nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, whole, note: None
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


def asked() -> str:
    """The line that the user typed, for captions."""
    return shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "advantage-probe"), *sys.argv[1:]])


def print_json(value: Any) -> None:
    """One object on one line, NaN and infinities as null."""
    import json

    from ..files.export import jsonable

    print(json.dumps(jsonable(value)))


def checked(out: Path | None, tables: str, *, overwrite: bool) -> Sequence[str]:
    """The formats of `--tables`; a destination that cannot be had is refused before any work is done."""
    from ..files.export import wanted_tables
    from ..files.folders import check_out

    formats = wanted_tables(tables)
    if out is not None:
        check_out(out, overwrite=overwrite)
    return formats


def finish(
    write: Callable[[Path], None],
    out: Path | None,
    *,
    overwrite: bool,
    as_json: bool,
    found: Callable[[], Any],
    text: Callable[[], str],
    files: str,
) -> None:
    """Print `found` as JSON or `text`, then let `write` fill the folder: a full disk costs the files, not the figures.

    Args:
        files: what lies where afterwards; {out} is the folder.
    """
    from ..files.folders import new_folder

    if as_json:
        print_json(found())
    else:
        print(text(), flush=True)
    if out is None:
        return
    with new_folder(out, overwrite=overwrite) as folder:
        write(folder)
    if not as_json:
        print("\n" + files.replace("{out}", str(out)))


def model_and_texts(
    model: str | None, text: list[str] | None, example: str | None, *, needs_text: bool = True
) -> tuple[str, list[tuple[str, str]], str]:
    """What to load, the texts (name, text), and the name that the record shows."""
    from ...hooks.errors import BadInput
    from ..inputs import examples

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
    return model, texts_of(files), name


def texts_of(files: Sequence[str]) -> list[tuple[str, str]]:
    """Name and text of every file; raises `BadInput` as `read_text`."""
    from ...probe.tables import readable
    from ..inputs.corpus import read_text

    return [(readable(Path(file).name) if file != "-" else "standard input", read_text(file)) for file in files]


def loaded(
    model: str | None,
    text: list[str] | None,
    example: str | None,
    *,
    device: str,
    dtype: str,
    attention: str | None = None,
    revision: str | None = None,
    needs_text: bool = True,
) -> tuple[Any, list[tuple[str, str]], str, str]:
    """The loaded model, its texts, its name, and what is known of the origin of its weights ("" for nothing)."""
    from ..inputs.loading import load
    from ..inputs.precision import origin

    source, texts, name = model_and_texts(model, text, example, needs_text=needs_text)
    with progress("loading", 1) as note:
        found = load(source, dtype=dtype, device=device, implementation=attention, revision=revision)
        note(1, 1, name or source)
    return found, texts, name or source, origin(source)


def of_tunnel(model: str | None, example: str | None) -> str | None:
    """The shipped tunnel model or the run's folder that the user named; None for any other model."""
    if model is None:
        return example if example in tunnels() else None
    return model if example is None and (Path(model) / "card.json").is_file() else None


def tunnels() -> tuple[str, ...]:
    from ..wind_tunnels.truth.shipped import shipped_names

    return tuple(shipped_names())
