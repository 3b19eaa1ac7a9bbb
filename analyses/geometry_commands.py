"""`advantage-probe manifold`, `geometry` and `in-context`: registered on the command line's own app.

Nothing heavy is imported until a command runs.
"""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import pandas as pd


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


Model = Annotated[str | None, typer.Argument(help="A local folder or a hub name; leave out with --example.")]
Example = Annotated[str | None, typer.Option("--example", help="gemma, sticky, or (manifold only) a shipped tunnel.")]
Device = Annotated[str, typer.Option("--device", help="Where to run: cpu, cuda, cuda:1, mps …")]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16 or float64.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder for tables, bases and a report. [default: none]")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier result in --out.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
File = Annotated[Path | None, typer.Option("--prompts", help="Your own passages, UTF-8, blank lines between them.")]
Length = Annotated[int, typer.Option("--length", min=2, help="Tokens of every prompt.")]
Count = Annotated[int, typer.Option("--count", min=10, help="Prompts of a set.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of every draw.")]
Draws = Annotated[int, typer.Option("--draws", min=200, help="Null draws and half samples.")]


def register(app: typer.Typer) -> None:
    """Put the three commands on `app`."""
    app.command("manifold")(manifold)
    app.command("geometry")(geometry)
    app.command("in-context")(in_context)


def _loaded(model: str | None, example: str | None, device: str, dtype: str) -> tuple[Any, str, str]:
    """The loaded model, its name, and what is known of its weights' origin."""
    from .console import model_and_texts, progress
    from .loading import load
    from .pretrained.rounding import origin

    source, _, name = model_and_texts(model, None, example, needs_text=False)
    with progress("loading", 1) as note:
        loaded = load(source, dtype=dtype, device=device)
        note(1, 1, name or source)
    return loaded, name or source, origin(source)


def _sets(loaded: Any, file: Path | None, length: int, count: int, seed: int, genres: bool) -> dict[str, Any]:
    """Prompt sets by name: the user's, or the shipped ones (mixed first, then each genre)."""
    from .pretrained import prompts as shipped

    if file is not None:
        texts = [("own", text) for text in shipped.own_passages(file)]
        return {"own": shipped.prompts(texts, loaded.tokenizer, loaded.model, length)}
    names: list[str | None] = [None, *(shipped.GENRES if genres else ())]
    return {
        name or "mixed": shipped.prompts(shipped.drawn(name, count, seed), loaded.tokenizer, loaded.model, length)
        for name in names
    }


