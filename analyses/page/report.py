"""The one-file HTML report: opened offline, nothing fetched, every string escaped.

The first screen answers what the loss is doing to this model's heads; below lie the heads, each with its map over the text,
its update directions and its strongest pairs. The page shows a selection; the files beside it hold everything.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pandas as pd

from ...hooks.errors import BadRequest
from ...probe.bootstrap import told
from ...probe.watch import Watch
from ..files.export import write_text
from ..files.numbers import number
from ..intervals.resampled import resampled
from ..runs.run import Run
from ..runs.stored import open_run
from ..runs.training_runs import of_folder, of_watch
from . import packed
from .sentences import captured, sentences

LIMIT, SPARE = 5_000_000, 120_000  # bytes of a page, and those of its style, script and words


def tokens_of(run: Run) -> list[str | None]:
    """The tokens of the window that the maps show, as the tables spell them."""
    if run.tokens.empty:
        return []
    table = run.tokens[["token_id", "token"]].dropna().drop_duplicates("token_id")
    known = dict(zip(table["token_id"].astype(int), table["token"].astype(object), strict=True))
    return [known.get(number) for number in run.maps.tokens]


def named_heads(run: Run) -> tuple[list[str], str]:
    """The heads that the page names, at most twelve, and what they are."""
    found = resampled(run.sequences)
    labels = [] if found is None else found.singled_out("routing_pressure")[0]
    if labels:
        return labels[:12], "Heads above the median routing pressure on one half of the windows, all at once (95 %),"
    strongest = run.heads.sort_values("routing_pressure", ascending=False)["label"].astype(str).head(3).tolist()
    return strongest, "The heads of largest routing pressure, which are not told apart from the others,"


def left_out(run: Run, data: dict[str, Any]) -> str:
    """What the page does not show and the files do."""
    said = []
    if data["maps"]:
        length = max(one.length[0] for one in run.maps.pooled.values())
        fine = f", at most 256 × 256 for {', '.join(data['fine'])}" if data["fine"] else ""
        said.append(
            f"Maps show the first of {run.record.get('windows')} windows ({length} tokens), pooled to at most 64 × 64 "
            f"cells{fine}; values have 8 bits."
        )
    if data["drawn"] and data["drawn"] < len(run.heads):
        said.append(
            f"To stay under {LIMIT:,} bytes, maps, pairs and words are here for the {data['drawn']:,} heads of largest "
            f"routing pressure of {len(run.heads):,}."
        )
    if len(run.edges):
        kept = int(run.edges["rank"].max())
        said.append(f"{kept} pairs per head and direction were kept, {packed.LISTED} are listed.")
    if data["history"]:
        steps, heads = data["history"]["of"]
        shown = len(data["history"]["steps"]), len(data["history"]["heads"])
        if shown != (steps, heads):
            said.append(f"Courses are drawn at {shown[0]:,} of {steps:,} steps, of {shown[1]:,} of {heads:,} heads.")
    return " ".join(said)


def plotly() -> str:
    """plotly's script, which the page holds compressed and inflates."""
    import plotly as library

    return (Path(library.__file__).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def script_json(value: Any) -> Any:
    """JSON that can stand inside a script element: nothing in it ends the element."""
    from markupsafe import Markup

    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # only "<" could end the element; its escape means the same in JSON
    return Markup(text.replace("<", "\\u003c"))


def html(run: Run) -> str:
    """The page."""
    from jinja2 import Environment, FileSystemLoader

    folder = Path(__file__).parent / "templates"
    environment = Environment(loader=FileSystemLoader(folder, encoding="utf-8"), autoescape=True)
    template = environment.get_template("report.html.jinja")
    record, cloud, training = run.record, run.more.get("manifold"), "history" in run.more
    found = resampled(run.sequences)
    resolved = None if found is None else found.singled_out("routing_pressure")[0]
    drawn = plotly() if cloud is not None and not cloud.empty else ""
    library = base64.b64encode(zlib.compress(drawn.encode(), 9)).decode("ascii") if drawn else ""
    own = script(environment)
    room = LIMIT - len(library) - SPARE
    data = packed.data_of(run.heads, run.edges, run.maps, tokens_of(run), resolved, run.more, room)
    apart = ("versions", "texts", "not_captured", "columns_of")
    flat = {**{name: value for name, value in record.items() if name not in apart}, **record.get("versions", {})}
    if "texts" in record:
        flat["texts"] = ", ".join(record["texts"])
    kinds = (record.get(name) for name in ("architecture", "attention_implementation", "dtype"))
    return template.render(
        title=record.get("model", "a model"),
        subtitle=" · ".join(str(kind) for kind in kinds if kind is not None),
        sentences=sentences(record, run.heads, run.edges, found, run.more),
        columns=[entry["name"] for entry in data["columns"]],
        columns_of=record.get("columns_of"),
        intervals=_of_intervals(run.sequences),
        elsewhere="The history holds" if training else "The files beside this page hold",
        pairs_of="over all observed steps" if training else "over all windows; the files hold more",
        left_out=left_out(run, data),
        checked=_checked(run.more.get("checked")),
        provenance=[*flat.items(), ("captured", captured(record))],
        data=script_json(data),
        script=own,
        policy=policy(str(own), *([drawn] if drawn else [])),
        plotly=library,
    )


def _checked(table: pd.DataFrame | None) -> list[dict[str, str]]:
    """Rows of the table of edges that were removed for real, as the page shows them."""
    if table is None:
        return []

    def place(row: dict[str, Any], side: str) -> str:
        spelled = row[f"{side}_token"]
        return f"{row[f'{side}_position']} {'' if pd.isna(spelled) else spelled}".strip()

    return [
        {
            "label": str(row["label"]),
            "query": place(row, "query"),
            "key": place(row, "key"),
            "attention": number(row["attention"]),
            "predicted": number(row["knockout"]),
            "true": number(row["true"]),
            "ratio": number(row["ratio"]),
        }
        for row in table.to_dict("records")
    ]


def _of_intervals(sequences: pd.DataFrame) -> str:
    """What the brackets of the table are, or why there are none."""
    count = sequences["sequence"].nunique() if len(sequences) else 0
    if not count:
        return ""
    said = told(count)
    if said.startswith("none"):
        return f"No intervals: {said.removeprefix('none: ')}."
    return f"Brackets: pointwise 95 % intervals over {count} sequences{', which are few' if said != 'ok' else ''}."


def script(environment: Any) -> Any:
    """The page's own script, whole."""
    from markupsafe import Markup

    return Markup(environment.loader.get_source(environment, "report.js")[0])


def policy(*scripts: str) -> str:
    """The page's Content-Security-Policy: nothing is fetched, and only these scripts run."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii") for text in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


def run_of(source: Run | Watch | str | os.PathLike[str]) -> Run:
    """What `write_report` draws.

    Raises:
        BadInput: for a folder that is missing or holds nothing of the kind. BadRequest: for anything else.
    """
    if isinstance(source, Run):
        return source
    if isinstance(source, Watch):
        return of_watch(source)
    if not isinstance(source, (str, os.PathLike)):
        raise BadRequest(f"write_report takes a folder, a watch or a run, not {type(source).__name__}.")
    folder = Path(source)
    found = of_folder(folder) if folder.is_dir() else None
    if found is not None:
        return found
    return open_run(folder)


def write_report(source: Run | Watch | str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the page of a run and return its path.

    Args:
        source: a folder that `analyze`, `watch(history=)`, `dynamics --out` or a watched `tunnel train` wrote, or a folder
            that has a history in it; a watch, open or closed; or a `Run`.
        out: the file. Of a folder: its report.html, beside the folder where that is a history, which holds nothing else.
            Of a watch or a run: report.html where the program runs.

    Raises:
        BadInput: for a folder that holds no run, or a file that cannot be written. NoAttentionSeen: for a watch that saw
            nothing. BadRequest: for anything else.
    """
    run = run_of(source)
    if out is not None:
        target = Path(out)
    elif isinstance(source, (str, os.PathLike)):
        folder = Path(source).resolve()  # "." has no name, and a history takes no stranger
        pure = any(folder.glob("part-*.parquet"))
        target = folder.parent / f"{folder.name}-report.html" if pure else folder / "report.html"
    else:
        target = Path("report.html")
    write_text(html(run), target)
    return target
