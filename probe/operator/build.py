"""Compiles the operator for the instruction set that torch runs with, once per machine, and loads it.

The variant follows `torch.backends.cpu.get_cpu_capability()` and not the processor: torch may have been told to use less,
and a wider build would round differently. What was built lies in the user's cache folder, under a name that says what it
was built from; it is loaded only from a folder that nobody else can write to, and only with the hash that was noted when
it was built. Where nothing can be built, one sentence says so and the pass in Python does the work.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from ...hooks.errors import UnsupportedKernel
from ..law.cache import cache_folder

SOURCES = ("one_pass.cpp", "sums_only.cpp", "totals.cpp", "draws.cpp")
HEADERS = ("call.h", "edges.h", "row_sums.h", "vectors.h")
SECONDS = 120  # a compiler that takes longer is stopped
_HERE = Path(__file__).parent
_VARIANTS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mf16c"),
}
# products and sums that the compiler would fuse are rounded twice in torch's kernels, so they are here
_FLAGS = (
    *("-O3", "-std=c++20", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden", "-fvisibility-inlines-hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-w"),
)


def _unavailable(reason: str) -> UnsupportedKernel:
    return UnsupportedKernel(
        f"The C++ operator is not available ({reason}); the same numbers are computed in Python, slower, and the kernel "
        "keeps its own backward."
    )


def refusal() -> str | None:
    """Why this process cannot use the operator whatever is installed, or None."""
    if os.environ.get("ADVANTAGE_PROBE_NO_BUILD") == "1":
        return "ADVANTAGE_PROBE_NO_BUILD=1"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"it is made for Linux on x86-64, not {sys.platform} on {platform.machine()}"
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _VARIANTS:
        return f"torch runs with the CPU capability {capability}, and it is made for {' and '.join(_VARIANTS)}"
    return None


def compiler() -> str | None:
    """The C++ compiler: CXX where that is set, else g++ or clang++."""
    return shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")


@cache
def library() -> ctypes.CDLL:
    """The operator, built where it has not been.

    Raises:
        UnsupportedKernel: where it cannot be had; the sentence names the reason.
    """
    reason = refusal()
    if reason is not None:
        raise _unavailable(reason)
    tool = compiler()
    if tool is None:
        raise _unavailable("no C++ compiler was found")
    try:
        folder = _private_folder(cache_folder() / "operator")
        path = folder / f"{_digest(tool)}.so"
        with _locked(path.with_suffix(".lock")):
            if not _sound(path):
                _build(tool, path)
            found = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        raise _unavailable(_first_line(error)) from None
    for name in ("advantage_probe_one_pass", "advantage_probe_sums", "advantage_probe_totals"):
        function = getattr(found, name)
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_int
    found.advantage_probe_draws.restype = None
    return found


def loaded() -> bool:
    """Whether the operator is there already."""
    return library.cache_info().currsize > 0


@cache
def available() -> bool:
    """Whether the operator can be had; says why not, once. Builds it where it has not been built."""
    try:
        library()
    except UnsupportedKernel as error:
        if os.environ.get("ADVANTAGE_PROBE_NO_BUILD") != "1":  # whoever sets it knows
            warnings.warn(f"advantage_probe: {error}", stacklevel=2)
        return False
    return True


def _first_line(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"the compiler took longer than {SECONDS} s"
    output = getattr(error, "stderr", None) or str(error)
    lines = [line for line in str(output).splitlines() if "error" in line.lower()] or str(output).splitlines()
    return lines[0].strip()[:200] if lines else type(error).__name__


def _digest(tool: str) -> str:
    """A name for everything that the machine code depends on."""
    version = subprocess.run(
        [tool, "--version"], capture_output=True, encoding="utf-8", errors="replace", timeout=10, check=True
    ).stdout
    parts = [torch.__version__, str(torch.version.git_version), torch.backends.cpu.get_cpu_capability(), tool, version]
    parts += [" ".join(_FLAGS), *((_HERE / name).read_text(encoding="utf-8") for name in (*SOURCES, *HEADERS))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _private_folder(folder: Path) -> Path:
    """The folder, made with 0700 where it is missing.

    Raises:
        OSError: where it is a link, or belongs to or can be written by someone else.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _owned(folder, stat.S_ISDIR)
    return folder


def _owned(path: Path, kind: object) -> None:
    facts = path.lstat()
    if not callable(kind) or not kind(facts.st_mode):
        raise OSError(f"{path} is a link or not what it should be")
    if facts.st_uid != os.getuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{path} belongs to someone else or can be written by others")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; waits for another's build no longer than a build may take."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise OSError(f"another process holds {path}") from None
                time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


def _noted(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _sound(path: Path) -> bool:
    """True where the artefact is there, ours alone, and what was built."""
    note = _noted(path)
    if not (path.exists() or path.is_symlink()) or not note.exists():
        return False
    _owned(path, stat.S_ISREG)
    _owned(note, stat.S_ISREG)
    return hashlib.sha256(path.read_bytes()).hexdigest() == note.read_text(encoding="ascii").strip()


def _build(tool: str, path: Path) -> None:
    root = Path(torch.__file__).parent
    capability = torch.backends.cpu.get_cpu_capability()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [tool, *_FLAGS, *_VARIANTS[capability], f"-DCPU_CAPABILITY={capability}"]
        command += [f"-DCPU_CAPABILITY_{capability}", f"-I{root / 'include'}"]
        command += [*(str(_HERE / name) for name in SOURCES), "-o", str(made)]
        command += [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
        subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=SECONDS, check=True)
        made.chmod(0o600)
        _noted(path).write_text(hashlib.sha256(made.read_bytes()).hexdigest(), encoding="ascii")
        _noted(path).chmod(0o600)
        os.replace(made, path)
