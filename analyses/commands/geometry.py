"""`advantage-probe manifold`, `geometry` and `in-context`: registered on the command line's own app.

Nothing heavy is imported until a command runs.
"""

from typing import Annotated, Any

import typer

from .console import checked, loaded, of_tunnel, progress
from .manifold import manifold
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
from .vectors import READING, few, finish_vectors, prompt_sets


def register(app: typer.Typer) -> None:
    """Put the three commands on `app`."""
    app.command("manifold")(manifold)
    app.command("geometry")(geometry)
    app.command("in-context")(in_context)


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
        from . import tunnel_geometry

        files: dict[str, Any] = {"out": out, "formats": formats, "overwrite": overwrite, "as_json": as_json}
        tunnel_geometry.geometry(tunnel, episodes=sequences, draws=draws, seed=seed, **files)
        return
    from ..pretrained import geometry as job

    read, _, name, source = loaded(
        model, None, example, device=device, dtype=dtype, needs_text=False, revision=revision
    )
    sets = prompt_sets(read, prompts, length, count, seed, True)
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
    words += few(found.manifolds)
    keys = found.keys[["head", "orthogonality", "low", "high", "gaussian", "shuffled", "p", "initial"]]
    parts = found.manifolds.drop(columns=["null", "null_edge", "note"])
    shown = {"keys: mean |cos| of W_K's columns": keys, "attention entropy, nats": found.attention, "values": parts}
    shown |= {"rules": found.rules} | ({"copies with rounding noise": found.copies} if len(found.copies) else {})
    finish_vectors(
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
        from ...hooks.errors import BadInput
        from . import tunnel_geometry

        if labels is not None:
            raise BadInput("A tunnel has outcomes of its own; leave --labels out.")
        files: dict[str, Any] = {"out": out, "formats": formats, "overwrite": overwrite, "as_json": as_json}
        tunnel_geometry.in_context(tunnel, episodes=sequences, seed=seed, **files)
        return
    from ..pretrained import in_context as job

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
    finish_vectors(
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
