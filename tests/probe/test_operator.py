"""The C++ operator against the kernel, the law and autograd; and the wrong variants, which must fail.

Gradients are compared bit for bit with those of sdpa's own CPU flash backward, numbers in float64 with the law's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calls import CASES, call_of, compared, operator
from kernels import FORWARD, KINDS, MASKS, SHAPES, ran, same_bits, unusual
from torch import Tensor

from advantage_probe.hooks.call import AttentionCall, CallSite
from advantage_probe.hooks.sequences import Sequences
from advantage_probe.hooks.site import Site
from advantage_probe.hooks.visibility import Structure, Visibility
from advantage_probe.probe import bootstrap
from advantage_probe.probe.columns import SUMS
from advantage_probe.probe.law.definition import vectors as defined
from advantage_probe.probe.operator import one_pass, records
from advantage_probe.probe.operator.draws import drawn
from advantage_probe.probe.operator.one_pass import EdgeRequest
from advantage_probe.probe.statistics import sequence_sums
from advantage_probe.probe.updates import Updates

pytestmark = operator


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_have_the_kernels_bits_and_numbers_are_those_of_the_law(
    shape: str, mask: str, dtype: torch.dtype, threads: int
) -> None:
    call, flash = ran(shape, mask, dtype)
    found, ours = one_pass.with_gradients(call, flash)
    assert same_bits(ours, flash.gradients(call.upstream))
    if dtype == torch.float64 and threads == 1 and "token" not in shape:
        expected = defined(call)
        seen = call.visibility.dense(call.query.shape[0], torch.device("cpu"))[0].sum(-1)
        if bool((seen == 1).all()):  # A is 0 there, up to rounding: nothing to be relative to
            return
        compared(found, expected, 1e-12)


@pytest.mark.parametrize("layout", ["heads first", "odd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_layouts_have_the_kernels_bits_too(layout: str, dtype: torch.dtype) -> None:
    for shape in ("blocks of 32", "blocks of 64", "grouped"):
        call, flash = ran(shape, "causal", dtype, layout)
        assert same_bits(one_pass.with_gradients(call, flash)[1], flash.gradients(call.upstream))


def test_gradients_are_those_of_autograd_through_plain_attention() -> None:
    for shape in ("blocks of 32", "grouped", "more keys"):
        call, flash = ran(shape, "two-sided")
        inputs = [tensor.clone().requires_grad_() for tensor in (call.query, call.key, call.value)]
        query, key, value = inputs
        key, value = (part.repeat_interleave(call.group, 1) for part in (key, value))
        attention = torch.softmax(query @ key.mT * flash.scale, -1)
        true = torch.autograd.grad(attention @ value, inputs, call.upstream)
        for one, other in zip(one_pass.with_gradients(call, flash)[1], true):
            assert float((one - other).abs().max()) <= 1e-12 * float(other.abs().max())


@pytest.mark.parametrize("place", ["query", "key", "value", "upstream"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e30])
def test_numbers_that_are_not_finite_go_where_the_kernel_sends_them(place: str, number: float) -> None:
    def change(*tensors: Tensor) -> None:
        tensors[("query", "key", "value", "upstream").index(place)][0, 0, 30, 2] = number

    for mask in ("causal", "boolean"):
        call, flash = ran("blocks of 32", mask, torch.float32, change=change)
        ours, theirs = one_pass.with_gradients(call, flash)[1], flash.gradients(call.upstream)
        for one, other in zip(ours, theirs):
            assert torch.equal(one.isnan(), other.isnan())
            assert torch.equal(one.nan_to_num(0.0), other.nan_to_num(0.0))


def test_the_same_call_gives_the_same_bits_again_and_with_two_threads() -> None:
    call, flash = ran("blocks of 64", "causal", torch.float32)
    first, _ = one_pass.with_gradients(call, flash, EdgeRequest(9))
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            again, _ = one_pass.with_gradients(call, flash, EdgeRequest(9))
            for name in ("entropy", "alignment", "usage", "score_square"):
                assert torch.equal(getattr(first, name), getattr(again, name))
            assert first.edges is not None
            assert again.edges is not None
            assert torch.equal(first.edges[0].key, again.edges[0].key)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(2, 2, 2, 0, 5, 8), (0, 2, 2, 5, 5, 8)])
def test_nothing_to_look_at_gives_nothing(shape) -> None:
    batch, heads, owners, queries, keys, width = shape
    query, key = torch.randn(batch, heads, queries, width), torch.randn(batch, owners, keys, width)
    site = CallSite(Site("attention", 0, "", "cross"), 0, 0, 1.0, None, 0.0, "sdpa", Sequences(tuple(range(batch))))
    call = AttentionCall(
        **vars(site),
        delivery=0,
        query=query,
        key=key,
        value=key,
        output=query,
        upstream=query,
        visibility=Visibility(Structure(), queries, keys, paired=False),
    )
    found = one_pass.vectors(call)
    assert found.entropy.shape == (batch, heads, queries)
    assert not found.usage.any()


def test_no_keys_leave_rows_that_see_nothing() -> None:
    query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 0, 8)
    site = CallSite(Site("attention", 0, "", "cross"), 0, 0, 1.0, None, 0.0, "sdpa", Sequences((0,)))
    call = AttentionCall(
        **vars(site),
        delivery=0,
        query=query,
        key=key,
        value=key,
        output=query,
        upstream=query,
        visibility=Visibility(Structure(), 3, 0, paired=False),
    )
    rows = one_pass.counting(call.visibility, 1)
    assert rows.blind.tolist() == [[3]]


def test_offsets_beyond_what_32_bits_count() -> None:
    apart = 2**31 + 64
    storage = torch.empty(apart + 2 * 40 * 16)  # only the pages that are written to exist
    generator = torch.Generator().manual_seed(0)
    call, flash = ran((2, 2, 2, 40, 40, 16), "causal", torch.float32)
    far = storage.as_strided((2, 2, 40, 16), (apart, 640, 16, 1))
    far.copy_(torch.randn(2, 2, 40, 16, generator=generator))
    output, normalizer = FORWARD(far, flash.key, flash.value, 0.0, True, scale=flash.scale)
    flash = replace(flash, query=far, output=output, normalizer=normalizer)
    call = replace(call, query=far, output=output)
    found, ours = one_pass.with_gradients(call, flash)
    assert same_bits(ours, flash.gradients(call.upstream))
    near = replace(call, query=far.contiguous())
    compared(found, defined(near, torch.float64), 1e-4)


# -- beside a kernel that keeps its backward ---------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_three_products_give_every_number_of_the_law(case: str, padded: bool) -> None:
    call = call_of(case, torch.float64, padded)
    compared(one_pass.vectors(call), defined(call), 1e-12)
    single = call_of(case, torch.float32, padded)
    compared(one_pass.vectors(single), defined(single, torch.float64), 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_caps_sinks_dropout_and_biases_follow_the_law(kind: str) -> None:
    call = unusual(kind)
    compared(one_pass.vectors(call), defined(call), 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_added_up_in_float32(dtype: torch.dtype) -> None:
    call = call_of("grouped", dtype)
    whole = replace(
        call,
        query=call.query.float(),
        key=call.key.float(),
        value=call.value.float(),
        upstream=call.upstream.float(),
        output=call.output.float(),
    )
    found, expected = one_pass.vectors(call), defined(whole, torch.float64)
    for name in ("entropy", "usage", "value_gradient", "score_square", "advantage_square"):
        true = getattr(expected, name)
        assert float((getattr(found, name) - true).abs().max()) <= 1e-4 * float(true.abs().max()), name


@pytest.mark.parametrize("mask", MASKS)
def test_two_products_give_the_same_from_what_the_kernel_knows(mask: str) -> None:
    call, flash = ran("blocks of 32", mask)
    if call.visibility.rows is not None:
        upstream = torch.where(call.visibility.rows[:, None, :, None], call.upstream, 0.0)
        call = replace(call, upstream=upstream)
    gradient = flash.gradients(call.upstream)[2]
    compared(one_pass.vectors(call, normalizer=flash.normalizer, value_gradient=gradient), defined(call), 1e-12)


def test_the_sums_have_the_order_in_which_they_are_stored() -> None:
    assert tuple(SUMS) == records.SUMS


def check_totals(call: AttentionCall, rows) -> None:
    """The sums that came with the pass against the same sums by tensor operations."""
    apart = replace(rows, totals=None)
    true = sequence_sums(call, apart)
    scale = true.abs().amax((0, 1)).clamp(min=1e-30)
    assert float(((rows.totals.sums - true).abs() / scale).max()) < 1e-12
    ours, theirs = (Updates.empty(call.query.shape[1], call.value.shape[3]) for _ in range(2))
    ours.add(rows, 2.0)
    theirs.add(apart, 2.0)
    assert torch.equal(ours.keys, theirs.keys)
    for name in ("total", "moment"):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert float((one - other).abs().max()) <= 1e-12 * float(other.abs().max())


def test_the_sums_that_come_with_a_pass_are_those_of_the_definition() -> None:
    for case in CASES:
        for padded in (False, True):
            call = call_of(case, torch.float64, padded)
            check_totals(call, one_pass.vectors(call))
    for kind in KINDS:
        check_totals(unusual(kind), one_pass.vectors(unusual(kind)))
    for shape in ("blocks of 32", "grouped", "more keys"):
        for mask in MASKS:
            call, flash = ran(shape, mask)
            check_totals(call, one_pass.with_gradients(call, flash)[0])


def test_a_head_with_numbers_that_are_not_finite_spares_its_group() -> None:
    call = call_of("grouped", torch.float64)
    upstream = call.upstream.clone()
    upstream[0, 0, 3] = torch.nan
    call = replace(call, upstream=upstream)
    rows = one_pass.vectors(call)
    true, found = sequence_sums(call, replace(rows, totals=None)), rows.totals.sums
    assert torch.equal(found.isnan().any(-1), true.isnan().any(-1))
    place = list(SUMS).index("group_gradient_square")
    torch.testing.assert_close(found[..., place], true[..., place], rtol=1e-12, atol=0)


def test_the_operator_draws_the_weights_of_numpys_generator() -> None:
    identities = [0, 1, 12345, 2**63, 2**64 - 1, *range(7, 60)]
    found = drawn(identities, bootstrap.REPLICATES, bootstrap._CUMULATIVE)
    assert found is not None
    for place, identity in enumerate(identities):
        assert found[:, place].tolist() == bootstrap._draw(identity).tolist()


# -- wrong variants ----------------------------------------------------------------------------------------------------


def residual(call: AttentionCall) -> float:
    found = one_pass.vectors(call)
    return float((found.residual.sum() / found.residual_scale.sum()).sqrt())


def test_tiled_groups_a_missing_mask_and_a_wrong_scale_do_not_reproduce_the_output() -> None:
    right = call_of("grouped", torch.float64)
    tiled = [part.repeat(1, right.group, 1, 1) for part in (right.key, right.value)]
    wrong = {
        "tiled groups": replace(right, key=tiled[0], value=tiled[1]),
        "no mask": replace(right, visibility=replace(right.visibility, structure=Structure())),
        "scale": replace(right, scale=right.scale * 1.01),
    }
    assert residual(right) < 1e-12
    for name, call in wrong.items():
        assert residual(call) > 1e-4, name
        with pytest.raises(AssertionError):
            compared(one_pass.vectors(call), defined(right), 1e-12)


def test_a_wrong_scale_or_order_has_other_bits() -> None:
    call, flash = ran("blocks of 32")
    theirs = flash.gradients(call.upstream)
    for wrong in (replace(flash, scale=flash.scale * 1.01), replace(flash, causal=False)):
        assert not same_bits(one_pass.with_gradients(call, wrong)[1], theirs)
