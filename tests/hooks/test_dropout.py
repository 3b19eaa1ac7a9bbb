"""Attention dropout: w is the matrix that was really used, and D uses w and α each in its place."""

from __future__ import annotations

import plain
import pytest
import torch
import zoo
from torch import nn
from truth import recorded, relative

import advantage_probe as ap
from advantage_probe.probe.columns import HEADS, WITHOUT_WEIGHTS
from advantage_probe.probe.law.definition import law
from advantage_probe.probe.law.verify import residuals


def llama(kernel: str) -> nn.Module:
    return zoo.llama(attn_implementation=kernel, attention_dropout=0.3).train()


def step(model: nn.Module, batch: dict, seed: int = 7) -> list[torch.Tensor]:
    """Output, gradients and the random state afterwards."""
    torch.manual_seed(seed)
    found = model(**batch)
    loss = found if isinstance(found, torch.Tensor) else found.loss
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return [loss.detach(), *gradients, torch.get_rng_state()]


def models():
    yield "eager", llama("eager"), zoo.batch("llama")
    yield "sdpa", llama("sdpa"), zoo.batch("llama")
    yield "bias", zoo.t5(dropout_rate=0.3).train(), zoo.batch("t5")
    yield "plain", plain.gpt(dropout=0.3).train(), {"idx": plain.ids()}
    for weights in (False, True):
        torch.manual_seed(0)
        mha = plain.louder(nn.MultiheadAttention(32, 4, dropout=0.3, batch_first=True))

        class Model(nn.Module):
            def __init__(self, inner: nn.Module, weights: bool) -> None:
                super().__init__()
                self.inner, self.weights = inner, weights

            def forward(self, x):
                return self.inner(x, x, x, need_weights=self.weights)[0].square().sum()

        yield f"multihead {weights}", Model(mha, weights), {"x": torch.randn(2, 6, 32)}


CASES = [pytest.param(model, batch, id=name) for name, model, batch in models()]


@pytest.mark.parametrize(("model", "batch"), CASES)
def test_a_run_with_dropout_draws_the_same_numbers_and_both_laws_hold(model: nn.Module, batch: dict) -> None:
    expected = step(model, batch)
    with ap.watch(model) as watch:
        found = step(model, batch)
        watch.step()
    assert all(torch.equal(one, other) for one, other in zip(expected, found))
    assert (watch.heads()["status"] == "ok").all()
    with recorded(model, inputs=True) as recorder:
        step(model, batch)
    for call in recorder.calls:
        assert call.weights is not None
        terms = law(call)
        dropped = (terms.weights == 0) & terms.visible
        assert 0.15 < float(dropped.sum() / terms.visible.sum()) < 0.45
        kept = terms.visible & ~dropped
        assert relative(terms.weights[kept] * 0.7, terms.attention[kept]) < 1e-4
        parts = residuals(call)
        assert max(float(part.max()) for part in (parts.query, parts.key, parts.value)) < 2e-5


@pytest.mark.parametrize(("model", "batch"), CASES)
def test_the_law_without_the_dropped_weights_fails(model: nn.Module, batch: dict) -> None:
    from dataclasses import replace

    with recorded(model, inputs=True) as recorder:
        step(model, batch)
    wrong = replace(recorder.calls[0], weights=None)
    assert float(residuals(wrong).value.max()) > 0.05


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_under_checkpointing_replays_what_the_recomputation_drew(reentrant: bool) -> None:
    model = llama("sdpa")
    with ap.watch(model) as watch:
        expected = step(model, zoo.batch("llama"))
    plainly = watch.heads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with ap.watch(model) as watch:
        found = step(model, zoo.batch("llama"))
    assert all(torch.equal(one, other) for one, other in zip(expected, found))
    assert watch.heads().equals(plainly)


@pytest.mark.parametrize("build", ["plain", "registry"])
def test_a_fused_kernel_with_dropout_keeps_what_attention_says_and_refuses_the_rest_by_name(
    build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain.gpt(dropout=0.3).train() if build == "plain" else llama("sdpa")
    batch = {"idx": plain.ids()} if build == "plain" else zoo.batch("llama")
    expected = step(model, batch)
    model.eval()
    with ap.watch(model) as watch:
        step(model, batch)
    plainly = watch.heads()
    model.train()
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_: 1)
    with pytest.warns(UserWarning, match="does not say which") as said, ap.watch(model, detail="edges") as watch:
        found = step(model, batch)
        watch.step(loss_weight=0.5)
    assert all(torch.equal(one, other) for one, other in zip(expected, found))
    assert len([entry for entry in said if "does not say which" in str(entry.message)]) == 1
    table = watch.heads()
    assert set(table["status"]) == {"dropout hidden by the kernel"}
    first = table["layer"] == 0  # later layers see other inputs once something was dropped
    for name in WITHOUT_WEIGHTS:
        assert table.loc[first, name].tolist() == pytest.approx(plainly.loc[first, name].tolist(), rel=1e-5), name
    assert table[[name for name in HEADS if name not in WITHOUT_WEIGHTS]].isna().all().all()
    verdict = ap.verify(model, batch, loss=lambda out: out if isinstance(out, torch.Tensor) else out.loss)
    assert set(verdict["verdict"]) == {"dropout hidden"}
