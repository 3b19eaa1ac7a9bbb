"""The one way in which a file is written: whole, or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path, *, flushed: bool = False) -> Iterator[Path]:
    """Yields a file beside `path` to write; a reader of `path` sees what was there before, or all of it.

    Args:
        flushed: have it on the disk before it takes its place, so that a power cut leaves one of the two as well.

    Raises:
        OSError: when it cannot be written; nothing is left behind.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError(errno.EINVAL, "it is a link, a device or a folder, which a file would replace")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem[:40]}-", suffix=path.suffix)
    os.close(handle)
    partial = Path(name)
    try:
        partial.chmod(0o644)
        yield partial
        if flushed:
            with partial.open("rb+") as written:
                os.fsync(written.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
