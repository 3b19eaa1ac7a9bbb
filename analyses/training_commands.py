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
    from .em import experiment as job
    from .export import check_out, new_folder

    if out is not None:
        check_out(out, overwrite=overwrite)
    with progress("EM against SGD") as note:
        found = job.run(numbers(seeds, job.SEEDS, "--seeds"), steps, damping=damping, progress=note)
    from .em import report

    if out is not None:
        with new_folder(out, overwrite=overwrite) as folder:
            report.write(found, folder)
    if json:
        print(as_json(report.summary(found)))
        return
    print(report.text(found))
    if out is not None:
        print(f"\nfigure: {out}/em.{{png,svg,pdf}}\ntables: {out}/{{arms,paired,curves,trajectories}}.{{parquet,csv}}")


def dynamics(
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            "--checkpoints", help="A kept run, a folder of several, or of models named checkpoint-N (--text)."
        ),
    ] = None,
    text: Annotated[list[str] | None, typer.Option("--text", help="Text file for models named checkpoint-N.")] = None,
    keep: Annotated[
        Path | None, typer.Option("--keep", help="Keep the trained runs here, each under seed-N; a killed one goes on.")
    ] = None,
    tunnel: Annotated[str, typer.Option("--tunnel", help="Task of the runs, a name of `tunnel list`.")] = "",
    seeds: Seeds = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Optimizer steps of each run.")] = None,
    causal: Annotated[
        bool, typer.Option("--causal/--no-causal", help="Also continue with routing frozen and with content frozen.")
    ] = True,
    out: Out = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Frame, precision, pressures, law-following and feedback of training runs, live or from saved checkpoints.

    Example: advantage-probe dynamics --seeds 0,1,2,3,4 --keep runs --out dynamics-report
    """
    import tempfile

    from ..hooks.refusals import BadInput
    from .dynamics import examined as job
    from .dynamics import report
    from .dynamics.course import load, runs_in
    from .dynamics.saved_models import models_in
    from .export import check_out, new_folder

    if out is not None:
        check_out(out, overwrite=overwrite)
    if checkpoints is not None and (keep, tunnel, seeds, steps) != (None, "", None, None):
        raise BadInput("--checkpoints reads finished runs; leave --keep, --tunnel, --seeds and --steps out.")
    if checkpoints is not None and models_in(checkpoints):
        _saved(checkpoints, text, out, overwrite=overwrite, json=json)
        return
    if text:
        raise BadInput(
            "--text goes with a folder of models named checkpoint-N; runs in a tunnel make their own episodes."
        )
    with tempfile.TemporaryDirectory() as temporary, progress("dynamics") as note:
        if checkpoints is not None:
            folders = runs_in(checkpoints)
        else:
            wanted = job.courses(tunnel, numbers(seeds, (0, 1, 2, 3, 4), "--seeds"), steps)
            folders = job.trained(wanted, keep or Path(temporary), note)
        if len({load(folder).but_for_its_seed for folder in folders}) > 1:
            raise BadInput("The runs differ in more than their seed; give runs of one task and recipe.")
        runs = [job.examine(folder, causal=causal, progress=note) for folder in folders]
    if out is not None:
        with new_folder(out, overwrite=overwrite) as folder:
            report.write(runs, folder)
    if json:
        print(as_json(report.summary(runs)))
        return
    print(report.text(runs))
    if out is not None:
        print(f"\nfigure: {out}/dynamics.{{png,svg,pdf}}\ntables: {out}/*.{{parquet,csv}}")


def _saved(folder: Path, files: list[str] | None, out: Path | None, *, overwrite: bool, json: bool) -> None:
    """`--checkpoints` on models of somebody else's run."""
    from ..hooks.refusals import BadInput
    from .corpus import read_text
    from .dynamics import saved_models as job
    from .export import new_folder

    if not files:
        raise BadInput(f"{str(folder)!r} holds models named checkpoint-N; give the text to look at with --text FILE.")
    texts = [(Path(file).name, read_text(file)) for file in files]
    with progress("dynamics") as note:
        found = job.examine_saved(folder, texts, note)
    if out is not None:
        with new_folder(out, overwrite=overwrite) as made:
            job.write(found, made)
    print(as_json(job.summary(found)) if json else job.text(found))
