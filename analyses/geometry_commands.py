"""`advantage-probe manifold`, `geometry` and `in-context`: registered on the command line's own app.

Nothing heavy is imported until a command runs.
"""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .commands.groups import Beside, Cut, Group, Keys, Strip
from .console import asked, checked, finish, loaded, of_tunnel, progress
from .options import (
    Count,
    Device,
    Draws,
    Dtype,
    Example,
    Json,
    Length,
    Model,
    Out,
    Overwrite,
    Prompts,
    Revision,
    Seed,
    Sequences,
    Tables,
)

if TYPE_CHECKING:
    import pandas as pd

    from .manifolds.pictures import Points


class Site(StrEnum):
    """Where vectors are taken."""

    value = "value"
    output = "output"
    key = "key"
    residual = "residual"


class By(StrEnum):
    """What a row of vectors holds."""

    head = "head"
    layer = "layer"
    model = "model"


def register(app: typer.Typer) -> None:
    """Put the three commands on `app`."""
    app.command("manifold")(manifold)
    app.command("geometry")(geometry)
    app.command("in-context")(in_context)


def _sets(found: Any, file: Path | None, length: int, count: int, seed: int, genres: bool) -> dict[str, Any]:
    """Prompt sets by name: the user's, or the shipped ones (mixed first, then each genre)."""
    from .pretrained import prompts as shipped

    if file is not None:
        texts = [("own", text) for text in shipped.own_passages(file)]
        return {"own": shipped.prompts(texts, found.tokenizer, found.model, length)}
    names: list[str | None] = [None, *(shipped.GENRES if genres else ())]
    return {
        name or "mixed": shipped.prompts(shipped.drawn(name, count, seed), found.tokenizer, found.model, length)
        for name in names
    }


