"""A watch in the place of sdpa's flash backward: outputs, gradients and random numbers keep their bits."""

from __future__ import annotations

import warnings

import pandas as pd
import plain
import pytest
import torch
import zoo
from calls import operator

import advantage_probe as ap
from advantage_probe.hooks.attachment import plans
from advantage_probe.hooks.observation import Reading, observe
from advantage_probe.hooks.visibility import Structure
from advantage_probe.probe.operator import build, classes

pytestmark = operator


def step(model, run, **options) -> tuple[ap.Watch, list[torch.Tensor], torch.Tensor]:
    """The watch, gradients of all parameters, and the output."""
    model.zero_grad(set_to_none=True)
    with ap.watch(model, **options) as watch:
        output = run(model)
        output.sin().sum().backward()
        watch.step(loss_weight=0.5)
    return watch, gradients_of(model), output.detach()


def unwatched(model, run) -> tuple[list[torch.Tensor], torch.Tensor]:
    model.zero_grad(set_to_none=True)
    output = run(model)
    output.sin().sum().backward()
    return gradients_of(model), output.detach()


def gradients_of(model) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


def ways(watch) -> set[str]:
    return set(watch.modules()["way"])


def logits(**batch):
    return lambda model: model(**batch).logits


def ids(family: str, length: int = 40) -> torch.Tensor:
    return zoo.batch(family, length=length)["input_ids"]


def padded(side: str):
    tokens = ids("llama")
    mask = torch.ones_like(tokens)
    mask[0, slice(0, 9) if side == "left" else slice(-9, None)] = 0
    return logits(input_ids=tokens, attention_mask=mask)


