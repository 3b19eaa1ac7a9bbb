"""`geometry` and `in-context` of a tunnel's model: keys, queries and read-out by layer, and calibration by position.

Nothing heavy is imported until a command runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .console import progress
from .interventions import written

READING = (
    "low, high: 95 % from half samples of episodes (of tokens, for keys). keys: mean |cos| of two tokens' first-layer "
    "keys, smaller is more orthogonal. alignment: mean cosine of asked queries with keys of earlier places that hold the "
    "same token, or the one after it, less that with the other places; null: another episode's places. read_out: bits by "
    "which the model's own unembedding misses the exact posterior when it reads a layer's stream."
)


def geometry(
    name: str,
    *,
    episodes: int,
    draws: int,
    seed: int,
    out: Path | None,
    formats: Sequence[str],
    overwrite: bool,
    as_json: bool,
) -> None:
    """Keys, alignment and read-out of a tunnel's model beside its untrained self."""
    import torch

    from ..manifolds import layerwise
    from ..wind_tunnels.truth.shipped import load, untrained_like

    task, model, card = load(name)
    untrained = untrained_like(card).eval()
    drawn = task.sample(episodes, torch.Generator().manual_seed(seed))
    with progress("geometry", 3) as note:
        keys = layerwise.orthogonality(task, model, untrained, draws, seed)
        note(1, 3, "keys")
        aligned = layerwise.alignment(model, drawn, min(draws, 50), seed)
        started = layerwise.alignment(untrained, drawn, 1, seed)
        if len(aligned):  # no token comes again where all keys are distinct
            aligned = aligned.assign(untrained=started["difference"])
        note(2, 3, "queries")
        read = layerwise.read_out(task, {"trained": model, "untrained": untrained}, drawn, draws, seed)
        note(3, 3, "read-out")
    first = keys[keys["tokens"] == keys["tokens"].iloc[0]]
    below = first[first["orthogonality"] < first["untrained"]]
    which = "" if first["tokens"].iloc[0] == "all" else f" of the {first['tokens'].iloc[0]}' tokens"
    most, expected = first["orthogonality"].max(), first["gaussian"].iloc[0]
    words = [
        f"First-layer keys{which}: {len(below)} of {len(first)} heads are more orthogonal than the untrained network's; "
        f"the least orthogonal one has {most:.2f}, {expected:.2f} is expected of random keys.",
        READING,
    ]
    record = {"model": name, "episodes": episodes, "seed": seed, "draws": draws}
    frames = {"keys": keys} | ({"alignment": aligned} if len(aligned) else {}) | {"read_out": read}
    written(f"{name}: geometry", words, frames, record, out, formats, overwrite=overwrite, as_json=as_json)


def in_context(
    name: str,
    *,
    episodes: int,
    seed: int,
    out: Path | None,
    formats: Sequence[str],
    overwrite: bool,
    as_json: bool,
) -> None:
    """A tunnel's model against the exact posterior of its task, rivals first, and position by position."""
    from ..wind_tunnels.truth.shipped import evaluate

    with progress("in-context") as note:
        found = evaluate(name, episodes, seed, note)
    frames = {title.replace(",", "").replace(" ", "_"): table.reset_index() for title, table in found.tables.items()}
    frames["positions"] = found.positions.reset_index()
    words = ["Bits; _ci: half-widths of 95 % intervals over episodes. Rivals stand above the model."]
    words += [
        f"{check.what}: {check.measured:.5f}, held to {'at least' if check.least else 'at most'} {check.bound:.5f}."
        for check in found.checks
    ]
    record = {"model": name, "episodes": episodes, "seed": seed, "unit": "bits"}
    written(f"{name}: in-context evidence", words, frames, record, out, formats, overwrite=overwrite, as_json=as_json)
