"""Edges that the operator keeps by a rising threshold, against all of them sorted."""

from __future__ import annotations

import pytest
import torch
from calls import call_of, operator
from kernels import ran, unusual

from advantage_probe.probe.law.definition import law
from advantage_probe.probe.law.knockout import knockout
from advantage_probe.probe.operator import one_pass
from advantage_probe.probe.operator.one_pass import EdgeRequest

pytestmark = operator
KEPT = 13


def ranked(terms, by_knockout: bool):
    """(B,H,Q,S): what edges are ranked by, positive where attention should rise."""
    gone = knockout(terms.attention, terms.weights, terms.compatibility, terms.sink)
    return gone.nan_to_num(0.0) if by_knockout else -terms.score_gradient


@pytest.mark.parametrize("by_knockout", [False, True], ids=["by D", "by the knock-out"])
@pytest.mark.parametrize("kind", ["one pass", "masked pass", "three products", "sinks", "dropped weights"])
def test_the_strongest_edges_are_those_of_a_full_sort(kind: str, by_knockout: bool) -> None:
    request = EdgeRequest(KEPT, by_knockout)
    if kind.endswith("pass"):
        call, flash = ran("blocks of 32", "causal" if kind == "one pass" else "padding")
        edges = one_pass.with_gradients(call, flash, request)[0].edges
    else:
        call = call_of("causal", torch.float64) if kind == "three products" else unusual(kind)
        edges = one_pass.vectors(call, request).edges
    terms = law(call)
    counted = call.visibility.counted(call.query.shape[0], torch.device("cpu"))[:, None, :, None]
    every = torch.where(counted, ranked(terms, by_knockout), 0.0)
    if kind == "dropped weights" and by_knockout:
        every = torch.where(terms.attention < 1, -terms.score_gradient / (1 - terms.attention), 0.0)
    assert edges is not None
    for side, found in zip((1, -1), edges):
        true, place = (side * every).flatten(2).topk(KEPT, -1)
        assert torch.equal(found.query * every.shape[-1] + found.key, place)
        for name in ("score_gradient", "attention", "advantage"):
            assert float((getattr(found, name) - getattr(terms, name).flatten(2).gather(-1, place)).abs().max()) < 1e-12
        gone = knockout(terms.attention, terms.weights, terms.compatibility, terms.sink).flatten(2).gather(-1, place)
        torch.testing.assert_close(found.knockout, gone, rtol=1e-10, atol=1e-12, equal_nan=True)
        compatible = terms.compatibility.flatten(2).gather(-1, place)
        assert float((found.compatibility - compatible).abs().max()) < 1e-12
        assert bool((true >= 0).all())


def test_fewer_edges_than_there_is_room_for_leave_empty_places() -> None:
    call = call_of("causal", torch.float64)
    edges = one_pass.vectors(call, EdgeRequest(10**4)).edges
    assert edges is not None
    every = law(call).score_gradient
    assert int((edges[0].score_gradient < 0).sum()) == int((every < 0).sum())


def test_the_knock_out_is_the_slope_of_the_loss_along_taking_the_edge_out() -> None:
    call = call_of("two-sided", torch.float64)
    edges = one_pass.vectors(call, EdgeRequest(3, by_knockout=True)).edges
    assert edges is not None
    terms, value = law(call), call.value
    for head in range(call.query.shape[1]):
        i, j = int(edges[0].query[0, head, 0]), int(edges[0].key[0, head, 0])
        kept = terms.attention[0, head, i].clone()
        kept[j] = 0
        moved = (kept / kept.sum()) @ value[0, head] - terms.attention[0, head, i] @ value[0, head]
        alpha, advantage = float(edges[0].attention[0, head, 0]), float(edges[0].advantage[0, head, 0])
        assert float(call.upstream[0, head, i] @ moved) == pytest.approx(alpha * advantage / (1 - alpha), rel=1e-10)