FAMILIES = {
    "gpt2": lambda: (zoo.gpt2(), logits(input_ids=ids("gpt2"))),
    "llama": lambda: (zoo.llama(), logits(input_ids=ids("llama"))),
    "llama, padded left": lambda: (zoo.llama(), padded("left")),
    "llama, padded right": lambda: (zoo.llama(), padded("right")),
    "mistral": lambda: (zoo.mistral(), logits(input_ids=ids("mistral"))),
    "bert": lambda: (zoo.bert(), logits(input_ids=ids("bert"))),
    "plain": lambda: (plain.gpt("module"), lambda model: model(plain.ids())),
    "bias": lambda: (plain.gpt("bias"), lambda model: model(plain.ids())),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_outputs_and_gradients_have_the_bits_of_an_unwatched_run(family: str, dtype: torch.dtype) -> None:
    model, run = FAMILIES[family]()
    model = model.to(dtype)
    theirs, output = unwatched(model, run)
    for _ in range(2):  # the first call of a class is compared with the kernel, the second trusted
        watch, ours, same = step(model, run)
        assert torch.equal(output, same)
        assert equal(ours, theirs)
        assert ways(watch) == {"one pass"}
        assert set(watch.modules()["reason"]) == {""}


@pytest.mark.parametrize("detail", ["heads", "tokens", "edges"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_column_is_that_of_the_passes_in_python(family: str, detail: str, monkeypatch) -> None:
    model, run = FAMILIES[family]()
    watch, _, _ = step(model.double(), run, detail=detail)
    monkeypatch.setattr(build, "available", lambda: False)
    other, _, _ = step(model, run, detail=detail)
    assert ways(other) == {"blocks in Python"}
    tables = [(watch.heads(intervals=True), other.heads(intervals=True)), (watch.updates(), other.updates())]
    if detail != "heads":
        tables.append((watch.tokens(), other.tokens()))
    for found, expected in tables:
        pd.testing.assert_frame_equal(found, expected, rtol=1e-9, atol=1e-12)
    if detail == "edges":
        order = ["module", "head", "query_position", "key_position"]
        found, expected = (one.edges(5).sort_values(order, ignore_index=True) for one in (watch, other))
        pd.testing.assert_frame_equal(found, expected, rtol=1e-9, atol=1e-12)


def test_dropout_draws_the_numbers_of_an_unwatched_run() -> None:
    model = zoo.gpt2(resid_pdrop=0.2, attn_pdrop=0.0).train()
    run = logits(input_ids=ids("gpt2"))
    torch.manual_seed(5)
    theirs, output = unwatched(model, run)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    watch, ours, same = step(model, run)
    assert ways(watch) == {"one pass"}
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(output, same)
    assert equal(ours, theirs)


def reason(watch) -> str:
    (found,) = set(watch.modules()["reason"]) - {""}
    return found


def test_calls_that_the_kernel_has_to_keep_say_why() -> None:
    run = logits(input_ids=ids("gpt2"))
    dropped, _, _ = step(zoo.gpt2(attn_pdrop=0.3).train(), run)
    assert "dropout" in reason(dropped)
    still = zoo.llama().requires_grad_(False)
    frozen = ap.watch(still)
    run(still).sum().backward()
    frozen.close()
    assert "need a gradient" in reason(frozen)
    half, _, _ = step(zoo.gpt2().bfloat16(), run)
    assert "bfloat16" in reason(half)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        math, _, _ = step(zoo.gpt2(), run)
    assert "MATH" in reason(math)
    with torch.autocast("cpu", torch.bfloat16):
        cast, _, _ = step(zoo.gpt2(), run)
    assert "autocast" in reason(cast)
    assert ways(frozen) == {"three products", "one pass"}  # the path to u begins at the first layer
    for watch in (dropped, half, math, cast):
        assert ways(watch) == {"three products"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_bit_equal_and_seen_once(reentrant: bool) -> None:
    model, run = FAMILIES["llama"]()
    model.train()
    plainly, _, _ = step(model, run)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    theirs, _ = unwatched(model, run)
    watch, ours, _ = step(model, run)
    assert equal(ours, theirs)
    pd.testing.assert_frame_equal(watch.heads(), plainly.heads(), rtol=1e-4, atol=1e-6)
    assert ways(watch) == {"one pass"}


def test_when_the_probe_fails_or_closes_the_kernel_gives_the_gradients(monkeypatch) -> None:
    model, run = FAMILIES["llama"]()
    theirs, _ = unwatched(model, run)

    model.zero_grad()
    watch = ap.watch(model)
    output = run(model)
    watch.close()  # between forward and backward
    output.sin().sum().backward()
    assert equal(gradients_of(model), theirs)

    model.zero_grad()
    watch = ap.watch(model)
    monkeypatch.setattr(type(watch._recorder), "receive_flash", lambda *_: 1 / 0)
    run(model).sin().sum().backward()
    assert equal(gradients_of(model), theirs)
    watch.close()
    with pytest.raises(ZeroDivisionError):
        watch.step()


def test_a_kept_graph_gives_the_same_gradients_twice_and_delivers_apart() -> None:
    model, run = FAMILIES["llama"]()
    with ap.watch(model) as watch:
        output = run(model).sin().sum()
        output.backward(retain_graph=True)
        once = gradients_of(model)
        model.zero_grad()
        output.backward()
    assert equal(once, gradients_of(model))
    assert watch.heads(backward=1)["score_slope"].tolist() == watch.heads()["score_slope"].tolist()


def test_second_derivatives_are_refused_in_torchs_own_words() -> None:
    model, run = FAMILIES["llama"]()
    weight = model.model.layers[0].self_attn.v_proj.weight

    def twice() -> str:
        (first,) = torch.autograd.grad(run(model).sin().sum(), weight, create_graph=True)
        with pytest.raises(RuntimeError) as told:
            first.square().sum().backward()
        return str(told.value)

    without = twice()
    watch = ap.watch(model)
    assert twice() == without
    watch.close()
    assert watch.heads()["routing_pressure"].min() > 0


def test_gradients_of_some_inputs_alone() -> None:
    for frozen in ("q_proj", "v_proj"):
        model, run = FAMILIES["llama"]()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name and "embed" not in name)
        theirs, _ = unwatched(model, run)
        watch, ours, _ = step(model, run)
        assert equal(ours, theirs)
        assert ways(watch) == {"one pass"}


class Twice(torch.nn.Module):
    """One observed call that is put together from two calls of sdpa."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.inner(x).chunk(3, -1))

        def run(query, key, value):
            parts = [torch.nn.functional.scaled_dot_product_attention(part, key, value) for part in query.chunk(2, 2)]
            return torch.cat(parts, 2).transpose(1, 2), None

        observers = plans(self, query, lambda: None)
        read = lambda: Reading("halves", Structure(), 0.5)  # noqa: E731
        return (observe(observers, query, key, value, run, read) if observers else run(query, key, value))[0]


def test_a_call_in_two_halves_is_left_to_a_tap() -> None:
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(1, 6, 8)
    theirs, _ = unwatched(model, lambda model: model(x))
    watch, ours, _ = step(model, lambda model: model(x))
    assert equal(ours, theirs)
    assert ways(watch) == {"three products"}
    assert watch.heads()["law_residual"].max() < 1e-6


def test_a_class_whose_bits_differ_is_demoted_once_and_keeps_the_kernels_gradients(monkeypatch) -> None:
    model, run = FAMILIES["gpt2"]()
    theirs, _ = unwatched(model, run)
    right, _, _ = step(model, run)
    original = classes.with_gradients

    def off(*given):
        rows, gradients = original(*given)
        gradients[1][0, 0, 0, 0] += 1e-6
        return rows, gradients

    monkeypatch.setattr(classes, "_bit_equal", {})
    monkeypatch.setattr(classes, "with_gradients", off)
    with pytest.warns(UserWarning, match="did not give its bits") as said:
        watch, ours, _ = step(model, run)
    assert len([one for one in said if "bits" in str(one.message)]) == 1
    assert equal(ours, theirs)
    assert ways(watch) == {"two products"}
    pd.testing.assert_frame_equal(watch.heads(), right.heads(), rtol=1e-4, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, ours, _ = step(model, run)
    assert equal(ours, theirs)
    assert ways(again) == {"two products"}


def test_a_mode_of_the_user_keeps_the_kernel(monkeypatch) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, run = FAMILIES["gpt2"]()
    theirs, _ = unwatched(model, run)
    with FlopCounterMode(display=False):
        watch, ours, _ = step(model, run)
    assert equal(ours, theirs)
    assert "mode" in reason(watch)


def test_what_is_ignored_is_said() -> None:
    model, run = FAMILIES["gpt2"]()
    for name in ("fused", "compiled"):
        with pytest.warns(DeprecationWarning, match=f"{name}= is ignored"):
            watch, _, _ = step(model, run, **{name: True})
        assert ways(watch) == {"one pass"}


def test_saved_tensors_are_those_of_the_kernel_and_no_more() -> None:
    """What a watched call keeps for its backward beside what the kernel keeps: nothing of the size of a call."""

    def kept(watched: bool) -> int:
        model, run = FAMILIES["gpt2"]()
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        watch = ap.watch(model) if watched else None
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = run(model)
        if watch is not None:
            watch.close()
        del output
        return sum(sizes.values())

    assert kept(True) == kept(False)
