"""A run as it lies in its folder: read back exactly, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from ...hooks.errors import BadInput
from ...probe import bootstrap
from ...probe.older import ROOTS, SLOPES, per_row
from ...probe.statistics import intervals
from ..intervals.resampled import per_sequence
from .maps import Maps
from .run import Run

FORMAT, OLDER = 3, 2  # of 2 six columns were not yet divided by the number of query rows
FRAMES = ("heads", "tokens", "edges", "updates", "sequences")
# frames that a run has when its model allows them, or when it is a training run
MORE = ("agreement", "vocabulary", "manifold", "history", "truth", "checked")
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
    "checked": {"label", "knockout", "true", "ratio"},
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
    if version not in (FORMAT, OLDER):
        made = record.get("advantage_probe", "unknown")
        newer = isinstance(version, int) and version > FORMAT
        remedy = "install a newer version" if newer else "analyse the text again with this version"
        raise BadInput(
            f"{str(folder)!r} has format {version!r} (written by version {made}), this version reads {OLDER} and {FORMAT}; "
            f"{remedy}."
        )
    frames = {name: _table(path, name) for name in FRAMES}
    if version == OLDER:
        frames["heads"] = _today(frames["heads"], frames["sequences"])
        record["converted_from"] = OLDER
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


def _today(heads: pd.DataFrame, sequences: pd.DataFrame) -> pd.DataFrame:
    """The heads of a run of format 2 as the columns mean today; intervals are taken anew from its sequences."""
    table = per_row(heads)
    if sequences.empty:
        return table
    sums, keys, names = per_sequence(sequences)
    weights = bootstrap.weights([int(name, 16) for name in names]).numpy()
    found = intervals(sums.sum(0), np.tensordot(weights, sums, 1), len(names), (*ROOTS, *SLOPES))
    own = pd.MultiIndex.from_frame(table[list(keys.columns)].astype(keys.dtypes.to_dict()))
    place = pd.MultiIndex.from_frame(keys).get_indexer(own)
    for name, ends in found.items():
        for end, values in zip(("low", "high"), ends):
            if f"{name}_{end}" in table:
                table[f"{name}_{end}"] = np.where(place >= 0, values[place], np.nan)
    return table
