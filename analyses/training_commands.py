"""`advantage-probe em` and `advantage-probe dynamics`: what happens to heads while a model learns.

As in `cli.py`, nothing heavy is imported until a command runs, and a user's mistake is one sentence and exit code 2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

Seeds = Annotated[str | None, typer.Option("--seeds", help="Whole numbers with commas between. [default: five]")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder for figure and tables; must not exist or be empty.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier result in --out.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, whole, note: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(
        *columns, TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=Console(stderr=True)
    ) as bar:
        task = bar.add_task(title, total=None, note="")
        yield lambda done, whole, note: bar.update(task, completed=done, total=whole, note=note)


def numbers(given: str | None, default: tuple[int, ...], option: str) -> tuple[int, ...]:
    """ "42, 7" as (42, 7).

    Raises:
        BadInput: where a part is no whole number.
    """
    from ..hooks.refusals import BadInput

    if given is None:
        return default
    try:
        return tuple(int(part) for part in given.split(","))
    except ValueError:
        raise BadInput(f"{option} takes whole numbers with commas between, such as 42,2024, not {given!r}.") from None


def as_json(value: Any) -> str:
    """One object, NaN and infinities as null."""
    import json

    from .export import jsonable

    return json.dumps(jsonable(value))


def em(
    seeds: Seeds = None,
    steps: Annotated[int, typer.Option("--steps", help="Iterations of every arm.")] = 1_000,
    damping: Annotated[float, typer.Option("--damping", help="Part of each closed-form step that is taken.")] = 1.0,
    out: Out = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """EM against SGD on the sticky chain, with the controls that a claim of a speed-up has to survive.

    Example: advantage-probe em --out em-report
    """
    from . import em as job
    from .export import check_out, new_folder

    if out is not None:
        check_out(out, overwrite=overwrite)
    with progress("EM against SGD") as note:
        found = job.run(numbers(seeds, job.SEEDS, "--seeds"), steps, damping=damping, progress=note)
    from . import em_report as report

    if out is not None:
        with new_folder(out, overwrite=overwrite) as folder:
            report.write(found, folder)
    if json:
        print(as_json(report.summary(found)))
        return
    print(report.text(found))
    if out is not None:
        print(f"\nfigure: {out}/em.{{png,svg,pdf}}\ntables: {out}/{{arms,paired,curves,trajectories}}.{{parquet,csv}}")
