"""Commands about runs that lie in folders, and about the installation: compare, report, cite, doctor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .console import print_json, progress
from .options import Draws, Json, Seed
from .options import Run as Folder


def add_run_commands(app: typer.Typer) -> None:
    """Add the commands of this file to the command line."""
    for command in (compare, report, cite, convert, doctor):
        app.command()(command)


def compare(
    run_a: Folder,
    run_b: Annotated[Path | None, typer.Argument(help="The other folder; leave out with --null.")] = None,
    null: Annotated[bool, typer.Option("--null", help="Hold one half of RUN_A's sequences against the other.")] = False,
    draws: Draws = 999,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option("--out", help="File for the table: .csv, .parquet or .json.")] = None,
    as_json: Json = False,
) -> None:
    """Which heads changed between two runs: sequence by sequence, all heads at once.

    Example: advantage-probe compare last-week today
    """
    from ...hooks.errors import BadInput
    from ..files.export import check_table, write_table
    from ..intervals.compare import compare as compared
    from ..intervals.compare import halves
    from ..runs.stored import open_run

    if (run_b is None) != null:
        raise BadInput("Give two run folders, or one and --null.")
    if out is not None:
        check_table(out)
    with progress("comparing"):
        first = open_run(run_a)
        result = (
            halves(first, draws=draws, seed=seed)
            if run_b is None
            else compared(first, open_run(run_b), draws=draws, seed=seed)
        )
    if out is not None:
        write_table(result.table, out)
    if as_json:
        found = {"sentence": result.sentence(), "paired": result.paired, "sequences": result.sequences, "draws": draws}
        print_json({**found, "rows": result.table.to_dict("records")})
        return
    print(result.sentence())
    shown = result.table[result.table["changed"]].sort_values("p").head(20)
    if len(shown):
        columns = ["label", "column", "first", "second", "difference", "difference_low", "difference_high", "p"]
        print(shown[columns].to_string(index=False, float_format=lambda value: f"{value:.4g}"))
        print(f"intervals are simultaneous over all heads and columns (95 %); p at least 1/{draws + 1}")


def report(
    folder: Annotated[
        Path, typer.Argument(help="What analyze, watch(history=), dynamics --out or tunnel train --watch wrote.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write it. [default: FOLDER/report.html, or beside a history]"),
    ] = None,
) -> None:
    """Build report.html anew from the files of a run, of a text or of a training.

    Example: advantage-probe report gpt2-book
    """
    from ..page.report import write_report

    print(f"report: {write_report(folder, out)}")


def cite(run: Folder) -> None:
    """A sentence for the methods section of a paper, and BibTeX.

    Example: advantage-probe cite gpt2-book
    """
    from ..runs.cite import citation
    from ..runs.stored import open_run

    print(citation(open_run(run).record))


def convert(
    folder: Annotated[Path, typer.Argument(help="A run or a history that an earlier version wrote.")],
) -> None:
    """Rewrite a folder of an earlier version as this version writes it; a history can then be gone on with.

    Example: advantage-probe convert runs/history
    """
    from ..runs.convert import convert as converted

    print(converted(folder))


def doctor(
    clean: Annotated[
        Path | None, typer.Option("--clean", help="A folder: remove what killed runs left in it, and do nothing else.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run one tiny model per adapter and print how well both laws hold; exit code 1 when one does not.

    Example: advantage-probe doctor
    """
    if clean is not None:
        from ..files.folders import sweep

        gone = sweep(clean)
        print("\n".join(f"removed {path}" for path in gone) or f"nothing was left in {clean}")
        return
    from .doctor import ADAPTERS, examined

    done = []

    def told(row: dict) -> None:
        done.append(row)
        note(len(done), len(ADAPTERS), row["adapter"])
        if not as_json:
            print(
                f"{row['adapter']:48} {row['heads']:3} heads  {row['worst_residual']:8.1e}  {row['verdict']}",
                flush=True,
            )

    with progress("examining", len(ADAPTERS)) as note:
        table = examined(told)
    if as_json:
        print_json({"adapters": table.to_dict("records")})
    if not (table["verdict"] == "ok").all():
        print("something is not as it should be on this machine", file=sys.stderr)
        raise typer.Exit(1)
