"""The GPU kernels, run by Triton's interpreter on the CPU, give the numbers of the block pass.

Triton decides when it is imported whether it interprets, so these tests run in a process of their own that says so first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from calls import CASES, call_of, compared

from advantage_probe.hooks.visibility import Structure
from advantage_probe.probe.law import blocks as blockwise
from advantage_probe.probe.law import triton_block as registers

pytest.importorskip("triton")


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_all_of_it_… starts")


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_all_of_it_passes_in_a_process_that_interprets() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--override-ini=addopts=--import-mode=importlib",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        __file__,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-500:]
    assert "16 passed, 1 skipped" in done.stdout


@pytest.fixture
def kernels():
    from advantage_probe.probe.law import triton_kernels as kernels

    return kernels


@inside
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("case", CASES)
def test_every_number_of_the_kernels_is_that_of_the_block_pass(kernels, case: str, padded: bool) -> None:
    call = call_of(case, padded=padded)
    assert kernels.fits(call)
    compared(registers.vectors(call), blockwise.vectors(call), 1e-4)


@inside
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_summed_in_float32(kernels, dtype: torch.dtype) -> None:
    call = call_of("grouped", dtype)
    found = registers.vectors(call)
    assert found.usage.dtype == found.entropy.dtype == torch.float32
    same = replace(call, **{name: getattr(call, name).float() for name in ("query", "key", "value", "upstream")})
    compared(found, blockwise.vectors(same), 2e-2)  # α is rounded to the inputs' precision nowhere, products are


@inside
def test_a_wrong_kernel_would_be_seen(kernels) -> None:
    """One key too few, one head too far, a scale off by a percent: all beyond the limit of the equality above."""
    call = call_of("grouped")
    expected = blockwise.vectors(call)
    shifted = replace(call, visibility=replace(call.visibility, structure=Structure(causal=True, offset=-1)))
    tiled = replace(call, value=call.value.flip(1))
    scaled = replace(call, scale=call.scale * 1.01)
    for wrong in (shifted, tiled, scaled):
        with pytest.raises(AssertionError):
            compared(registers.vectors(wrong), expected, 1e-4)


@inside
def test_other_calls_keep_the_block_pass(kernels) -> None:
    call = call_of("causal")
    assert not registers.usable(call)  # it lies on the CPU
    assert kernels.fits(call)
    mask = torch.ones(1, 1, 70, 70, dtype=torch.bool)
    assert not kernels.fits(replace(call, visibility=replace(call.visibility, mask=mask)))
    assert not kernels.fits(replace(call, sinks=torch.zeros(4)))
    assert not kernels.fits(replace(call, softcap=5.0))
    assert not kernels.fits(replace(call, weights=torch.zeros(2, 4, 70, 70)))
    assert not kernels.fits(call_of("causal", torch.float64))
