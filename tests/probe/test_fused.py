"""One pass for gradients and statistics gives what the kernel's backward and the block pass give apart."""

from __future__ import annotations

import pandas as pd
import plain
import pytest
import torch
import zoo
from calls import compiler

import advantage_probe as ap
from advantage_probe.hooks import tap as fused_module


def step(model, run, **options) -> tuple[pd.DataFrame, list[torch.Tensor], torch.Tensor]:
    """Heads with intervals, gradients of all parameters, and the output."""
    model.zero_grad(set_to_none=True)
    with ap.watch(model, **options) as watch:
        output = run(model)
        output.sin().sum().backward()
        watch.step(loss_weight=0.5)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return watch.heads(intervals=True), gradients, output.detach()


def count_fused(monkeypatch) -> list[int]:
    calls: list[int] = []
    original = fused_module._Fused.apply
    monkeypatch.setattr(fused_module._Fused, "apply", lambda *given: (calls.append(1), original(*given))[1])
    return calls


def logits(**batch):
    return lambda model: model(**batch).logits


FAMILIES = {
    "gpt2": lambda: (zoo.gpt2().double(), logits(input_ids=zoo.batch("gpt2", length=40)["input_ids"])),
    "llama": lambda: (zoo.llama().double(), logits(input_ids=zoo.batch("llama", length=40)["input_ids"])),
    "mistral": lambda: (zoo.mistral().double(), logits(input_ids=zoo.batch("mistral", length=40)["input_ids"])),
    "plain": lambda: (plain.gpt("module").double(), lambda model: model(plain.ids())),
    "bias": lambda: (plain.gpt("bias").double(), lambda model: model(plain.ids())),
}


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize(
    "options",
    [{}, {"detail": "edges"}, pytest.param({"compiled": True}, marks=compiler)],
    ids=["heads", "edges", "compiled"],
)
def test_gradients_and_every_column_are_those_of_the_two_passes(family: str, options: dict, monkeypatch) -> None:
    model, run = FAMILIES[family]()
    expected, gradients, output = step(model, run, detail=options.get("detail", "heads"))
    calls = count_fused(monkeypatch)
    found, ours, same = step(model, run, fused=True, **options)
    assert calls
    assert torch.equal(output, same)
    pd.testing.assert_frame_equal(found, expected, rtol=1e-9, atol=1e-12)
    assert len(ours) == len(gradients)
    for one, other in zip(ours, gradients, strict=True):
        assert float((one - other).abs().max()) <= 1e-12 * float(other.abs().max().clamp(min=1e-3))


def test_padded_rows_dropout_and_checkpoints_keep_the_kernels_backward(monkeypatch) -> None:
    calls = count_fused(monkeypatch)
    model = zoo.llama()
    batch = zoo.batch("llama")
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :3] = 0
    run = logits(input_ids=batch["input_ids"], attention_mask=mask)
    expected, gradients, _ = step(model, run)
    found, ours, _ = step(model, run, fused=True)
    assert not calls
    assert found.equals(expected)
    assert all(torch.equal(one, other) for one, other in zip(ours, gradients, strict=True))
    dropped = zoo.gpt2(attn_pdrop=0.3).train()
    step(dropped, logits(input_ids=batch["input_ids"]), fused=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    step(model, logits(input_ids=batch["input_ids"]), fused=True)
    assert not calls


def test_when_the_probe_fails_or_closes_the_kernel_gives_the_gradients(monkeypatch) -> None:
    model, run = FAMILIES["llama"]()
    _, expected, _ = step(model, run)

    def check(watch) -> None:
        for one, other in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(one.grad, other, rtol=1e-12, atol=1e-14)
        watch.close()

    calls = count_fused(monkeypatch)
    model.zero_grad()
    watch = ap.watch(model, fused=True)
    output = run(model)
    watch.close()  # between forward and backward
    output.sin().sum().backward()
    check(watch)

    model.zero_grad()
    watch = ap.watch(model, fused=True)
    monkeypatch.setattr(type(watch._recorder), "receive_fused", lambda *_: 1 / 0)
    run(model).sin().sum().backward()
    check(watch)
    with pytest.raises(ZeroDivisionError):
        watch.step()
    assert calls


def test_a_kept_graph_gives_the_same_gradients_twice_and_delivers_apart() -> None:
    model, run = FAMILIES["llama"]()
    with ap.watch(model, fused=True) as watch:
        output = run(model).sin().sum()
        output.backward(retain_graph=True)
        once = [parameter.grad.clone() for parameter in model.parameters()]
        output.backward()
    for one, twice in zip(once, model.parameters(), strict=True):
        torch.testing.assert_close(2 * one, twice.grad, rtol=1e-12, atol=1e-15)
    assert watch.heads(backward=1)["score_slope"].tolist() == watch.heads()["score_slope"].tolist()


def test_second_derivatives_are_refused_by_torch_itself() -> None:
    model, run = FAMILIES["llama"]()
    with ap.watch(model, fused=True) as watch:
        weight = model.model.layers[0].self_attn.v_proj.weight
        (first,) = torch.autograd.grad(run(model).sin().sum(), weight, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.square().sum().backward()
    watch.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_agree_with_the_kernel_as_far_as_they_reach(dtype: torch.dtype) -> None:
    model, run = FAMILIES["llama"]()
    model = model.to(dtype)
    _, expected, _ = step(model, run)
    _, ours, _ = step(model, run, fused=True)
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == dtype
        scale = float(other.float().abs().max().clamp(min=1e-3))
        assert float((one.float() - other.float()).abs().max()) <= limit * scale


def test_a_frozen_model_gives_the_same_table() -> None:
    model, run = FAMILIES["llama"]()
    model.requires_grad_(False)
    expected, none, _ = step(model, run)
    found, _, _ = step(model, run, fused=True)
    assert not none
    pd.testing.assert_frame_equal(found, expected, rtol=1e-9, atol=1e-12)


class Mixed(torch.nn.Module):
    """Queries and keys in float32 beside values in bfloat16, as a norm of queries and keys leaves them under autocast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm = torch.nn.Linear(8, 24), torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.inner(x).chunk(3, -1))
        query, key = query * self.norm, key * self.norm
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def test_the_kernel_that_steps_in_runs_under_the_autocast_of_the_forward(monkeypatch) -> None:
    found = []
    for fused in (False, True):
        model = Mixed()
        watch = ap.watch(model, fused=fused)
        calls = count_fused(monkeypatch)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)))
        assert bool(calls) == fused
        watch.close()
        output.float().sin().sum().backward()
        found.append(model.inner.weight.grad)
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-3)
