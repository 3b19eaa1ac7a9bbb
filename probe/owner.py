"""Who writes into a folder: one process at a time, told by a lock that a killed owner leaves behind open.

The lock is `flock` on a file in the folder, so that the system itself gives it up with the process. What the file
says is for
people: who the owner is.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path

from ..hooks.errors import BadRequest

try:
    import fcntl
except ImportError:  # no such lock on this system: nothing keeps two writers apart
    fcntl = None  # type: ignore[assignment]

NAME = ".owner"


class Owner:
    """The lock on `folder`, from construction to `release`; made by the process that holds it.

    Raises:
        BadRequest: when another process or watch writes there, naming it. OSError: when the folder cannot be written.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self.folder, self.pid = folder, os.getpid()
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / NAME
        self._file = self._locked(what)
        told = {"pid": self.pid, "host": socket.gethostname(), "watches": what, "since": time.strftime("%F %T")}
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(told).encode(), 0)
        held = os.stat(folder)
        self._identity = held.st_dev, held.st_ino

    def _locked(self, what: str) -> int:
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
            if fcntl is None:
                return file
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                said = _said(file)
                os.close(file)
                raise BadRequest(
                    f"The history {str(self.folder)!r} is being written by {said}; give every watch, and every process of "
                    "a distributed run, a folder of its own, or close the other first."
                ) from None
            with contextlib.suppress(OSError):  # an owner may have removed the file between our open and our lock
                if os.stat(self._path).st_ino == os.fstat(file).st_ino:
                    return file
            os.close(file)

    def there(self) -> bool:
        """Whether the folder is still the one that was locked: not removed, not replaced."""
        try:
            now = os.stat(self.folder)
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == self._identity

    @property
    def ours(self) -> bool:
        """False in a child that was forked while the lock was held: its parent writes."""
        return os.getpid() == self.pid

    def release(self) -> None:
        """Give the folder up; a second call does nothing."""
        if self._file < 0 or not self.ours:
            return
        with contextlib.suppress(OSError):
            if self.there():
                self._path.unlink(missing_ok=True)
        os.close(self._file)
        self._file = -1

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.release()


def _said(file: int) -> str:
    """What an owner's file says of it."""
    try:
        told = json.loads(os.pread(file, 4096, 0))
        return f"process {int(told['pid'])} on {told['host']} (since {told['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
