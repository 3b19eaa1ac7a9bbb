"""`advantage-probe ablate`, `interventions` and `vocabulary`.

Nothing heavy is imported until a command runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import checked, finish, loaded, of_tunnel, progress, tunnels
from .options import (
    Device,
    Draws,
    Dtype,
    Example,
    Json,
    MaxTokens,
    Model,
    Out,
    Overwrite,
    Seed,
    Sequences,
    Tables,
    Text,
)

if TYPE_CHECKING:
    import pandas as pd

    from ..interventions.subject import Subject

Window = Annotated[int, typer.Option("--window", min=2, help="Tokens per window of a text; only whole windows count.")]


def register(app: typer.Typer) -> None:
    """Put the three commands on `app`."""
    for command in (ablate, interventions, vocabulary):
        app.command()(command)


def _subject(
    model: str | None,
    example: str | None,
    text: list[str] | None,
    *,
    sequences: int,
    window: int,
    most: int | None,
    seed: int,
    device: str,
    dtype: str,
) -> Subject:
    from ...hooks.errors import BadInput
    from ..interventions import subject

    tunnel = of_tunnel(model, example)
    if tunnel is not None:
        if text:
            raise BadInput("A tunnel makes its own episodes; leave --text out.")
        return subject.of_tunnel(tunnel, sequences, seed)
    read, texts, name, _ = loaded(model, text, example, device=device, dtype=dtype)
    return subject.of_text(read, texts, name, window, most)


def written(
    title: str,
    words: list[str],
    frames: dict[str, pd.DataFrame],
    record: dict[str, Any],
    out: Path | None,
    formats: Sequence[str],
    *,
    overwrite: bool,
    as_json: bool,
) -> None:
    from ..files.export import write_frame, write_json
    from ..manifolds.pictures import number, page

    def write(folder: Path) -> None:
        for name, frame in frames.items():
            write_frame(frame, folder / name, formats)
        write_json(record | {"sentences": words}, folder / "run.json")
        (folder / "report.html").write_text(page(title, words, frames, {}), encoding="utf-8")

    def text() -> str:
        parts = [title]
        for name, frame in frames.items():
            parts.append(f"\n{name}\n{frame.to_string(index=False, float_format=number, na_rep='–')}")
        return "\n".join([*parts, "", *words])

    finish(
        write,
        out,
        overwrite=overwrite,
        as_json=as_json,
        found=lambda: {
            "record": record,
            "sentences": words,
            **{name: frame.to_dict("records") for name, frame in frames.items()},
        },
        text=text,
        files="report: {out}/report.html",
    )


def ablate(
    model: Model = None,
    text: Text = None,
    example: Example = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Heads that get random directions beside them.")] = 5,
    directions: Annotated[int, typer.Option("--directions", min=10, help="Random directions of each control.")] = 20,
    sequences: Sequences = 128,
    window: Window = 64,
    max_tokens: MaxTokens = 4096,
    seed: Seed = 0,
    draws: Draws = 200,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    out: Out = None,
    overwrite: Overwrite = False,
    tables: Tables = "parquet,csv",
    as_json: Json = False,
) -> None:
    """Put every head, and every layer, at its mean: what it costs, beside random directions, and which heads are flagged.

    Example: advantage-probe ablate --example bijection-repeats --out ablations
    """
    formats = checked(out, tables, overwrite=overwrite)
    from ..interventions import flags
    from ..interventions.ablation import ablation, layers_of, sentences
    from ..interventions.decodable import sequence_loss
    from ..vectors.collecting import collect

    given = _subject(
        model, example, text, sequences=sequences, window=window, most=max_tokens, seed=seed, device=device, dtype=dtype
    )
    outputs = layers_of(collect(given.model, given.batches, "output", "all").vectors)
    measure = sequence_loss(given.model, given.batches)
    with progress("ablating") as note:
        table = ablation(
            given.model,
            measure,
            outputs,
            top=top,
            directions=directions,
            draws=draws,
            seed=seed,
            progress=note,
        )
    loss = float(measure().mean())
    maps = flags.attention_maps(given.model, given.batches)
    flagged = [*flags.dead(table, loss), *flags.sinks(maps), *flags.alike(maps)]
    words = [f"Loss: {loss:.4f} nats per target, {given.origin}; picked on one half, estimated on the other."]
    words += sentences(table) + (flagged or ["No head is flagged as dead, as a sink, or as another one's twin."])
    record = {"model": given.name, "sequences": given.sequences, "origin": given.origin, "seed": seed, "loss": loss}
    record |= {"flags": flagged, "directions": directions, "unit": "nats per target"}
    title = f"{given.name}: heads and layers at their means"
    written(title, words, {"ablations": table}, record, out, formats, overwrite=overwrite, as_json=as_json)


def interventions(
    model: Model = None,
    example: Example = None,
    sequences: Sequences = 128,
    seed: Seed = 0,
    draws: Draws = 200,
    out: Out = None,
    overwrite: Overwrite = False,
    tables: Tables = "parquet,csv",
    as_json: Json = False,
) -> None:
    """What a tunnel's model does when the entropy axis of its values or outputs is cut, kept alone, or shifted.

    Example: advantage-probe interventions --example bijection-repeats
    """
    formats = checked(out, tables, overwrite=overwrite)
    import pandas as pd

    from ...hooks.errors import BadInput
    from ..interventions.decodable import decodable_and_used
    from ..wind_tunnels.truth.shipped import load

    name = example if model is None else model
    if name is None or (example is not None and model is not None):
        raise BadInput(f"Name a run's folder, or say --example with one of {', '.join(tunnels())}.")
    task, network, card = load(name)
    network = network.eval().requires_grad_(False)
    layers = int(card["recipe"]["shape"]["layers"])
    parts = []
    with progress("intervening", layers) as note:
        for layer in range(layers):
            parts.append(decodable_and_used(task, network, layer, episodes=sequences, draws=draws, seed=seed))
            note(layer + 1, layers, f"layer {layer}")
    words = [
        "effect: nats per target on the half of the episodes that the axis was not fitted on; isotropic, covariance: the "
        "same action along random axes. The entropy that a linear map reads off these values is read off a count too: see "
        "`manifold --group count`."
    ]
    record = {"model": name, "episodes": sequences, "draws": draws, "seed": seed, "unit": "nats per target"}
    frames = {"interventions": pd.concat(parts, ignore_index=True)}
    written(f"{name}: interventions", words, frames, record, out, formats, overwrite=overwrite, as_json=as_json)


def vocabulary(
    model: Model = None,
    text: Text = None,
    example: Example = None,
    layer: Annotated[list[int] | None, typer.Option("--layer", help="Only these layers. [default: all]")] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Tokens each way.")] = 5,
    sequences: Sequences = 128,
    window: Window = 64,
    max_tokens: MaxTokens = 512,
    seed: Seed = 0,
    draws: Draws = 200,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    out: Out = None,
    overwrite: Overwrite = False,
    tables: Tables = "parquet,csv",
    as_json: Json = False,
) -> None:
    """Which tokens every head is pushed to say, beside random directions of the same length.

    Example: advantage-probe vocabulary --example gemma --layer 17
    """
    formats = checked(out, tables, overwrite=overwrite)
    from ...hooks.errors import BadInput
    from ..runs.analyze import cross_entropy
    from ..weights.vocabulary import vocabulary as read

    given = _subject(
        model, example, text, sequences=sequences, window=window, most=max_tokens, seed=seed, device=device, dtype=dtype
    )
    network = given.model
    known: Any = getattr(network.config, "num_hidden_layers", None)
    wrong = [number for number in layer or () if known is not None and not 0 <= number < known]
    if wrong:
        raise BadInput(f"{given.name} has layers 0 … {known - 1}; there is no {wrong[0]}.")

    def losses() -> Any:
        for batch in given.batches:
            yield lambda batch=batch: cross_entropy(
                network(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits, batch.targets
            )

    network.requires_grad_(True)
    with progress("reading updates", 1) as note:
        found = read(network, losses(), given.tokenizer, layers=layer, top=top, draws=draws, seed=seed)
        note(1, 1, given.name)
    first = found.tokens[(found.tokens["rank"] == 1) & (found.tokens["key"] == "")]
    far = int((first["p"] <= 0.05).sum())
    words = [
        f"First tokens that go further than 95 % of random directions of the same length: {far} of {len(first)}; "
        f"{0.05 * len(first):.1f} are expected of random ones.",
        f"Norms on the way were passed by their mean Jacobian: {', '.join(found.norms) or 'none'}. {given.origin}.",
    ]
    record = {"model": given.name, "origin": given.origin, "seed": seed, "draws": draws}
    title = f"{given.name}: what heads are pushed to say"
    written(title, words, {"vocabulary": found.tokens}, record, out, formats, overwrite=overwrite, as_json=as_json)
