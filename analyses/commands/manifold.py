"""`advantage-probe manifold`: do vectors lie on a curve, and what orders it?

Nothing heavy is imported until the command runs.
"""

from enum import StrEnum
from typing import Annotated, Any

import typer

from .console import checked, loaded, of_tunnel, progress
from .groups import Beside, Cut, Group, Keys, Strip
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
    Seed,
    Sequences,
    Tables,
)
from .vectors import READING, few, finish_vectors, prompt_sets


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


def manifold(
    model: Model = None,
    example: Example = None,
    site: Annotated[Site, typer.Option("--site", help="Which vectors.")] = Site.value,
    by: Annotated[By | None, typer.Option("--by", help="Per head, layer (heads side by side) or model.")] = None,
    layer: Annotated[list[int] | None, typer.Option("--layer", help="Only these layers. [default: all]")] = None,
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
    from ...hooks.errors import BadInput
    from ..manifolds import report as job
    from . import groups as grouping

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
        given = next(iter(prompt_sets(read, prompts, length, count, seed, False).values()))
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
    words += few(found.table)
    title = f"{record['model']}: {site.value} vectors by {found.table['site'].nunique()} sites"
    hidden = ("null", "null_edge", "rows", "note")
    shown = found.table[[column for column in found.table.columns if column not in hidden]]
    finish_vectors(
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
