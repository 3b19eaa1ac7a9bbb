"""The conditions under which people run models: precision, packing, freezing, adapters, threads, copies, many watches."""

from __future__ import annotations

import warnings

import census
import numpy as np
import pandas as pd
import plain
import pytest
import torch
import zoo
from torch import nn
from truth import recorded, relative

import advantage_probe as ap
from advantage_probe.hooks.sequences import documents
from advantage_probe.probe.law.definition import law
from advantage_probe.probe.law.verify import residuals


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(torch.equal(left, right) for left, right in zip(one, other))


# -- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_read_in_float32_and_rows_of_the_score_gradient_sum_to_zero(name: str, dtype: torch.dtype) -> None:
    model = zoo.llama() if name == "llama" else plain.gpt()
    batch = zoo.batch("llama") if name == "llama" else {"idx": plain.ids()}

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            found = model(**batch)
            return found if isinstance(found, torch.Tensor) else found.loss

    loss().backward()
    expected = gradients(model)
    with recorded(model, inputs=True) as recorder:
        loss().backward()
    model.zero_grad(set_to_none=True)
    assert len(recorder.calls) == 2
    for call in recorder.calls:
        terms = law(call)
        assert terms.score_gradient.dtype == torch.float32
        assert float(terms.score_gradient.sum(-1).abs().max()) < 1e-5 * float(terms.score_gradient.abs().max())
        found = residuals(call)
        assert max(float(part.max()) for part in (found.query, found.key, found.value)) < 2e-2
    with ap.watch(model) as watch:
        loss().backward()
    assert equal(expected, gradients(model))
    assert len(watch.heads()) == 8


def test_a_loss_scaler_leaves_no_trace_in_the_numbers_and_skipped_steps_are_left_out() -> None:
    tables = []
    for scale in (1.0, 65536.0):
        model = zoo.llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with ap.watch(model, scaler=scaler) as watch:
            for _ in range(2):
                scaler.scale(model(**zoo.batch("llama")).loss).backward()
                scaler.step(optimizer)
                watch.step()
                scaler.update(scale)
                optimizer.zero_grad()
        tables.append(watch.heads())
    for column in ("routing_pressure", "content_pressure", "advantage_std"):
        assert tables[0][column].tolist() == pytest.approx(tables[1][column].tolist(), rel=1e-3)


def test_an_overflow_in_one_head_flags_that_head_and_poisons_nothing_else() -> None:
    class Overflowing(plain.Attention):
        factor = 1.0

        def forward(self, x):
            q, k, v = (part.view(2, 9, 4, 8).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
            size = torch.ones(4)
            size[1] = Overflowing.factor
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v * size[:, None, None], is_causal=True)
            return self.c_proj(y.transpose(1, 2).reshape(2, 9, 32))

    torch.manual_seed(0)
    model = plain.louder(plain.GPT([plain.Block(Overflowing())]))
    with ap.watch(model) as watch:
        for Overflowing.factor in (1.0, float("inf"), 1.0):
            loss = model(plain.ids())
            # the other heads keep a finite gradient although the loss is not
            loss = loss if torch.isfinite(loss) else torch.nan_to_num(loss)
            loss.backward()
            model.zero_grad(set_to_none=True)
            watch.step()
    table = watch.heads()
    assert table["status"].tolist()[1].startswith("non-finite")
    clean = watch.heads(step=0)
    again = watch.heads(step=2)
    assert again["routing_pressure"].tolist() == clean["routing_pressure"].tolist()
    assert table["routing_pressure"].notna().all()


# -- packing ---------------------------------------------------------------------------------------------------------


def packed() -> dict[str, torch.Tensor]:
    return {"input_ids": plain.ids(1, 7), "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]])}


def test_packed_documents_keep_apart_and_rows_equal_those_of_the_document_alone() -> None:
    model, batch = zoo.llama(), packed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with recorded(model) as together:
            model(**batch, use_cache=False).logits[:, 4:].square().sum().backward()
    with recorded(model) as alone:
        model(input_ids=batch["input_ids"][:, 4:], use_cache=False).logits.square().sum().backward()
    for one, other in zip(together.calls, alone.calls):
        terms = law(one)
        assert float(terms.attention[0, :, 4:, :4].abs().max()) == 0
        assert not bool(terms.visible[0, :, 4:, :4].any())
        assert relative(terms.attention[:, :, 4:, 4:], law(other).attention) < 1e-5
        assert relative(terms.score_gradient[:, :, 4:, 4:], law(other).score_gradient) < 1e-4


def test_positions_in_token_tables_start_again_with_every_document() -> None:
    model = zoo.llama()
    with ap.watch(model, detail="tokens") as watch:
        model(**packed(), use_cache=False).logits.square().sum().backward()
    rows = watch.tokens()
    for side in ("query", "key"):
        one = rows[(rows["side"] == side) & (rows["head"] == 0) & (rows["layer"] == 0)]
        assert one["position"].tolist() == [0, 1, 2, 3, 0, 1, 2]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "mistral", "modernbert"])
