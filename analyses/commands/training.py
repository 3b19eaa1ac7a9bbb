"""`advantage-probe em` and `advantage-probe dynamics`: what happens to heads while a model learns.

As in `cli.py`, nothing heavy is imported until a command runs, and a user's mistake is one sentence and exit code 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .console import asked, checked, finish, going_on, progress, texts_of
from .options import Json, Out, Overwrite, Seeds, Tables, Text


def numbers(given: str | None, default: tuple[int, ...], option: str) -> tuple[int, ...]:
    """ "42, 7" as (42, 7).

    Raises:
        BadInput: where a part is no whole number.
    """
    from ...hooks.errors import BadInput

    if given is None:
        return default
    try:
        return tuple(int(part) for part in given.split(","))
    except ValueError:
        raise BadInput(f"{option} takes whole numbers with commas between, such as 42,2024, not {given!r}.") from None


def em(
    seeds: Seeds = None,
    steps: Annotated[int, typer.Option("--steps", help="Optimizer steps of each run.")] = 1_000,
    damping: Annotated[float, typer.Option("--damping", help="Part of each closed-form step that is taken.")] = 1.0,
    out: Out = None,
    overwrite: Overwrite = False,
    tables: Tables = "parquet,csv",
    as_json: Json = False,
) -> None:
    """EM against SGD on the sticky chain, with the controls that a claim of a speed-up has to survive.

    Example: advantage-probe em --out em-report
    """
    formats = checked(out, tables, overwrite=overwrite)
    from ..em import experiment as job
    from ..em import report

    with progress("EM against SGD") as note:
        found = job.run(numbers(seeds, job.SEEDS, "--seeds"), steps, damping=damping, progress=note)
    finish(
        lambda folder: report.write(found, folder, formats, asked()),
        out,
        overwrite=overwrite,
        as_json=as_json,
        found=lambda: report.summary(found),
        text=lambda: report.text(found),
        files="figures: {out}/{em,em-values}.{png,svg,pdf}\ntables: {out}/{arms,paired,curves,trajectories}.*",
    )


def dynamics(
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            "--checkpoints", help="A kept run, a folder of several, or of models named checkpoint-N (--text)."
        ),
    ] = None,
    text: Text = None,
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
    tables: Tables = "parquet,csv",
    as_json: Json = False,
) -> None:
    """Frame, precision, pressures, law-following and feedback of training runs, live or from saved checkpoints.

    Example: advantage-probe dynamics --seeds 0,1,2,3,4 --keep runs --out dynamics-report
    """
    formats = checked(out, tables, overwrite=overwrite)
    import tempfile

    from ...hooks.errors import BadInput
    from ..dynamics import examined as job
    from ..dynamics import report
    from ..dynamics.course import load, runs_in
    from ..dynamics.saved_models import models_in
    from ..files.folders import check_writable

    if checkpoints is not None and (keep, tunnel, seeds, steps) != (None, "", None, None):
        raise BadInput("--checkpoints reads finished runs; leave --keep, --tunnel, --seeds and --steps out.")
    if checkpoints is not None and models_in(checkpoints):
        _saved(checkpoints, text, out, formats, overwrite=overwrite, as_json=as_json)
        return
    if text:
        raise BadInput(
            "--text goes with a folder of models named checkpoint-N; runs in a tunnel make their own episodes."
        )
    if keep is not None:
        check_writable(keep, "--keep")
    how = "what was trained is kept: the same line goes on"
    if keep is None and checkpoints is None:
        how = "nothing was kept; with --keep DIR an interrupted run goes on where it was"
    with tempfile.TemporaryDirectory() as temporary, progress("dynamics") as note, going_on(how):
        if checkpoints is not None:
            folders = runs_in(checkpoints)
        else:
            wanted = job.courses(tunnel, numbers(seeds, (0, 1, 2, 3, 4), "--seeds"), steps)
            folders = job.trained(wanted, keep or Path(temporary), note)
        if len({load(folder).but_for_its_seed for folder in folders}) > 1:
            raise BadInput("The runs differ in more than their seed; give runs of one task and recipe.")
        runs = [job.examine(folder, causal=causal, progress=note) for folder in folders]
    finish(
        lambda folder: report.write(runs, folder, formats, asked()),
        out,
        overwrite=overwrite,
        as_json=as_json,
        found=lambda: report.summary(runs),
        text=lambda: report.text(runs),
        files="figure: {out}/dynamics.{png,svg,pdf}\ntables: "
        "{out}/{checkpoints,pressures,following,feedback,steps,causal}.*",
    )


def _saved(
    folder: Path, files: list[str] | None, out: Path | None, formats: Sequence[str], *, overwrite: bool, as_json: bool
) -> None:
    """`--checkpoints` on models of somebody else's run."""
    from ...hooks.errors import BadInput
    from ..dynamics import saved_models as job

    if not files:
        raise BadInput(f"{str(folder)!r} holds models named checkpoint-N; give the text to look at with --text FILE.")
    with progress("dynamics") as note:
        found = job.examine_saved(folder, texts_of(files), note)
    finish(
        lambda made: job.write(found, made, formats, asked()),
        out,
        overwrite=overwrite,
        as_json=as_json,
        found=lambda: job.summary(found),
        text=lambda: job.text(found),
        files="figure: {out}/dynamics.{png,svg,pdf}\ntables: {out}/{checkpoints,pressures}.*",
    )
