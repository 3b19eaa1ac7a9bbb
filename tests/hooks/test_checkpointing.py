"""Activation checkpointing of both kinds: every call counted once, no memory held, nothing broken by opening or closing."""

from __future__ import annotations

import pytest
import torch
import zoo
from truth import gradients, untouched

import advantage_probe as ap


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_gradient_checkpointing_counts_every_call_once(family: str, reentrant: bool) -> None:
    model = zoo.FAMILIES[family].build().train()
    if family == "gpt2":
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    batch = zoo.batch(family)
    with ap.watch(model) as watch:
        model(**batch).loss.backward()
    plain, expected = watch.heads(), gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    unwatched = model(**batch)
    unwatched.loss.backward()
    assert all(torch.equal(one, other) for one, other in zip(expected, gradients(model)))
    with ap.watch(model) as watch:
        model(**batch).loss.backward()
    assert all(torch.equal(one, other) for one, other in zip(expected, gradients(model)))
    assert watch.heads().equals(plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_module_used_three_times_keeps_its_uses_apart_under_checkpointing(reentrant: bool) -> None:
    model = zoo.albert()
    batch = zoo.batch("albert")
    with ap.watch(model) as watch:
        model(**batch).loss.backward()
    plain, expected = watch.heads(), gradients(model)
    group = model.albert.encoder.albert_layer_groups[0]
    forward = group.forward

    group.forward = lambda hidden, mask, **kwargs: torch.utils.checkpoint.checkpoint(
        lambda states: forward(states, mask, **kwargs), hidden, use_reentrant=reentrant
    )
    with ap.watch(model) as watch:
        model(**batch).loss.backward()
    assert all(torch.equal(one, other) for one, other in zip(expected, gradients(model)))
    assert watch.heads()["use"].unique().tolist() == [0, 1, 2]
    assert watch.heads().equals(plain)


def test_checkpointing_keeps_its_memory_saving() -> None:
    model = zoo.llama(num_hidden_layers=4).train()
    batch = zoo.batch("llama", rows=4, length=48)

    def saved_bytes(watched: bool) -> int:
        count = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += tensor.numel() * tensor.element_size()
            return tensor

        # what the graph holds outside the checkpoints: the outer hooks do not see what checkpointing takes over
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            if watched:
                with ap.watch(model) as watch:
                    model(**batch).loss.backward()
                    watch.step()
            else:
                model(**batch).loss.backward()
        return count

    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert saved_bytes(True) == saved_bytes(False)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("change", ["open", "close", "skip", "two forwards"])
def test_opening_closing_and_skipping_before_the_backward_never_break_it(reentrant: bool, change: str) -> None:
    model = zoo.llama().train()
    batch = zoo.batch("llama")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model(**batch).loss.backward()
    expected = gradients(model)
    if change == "open":
        loss = model(**batch).loss
        watch = ap.watch(model)
        loss.backward()
        assert not watch.state().entries
        watch.close()
    elif change == "close":
        watch = ap.watch(model)
        loss = model(**batch).loss
        watch.close()
        loss.backward()
    elif change == "skip":
        watch = ap.watch(model, every=2)
        loss = model(**batch).loss
        loss.backward()
        gradients(model)
        watch.step()
        loss = model(**batch).loss  # a skipped step
        loss.backward()
        watch.step()
        assert watch.history()["step"].unique().tolist() == [0]
        watch.close()
    else:
        watch = ap.watch(model)
        first = model(**batch).loss
        watch.close()
        second = model(**zoo.batch("llama", seed=1)).loss
        other = ap.watch(model)
        second.backward()
        gradients(model)
        first.backward()
        other.close()
    assert all(torch.equal(one, other) for one, other in zip(expected, gradients(model)))
    untouched()
