"""`sweep.py`, compiled by torch's inductor for the CPU, once per machine.

Between the products, the block pass goes a dozen times over buffers that the cache holds only in part. Compiled, a row
stays in the cache until everything that it has is known. Sizes are symbols, so one compilation serves all models; it is
kept in the user's cache folder and found there by later processes.

Shapes: n heads of batch rows, r query rows, s keys, V value width.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock  # torch depends on it
from torch import Tensor, nn

from ...hooks.errors import BadRequest
from ...hooks.visibility import Structure
from . import row_sums, sweep, vectors
from .cache import cache_folder

# the number of threads is torch's at the time of the call; nothing is written between the sweeps to be read again
_SETTINGS = {
    "cpp.dynamic_threads": True,
    "realize_reads_threshold": 1000,
    "realize_opcount_threshold": 10000,
    "realize_acc_reads_threshold": 1000,
}


class _Sweep(nn.Module):
    """What torch.export wants: `sweep.sweep` as a module that always returns tensors."""

    def __init__(self, gradient: bool) -> None:
        super().__init__()
        self.gradient = gradient

    def forward(
        self,
        score: Tensor,
        compatibility: Tensor,
        shown: Tensor,
        upstream: Tensor,
        output: Tensor,
        live: Tensor,
        n: Tensor,
    ) -> tuple[Tensor, ...]:
        found = sweep.sweep(score, compatibility, shown, upstream, output, live, n, self.gradient)
        return tuple(part for part in found if part is not None)


@cache
def compiled(dtype: torch.dtype, shared: bool, gradient: bool) -> Callable[..., list[Tensor]]:
    """`sweep.sweep` without the parts that are None; its arguments have to be contiguous.

    Args:
        dtype: of everything but `live`. shared: `shown` is (r,s), the same for every head. gradient: also D.

    Raises:
        BadRequest: where torch cannot compile, mostly for want of a C++ compiler.
    """
    path = cache_folder() / f"sweep-{_digest(str((dtype, shared, gradient)))}.pt2"
    if not _whole(path):
        if sys.stderr.isatty():
            print("advantage_probe: compiling the pass for this machine, once.", file=sys.stderr, flush=True)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):  # torch's own files are in the way of one another
                if not _whole(path):
                    _compile(path, dtype, shared, gradient)
        except Exception as error:
            raise BadRequest(
                "compiled=True needs a C++ compiler that torch can call, such as g++, and a writable cache folder "
                "(ADVANTAGE_PROBE_CACHE); see to both, or leave compiled out."
            ) from error
    try:
        loaded: Any = torch._inductor.aoti_load_package(str(path))
    except Exception as error:
        raise BadRequest(
            f"The pass that was compiled into {str(path)!r} cannot be loaded ({str(error).splitlines()[0]}); delete the "
            "file, see that programs may run from the folder for temporary files (TMPDIR), or leave compiled out."
        ) from error
    return loaded


def _whole(path: Path) -> bool:
    """Whether the file is there and as it was written: torch would run a damaged one."""
    try:
        with zipfile.ZipFile(path) as package:
            return package.testzip() is None
    except (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile):
        return False


def _digest(variant: str) -> str:
    """What the compiled code depends on."""
    sources = "".join(inspect.getsource(module) for module in (sweep, row_sums, vectors, sys.modules[__name__]))
    machine = (
        torch.__version__,
        sorted(_SETTINGS.items()),
        platform.platform(),
        platform.machine(),
        _instructions(),
        torch.backends.cpu.get_cpu_capability(),
    )
    return hashlib.sha256(repr((variant, machine, sources)).encode()).hexdigest()[:16]


def _instructions() -> str:
    """What the processor can do: the compiler builds for the one at hand, and a home folder may serve several."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(path: Path, dtype: torch.dtype, shared: bool, gradient: bool) -> None:
    with torch.device("cpu"):  # whatever the user's default is
        example, shapes = _example(dtype, shared)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        warnings.simplefilter("ignore")
        program = torch.export.export(_Sweep(gradient), example, dynamic_shapes=shapes)
        made = torch._inductor.aoti_compile_and_package(
            program, package_path=f"{folder}/sweep.pt2", inductor_configs=dict(_SETTINGS)
        )
        os.replace(made, path)


def _example(dtype: torch.dtype, shared: bool) -> tuple[tuple[Tensor, ...], tuple[dict[int, Any], ...]]:
    """Arguments of the sweep, and which of their sizes are which symbol: every one is."""
    n, r, s, width = 4, 128, 1000, 96
    axes = {name: torch.export.Dim(name, min=1) for name in ("n", "r", "s", "width")}
    by_entry = {0: axes["n"], 1: axes["r"], 2: axes["s"]}
    by_row, across = {0: axes["n"], 1: axes["r"]}, {0: axes["n"], 1: axes["r"], 2: axes["width"]}
    shown = torch.ones(r, s, dtype=dtype) if shared else torch.ones(n, r, s, dtype=dtype)
    example = (
        torch.zeros(n, r, s, dtype=dtype),
        torch.zeros(n, r, s, dtype=dtype),
        shown,
        torch.zeros(n, r, width, dtype=dtype),
        torch.zeros(n, r, width, dtype=dtype),
        torch.ones(n, r, dtype=torch.bool),
        torch.ones(n, r, dtype=dtype),
    )
    of_shown = {0: axes["r"], 1: axes["s"]} if shared else by_entry
    return example, (by_entry, by_entry, of_shown, across, across, by_row, by_row)


@lru_cache(maxsize=2)
def strip(structure: Structure, rows: int, queries: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    """What `rows` queries see, as 1 and 0, by the place of a key relative to the first of them; and the column of place 0.

    Who sees whom depends on that place alone, so that every block of a call looks through a window of one strip.
    """
    zero = queries + abs(structure.offset)
    relative = replace(structure, offset=0)
    seen = relative.visible(0, rows, -zero, keys + abs(structure.offset) + 1, torch.device("cpu"))
    return seen.to(dtype), zero


def window(
    structure: Structure, start: int, rows: int, columns: int, queries: int, keys: int, dtype: torch.dtype
) -> Tensor:
    """(rows, columns): 1 where the queries of a block see its keys, 0 elsewhere; `start` is the place of its first query
    relative to its first key.
    """
    cut = _short if columns <= 1024 else _window
    return cut(structure, start, rows, columns, queries, keys, dtype)


def _window(
    structure: Structure, start: int, rows: int, columns: int, queries: int, keys: int, dtype: torch.dtype
) -> Tensor:
    whole, zero = strip(structure, rows, queries, keys, dtype)
    return whole[:, zero - start : zero - start + columns].contiguous()


# all heads of all layers look through the same few, one after the other; long ones would fill the memory
_short = lru_cache(maxsize=16)(_window)
