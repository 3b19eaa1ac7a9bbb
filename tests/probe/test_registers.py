"""The GPU kernels, run by Triton's interpreter on the CPU, give the numbers of the block pass.

Triton decides when it is imported whether it interprets, so these tests run in a process of their own that says so first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch

from advantage_probe.hooks.call import AttentionCall, CallSite
from advantage_probe.hooks.forward import Sequences
from advantage_probe.hooks.site import Site
from advantage_probe.hooks.visibility import Structure, Visibility
from advantage_probe.probe import blockwise, registers
from advantage_probe.probe.law import law

pytest.importorskip("triton")
CASES = {
    "causal": (Structure(causal=True), 70, 70, 1),
    "grouped": (Structure(causal=True), 33, 33, 2),
    "window": (Structure(causal=True, window=9), 70, 70, 2),
    "two-sided": (Structure(), 40, 40, 1),
    "behind a cache": (Structure(causal=True, offset=37), 30, 67, 1),
    "cross": (Structure(), 20, 50, 2),
}


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
    from advantage_probe.probe import kernels

    return kernels


def call_of(case: str, dtype: torch.dtype = torch.float32, padded: bool = False, width: int = 24) -> AttentionCall:
    """A call with its true output, from plain tensors; values are narrower than keys."""
    structure, queries, keys, group = CASES[case]
    generator = torch.Generator().manual_seed(len(case))
    batch, heads = 2, 4

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    sequences = Sequences(tuple(range(batch)))
    kind = "cross" if case == "cross" else "decoder_self"
    site = CallSite(Site("attention", 0, "", kind), 0, 1, 0.6, None, 0.0, "sdpa", sequences)
    rows = None
    if padded:
        rows = torch.ones(batch, queries, dtype=torch.bool)
        rows[0, -5:] = False
    call = AttentionCall(
        site,
        0,
        draw(batch, queries, heads, width).transpose(1, 2),  # as models have them: not contiguous
        draw(batch, heads // group, keys, width),
        draw(batch, heads // group, keys, 18),
        draw(batch, heads, queries, 18),
        draw(batch, heads, queries, 18),
        Visibility(structure, queries, keys, rows=rows, paired=case != "cross"),
    )
    weights = law(call, torch.float64).weights
    value = call.value.double().repeat_interleave(group, 1)
    return replace(call, output=torch.einsum("bhqs,bhsv->bhqv", weights, value).to(dtype))


def compared(found, expected, limit: float) -> None:
    assert torch.equal(found.counted, expected.counted)
    assert torch.equal(found.aligned, expected.aligned)
    assert torch.equal(found.blind.expand_as(expected.blind), expected.blind)
    left = {"counted", "aligned", "blind", "edges", "query_gradient", "key_gradient", "residual"}
    for name in (entry.name for entry in fields(found) if entry.name not in left):
        true, got = getattr(expected, name), getattr(found, name)
        if true is None:  # the block pass takes distances from usage where it can
            assert name == "reach"
            continue
        scale = max(float(true.abs().max()), 1e-30)
        assert float((got.expand(true.shape) - true).abs().max()) <= limit * scale, name
    # rounding squared: small beside what it is measured against, in both
    assert float((found.residual.sum() / found.residual_scale.sum()).sqrt()) <= limit


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
    scaled = replace(call, call=replace(call.call, scale=call.call.scale * 1.01))
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
    assert not kernels.fits(replace(call, call=replace(call.call, softcap=5.0)))
    assert not kernels.fits(replace(call, weights=torch.zeros(2, 4, 70, 70)))
    assert not kernels.fits(call_of("causal", torch.float64))
