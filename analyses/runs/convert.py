"""Folders of an earlier version, rewritten whole as this version writes them."""

from __future__ import annotations

import shutil
from pathlib import Path

from ...hooks.errors import BadInput
from ...probe.history import convert as convert_history
from ..files.export import FORMATS, write_frame, write_json
from ..files.folders import new_folder
from ..files.names import HISTORY
from .stored import FORMAT, open_run


def convert(folder: Path) -> str:
    """Rewrite a history, a run with a history in it, or a run of `analyze`; returns what was done.

    Raises:
        BadInput: for a folder that holds none of them, or is damaged; it is left as it was.
    """
    for place in (folder, folder / HISTORY):
        if any(place.glob("part-*.parquet")):
            count = convert_history(place)
            return f"{place}: {count} files rewritten" if count else f"{place} is of this version already"
    if not (folder / "run.json").is_file():
        raise BadInput(f"{str(folder)!r} holds neither a history nor a run; name the folder that one lies in.")
    run = open_run(folder)
    if run.record["format"] == FORMAT:
        return f"{folder} is of this version already"
    formats = [kind for kind in FORMATS if (folder / f"heads.{kind}").is_file()]
    with new_folder(folder, overwrite=True) as work:
        shutil.copytree(folder, work, dirs_exist_ok=True)
        for name in ("report.html", "heads.tex"):  # they show the old numbers
            (work / name).unlink(missing_ok=True)
        write_frame(run.heads, work / "heads", formats)
        write_json({**run.record, "format": FORMAT}, work / "run.json")
    return f"{folder}: heads rewritten; `advantage-probe report {folder}` draws its page anew"
