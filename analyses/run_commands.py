"""Commands about runs that lie in folders, and about the installation: compare, report, cite, doctor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Folder = Annotated[Path, typer.Argument(help="A folder that analyze wrote.")]


def add_run_commands(app: typer.Typer) -> None:
    """Add the commands of this file to the command line."""
    for command in (compare, report, cite, doctor):
        app.command()(command)


def compare(
    run_a: Folder,
    run_b: Annotated[Path | None, typer.Argument(help="The other folder; leave out with --null.")] = None,
    null: Annotated[bool, typer.Option("--null", help="Hold one half of RUN_A's sequences against the other.")] = False,
    draws: Annotated[int, typer.Option("--draws", min=200, help="Exchanges that make the null.")] = 999,
    seed: Annotated[int, typer.Option("--seed", help="Of the exchanges and the halves.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the table here (.csv or .parquet).")] = None,
    as_json: Json = False,
) -> None:
    """Which heads changed between two runs: sequence by sequence, all heads at once.

    Example: advantage-probe compare last-week today
    """
    import json

    from ..hooks.refusals import BadInput
    from .compare import compare as compared
    from .compare import halves
    from .export import jsonable, write_table
    from .stored import open_run

    if (run_b is None) != null:
        raise BadInput("Give two run folders, or one and --null.")
    if out is not None and out.suffix not in (".csv", ".parquet"):
        raise BadInput(f"--out must end in .csv or .parquet, not {str(out)!r}.")
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
        print(json.dumps(jsonable({**found, "rows": result.table.to_dict("records")})))
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
    from .report import write_report

    print(f"report: {write_report(folder, out)}")


def cite(run: Folder) -> None:
    """A sentence for the methods section of a paper, and BibTeX.

    Example: advantage-probe cite gpt2-book
    """
    from .cite import citation
    from .stored import open_run

    print(citation(open_run(run).record))


def doctor(as_json: Json = False) -> None:
    """Run one tiny model per adapter and print how well both laws hold; exit code 1 when one does not.

    Example: advantage-probe doctor
    """
    import json

    from .doctor import examined
    from .export import jsonable

    def told(row: dict) -> None:
        if not as_json:
            print(
                f"{row['adapter']:48} {row['heads']:3} heads  {row['worst_residual']:8.1e}  {row['verdict']}",
                flush=True,
            )

    table = examined(told)
    if as_json:
        print(json.dumps(jsonable({"adapters": table.to_dict("records")})))
    if not (table["verdict"] == "ok").all():
        print("something is not as it should be on this machine", file=sys.stderr)
        raise typer.Exit(1)
