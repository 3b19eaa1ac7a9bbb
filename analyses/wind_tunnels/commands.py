"""`advantage-probe tunnel`: list the tunnels, train in one, recompute a trained model's figures.

Nothing heavy is imported until a command runs. Bad input is one sentence on standard error and exit code 2; a check
that failed is 1.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import pandas as pd

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Bayesian wind tunnels: tasks with exact posteriors."
)


@contextmanager
def _one_sentence() -> Iterator[None]:
    from .errors import TunnelError

    try:
        yield
    except (TunnelError, OSError) as error:
        typer.echo(f"advantage-probe tunnel: {error}", err=True)
        raise typer.Exit(2) from None


def with_half_widths(figures: "pd.DataFrame") -> "pd.DataFrame":
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
def list_tunnels() -> None:
    """Every tunnel, its length and outcomes, and whether a trained model is shipped."""
    with _one_sentence():
        from .registry import tunnel, tunnel_names
        from .shipped import shipped_names

        trained = shipped_names()
        for name in tunnel_names():
            task = tunnel(name)
            note = "trained model shipped" if name in trained else ""
            typer.echo(f"{name:<20} {task.length:>3} positions  {len(task.outcomes):>3} outcomes  {note}".rstrip())


@app.command()
def train(
    name: Annotated[str, typer.Argument(help="A tunnel of `list`.")],
    preset: Annotated[
        str, typer.Option(help="tiny, small, paper, or shipped (a shipped model's own recipe).")
    ] = "tiny",
    out: Annotated[Path | None, typer.Option(help="Folder of the run; default: tunnel-NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps: where the model trains.")] = "cpu",
    distilled: Annotated[
        bool | None,
        typer.Option("--distilled/--sampled", help="Exact predictives as targets, or draws; default: the preset's."),
    ] = None,
    watch: Annotated[
        int | None,
        typer.Option("--watch", min=1, help="Watch every head at every n-th step; `report FOLDER` draws them."),
    ] = None,
) -> None:
    """Train a model in a tunnel; a killed run continues with --resume and loses one interval at most."""
    with _one_sentence():
        from .recipes import recipe
        from .registry import tunnel
        from .training import train as run
        from .training import train_watched

        task, chosen = tunnel(name), recipe(name, preset)
        targets = ""
        if distilled is not None:
            chosen = replace(chosen, distilled=distilled)
            targets = " --distilled" if distilled else " --sampled"
        folder = Path(f"tunnel-{name}") if out is None else out
        command = f"advantage-probe tunnel train {name} --preset {preset}{targets} --out {folder}"
        shown = sys.stderr.isatty()
        watched = run if watch is None else partial(train_watched, every=watch)
        _, curve = watched(
            task, chosen, folder, name=name, command=command, resume=resume, progress=shown, device=device
        )
        last = curve[-1]
        typer.echo(
            f"{name}: entropy error {last['entropy_error']:.4f} bits, KL {last['kl']:.5f} bits "
            f"after {last['step']:.0f} steps; written to {folder}"
        )


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(metavar="NAME_OR_FOLDER", help="A shipped model or the folder of a run.")],
    sequences: Annotated[int, typer.Option(min=64, help="Fresh held-out sequences.")] = 2_000,
    positions: Annotated[bool, typer.Option("--positions", help="Also print the table per position.")] = False,
) -> None:
    """Recompute a model's figures (bits), every trivial rival in the rows above; exit code 1 if a check fails."""
    with _one_sentence():
        from .shipped import evaluate as recompute

        result = recompute(model, sequences)
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
    if not all(check.passed for check in result.checks):
        raise typer.Exit(1)