def _finish(
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
    from .export import write_frame, write_json
    from .manifolds.pictures import number, page, write_scatter

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


def _few(table: "pd.DataFrame") -> list[str]:
    """A sentence where intervals rest on too few sequences."""
    from .manifolds.nulls import FEW

    least = int(table["n"].min())
    return [f"Intervals of {least} sequences say little: fewer than {FEW} are too few."] if least < FEW else []


def manifold(
    model: Model = None,
    example: Example = None,
    site: Annotated[Site, typer.Option("--site", help="Which vectors.")] = Site.value,
    by: Annotated[By | None, typer.Option("--by", help="Per head, layer (heads side by side) or model.")] = None,
    layer: Annotated[list[int] | None, typer.Option("--layer", help="Only these layers (pretrained models).")] = None,
    prompts: Prompts = None,
    length: Length = 64,
    count: Count = 75,
    sequences: Sequences = 256,
    exchanged: Annotated[
        bool, typer.Option("--exchanged/--no-exchanged", help="Beside a tunnel model trained on exchanged targets.")
    ] = True,
    correlation: Annotated[
        bool | None,
        typer.Option("--correlation/--covariance", help="[default: covariance in tunnels, else correlation]"),
    ] = None,
    group: Group = None,
    keys: Keys = None,
    beside: Beside = None,
    strip: Strip = None,
    cut: Cut = False,
    seed: Seed = 0,
    draws: Draws = 200,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    out: Out = None,
    overwrite: Overwrite = False,
    tables: Tables = "parquet,csv",
    as_json: Json = False,
) -> None:
    """Do a model's vectors lie on a low-dimensional manifold ordered by entropy? Every figure beside its nulls.

    Example: advantage-probe manifold --example bijection-repeats --out bijection-manifold
    """
    formats = checked(out, tables, overwrite=overwrite)
    from ..hooks.refusals import BadInput
    from .commands import groups as grouping
    from .manifolds import report as job

    if group is None and (keys is not None or beside or cut or strip is not None):
        raise BadInput("--keys, --beside, --cut and --strip go with --group.")
    tunnel = of_tunnel(model, example)
    files: dict[str, Any] = {"out": out, "formats": formats, "overwrite": overwrite, "as_json": as_json}
    if tunnel is not None and group is not None:
        grouping.for_tunnel(
            tunnel,
            group.value,
            keys.value if keys else None,
            site.value,
            beside=beside or (),
            strip=strip,
            cut=cut,
            layers=layer,
            episodes=sequences,
            draws=draws,
            seed=seed,
            **files,
        )
        return
    if tunnel is not None:
        if prompts is not None or layer:
            raise BadInput("A tunnel makes its own episodes and shows all layers; leave --prompts and --layer out.")
        with progress("reading out") as note:
            found = job.tunnel_report(
                tunnel,
                site.value,
                (by or By.head).value,
                episodes=sequences,
                exchanged=exchanged,
                correlation=bool(correlation),
                draws=draws,
                seed=seed,
                progress=note,
            )
        source = ""
    else:
        read, _, name, source = loaded(model, None, example, device=device, dtype=dtype, needs_text=False)
        given = next(iter(_sets(read, prompts, length, count, seed, False).values()))
        layers = tuple(layer) if layer else None
        if group is not None:
            if keys is not None or beside or cut or strip is not None:
                raise BadInput("--keys, --beside, --cut and --strip are for tunnels' models; leave them out.")
            told: dict[str, Any] = {"name": name, "source": source, "layers": layer, "draws": draws, "seed": seed}
            grouping.for_prompts(read.model, given, group.value, site.value, **told, **files)
            return
        known = getattr(read.model.config, "num_hidden_layers", None)
        if layers and known is not None and any(not 0 <= number < known for number in layers):
            raise BadInput(f"{name} has layers 0 … {known - 1}; there is no {max(layers)}.")
        with progress("reading out") as note:
            found = job.pretrained_report(
                read.model,
                given,
                site.value,
                (by or By.layer).value,
                name=name,
                correlation=correlation is None or correlation,
                layers=layers,
                draws=draws,
                seed=seed,
                progress=note,
            )
    record = found.record | ({"weights": source} if source else {})
    words = [READING, f"Entropy: {record['entropy']}."] + ([f"Weights: {source}."] if source else [])
    words += _few(found.table)
    title = f"{record['model']}: {site.value} vectors by {found.table['site'].nunique()} sites"
    hidden = ("null", "null_edge", "rows", "note")
    shown = found.table[[column for column in found.table.columns if column not in hidden]]
    _finish(
        title,
        words,
        {"manifold": found.table},
        record,
        out,
        formats,
        overwrite=overwrite,
        as_json=as_json,
        shown={"manifold": shown},
        points=found.points,
        bases=found.bases,
    )


def geometry(
    model: Model = None,
    example: Example = None,
    prompts: Prompts = None,
    length: Length = 64,
    count: Count = 75,
    sequences: Sequences = 256,
    revision: Revision = None,
    copies: Annotated[
        int | None, typer.Option("--copies", min=0, help="Copies with rounding noise. [default: 3 if de-quantised]")
    ] = None,
    seed: Seed = 0,
    draws: Draws = 200,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    out: Out = None,
    overwrite: Overwrite = False,
    tables: Tables = "parquet,csv",
    as_json: Json = False,
) -> None:
    """Key orthogonality, attention focusing and value manifold of a pretrained model, the paper's rules beside their nulls.

    Example: advantage-probe geometry --example gemma --out gemma-geometry
    """
    formats = checked(out, tables, overwrite=overwrite)
    if (tunnel := of_tunnel(model, example)) is not None:
        from .commands import tunnel_geometry

        files: dict[str, Any] = {"out": out, "formats": formats, "overwrite": overwrite, "as_json": as_json}
        tunnel_geometry.geometry(tunnel, episodes=sequences, draws=draws, seed=seed, **files)
        return
    from .pretrained import geometry as job

    read, _, name, source = loaded(
        model, None, example, device=device, dtype=dtype, needs_text=False, revision=revision
    )
    sets = _sets(read, prompts, length, count, seed, True)
    copies = copies if copies is not None else 3 if source else 0
    with progress("geometry") as note:
        found = job.geometry(read.model, sets, copies=copies, draws=draws, seed=seed, progress=note)
    record = (
        {"model": name, "revision": read.revision, "seed": seed}
        | found.record
        | ({"weights": source} if source else {})
    )
    verdict = job.verdict(found.rules)
    words = [READING, f"{verdict}."] + ([f"Weights: {source}; {copies} copies with rounding noise."] if source else [])
    words += _few(found.manifolds)
    keys = found.keys[["head", "orthogonality", "low", "high", "gaussian", "shuffled", "p", "initial"]]
    parts = found.manifolds.drop(columns=["null", "null_edge", "note"])
    shown = {"keys: mean |cos| of W_K's columns": keys, "attention entropy, nats": found.attention, "values": parts}
    shown |= {"rules": found.rules} | ({"copies with rounding noise": found.copies} if len(found.copies) else {})
    _finish(
        f"{name}: geometry",
        words,
        found.frames,
        record,
        out,
        formats,
        overwrite=overwrite,
        as_json=as_json,
        shown=shown,
    )


def in_context(
    model: Model = None,
    example: Example = None,
    labels: Annotated[
        str | None, typer.Option("--labels", help="Two single-token words, FIRST,SECOND. [default: by tokenizer]")
    ] = None,
    per: Annotated[int, typer.Option("--per", min=10, help="Prompts for each number of examples.")] = 50,
    sequences: Sequences = 2_000,
    seed: Seed = 0,
    draws: Draws = 200,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    out: Out = None,
    overwrite: Overwrite = False,
    tables: Tables = "parquet,csv",
    as_json: Json = False,
) -> None:
    """Does a model weigh labelled examples as Bayes' rule does? Rivals in the rows above it, controls beside it.

    Example: advantage-probe in-context openai-community/gpt2 --labels foo,bar
    """
    formats = checked(out, tables, overwrite=overwrite)
    if (tunnel := of_tunnel(model, example)) is not None:
        from ..hooks.refusals import BadInput
        from .commands import tunnel_geometry

        if labels is not None:
            raise BadInput("A tunnel has outcomes of its own; leave --labels out.")
        files: dict[str, Any] = {"out": out, "formats": formats, "overwrite": overwrite, "as_json": as_json}
        tunnel_geometry.in_context(tunnel, episodes=sequences, seed=seed, **files)
        return
    from .pretrained import in_context as job

    read, _, name, source = loaded(model, None, example, device=device, dtype=dtype, needs_text=False)
    wanted = [word.strip() for word in labels.split(",")] if labels is not None else None
    with progress("in-context") as note:
        found = job.in_context(
            read.model, read.tokenizer, labels=wanted, per=per, draws=draws, seed=seed, progress=note
        )
    record = {"model": name} | found.record | ({"weights": source} if source else {})
    mass = ", ".join(f"{control} {value:.3f}" for control, value in record["label_mass"].items())
    words = [
        READING,
        "latent_error is held against the latent posterior, which is not what is predicted: a perfect Bayesian scores "
        f"{record['perfect_against_latent']:.3f} bits there, the best constant {record['constant_against_latent']:.3f}, "
        f"the best constant for each k {record['constant_per_k_against_latent']:.3f}.",
        f"Labels: {record['labels']}; probability on the two labels together: {mass}.",
    ] + ([f"Weights: {source}."] if source else [])
    columns = ["control", "source", "kl", "kl_low", "kl_high", "entropy_error", "entropy_error_low"]
    columns += ["entropy_error_high", "latent_error", "kl_null", "kl_p"]
    last = found.coordinates[found.coordinates["layer"] == found.coordinates["layer"].iloc[-1]]
    shown = {"scores, bits": found.scores[columns], "by number of examples": found.shots, "log-odds": found.slopes}
    shown |= {"value coordinates of the last layer, within k": last}
    _finish(
        f"{name}: in-context evidence",
        words,
        found.frames,
        record,
        out,
        formats,
        overwrite=overwrite,
        as_json=as_json,
        shown=shown,
    )
