"""Faults that people reported of other capture code, each for its whole kind and not only its example.

The rest of them are tested where they belong: kernels, masks and columns in test_functional.py, windows and uses in
test_huggingface.py, precision, packing and copies in test_conditions.py, bridges in test_transformer_lens.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import census
import pytest
import torch
import zoo
from torch import nn
from truth import KEPT, NAME, recorded, reference_registered, relative

import advantage_probe as ap
from advantage_probe.probe.law.definition import law
from advantage_probe.probe.law.verify import residuals


def loss_of(model: nn.Module, family: str) -> torch.Tensor:
    return model(**zoo.batch(family)).loss


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "bart", "bert", "albert"])
def test_heads_are_there_where_the_model_itself_hands_out_none(family: str) -> None:
    model = zoo.FAMILIES[family].build()
    with ap.watch(model) as watch:
        result = model(**zoo.batch(family), output_attentions=False)
        result.loss.backward()
    assert not getattr(result, "attentions", None)
    layers = {"llama": 2, "gpt2": 3, "t5": 6, "bart": 6, "bert": 2, "albert": 3}[family]
    table = watch.heads()
    assert len(table) == layers * 4
    assert (table["status"] == "ok").all()


@pytest.mark.parametrize("family", ["gpt2", "t5", "OPT", "gemma2"])
def test_the_scale_is_the_one_that_the_model_passes(family: str) -> None:
    if family == "OPT":
        with census.quiet():
            torch.manual_seed(0)
            model, batch = census.build("OPT"), census.batch("OPT")
        model.set_attn_implementation("eager")
    else:
        model, batch = zoo.FAMILIES[family].build(attn_implementation="eager"), zoo.batch(family)
    with recorded(model, inputs=True) as recorder:
        result = model(**batch, output_attentions=True)
        result.loss.backward()
    shown = list(getattr(result, "attentions", None) or ())
    for stack in ("encoder", "decoder", "cross"):
        shown += list(getattr(result, f"{stack}_attentions", None) or ())
    assert len(shown) == len(recorder.calls)
    for call in recorder.calls:
        alpha = law(call).attention
        assert min(float((alpha - other).abs().max()) for other in shown if other.shape == alpha.shape) < 1e-6
        found = residuals(call)
        assert max(float(part.nan_to_num().max()) for part in (found.query, found.key, found.value)) < 1e-5
        wrong = replace(call, scale=call.scale * 1.3)
        assert float(residuals(wrong).query.nan_to_num().max()) > 1e-3


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_value_heads_are_repeated_in_order_and_a_tiled_order_fails(kv_heads: int) -> None:
    model = zoo.llama(num_key_value_heads=kv_heads)
    with recorded(model, inputs=True) as recorder:
        loss_of(model, "llama").backward()
    for call in recorder.calls:
        terms = law(call)
        pooled = terms.value_gradient.unflatten(1, (kv_heads, 4 // kv_heads)).sum(2)
        assert relative(pooled, call.value_gradient) < 1e-6
        if kv_heads == 2:
            tiled = call.value.repeat(1, 2, 1, 1)
            other = law(replace(call, key=call.key.repeat(1, 2, 1, 1), value=tiled))
            assert relative(other.weights @ tiled, call.output) > 1e-2


def test_widths_come_from_the_tensors_where_the_config_says_something_else() -> None:
    model = zoo.deepseek_v3()
    with recorded(model, inputs=True) as recorder:
        loss_of(model, "deepseek_v3").backward()
    for call in recorder.calls:
        assert (call.query.shape[-1], call.value.shape[-1], call.upstream.shape[-1]) == (12, 6, 6)
        found = residuals(call)
        assert max(float(part.max()) for part in (found.query, found.key, found.value)) < 1e-5


def test_a_two_sided_window_is_two_sided() -> None:
    with census.quiet():
        model, batch = census.build("ModernBERT"), census.batch("ModernBERT")
        with recorded(model) as recorder:
            model(**batch).loss.backward()
    place = torch.arange(9)
    windowed = 0
    for call in recorder.calls:
        seen = law(call).visible[0, 0]
        assert call.site.kind == "encoder_self"
        if not bool(seen.all()):
            windowed += 1
            reach = int((seen & (place[None] > place[:, None])).sum(-1).max())
            assert torch.equal(seen, (place[:, None] - place[None]).abs() <= reach)
    assert windowed == 1


def test_the_capped_score_and_the_raw_score_have_their_own_gradients() -> None:
    with reference_registered():
        model = zoo.gemma2(attn_logit_softcapping=0.05, attn_implementation=NAME).double()
        with recorded(model) as recorder:
            loss_of(model, "gemma2").backward()
        kept = {id(entry.module): entry for entry in KEPT}
        for call in recorder.calls:
            entry = kept[id(dict(model.named_modules())[call.site.module])]
            terms = law(call)
            assert relative(terms.score_gradient, entry.score.grad.nan_to_num()) < 1e-9
            assert relative(terms.raw_score_gradient, terms.score_gradient) > 0.1
    model = zoo.gemma2(attn_logit_softcapping=0.05, attn_implementation="eager")
    assert (ap.verify(model, zoo.batch("gemma2"))["verdict"] == "ok").all()


def test_a_whole_batch_of_tokens_keeps_its_rows_when_a_real_token_equals_the_padding_id() -> None:
    model = zoo.llama(pad_token_id=2, eos_token_id=2)
    ids = zoo.batch("llama")["input_ids"].clone()
    ids[0, 4] = 2  # a genuine end inside the text
    ids[1, -2:] = 2
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    with recorded(model) as recorder:
        model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    for call in recorder.calls:
        assert call.visibility.counted(2, torch.device("cpu")).tolist() == mask.bool().tolist()
        assert float(law(call).attention[1, :, :, -2:][:, :7].abs().max()) == 0


def test_repeated_uses_of_a_shared_block_are_rows_of_their_own() -> None:
    class Twice(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, **batch: Any) -> torch.Tensor:
            return self.inner(**batch).loss + self.inner(**batch).loss

    model = zoo.llama()
    with ap.watch(Twice(model)) as watch:
        watch._recorder.attachment.model(**zoo.batch("llama")).backward()
    table = watch.heads()
    assert table["use"].unique().tolist() == [0, 1]
    assert len(table) == 16
    one, two = (table[table["use"] == use]["routing_pressure"].tolist() for use in (0, 1))
    assert one == pytest.approx(two, rel=1e-6)
