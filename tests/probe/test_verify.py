"""Verification: wrong readings and broken numbers fail, rounding alone does not."""

from __future__ import annotations

import pytest
import torch
import zoo

import advantage_probe as ap


def test_verification_fails_on_a_wrong_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from advantage_probe.hooks.adapters import huggingface as attention_registry

    model, batch = zoo.llama(), zoo.batch("llama")
    right = attention_registry.read
    monkeypatch.setattr(
        attention_registry, "read", lambda *given: replace(right(*given), scale=right(*given).scale * 1.01)
    )
    table = ap.verify(model, batch)
    assert (table["verdict"] == "fails").all()


def test_verification_needs_a_loss() -> None:
    with pytest.raises(ap.BadInput, match="labels"):
        ap.verify(zoo.llama(), {"input_ids": zoo.batch("llama")["input_ids"]})
    with pytest.raises(ap.NoAttentionSeen):
        ap.verify(torch.nn.Linear(2, 1), {"input": torch.ones(1, 2)}, loss=lambda output: output.sum())


def test_verification_fails_on_broken_weights_and_not_on_saturated_heads_or_single_tokens() -> None:
    model = zoo.llama()
    one = zoo.batch("llama", length=2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(300)
    assert not (ap.verify(model, zoo.batch("llama"))["verdict"] == "fails").any()
    assert not (ap.verify(zoo.llama(), one)["verdict"] == "fails").any()
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[0, 0] = torch.nan
    assert (ap.verify(model, zoo.batch("llama"))["verdict"] != "ok").any()
