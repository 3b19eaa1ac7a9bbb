"""A run as it lies in its folder: read back exactly, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pyarrow as pa

from ...hooks.errors import BadInput
from .maps import Maps
from .run import Run

FORMAT = 2
FRAMES = ("heads", "tokens", "edges", "updates", "sequences")
# frames that a run has when its model allows them, or when it is a training run
MORE = ("agreement", "vocabulary", "manifold", "history", "truth")
_NEEDED = {
    "heads": {"module", "use", "head", "label", "layer", "status", "routing_pressure", "law_residual"},
    "tokens": {"side", "sequence", "position", "token_id"},
    "edges": {"direction", "rank", "query_position", "key_position", "score_gradient", "compatibility"},
    "updates": {"label", "update_norm"},
    "sequences": {"sequence", "module", "use", "head", "queries"},
    "agreement": {"label", "pairs"},
    "vocabulary": {"label", "direction", "rank", "token", "strength", "random_edge", "p"},
    "manifold": {"label", "axis_1", "entropy", "sequence", "position"},
    "history": {"step", "label"},
    "truth": {"head"},
}


def open_run(folder: str | Path) -> Run:
    """Read a folder that `analyze` wrote.

    Raises:
        BadInput: for a folder that is missing or no run, of another version, or with a table missing, damaged or without
            a column.
    """
    path = Path(folder)
    if not path.is_dir():
        what = "is a file; name the folder it lies in" if path.exists() else "does not exist"
        raise BadInput(f"The run folder {str(folder)!r} {what}.")
    try:
        record = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{str(folder)!r} is no run folder: it has no run.json.") from None
    except (ValueError, OSError) as error:
        raise BadInput(f"{str(path / 'run.json')!r} is damaged ({error}); analyse again.") from error
    if not isinstance(record, dict):
        raise BadInput(f"{str(path / 'run.json')!r} is damaged (it holds no record); analyse again.")
    version = record.get("format")
    if version != FORMAT:
        made = record.get("advantage_probe", "unknown")
        newer = isinstance(version, int) and version > FORMAT
        remedy = "install a newer version" if newer else "analyse the text again with this version"
        raise BadInput(
            f"{str(folder)!r} has format {version!r} (written by version {made}), this version reads {FORMAT}; {remedy}."
        )
    frames = {name: _table(path, name) for name in FRAMES}
    more = {name: _table(path, name) for name in MORE if (path / f"{name}.parquet").exists()}
    return Run(**frames, record=record, maps=Maps.load(path / "maps.safetensors"), more=more, folder=path)


def _table(folder: Path, name: str) -> pd.DataFrame:
    """One table of a run; raises `BadInput` as `open_run`."""
    file = folder / f"{name}.parquet"
    try:
        table = pd.read_parquet(file)
    except FileNotFoundError:
        raise BadInput(f"{str(folder)!r} has no {name}.parquet; analyse again.") from None
    except (OSError, pa.ArrowException, ValueError) as error:
        raise BadInput(f"{str(file)!r} is damaged ({str(error).splitlines()[0]}); analyse again.") from error
    missing = _NEEDED[name] - set(table.columns)
    if missing:
        raise BadInput(f"{str(file)!r} lacks the column {sorted(missing)[0]!r}; analyse again.")
    return table
