"""Folders that are whole or not there at all."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...hooks.errors import BadInput, ProbeError
from ...probe.owner import NAME as OWNER
from ...probe.owner import Owner


class _Taken(BadInput):
    """The name was taken by something else while its folder was filled."""


@contextmanager
def new_folder(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a folder to fill; it becomes `out` when the block ends well and vanishes when it does not.

    A reader sees what was there (nothing, an empty folder, the earlier result) or the whole new folder: one rename puts it
    in place, and it trades names with an earlier result where the system can do that.

    Raises:
        BadInput: when `out` is a file, not empty (unless `overwrite`), the folder one stands in, or cannot be
            written, or when something else took its place while the block ran.
    """
    out = out.expanduser().resolve()
    check_out(out, overwrite=overwrite)
    earlier = _identity(out) if overwrite else None
    work: Path | None = None
    owner: Owner | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        sweep(out.parent, out.name)
        work = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name[:40]}-"))
        owner = Owner(work, str(out))
        work.chmod(stat.S_IMODE(out.stat().st_mode) if out.is_dir() else 0o755)
        yield work
        for path in work.rglob("*"):  # some libraries write for the owner's eyes alone
            path.chmod(0o755 if path.is_dir() else 0o644)
        owner.release()
        _put(work, out, earlier)
    except Exception as error:
        reason = "" if isinstance(error, _Taken) else _refused_by_the_disk(error)
        if not reason:
            raise
        kept = "what was there is unchanged" if out.is_dir() and any(out.iterdir()) else "nothing was left there"
        raise BadInput(f"{str(out)!r} could not be written ({reason}); {kept}.") from error
    finally:
        if owner is not None:
            owner.release()
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)


def _refused_by_the_disk(error: BaseException) -> str:
    """Why a file could not be written, "" where that is not what went wrong; safetensors wraps what the system said."""
    if isinstance(error, BadInput) and isinstance(error.__cause__, OSError):
        error = error.__cause__
    if isinstance(error, OSError):
        return str(error.strerror or error)
    return str(error) if "os error" in str(error) else ""


def _identity(folder: Path) -> tuple[int, int] | None:
    """What tells a folder that holds something from another of its name."""
    try:
        if not any(folder.iterdir()):
            return None
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _put(work: Path, out: Path, earlier: tuple[int, int] | None) -> None:
    """`work` under the name `out`; the earlier result, if it is still the one that was asked to be replaced, then lies at
    `work`, or is gone.
    """
    if earlier is None:
        try:
            os.replace(
                work, out
            )  # takes the place of nothing, or of an empty folder: the system itself refuses the rest
        except OSError as error:
            if _identity(out) is None and not out.is_file():
                raise
            raise _Taken(
                f"{str(out)!r} appeared while the run was on and is left as it is; give another --out."
            ) from error
    elif _identity(out) != earlier:
        raise _Taken(
            f"{str(out)!r} was replaced by another while the run was on and is left as it is; give another --out."
        )
    elif not _traded(work, out):
        old = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name[:40]}-old-"))
        out.rename(old / "run")
        try:
            work.rename(out)
        except BaseException:
            (old / "run").rename(out)
            old.rmdir()
            raise
        shutil.rmtree(old, ignore_errors=True)


def sweep(folder: Path, name: str | None = None) -> list[Path]:
    """Remove what killed runs left in `folder` (of the result `name`, or of any): the folders that their owner had
    begun and whose lock is free again. Links are not followed.
    """
    gone = []
    for path in sorted(folder.glob(f".{name[:40]}-*" if name is not None else ".*-*")):
        if path.is_symlink() or not (path / OWNER).is_file():
            continue
        try:
            owner = Owner(path, "sweeping")
        except (ProbeError, OSError):
            continue  # its run is on
        shutil.rmtree(path, ignore_errors=True)
        owner.release()
        gone.append(path)
    return gone


def _traded(one: Path, other: Path) -> bool:
    """Let two folders trade names in one step (Linux); False where the system or the file system cannot."""
    try:
        trade = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return trade(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def check_out(out: Path, *, overwrite: bool = False) -> None:
    """Refuse a destination before any work is done.

    Raises:
        BadInput: as `new_folder`.
    """
    out = out.expanduser().resolve()
    if out.exists() and not out.is_dir():
        raise BadInput(f"{str(out)!r} is a file; give a folder with --out.")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise BadInput(f"The folder {str(out)!r} is not empty; choose another with --out, or say --overwrite.")
        here, home = Path.cwd(), Path.home()
        if not (out / "run.json").is_file() or out in (here, home, *here.parents, *home.parents):
            raise BadInput(f"The folder {str(out)!r} holds no earlier result, so it is not replaced; choose another.")
    elif out.is_dir() and (out == Path.cwd() or out.is_mount()):
        which = "the folder you are in" if out == Path.cwd() else "a mount point"
        raise BadInput(f"{str(out)!r} is {which} and cannot be put in place whole; give a folder inside it with --out.")
    check_writable(out.parent, "--out")


def check_writable(folder: Path, option: str) -> None:
    """Refuse a folder, there or still to be made, in which nothing can be written; `option` is how it was named.

    Raises:
        BadInput: where that is so.
    """
    folder = folder.expanduser().absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.TemporaryDirectory(dir=there, prefix=".probe-"):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(f"{str(there)!r} cannot be written ({reason}); choose another folder with {option}.") from error
