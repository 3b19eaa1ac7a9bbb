"""`advantage-probe tunnel`: list the tunnels, train in one, recompute a trained model's figures.

Nothing heavy is imported until a command runs. Bad input is one sentence on standard error and exit code 2; a check
that failed is 1.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import going_on, print_json, progress
from .options import Device, Json, Sequences

if TYPE_CHECKING:
    import pandas as pd

    from ..wind_tunnels.truth.shipped import Evaluation

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Bayesian wind tunnels: tasks with exact posteriors."
)


def with_half_widths(figures: pd.DataFrame) -> pd.DataFrame:
    """Every column beside its `_ci` column as "mean ± half-width", five places."""
    shown = {}
    for name, column in figures.items():
        if str(name).endswith("_ci"):
            continue
        half = figures.get(f"{name}_ci")
        if half is None:
            shown[name] = ["–" if value != value else f"{value:.5f}" for value in column]
        else:
            shown[name] = [f"{value:.5f} ± {width:.5f}" for value, width in zip(column, half, strict=True)]
    return type(figures)(shown, index=figures.index)


@app.command("list")
def list_tunnels(as_json: Json = False) -> None:
    """Every tunnel, its length and outcomes, and whether a trained model is shipped.

    Example: advantage-probe tunnel list
    """
    from ..wind_tunnels.tasks.registry import tunnel, tunnel_names
    from ..wind_tunnels.training.recipes import task_of
    from ..wind_tunnels.truth.shipped import shipped_names

    rows = []
    for name in tunnel_names():
        task = tunnel(name)
        row: dict[str, Any] = {"tunnel": name, "positions": task.length, "outcomes": len(task.outcomes)}
        models = [model for model in shipped_names() if task_of(model) == name]
        rows.append(row | {"shipped": bool(models), "models": models})
    if as_json:
        print_json({"tunnels": rows})
        return
    for row in rows:
        note = f"trained: {', '.join(row['models'])}" if row["shipped"] else ""
        sizes = f"{row['positions']:>3} positions  {row['outcomes']:>3} outcomes"
        typer.echo(f"{row['tunnel']:<20} {sizes}  {note}".rstrip())


@app.command()
def train(
    name: Annotated[str, typer.Argument(help="A tunnel of `list`.")],
    preset: Annotated[
        str, typer.Option("--preset", help="tiny, small, paper, or shipped (a shipped model's own recipe).")
    ] = "tiny",
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the run. [default: tunnel-NAME]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier result in --out.")] = False,
    device: Device = "cpu",
    distilled: Annotated[
        bool | None,
        typer.Option("--distilled/--sampled", help="Exact predictives as targets, or draws. [default: the preset's]"),
    ] = None,
    watch: Annotated[
        int | None,
        typer.Option("--watch", min=1, help="Watch every head at every n-th step; `report FOLDER` draws them."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model in a tunnel; a killed run continues with --resume and loses one interval at most.

    Example: advantage-probe tunnel train coin --preset tiny --out coin-run
    """
    from ..wind_tunnels.tasks.registry import tunnel
    from ..wind_tunnels.training.checkpoints import make_way
    from ..wind_tunnels.training.recipes import recipe
    from ..wind_tunnels.training.runner import train as run
    from ..wind_tunnels.training.runner import train_watched, usable

    task, chosen = tunnel(name), recipe(name, preset)
    usable(device)  # before anything is put out of the way
    targets = ""
    if distilled is not None:
        chosen = replace(chosen, distilled=distilled)
        targets = " --distilled" if distilled else " --sampled"
    folder = Path(f"tunnel-{name}") if out is None else out
    make_way(folder, resume=resume, overwrite=overwrite)
    command = f"advantage-probe tunnel train {name} --preset {preset}{targets} --out {folder}"
    watched = run if watch is None else partial(train_watched, every=watch)
    with going_on(f"continue with: {command} --resume"), progress("training") as note:
        _, curve = watched(
            task, chosen, folder, name=name, command=command, resume=resume, progress=note, device=device
        )
    last = curve[-1]
    if as_json:
        print_json({"tunnel": name, "folder": str(folder), "command": command, "curve": curve})
        return
    typer.echo(
        f"{name}: entropy error {last['entropy_error']:.4f} bits, KL {last['kl']:.5f} bits "
        f"after {last['step']:.0f} steps; written to {folder}"
    )


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(metavar="NAME_OR_FOLDER", help="A shipped model or the folder of a run.")],
    sequences: Sequences = 2_000,
    positions: Annotated[bool, typer.Option("--positions", help="Also print the table per position.")] = False,
    as_json: Json = False,
) -> None:
    """Recompute a model's figures (bits), every trivial rival in the rows above; exit code 1 if a check fails.

    Example: advantage-probe tunnel evaluate bijection-repeats
    """
    from ..wind_tunnels.truth.shipped import evaluate as recompute

    with progress("evaluating") as note:
        result = recompute(model, sequences, progress=note)
    if as_json:
        print_json(_object(result, sequences))
    else:
        _show(result, sequences, positions)
    if not all(check.passed for check in result.checks):
        raise typer.Exit(1)


def _object(result: Evaluation, sequences: int) -> dict[str, Any]:
    def rows(table: pd.DataFrame) -> list[dict[str, Any]]:
        return table.rename_axis(table.index.name or "reader").reset_index().to_dict("records")

    checks = [
        {"what": it.what, "measured": it.measured, "bound": it.bound, "least": it.least, "passed": it.passed}
        for it in result.checks
    ]
    return {
        "tunnel": result.name,
        "sequences": sequences,
        "unit": "bits",
        "tables": {title: rows(figures) for title, figures in result.tables.items()},
        "positions": rows(result.positions.rename_axis("position")),
        "controls": None if result.controls is None else rows(result.controls),
        "checks": checks,
    }


def _show(result: Evaluation, sequences: int, positions: bool) -> None:
    for title, figures in result.tables.items():
        typer.echo(f"{result.name}: {title} ({sequences} sequences)")
        typer.echo(with_half_widths(figures).to_string())
        typer.echo("")
    if result.controls is not None:
        typer.echo(f"{result.name}: networks without attention, trained alike (recorded; bits)")
        typer.echo(result.controls.to_string(float_format=lambda value: f"{value:.5g}"))
        typer.echo("")
    if positions:
        typer.echo(result.positions.to_string(float_format=lambda value: f"{value:.5f}"))
    for check in result.checks:
        sign = "≥" if check.least else "≤"
        verdict = "passed" if check.passed else "FAILED"
        typer.echo(f"{verdict}: {check.what}: {check.measured:.5f} {sign} {check.bound:.5f}")
