"""What the commands on vectors share: their prompt sets, and the folder they write.

Nothing heavy is imported until a command runs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import asked, finish

if TYPE_CHECKING:
    import pandas as pd

    from ..manifolds.pictures import Points


def prompt_sets(found: Any, file: Path | None, length: int, count: int, seed: int, genres: bool) -> dict[str, Any]:
    """Prompt sets by name: the user's, or the shipped ones (mixed first, then each genre)."""
    from ..inputs import prompts as shipped

    if file is not None:
        texts = [("own", text) for text in shipped.own_passages(file)]
        return {"own": shipped.prompts(texts, found.tokenizer, found.model, length)}
    names: list[str | None] = [None, *(shipped.GENRES if genres else ())]
    return {
        name or "mixed": shipped.prompts(shipped.drawn(name, count, seed), found.tokenizer, found.model, length)
        for name in names
    }


def finish_vectors(
    title: str,
    words: list[str],
    frames: "dict[str, pd.DataFrame]",
    record: dict[str, Any],
    out: Path | None,
    formats: Sequence[str],
    *,
    overwrite: bool,
    as_json: bool,
    shown: "dict[str, pd.DataFrame]",
    points: "Points | None" = None,
    bases: dict[str, Any] | None = None,
) -> None:
    from ..files.export import write_frame, write_json
    from ..files.numbers import number
    from ..manifolds.pictures import page, write_scatter

    def write(folder: Path) -> None:
        for name, frame in frames.items():
            write_frame(frame, folder / name, formats)
        pictures = {}
        if points is not None:
            drawn = write_scatter(points, folder / "projections", str(record["entropy"]), asked())
            pictures["projections"] = drawn.read_bytes()
        if bases:
            (folder / "bases").mkdir()
            for name, basis in bases.items():
                basis.save(folder / "bases" / f"{name.replace(' ', '-')}.safetensors")
        write_json(record, folder / "run.json")
        (folder / "report.html").write_text(page(title, words, frames, pictures), encoding="utf-8")

    def text() -> str:
        parts = [title]
        for name, frame in shown.items():
            parts.append(f"\n{name}\n{frame.to_string(index=False, float_format=number, na_rep='–')}")
        return "\n".join([*parts, "", *words])

    finish(
        write,
        out,
        overwrite=overwrite,
        as_json=as_json,
        found=lambda: {"record": record, **{name: frame.to_dict("records") for name, frame in frames.items()}},
        text=text,
        files="report: {out}/report.html",
    )


READING = (
    "low, high: 95 % from half samples of the sequences; null_mean, null_edge: the named null; p: at most, from the draws. "
    "Columns without intervals are single reference models."
)


def few(table: "pd.DataFrame") -> list[str]:
    """A sentence where intervals rest on too few sequences."""
    from ..intervals.nulls import FEW

    least = int(table["n"].min())
    return [f"Intervals of {least} sequences say little: fewer than {FEW} are too few."] if least < FEW else []
