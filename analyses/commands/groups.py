"""`advantage-probe manifold --group …`: keys in groups, their curve, its nulls and the verdict, in one picture.

Nothing heavy is imported until the command runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import asked, finish, progress

if TYPE_CHECKING:
    from ..manifolds.group_report import GroupReport


# not written as classes: a member named "count" would hide a method of str
GroupName = StrEnum("GroupName", {name: name for name in ("count", "entropy", "position")})  # type: ignore[misc]
KeysName = StrEnum("KeysName", {name: name for name in ("new", "repeated", "all")})  # type: ignore[misc]
Group = Annotated[
    GroupName | None,
    typer.Option("--group", help="Means of keys grouped by count of used symbols, exact entropy, or position."),
]
Keys = Annotated[KeysName | None, typer.Option("--keys", help="With --group: which keys. [default: new, else all]")]
Beside = Annotated[
    list[str] | None,
    typer.Option(
        "--beside", help="With --group: a run of the same task with another seed, for the verdict; repeatable."
    ),
]
Strip = Annotated[
    Path | None, typer.Option("--strip", help="With --group: a folder of step-N folders, drawn over training.")
]
Cut = Annotated[
    bool, typer.Option("--cut", help="With --group: also cut each layer's first axis, beside random ones (minutes).")
]
READING = (
    "shares: of the group means on one axis and two, and of the groups in the keys' variance; null and edge: labels "
    "permuted inside positions before the axis is fitted (mean, 97.5 % point). order: rank correlation of the axis "
    "with entropy on episodes that it was not fitted on, inside positions; p against exchanged entropies, axis_p against "
    "axes fitted to permuted labels. verdict: place +1 where repeated keys lie at the point of their count, −1 at the "
    "low-entropy end. cuts: nats per target that cutting a layer's axis costs, random axes from the covariance beside."
)


def for_tunnel(
    name: str,
    group: str,
    keys: str | None,
    where: str,
    *,
    beside: Sequence[str],
    strip: Path | None,
    cut: bool,
    layers: Sequence[int] | None,
    episodes: int,
    draws: int,
    seed: int,
    out: Path | None,
    formats: Sequence[str],
    overwrite: bool,
    as_json: bool,
) -> None:
    """A tunnel's model; with `strip` also over its training."""
    from ..manifolds.group_report import tunnel_groups
    from ..manifolds.group_strip import over_training

    settings: dict[str, Any] = {"group": group, "keys": keys, "where": where}
    settings |= {"episodes": episodes, "draws": draws, "seed": seed}
    with progress("grouping keys") as note:
        found = tunnel_groups(name, beside=beside, layers=layers, cut=cut, progress=note, **settings)
    course = None
    if strip is not None:
        with progress("over training") as note:
            course = over_training(strip, layer=layers[-1] if layers else None, progress=note, **settings)
    _finish(found, course, out, formats, overwrite=overwrite, as_json=as_json)


def for_prompts(
    model: Any,
    prompts: Any,
    group: str,
    where: str,
    *,
    name: str,
    source: str,
    layers: Sequence[int] | None,
    draws: int,
    seed: int,
    out: Path | None,
    formats: Sequence[str],
    overwrite: bool,
    as_json: bool,
) -> None:
    """A pretrained model's prompts, in bins of its own entropy."""
    from dataclasses import replace

    from ..manifolds.group_report import prompt_groups

    settings: dict[str, Any] = {"group": group, "where": where, "layers": layers, "draws": draws, "seed": seed}
    with progress("grouping prompts", 1) as note:
        found = prompt_groups(model, prompts, name=name, **settings)
        note(1, 1, name)
    if source:
        found = replace(found, words=(*found.words, f"Weights: {source}."), record=found.record | {"weights": source})
    _finish(found, None, out, formats, overwrite=overwrite, as_json=as_json)


def _finish(
    found: GroupReport,
    course: Any,
    out: Path | None,
    formats: Sequence[str],
    *,
    overwrite: bool,
    as_json: bool,
) -> None:
    from ..files.export import write_frame, write_json
    from ..manifolds.group_pictures import write_manifold, write_strip
    from ..manifolds.pictures import number, page

    title = (
        f"{found.record['model']}: {found.record['vectors']} vectors of {found.record['keys']} keys, grouped by "
        f"{found.record['group']}"
    )
    frames = found.frames | ({} if course is None else {"strip": course.curves, "strip_order": course.order})
    words = [*found.words, *([] if course is None else course.words), READING]

    def write(folder: Path) -> None:
        for name, frame in frames.items():
            write_frame(frame, folder / name, formats)
        pictures = {"group means in their plane": write_manifold(found, folder / "manifold", asked()).read_bytes()}
        if course is not None:
            strip = write_strip(course.curves, course.order, found.record["group"], folder / "training", asked())
            pictures["over training"] = strip.read_bytes()
        write_json(found.record | {"sentences": words}, folder / "run.json")
        shown = {name: frame for name, frame in frames.items() if name != "points"}
        (folder / "report.html").write_text(page(title, words, shown, pictures), encoding="utf-8")

    def text() -> str:
        parts = [title]
        for name in ("shares", "order", "verdict", "cuts"):
            if name in frames:
                table = frames[name].to_string(index=False, float_format=number, na_rep="–")
                parts.append(f"\n{name}\n{table}")
        return "\n".join([*parts, "", *words])

    finish(
        write,
        out,
        overwrite=overwrite,
        as_json=as_json,
        found=lambda: {
            "record": found.record,
            "sentences": words,
            **{name: frame.to_dict("records") for name, frame in frames.items() if name != "points"},
        },
        text=text,
        files="report: {out}/report.html\npicture: {out}/manifold.pdf, .svg, .png, its data and caption beside it",
    )
