"""Options of the command line: one name, one meaning and one help text each, wherever they appear.

Nothing heavy is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str | None, typer.Argument(help="A local folder or a hub name; leave out with --example.")]
Run = Annotated[Path, typer.Argument(help="A folder that analyze wrote.")]
Text = Annotated[
    list[str] | None, typer.Option("--text", help="Text file, UTF-8; may be given several times; - is stdin.")
]
Example = Annotated[
    str | None, typer.Option("--example", help="At hand without a network: gemma, sticky, or a shipped tunnel.")
]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a hub model.")]
Device = Annotated[str, typer.Option("--device", help="Where to run: cpu, cuda, cuda:1, mps …")]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16 or float64.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Analyse at most this many tokens of the text.")]
Window = Annotated[
    int | None, typer.Option("--window", help="Tokens per window, at most the model's context. [default: 256]")
]
BatchSize = Annotated[int | None, typer.Option("--batch-size", min=1, help="Windows at once. [default: by memory]")]
Attention = Annotated[str | None, typer.Option("--attention", help="Attention implementation, such as sdpa or eager.")]
Prompts = Annotated[Path | None, typer.Option("--prompts", help="Your own passages, UTF-8, blank lines between them.")]
Length = Annotated[int, typer.Option("--length", min=2, help="Tokens of every prompt.")]
Count = Annotated[int, typer.Option("--count", min=10, help="Prompts of a set.")]
Sequences = Annotated[int, typer.Option("--sequences", min=10, help="Fresh sequences of a tunnel.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of every draw.")]
Seeds = Annotated[str | None, typer.Option("--seeds", help="Whole numbers with commas between. [default: five]")]
Draws = Annotated[int, typer.Option("--draws", min=200, help="Draws of every null, and half samples of intervals.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder for the results; must not exist or be empty.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier result in --out.")]
Tables = Annotated[
    str, typer.Option("--tables", help="Formats of the tables in --out: parquet (always), csv, json; commas between.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