def _finish(
    title: str,
    words: list[str],
    frames: "dict[str, pd.DataFrame]",
    record: dict[str, Any],
    out: Path | None,
    *,
    overwrite: bool,
    as_json: bool,
    shown: "dict[str, pd.DataFrame]",
    pictures: dict[str, bytes] | None = None,
    bases: dict[str, Any] | None = None,
) -> None:
    from .export import jsonable, new_folder, write_frame, write_json
    from .manifolds.pictures import number, page

    if out is not None:
        with new_folder(out, overwrite=overwrite) as folder:
            for name, frame in frames.items():
                write_frame(frame, folder / name)
            for name, data in (pictures or {}).items():
                (folder / f"{name.replace(' ', '-')}.png").write_bytes(data)
            if bases:
                (folder / "bases").mkdir()
                for name, basis in bases.items():
                    basis.save(folder / "bases" / f"{name.replace(' ', '-')}.safetensors")
            write_json(record, folder / "run.json")
            (folder / "report.html").write_text(page(title, words, frames, pictures or {}), encoding="utf-8")
    if as_json:
        tables = {name: frame.to_dict("records") for name, frame in frames.items()}
        print(json.dumps(jsonable({"record": record, **tables})))
        return
    print(title)
    for name, frame in shown.items():
        print(f"\n{name}\n{frame.to_string(index=False, float_format=number, na_rep='–')}")
    print()
    for sentence in words:
        print(sentence)
    if out is not None:
        print(f"\nreport: {out / 'report.html'}")


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
    prompts: File = None,
    length: Length = 64,
    count: Count = 75,
    episodes: Annotated[int, typer.Option("--episodes", min=10, help="Episodes of a tunnel.")] = 256,
    exchanged: Annotated[
        bool, typer.Option("--exchanged/--no-exchanged", help="Beside a tunnel model trained on exchanged targets.")
    ] = True,
    correlation: Annotated[
        bool | None,
        typer.Option("--correlation/--covariance", help="[default: covariance in tunnels, else correlation]"),
    ] = None,
    seed: Seed = 0,
    draws: Draws = 200,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Do a model's vectors lie on a low-dimensional manifold ordered by entropy? Every figure beside its nulls.

    Example: advantage-probe manifold --example bijection-repeats --out bijection-manifold
    """
    from ..hooks.refusals import BadInput
    from .console import progress, tunnels
    from .export import check_out
    from .manifolds import report as job
    from .manifolds.pictures import png, scatter

    if out is not None:
        check_out(out, overwrite=overwrite)
    tunnel = example if example in tunnels() and model is None else None
    if tunnel is None and model is not None and (Path(model) / "card.json").is_file():
        tunnel = model
    if tunnel is not None:
        if prompts is not None or layer:
            raise BadInput("A tunnel makes its own episodes and shows all layers; leave --prompts and --layer out.")
        from .wind_tunnels.errors import TunnelError

        with progress("reading out") as note:
            try:
                found = job.tunnel_report(
                    tunnel,
                    site.value,
                    (by or By.head).value,
                    episodes=episodes,
                    exchanged=exchanged,
                    correlation=bool(correlation),
                    draws=draws,
                    seed=seed,
                    progress=note,
                )
            except TunnelError as error:
                raise BadInput(str(error)) from error
        source = ""
    else:
        loaded, name, source = _loaded(model, example, device, dtype)
        given = next(iter(_sets(loaded, prompts, length, count, seed, False).values()))
        layers = tuple(layer) if layer else None
        known = getattr(loaded.model.config, "num_hidden_layers", None)
        if layers and known is not None and any(not 0 <= number < known for number in layers):
            raise BadInput(f"{name} has layers 0 … {known - 1}; there is no {max(layers)}.")
        with progress("reading out") as note:
            found = job.pretrained_report(
                loaded.model,
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
        overwrite=overwrite,
        as_json=as_json,
        shown={"manifold": shown},
        pictures={"projections": png(scatter(found.points))} if out is not None else None,
        bases=found.bases,
    )


def geometry(
    model: Model = None,
    example: Example = None,
    prompts: File = None,
    length: Length = 64,
    count: Count = 75,
    copies: Annotated[
        int | None, typer.Option("--copies", min=0, help="Copies with rounding noise. [default: 3 if de-quantised]")
    ] = None,
    seed: Seed = 0,
    draws: Draws = 200,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Key orthogonality, attention focusing and value manifold of a pretrained model, the paper's rules beside their nulls.

    Example: advantage-probe geometry --example gemma --out gemma-geometry
    """
    from .console import progress
    from .export import check_out
    from .pretrained import geometry as job

    if out is not None:
        check_out(out, overwrite=overwrite)
    loaded, name, source = _loaded(model, example, device, dtype)
    sets = _sets(loaded, prompts, length, count, seed, True)
    copies = copies if copies is not None else 3 if source else 0
    with progress("geometry") as note:
        found = job.geometry(loaded.model, sets, copies=copies, draws=draws, seed=seed, progress=note)
    record = {"model": name, "seed": seed} | found.record | ({"weights": source} if source else {})
    verdict = job.verdict(found.rules)
    words = [READING, f"{verdict}."] + ([f"Weights: {source}; {copies} copies with rounding noise."] if source else [])
    words += _few(found.manifolds)
    keys = found.keys[["head", "orthogonality", "low", "high", "gaussian", "shuffled", "p", "initial"]]
    parts = found.manifolds.drop(columns=["null", "null_edge", "note"])
    shown = {"keys: mean |cos| of W_K's columns": keys, "attention entropy, nats": found.attention, "values": parts}
    shown |= {"rules": found.rules} | ({"copies with rounding noise": found.copies} if len(found.copies) else {})
    _finish(f"{name}: geometry", words, found.frames, record, out, overwrite=overwrite, as_json=as_json, shown=shown)


def in_context(
    model: Model = None,
    example: Example = None,
    labels: Annotated[
        str | None, typer.Option("--labels", help="Two single-token words, FIRST,SECOND. [default: by tokenizer]")
    ] = None,
    per: Annotated[int, typer.Option("--per", min=10, help="Prompts for each number of examples.")] = 50,
    seed: Seed = 0,
    draws: Draws = 200,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Does a model weigh labelled examples as Bayes' rule does? Rivals in the rows above it, controls beside it.

    Example: advantage-probe in-context openai-community/gpt2 --labels foo,bar
    """
    from .console import progress
    from .export import check_out
    from .pretrained import in_context as job

    if out is not None:
        check_out(out, overwrite=overwrite)
    loaded, name, source = _loaded(model, example, device, dtype)
    wanted = [word.strip() for word in labels.split(",")] if labels is not None else None
    with progress("in-context") as note:
        found = job.in_context(
            loaded.model, loaded.tokenizer, labels=wanted, per=per, draws=draws, seed=seed, progress=note
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
        overwrite=overwrite,
        as_json=as_json,
        shown=shown,
    )
