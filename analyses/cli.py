"""The command line: `advantage-probe`.

This module imports neither torch nor transformers, so that `--help` answers at once; every command loads what it needs.
Errors of the user's input are one sentence on stderr and exit code 2; a failed check is exit code 1.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .commands.console import Interrupted, checked, interruptible, loaded, print_json, progress, tunnels
from .commands.geometry import register as register_geometry
from .commands.interventions import register as register_interventions
from .commands.options import (
    Attention,
    BatchSize,
    Device,
    Dtype,
    Example,
    Json,
    MaxTokens,
    Model,
    Overwrite,
    Revision,
    Tables,
    Text,
    Window,
)
from .commands.runs import add_run_commands
from .commands.training import dynamics, em
from .commands.tunnels import app as tunnel_app

if TYPE_CHECKING:
    import pandas as pd

    from .runs.run import Run

# what a disk or its owner refuses, wherever a file is written
NOT_OURS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="See how cross-entropy reshapes every attention head of a transformer.",
)


@app.command()
def analyze(
    model: Model = None,
    text: Text = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the results; must not exist or be empty.")] = Path(
        "probe-report"
    ),
    example: Example = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    max_tokens: MaxTokens = 4096,
    window: Window = None,
    batch_size: BatchSize = None,
    attention: Attention = None,
    revision: Revision = None,
    targets: Annotated[
        str, typer.Option("--targets", help="all, last (of every window), or a CSV file of positions.")
    ] = "all",
    loss: Annotated[str, typer.Option("--loss", help="ce, or logit-diff: the target's logit less another's.")] = "ce",
    edges: Annotated[int, typer.Option("--edges", min=1, help="Pairs to keep per head and direction.")] = 64,
    check: Annotated[int, typer.Option("--check", min=0, help="Strongest edges to remove for real; 0 for none.")] = 20,
    top: Annotated[int, typer.Option("--top", min=1, help="Heads to print.")] = 12,
    overwrite: Overwrite = False,
    tables: Tables = "parquet,csv",
    as_json: Json = False,
) -> None:
    """Show what the loss on a text does to every head: tables, files and a report.

    Example: advantage-probe analyze openai-community/gpt2 --text book.txt --out gpt2-book
    """
    formats = checked(out, tables, overwrite=overwrite)
    from ..hooks.errors import BadInput
    from .inputs.corpus import start_token
    from .inputs.objective import objective
    from .runs import analyze as job

    if example is not None and model is None and example in tunnels():
        if (targets, loss) != ("all", "ce"):
            raise BadInput("A tunnel has targets and a loss of its own; leave --targets and --loss out.")
        kept = {"edges": edges, "check": check, "top": top}
        _analyze_tunnel(example, text, out, formats, **kept, overwrite=overwrite, as_json=as_json)
        return
    read, texts, name, _ = loaded(
        model, text, example, device=device, dtype=dtype, attention=attention, revision=revision
    )
    items = job.cut(texts, read.model, read.tokenizer, length=window, most=max_tokens)
    offset = int(start_token(read.tokenizer) is not None)
    asked = objective(loss, targets, [title for title, _ in texts], read.tokenizer, items, offset)
    with progress("analysing", len(items)) as note:
        run = job.analyze(
            read.model,
            read.tokenizer,
            items,
            name=name,
            batch_size=batch_size,
            edges=edges,
            check=check,
            asked=asked,
            progress=note,
            record={"revision": read.revision},
        )
    _write(run, out, formats, overwrite=overwrite)
    _show(run, out, top=top, as_json=as_json)


def _analyze_tunnel(
    name: str,
    text: list[str] | None,
    out: Path,
    formats: Sequence[str],
    *,
    edges: int,
    check: int,
    top: int,
    overwrite: bool,
    as_json: bool,
) -> None:
    """A shipped tunnel model on fresh episodes, its heads against the exact posterior."""
    from ..hooks.errors import BadInput
    from .wind_tunnels.truth.against_truth import analyze_tunnel

    if text:
        raise BadInput("A tunnel makes its own episodes; leave --text out.")
    with progress("analysing") as note:
        found = analyze_tunnel(name, edges=edges, check=check, progress=note)
    _write(found.run, out, formats, overwrite=overwrite, more={"truth": found.truth})
    _show(found.run, out, top=top, as_json=as_json)
    if not as_json:
        shown = found.truth.to_string(index=False, float_format=lambda value: f"{value:.3f}")
        print(f"\nagainst the exact posterior of {name}, inside positions:\n{shown}")
        print(
            "r: correlation with the exact predictive entropy; value_r2: held out; p: at most, 200 exchanges of episodes"
        )


def _write(
    run: Run,
    out: Path,
    formats: Sequence[str],
    *,
    overwrite: bool,
    more: dict[str, pd.DataFrame] | None = None,
) -> None:
    from .files.export import write_frame, write_json
    from .files.folders import new_folder
    from .files.latex import heads_table
    from .page.report import html, named_heads

    whole = len(run.frames) + len(run.more) + len(more or {}) + 1
    with new_folder(out, overwrite=overwrite) as folder, progress("writing") as note:
        for place, (title, frame) in enumerate({**run.frames, **(more or {}), **run.more}.items()):
            write_frame(frame, folder / title, formats)
            note(place + 1, whole, title)
        run.maps.save(folder / "maps.safetensors")
        write_json(run.record, folder / "run.json")
        labels, why = named_heads(run)
        caption = f"{why} of {run.record.get('model')}; brackets: pointwise 95 % intervals over windows."
        (folder / "heads.tex").write_text(heads_table(run.heads, labels, caption), encoding="utf-8")
        (folder / "report.html").write_text(html(run), encoding="utf-8")
        note(whole, whole, "report")


def _show(run: Run, out: Path, *, top: int, as_json: bool) -> None:
    if as_json:
        print_json({"record": run.record, "heads": run.heads.to_dict("records")})
        return
    _print_heads(run, top)
    _print_checked(run, top)
    print(f"\nreport: {out / 'report.html'}\ntables: {out}/{{heads,tokens,edges,updates,sequences}}.*")


def _print_checked(run: Run, top: int) -> None:
    """Edges that were removed for real: what was predicted and what the loss did."""
    table = run.more.get("checked")
    if table is None or table.empty:
        return
    names = {"label": "head", "query_token": "query", "key_token": "key", "attention": "attention"}
    shown = table.head(top).rename(columns={**names, "knockout": "predicted"})
    print("\nedges that are worth most, each removed for real (change of the summed loss):")
    places = ["head", "sequence", "query_position", "query", "key_position", "key"]
    columns = [*places, "attention", "predicted", "true", "ratio"]
    print(shown[columns].to_string(index=False, float_format=lambda value: f"{value:.3g}"))


def _print_heads(run: Run, top: int) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ..probe.columns import columns_of
    from .files.numbers import number

    names = columns_of("terminal")
    ranked = run.heads.sort_values("routing_pressure", ascending=False).head(top)
    count = len(run.heads)
    table = Table(title=escape(f"{run.record['model']}: {min(top, count)} of {count} heads, strongest routing first"))
    for name in ("head", *names, "status"):
        table.add_column(name, justify="left" if name in ("head", "status") else "right", no_wrap=True)
    for row in ranked.to_dict("records"):
        cells = [str(row["label"])]
        for name in names:
            cell = number(row[name])
            if name == "routing_pressure" and row[f"{name}_low"] == row[f"{name}_low"]:
                cell += f" [{number(row[name + '_low'])}, {number(row[name + '_high'])}]"
            cells.append(cell.replace("[", "\\["))
        table.add_row(*cells, str(row["status"]))
    wide = None if sys.stdout.isatty() else 140
    Console(width=wide, legacy_windows=False).print(table)
    said = ranked["interval"].astype(str).iloc[0] if len(ranked) else "ok"
    if said.startswith("none"):
        print(f"no intervals ({said.removeprefix('none: ')})")
    else:
        print(f"brackets: pointwise 95 % interval over windows{'' if said == 'ok' else f' ({said})'}")


@app.command()
def verify(
    model: Model = None,
    text: Text = None,
    example: Example = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    max_tokens: MaxTokens = 128,
    attention: Attention = None,
    as_json: Json = False,
) -> None:
    """Hold both laws against the model's own autograd on a piece of text; exit code 1 when they fail.

    Example: advantage-probe verify ./my-model --text page.txt
    """
    from .inputs.corpus import batches
    from .runs import analyze as job

    read, texts, name, _ = loaded(model, text, example, device=device, dtype=dtype, attention=attention)
    items = job.cut(texts, read.model, read.tokenizer, length=None, most=max_tokens)
    batch = next(batches(items[:1], 1, 0))
    from ..probe.law.verify import verify as check

    place = next(read.model.parameters()).device
    with progress("verifying"):
        table = check(
            read.model,
            {"input_ids": batch.ids.to(place), "use_cache": False},
            loss=lambda result: job.cross_entropy(result.logits, batch.targets.to(place)) / batch.count,
        )
    failed = table[table["verdict"] == "fails"]
    numbers = ["query_residual", "key_residual", "value_residual"]
    worst = float(table[numbers].max().max())
    if as_json:
        print_json({"worst": worst, "failed": len(failed), "heads": table.to_dict("records")})
    else:
        shown = table.groupby("module", sort=False, observed=True)[numbers].max()
        print(shown.to_string(float_format=lambda value: f"{value:.1e}"))
        verdict = "both laws hold" if failed.empty else f"the law FAILS on {len(failed)} heads"
        if not (table["verdict"] == "ok").any() and failed.empty:
            verdict = "nothing was checked: no gradient reached any head"
        print(f"\n{name}: {len(table)} heads, worst residual {worst:.1e}: {verdict}")
    if not failed.empty or not (table["verdict"] == "ok").any():
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the version.

    Example: advantage-probe version
    """
    from .. import __version__

    print(__version__)


app.add_typer(tunnel_app, name="tunnel")
register_geometry(app)
register_interventions(app)
add_run_commands(app)
app.command()(em)
app.command()(dynamics)


def main() -> None:
    """Entry point: typed refusals become one sentence and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        with interruptible():
            app(prog_name="advantage-probe")
    except Interrupted as end:
        print(f"advantage-probe: interrupted; {end.how}.", file=sys.stderr)
        sys.exit(128 + end.number)
    except OSError as error:
        if error.errno not in NOT_OURS:
            raise
        where = f" ({error.filename})" if error.filename else ""
        print(f"advantage-probe: {error.strerror}{where}; make room or choose another folder.", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        if "advantage_probe.hooks.errors" in sys.modules:
            from ..hooks.errors import ProbeError

            if isinstance(error, ProbeError):
                print(f"advantage-probe: {error}", file=sys.stderr)
                sys.exit(2)
        raise


if __name__ == "__main__":
    main()
