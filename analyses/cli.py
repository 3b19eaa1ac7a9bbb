"""The command line: `advantage-probe`.

This module imports neither torch nor transformers, so that `--help` answers at once; every command loads what it needs.
Errors of the user's input are one sentence on stderr and exit code 2; a failed check is exit code 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import model_and_texts, progress, tunnels
from .geometry_commands import register as register_geometry
from .run_commands import add_run_commands
from .training_commands import dynamics, em
from .wind_tunnels.commands import app as tunnel_app

if TYPE_CHECKING:
    from .analyze import Run

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="See how cross-entropy reshapes every attention head of a transformer.",
)


Model = Annotated[str | None, typer.Argument(help="A local folder or a hub name; leave out with --example.")]
Text = Annotated[
    list[str] | None, typer.Option("--text", help="Text file, UTF-8; may be given several times; - is stdin.")
]
Example = Annotated[
    str | None, typer.Option("--example", help="At hand without a network: gemma, sticky, or a shipped tunnel.")
]
Device = Annotated[str, typer.Option("--device", help="Where to run: cpu, cuda, cuda:1, mps …")]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16 or float64.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Analyse at most this many tokens of the text.")]
Window = Annotated[
    int | None, typer.Option("--window", help="Tokens per window, at most the model's context. [default: 256]")
]
BatchSize = Annotated[int | None, typer.Option("--batch-size", min=1, help="Windows at once. [default: by memory]")]
Attention = Annotated[str | None, typer.Option("--attention", help="Attention implementation, such as sdpa or eager.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


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
    targets: Annotated[
        str, typer.Option("--targets", help="all, last (of every window), or a CSV file of positions.")
    ] = "all",
    loss: Annotated[str, typer.Option("--loss", help="ce, or logit-diff: the target's logit less another's.")] = "ce",
    edges: Annotated[int, typer.Option("--edges", min=1, help="Pairs to keep per head and direction.")] = 64,
    top: Annotated[int, typer.Option("--top", min=1, help="Heads to print.")] = 12,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier result in --out.")] = False,
    as_json: Json = False,
) -> None:
    """Show what the loss on a text does to every head: tables, files and a report.

    Example: advantage-probe analyze openai-community/gpt2 --text book.txt --out gpt2-book
    """
    from ..hooks.refusals import BadInput
    from . import analyze as job
    from .corpus import start_token
    from .export import check_out
    from .loading import load
    from .objective import objective

    check_out(out, overwrite=overwrite)
    if example is not None and model is None and example in tunnels():
        if (targets, loss) != ("all", "ce"):
            raise BadInput("A tunnel has targets and a loss of its own; leave --targets and --loss out.")
        _analyze_tunnel(example, text, out, edges=edges, top=top, overwrite=overwrite, as_json=as_json)
        return
    folder, texts, name = model_and_texts(model, text, example)
    with progress("loading", 1) as note:
        loaded = load(folder, dtype=dtype, device=device, implementation=attention)
        note(1, 1, name)
    items = job.cut(texts, loaded.model, loaded.tokenizer, length=window, most=max_tokens)
    offset = int(start_token(loaded.tokenizer) is not None)
    asked = objective(loss, targets, [title for title, _ in texts], loaded.tokenizer, items, offset)
    with progress("analysing", len(items)) as note:
        run = job.analyze(
            loaded.model,
            loaded.tokenizer,
            items,
            name=name,
            batch_size=batch_size,
            edges=edges,
            asked=asked,
            progress=note,
            record={"revision": loaded.revision},
        )
    _write(run, out, overwrite=overwrite)
    _show(run, out, top=top, as_json=as_json)


def _analyze_tunnel(
    name: str, text: list[str] | None, out: Path, *, edges: int, top: int, overwrite: bool, as_json: bool
) -> None:
    """A shipped tunnel model on fresh episodes, its heads against the exact posterior."""
    from ..hooks.refusals import BadInput
    from .against_truth import analyze_tunnel
    from .export import write_frame

    if text:
        raise BadInput("A tunnel makes its own episodes; leave --text out.")
    with progress("analysing") as note:
        found = analyze_tunnel(name, edges=edges, progress=note)
    _write(found.run, out, overwrite=overwrite, more={"truth": lambda stem: write_frame(found.truth, stem)})
    _show(found.run, out, top=top, as_json=as_json)
    if not as_json:
        shown = found.truth.to_string(index=False, float_format=lambda value: f"{value:.3f}")
        print(f"\nagainst the exact posterior of {name}, inside positions:\n{shown}")
        print(
            "r: correlation with the exact predictive entropy; value_r2: held out; p: at most, 200 exchanges of episodes"
        )


def _write(run: Run, out: Path, *, overwrite: bool, more: dict[str, Callable[[Path], None]] | None = None) -> None:
    from .export import new_folder, write_frame, write_json
    from .latex import heads_table
    from .report import html, named_heads

    with new_folder(out, overwrite=overwrite) as folder, progress("writing", 5) as note:
        for place, (title, frame) in enumerate(run.frames.items()):
            write_frame(frame, folder / title)
            note(place + 1, 5, title)
        for title, write in (more or {}).items():
            write(folder / title)
        for title, frame in run.more.items():
            write_frame(frame, folder / title)
        run.maps.save(folder / "maps.safetensors")
        write_json(run.record, folder / "run.json")
        labels, why = named_heads(run)
        caption = f"{why} of {run.record.get('model')}; brackets: pointwise 95 % bootstrap intervals over windows."
        (folder / "heads.tex").write_text(heads_table(run.heads, labels, caption), encoding="utf-8")
        (folder / "report.html").write_text(html(run), encoding="utf-8")
        note(5, 5, "report")


def _show(run: Run, out: Path, *, top: int, as_json: bool) -> None:
    if as_json:
        import json

        from .export import jsonable

        print(json.dumps(jsonable({"record": run.record, "heads": run.heads.to_dict("records")})))
        return
    _print_heads(run, top)
    print(f"\nreport: {out / 'report.html'}\ntables: {out}/{{heads,tokens,edges,updates,sequences}}.{{parquet,csv}}")


def _print_heads(run: Run, top: int) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    names = ("routing_pressure", "content_relative", "alignment", "coherence", "effective_keys", "law_residual")
    ranked = run.heads.sort_values("routing_pressure", ascending=False).head(top)
    count = len(run.heads)
    table = Table(title=escape(f"{run.record['model']}: {min(top, count)} of {count} heads, strongest routing first"))
    for name in ("head", *names, "status"):
        table.add_column(name, justify="left" if name in ("head", "status") else "right", no_wrap=True)
    for row in ranked.to_dict("records"):
        cells = [str(row["label"])]
        for name in names:
            cell = _number(row[name])
            if name == "routing_pressure":
                cell += f" [{_number(row[name + '_low'])}, {_number(row[name + '_high'])}]"
            cells.append(cell.replace("[", "\\["))
        table.add_row(*cells, str(row["status"]))
    wide = None if sys.stdout.isatty() else 140
    Console(width=wide, legacy_windows=False).print(table)
    print("brackets: pointwise 95 % bootstrap interval over windows")


def _number(value: Any) -> str:
    if value != value:
        return "–"
    size = abs(value)
    return "0" if value == 0 else f"{value:.2e}" if size < 1e-3 or size >= 1e4 else f"{value:.3g}"


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
    from . import analyze as job
    from .corpus import batches
    from .loading import load

    folder, texts, name = model_and_texts(model, text, example)
    with progress("loading", 1) as note:
        loaded = load(folder, dtype=dtype, device=device, implementation=attention)
        note(1, 1, name)
    items = job.cut(texts, loaded.model, loaded.tokenizer, length=None, most=max_tokens)
    batch = next(batches(items[:1], 1, 0))
    from ..probe.verify import verify as check

    place = next(loaded.model.parameters()).device
    table = check(
        loaded.model,
        {"input_ids": batch.ids.to(place), "use_cache": False},
        loss=lambda result: job.cross_entropy(result.logits, batch.targets.to(place)) / batch.count,
    )
    failed = table[table["verdict"] == "fails"]
    numbers = ["query_residual", "key_residual", "value_residual"]
    worst = float(table[numbers].max().max())
    if as_json:
        import json

        from .export import jsonable

        print(json.dumps(jsonable({"worst": worst, "failed": len(failed), "heads": table.to_dict("records")})))
    else:
        shown = table.groupby("module", sort=False, observed=True)[numbers].max()
        print(shown.to_string(float_format=lambda value: f"{value:.1e}"))
        verdict = "both laws hold" if failed.empty else f"the law FAILS on {len(failed)} heads"
        if not (table["verdict"] == "ok").any() and failed.empty:
            verdict = "nothing was checked: no gradient reached any head"
        print(f"\n{name or folder}: {len(table)} heads, worst residual {worst:.1e}: {verdict}")
    if not failed.empty or not (table["verdict"] == "ok").any():
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the version."""
    from .. import __version__

    print(__version__)


app.add_typer(tunnel_app, name="tunnel")
register_geometry(app)
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
        app()
    except KeyboardInterrupt:
        print("advantage-probe: interrupted; nothing was written.", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if "torch" in sys.modules or "advantage_probe.hooks.refusals" in sys.modules:
            from ..hooks.refusals import ProbeError

            if isinstance(error, ProbeError):
                print(f"advantage-probe: {error}", file=sys.stderr)
                sys.exit(2)
        raise


if __name__ == "__main__":
    main()
