"""torch.compile: watches opened before and after compiling, whole graphs included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import census
import plain
import pytest
import torch
import zoo
from torch import nn

import advantage_probe as ap

BUILDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "llama": (lambda: zoo.llama(num_hidden_layers=1).double(), zoo.batch("llama")),
    "gemma2": (lambda: zoo.gemma2(attn_implementation="eager", num_hidden_layers=1).double(), zoo.batch("gemma2")),
    "plain": (lambda: plain.gpt("name", layers=1).double(), {"idx": plain.ids()}),
    "by hand": (lambda: plain.hand().double(), {"idx": plain.ids()}),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(run: Any, model: nn.Module, batch: dict[str, Any]) -> list[torch.Tensor]:
    found = run(**batch)
    loss = found if isinstance(found, torch.Tensor) else found.loss
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return [loss.detach(), *gradients]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one, other))


def same(table: Any, expected: Any) -> None:
    assert table["module"].tolist() == expected["module"].tolist()
    assert (table["status"] == "ok").all()
    for name in ("queries", "attention_entropy", "routing_pressure", "content_pressure", "alignment"):
        assert table[name].tolist() == pytest.approx(expected[name].tolist(), rel=1e-9), name


@pytest.mark.parametrize("name", BUILDS)
def test_a_compiled_model_stays_whole_bit_equal_and_seen(name: str) -> None:
    build, batch = BUILDS[name]
    model = build()
    with ap.watch(model) as watch:
        step(model, model, batch)
    expected = watch.heads()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    unwatched = step(compiled, model, batch)
    with ap.watch(model) as watch:  # attached after compiling
        watched = step(compiled, model, batch)
    assert equal(unwatched, watched)
    same(watch.heads(), expected)
    assert equal(unwatched, step(compiled, model, batch))
    torch._dynamo.reset()
    with ap.watch(model) as watch:  # attached before compiling
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        watched = step(compiled, model, batch)
        watch.step()
        step(compiled, model, batch)
        watch.step()
    assert equal(unwatched, watched)
    same(watch.heads(0), expected)
    same(watch.heads(1), expected)


def test_padding_and_tokens_are_known_in_compiled_models_too() -> None:
    model = zoo.llama(num_hidden_layers=1).double()
    batch = zoo.batch("llama")
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, -3:] = 0
    with ap.watch(model, detail="tokens") as watch:
        step(model, model, batch)
    compiled = torch.compile(model, backend="aot_eager")
    with ap.watch(model, detail="tokens") as seen:
        step(compiled, model, batch)
    same(seen.heads(), watch.heads())
    assert seen.tokens()["token_id"].tolist() == watch.tokens()["token_id"].tolist()


def test_an_entirely_frozen_compiled_model_is_reached() -> None:
    model = zoo.llama(num_hidden_layers=1).double().requires_grad_(False)
    with ap.watch(model) as watch:
        model(**zoo.batch("llama")).loss.backward()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with ap.watch(model) as seen:
        compiled(**zoo.batch("llama")).loss.backward()
    same(seen.heads(), watch.heads())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_cannot_be_read_in_a_compiled_model_is_refused_by_name() -> None:
    with census.quiet():
        bloom = census.build("BLOOM")
    cases = [
        (bloom, census.batch("BLOOM"), "BloomAttention computes attention by hand"),
        (plain.gpt(dropout=0.3).train(), {"idx": plain.ids()}, "compiled kernel drops"),
    ]
    for model, batch, message in cases:
        compiled = torch.compile(model, backend="aot_eager")
        with pytest.raises(ap.UnsupportedKernel, match=message), ap.watch(model) as watch:
            step(compiled, model, batch)
            watch.step()
        torch._dynamo.reset()
        with torch.compiler.set_stance("force_eager"), ap.watch(model) as watch:  # the remedy that it names
            step(compiled, model, batch)
        assert (watch.heads()["status"] == "ok").all()


def test_a_second_backward_through_a_compiled_graph_is_kept_apart() -> None:
    model = zoo.llama(num_hidden_layers=1)
    compiled = torch.compile(model, backend="aot_eager")
    with ap.watch(model) as watch:
        loss = compiled(**zoo.batch("llama")).loss
        loss.backward(retain_graph=True)
        loss.backward()
    assert watch.heads()["queries"].max() == 18
    assert watch.heads(backward=1)["routing_pressure"].tolist() == watch.heads()["routing_pressure"].tolist()


def test_the_compiled_object_itself_can_be_watched() -> None:
    model = plain.gpt(layers=1).double()
    with ap.watch(model) as watch:
        step(model, model, {"idx": plain.ids()})
    compiled = torch.compile(model, backend="aot_eager")
    with ap.watch(compiled) as seen:
        step(compiled, model, {"idx": plain.ids()})
    same(seen.heads(), watch.heads())


def test_a_checkpoint_inside_a_compiled_graph_is_counted_once() -> None:
    model, saving = plain.gpt(layers=2).double(), plain.gpt(layers=2, checkpoint=False).double()
    with ap.watch(model) as watch:
        step(model, model, {"idx": plain.ids()})
    compiled = torch.compile(saving, backend="aot_eager")
    unwatched = step(compiled, saving, {"idx": plain.ids()})
    with ap.watch(saving) as seen:
        watched = step(compiled, saving, {"idx": plain.ids()})
    assert equal(unwatched, watched)
    same(seen.heads(), watch.heads())
    assert (seen.heads()["use"] == 0).all()


def test_opening_and_closing_many_times_finds_the_compiled_graphs_again() -> None:
    model = plain.gpt(layers=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    counters = torch._dynamo.utils.counters["stats"]
    step(compiled, model, {"idx": plain.ids()})
    counts = []
    for _ in range(10):
        with ap.watch(model) as watch:
            step(compiled, model, {"idx": plain.ids()})
        assert len(watch.heads()) == 4
        step(compiled, model, {"idx": plain.ids()})
        counts.append(counters["unique_graphs"])
    assert counts[-1] == counts[1]