def test_packed_documents_are_sampling_units_of_their_own(family: str, implementation: str) -> None:
    """Statistics and intervals are those of the same documents in rows of their own."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    lengths, start = (9, 4, 7), 0
    ids = torch.randint(1, 31, (1, sum(lengths)), generator=torch.Generator().manual_seed(3))
    if family == "modernbert":
        config = ModernBertConfig(
            vocab_size=31,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            pad_token_id=0,
        )
        model = zoo.finish(ModernBertForMaskedLM._from_config(config, attn_implementation=implementation)).double()
    else:
        model = getattr(zoo, family)(attn_implementation=implementation).double()
    torch.manual_seed(2)
    direction = torch.randn(1, sum(lengths), 31, dtype=torch.float64)
    with ap.watch(model) as apart:
        for length in lengths:
            there = slice(start, start := start + length)
            (model(input_ids=ids[:, there]).logits * direction[:, there]).sum().backward()
        apart.step(loss_weight=1.0)
    packed = torch.cat([torch.arange(length) for length in lengths])[None]
    options = {} if family == "modernbert" else {"position_ids": packed, "use_cache": False}
    if family == "modernbert":  # takes no hint from positions: the mask says it
        number = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
        hidden = torch.zeros(20, 20, dtype=torch.float64).masked_fill(number[:, None] != number[None], float("-inf"))
        options = {"attention_mask": hidden[None, None], "position_ids": packed}
    with ap.watch(model) as together:
        (model(input_ids=ids, **options).logits * direction).sum().backward()
        together.step(loss_weight=1.0)
    expected, found = apart.heads(intervals=True), together.heads(intervals=True)
    single = implementation == "eager"  # its softmax runs in float32 whatever the model's dtype
    pd.testing.assert_frame_equal(found, expected, rtol=1e-5 if single else 1e-9, atol=1e-6 if single else 1e-12)
    assert not np.allclose(found["usage_effective_low"], found["usage_effective_high"])


def test_attention_that_crosses_packed_documents_is_reported_as_it_is_and_said_once() -> None:
    model, batch = zoo.llama(), packed()
    batch["attention_mask"] = torch.ones(1, 7, dtype=torch.long)
    with pytest.warns(UserWarning, match="crosses from one document into another") as said, recorded(model) as recorder:
        for _ in range(2):
            model(**batch, use_cache=False).logits.square().sum().backward()
    assert len([entry for entry in said if "crosses" in str(entry.message)]) == 1
    assert float(law(recorder.calls[0]).attention[0, :, 4:, :4].max()) > 0.01


def test_documents_are_counted_where_positions_start_again_and_padding_says_nothing() -> None:
    assert documents(torch.tensor([[0, 1, 2, 3]])) is None
    assert documents(torch.tensor([[0, 1, 0, 1, 0]])).tolist() == [[0, 0, 1, 1, 2]]
    assert documents(torch.tensor([[1, 1, 0, 1]]), torch.tensor([[False, False, True, True]])) is None


# -- frozen, adapters, prepared ----------------------------------------------------------------------------------------


def test_no_gradient_is_not_zero_gradient() -> None:
    model = zoo.llama().requires_grad_(False)
    model.model.layers[1].mlp.down_proj.requires_grad_(True)
    with pytest.warns(UserWarning, match="no gradient path"), ap.watch(model) as watch:
        model(**zoo.batch("llama")).loss.backward()
    table = watch.heads()
    assert table["routing_pressure"].isna().all()
    assert set(table["status"]) == {"no gradient path"}
    with ap.watch(model, reach_all=True) as watch:
        model(**zoo.batch("llama")).loss.backward()
    assert (watch.heads()["status"] == "ok").all()


def test_an_entirely_frozen_model_gives_the_numbers_of_the_trainable_one() -> None:
    model = zoo.llama()
    with ap.watch(model) as watch:
        model(**zoo.batch("llama")).loss.backward()
    expected = watch.heads()
    model.zero_grad(set_to_none=True)
    model.requires_grad_(False)
    with ap.watch(model) as watch:
        model(**zoo.batch("llama")).loss.backward()
    assert watch.heads()["routing_pressure"].tolist() == pytest.approx(expected["routing_pressure"].tolist(), rel=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters())
    embeds = model.get_input_embeddings()(zoo.batch("llama")["input_ids"]).detach().requires_grad_()
    with ap.watch(model) as watch:
        model(inputs_embeds=embeds, labels=zoo.batch("llama")["labels"]).loss.backward()
    assert watch.heads()["routing_pressure"].tolist() == pytest.approx(expected["routing_pressure"].tolist(), rel=1e-6)
    assert embeds.grad is not None


def test_u_exists_where_only_a_query_projection_is_trainable() -> None:
    full = zoo.llama()
    with recorded(full) as recorder:
        full(**zoo.batch("llama")).loss.backward()
    model = zoo.llama().requires_grad_(False)
    model.model.layers[0].self_attn.q_proj.requires_grad_(True)
    with recorded(model) as seen:
        model(**zoo.batch("llama")).loss.backward()
    assert len(seen.calls) == 2
    for one, other in zip(recorder.calls, seen.calls):
        assert relative(other.upstream, one.upstream) < 1e-6
        assert relative(law(other).value_gradient, law(one).value_gradient) < 1e-6


def test_lora_and_prefix_tuning_are_read_and_prefix_keys_are_no_tokens() -> None:
    peft = pytest.importorskip("peft")
    for config in (
        peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False),
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    ):
        torch.manual_seed(0)
        with census.quiet():
            model = peft.get_peft_model(zoo.llama(), config).eval()
            batch = zoo.batch("llama")
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            model(**batch).loss.backward()
            expected = gradients(model)
            with recorded(model, inputs=True) as recorder:
                model(**batch).loss.backward()
            model.zero_grad(set_to_none=True)
            with ap.watch(model, detail="tokens") as watch:
                model(**batch).loss.backward()
        assert equal(expected, gradients(model))
        assert not recorder.errors
        assert (watch.heads()["status"] == "ok").all()
        for call in recorder.calls:
            found = residuals(call)
            assert max(float(part.nan_to_num().max()) for part in (found.query, found.key, found.value)) < 1e-5
        if isinstance(config, peft.PrefixTuningConfig):
            assert {call.key.shape[2] for call in recorder.calls} == {12}
            rows = watch.tokens()
            keys = rows[(rows["side"] == "key") & (rows["head"] == 0) & (rows["sequence"] == 0) & (rows["layer"] == 0)]
            assert keys["token"].tolist()[:3] == ["<prefix>"] * 3
            assert keys["token_id"].tolist()[3:] == batch["input_ids"][0].tolist()


def test_a_model_prepared_by_accelerate_is_read() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = zoo.llama()
    with ap.watch(model) as watch:
        model(**zoo.batch("llama")).loss.backward()
    expected = watch.heads()
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    with ap.watch(prepared) as watch:
        accelerator.backward(prepared(**zoo.batch("llama")).loss)
    assert watch.heads()["routing_pressure"].tolist() == expected["routing_pressure"].tolist()


def test_dynamically_dequantised_weights_are_read() -> None:
    class Quantised(nn.Module):
        """Integer weights, dequantised in a differentiable forward."""

        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
            self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
            self.register_buffer("scale", scale)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight.float() * self.scale)

    model = zoo.llama()
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Quantised(getattr(layer.self_attn, name)))
    assert (ap.verify(model, zoo.batch("llama"))["verdict"] == "ok").all()


def test_sub_models_may_run_different_kernels() -> None:
    with census.quiet():
        model = census.build("LLaVA")
        model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
        with recorded(model) as recorder:
            model(**census.batch("LLaVA")).loss.backward()
    kernels = {(call.site.stack, call.implementation) for call in recorder.calls}
    assert kernels == {("vision", "sdpa"), ("", "eager")}


def test_a_decoder_with_added_cross_attention_shows_both_kinds() -> None:
    from transformers import BertConfig, BertLMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = BertConfig(**sizes, num_attention_heads=4, is_decoder=True, add_cross_attention=True)
    model = BertLMHeadModel(config).eval()
    encoded = torch.randn(2, 9, 32)
    with recorded(model) as recorder:
        model(input_ids=plain.ids(2, 5), encoder_hidden_states=encoded).logits.square().sum().backward()
    shapes = {call.site.kind: tuple(law(call).attention.shape) for call in recorder.calls}
    assert shapes == {"decoder_self": (2, 4, 5, 5), "cross": (2, 4, 5, 9)}
    cross = next(call for call in recorder.calls if call.site.kind == "cross")
    assert torch.allclose(law(cross).attention.sum(-1), torch.ones(2, 4, 5), atol=1e-6)
    assert bool(law(cross).visible.all())
