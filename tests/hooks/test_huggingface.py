"""Calls through transformers' registry: nothing changes for the user, and every head arrives once."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import zoo
from truth import gradients, recorded, relative, untouched

import advantage_probe as ap
from advantage_probe.hooks.adapters.huggingface import read
from advantage_probe.probe.law.definition import law

KERNELS = [(family, kernel) for family, entry in zoo.FAMILIES.items() for kernel in entry.kernels]


def padded(family: str, side: str) -> dict[str, torch.Tensor]:
    """A batch whose second row has three padding tokens."""
    batch = zoo.batch(family)
    mask = torch.ones_like(batch["input_ids"])
    place = slice(0, 3) if side == "left" else slice(-3, None)
    mask[1, place] = 0
    batch["attention_mask"] = mask
    if batch["labels"].shape == mask.shape:
        # the first real token is predicted from padding, whose output is the kernel's own affair
        hidden = (mask == 0) | (mask.roll(1, 1) == 0) if side == "left" else mask == 0
        batch["labels"] = batch["labels"].masked_fill(hidden, -100)
    return batch


@pytest.mark.parametrize(("family", "kernel"), KERNELS)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_outputs_and_gradients_are_bit_equal_to_the_unwatched_run(family: str, kernel: str, padding: str) -> None:
    model = zoo.FAMILIES[family].build(attn_implementation=kernel)
    batch = zoo.batch(family) if padding == "none" else padded(family, padding)
    plain = model(**batch)
    plain.loss.backward()
    expected = gradients(model)
    with ap.watch(model) as watch:
        watched = model(**batch)
        watched.loss.backward()
        watch.step()
    assert torch.equal(plain.logits, watched.logits)
    assert all(torch.equal(one, other) for one, other in zip(expected, gradients(model)))
    table = watch.heads()
    assert (table["status"] == "ok").all(), table["status"].unique()
    assert table["law_residual"].max() < 1e-6


@pytest.mark.parametrize(("family", "kernel"), KERNELS)
def test_the_laws_hold_on_the_loaded_kernel(family: str, kernel: str) -> None:
    model = zoo.FAMILIES[family].build(attn_implementation=kernel)
    table = ap.verify(model, zoo.batch(family))
    assert (table["verdict"] == "ok").all()
    assert table[["query_residual", "key_residual", "value_residual"]].max().max() < 5e-6
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_capture_does_not_depend_on_the_kernel() -> None:
    tables = {}
    for kernel in ("sdpa", "eager"):
        model = zoo.llama(attn_implementation=kernel)
        with ap.watch(model) as watch:
            model(**padded("llama", "left")).loss.backward()
        tables[kernel] = watch.heads().select_dtypes("float64")
    difference = (tables["sdpa"] - tables["eager"]).abs().drop(columns="law_residual")
    assert (difference / tables["eager"].abs().max()).max().max() < 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "bert"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_sequences_give_the_numbers_of_the_unpadded_ones(family: str, side: str) -> None:
    model = zoo.FAMILIES[family].build(attn_implementation="eager")
    batch = padded(family, side)
    if family in ("gpt2", "bert"):  # absolute positions must not shift with the padding
        batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    sums = []
    with ap.watch(model) as watch:
        total = torch.nn.functional.cross_entropy
        logits = model(**{name: part for name, part in batch.items() if name != "labels"}).logits
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        total(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    whole = watch.heads()
    with ap.watch(model) as watch:
        for row in range(2):
            real = batch["attention_mask"][row].bool()
            logits = model(input_ids=batch["input_ids"][row : row + 1, real]).logits
            total(logits.flatten(0, 1), batch["input_ids"][row, real], reduction="sum").backward()
    sums = watch.heads()
    assert whole["queries"].tolist() == sums["queries"].tolist()
    for name in whole.select_dtypes("float64").columns:
        if name != "law_residual":
            scale = sums[name].abs().max()
            assert (whole[name] - sums[name]).abs().max() <= 1e-5 * scale, name


def test_closing_restores_everything_also_after_an_exception() -> None:
    model = zoo.llama()
    with pytest.raises(RuntimeError, match="mine"), ap.watch(model) as watch:
        raise RuntimeError("mine")
    assert watch.closed
    watch.close()
    untouched()


def test_a_registry_entry_of_the_user_survives() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def mine(*args, **kwargs):
        return original(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = mine
    try:
        model = zoo.llama()
        with ap.watch(model) as watch:
            model(**zoo.batch("llama")).loss.backward()
        assert len(watch.heads()) == 8
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is mine
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def test_a_second_model_of_the_same_config_is_not_recorded() -> None:
    model = zoo.llama()
    other = type(model)(model.config)
    with ap.watch(model) as watch:
        other(**zoo.batch("llama")).loss.backward()
        assert not watch.state().entries
        model(**zoo.batch("llama")).loss.backward()
    assert watch.heads()["queries"].max() == 18
    assert model.config._attn_implementation == "sdpa"


def test_copies_pickles_and_saved_models_carry_nothing(tmp_path) -> None:
    model = zoo.llama()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with ap.watch(model) as watch:
        model(**zoo.batch("llama")).loss.backward()
        twin = copy.deepcopy(model)
        blob = pickle.dumps(model)
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        model.save_pretrained(tmp_path)
        rows = watch.heads()["queries"].tolist()
        twin(**zoo.batch("llama")).loss.backward()
        assert watch.heads()["queries"].tolist() == rows
    assert b"advantage_probe" not in blob
    assert b"advantage_probe" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for name, module in model.named_modules():
        assert set(vars(module)) == before[name]
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all("__call__" not in vars(module) for module in twin.modules())


def test_nested_and_overlapping_watches_see_the_same() -> None:
    model = zoo.llama().double()  # two watches stand beside the kernel, one takes its place
    batch = zoo.batch("llama")
    outer = ap.watch(model)
    inner = ap.watch(model.model)
    model(**batch).loss.backward()
    outer.close()
    model(**batch).loss.backward()
    inner.close()
    assert outer.heads()["queries"].max() == 18
    assert inner.heads()["queries"].max() == 36
    numbers = outer.heads().select_dtypes("float64")
    assert numbers["routing_pressure"].max() > 0
    assert inner.heads()["attention_entropy"].tolist() == pytest.approx(numbers["attention_entropy"].tolist(), rel=1e-9)
    untouched()


def test_sparse_attention_stays_sparse() -> None:
    model = zoo.deepseek_v32()
    batch = {"input_ids": zoo.batch("llama", length=12)["input_ids"]}
    batch["labels"] = batch["input_ids"]
    plain = model(**batch).logits
    with ap.watch(model) as watch:
        result = model(**batch)
        result.loss.backward()
    assert torch.equal(plain, result.logits)
    assert watch.heads()["law_residual"].max() < 1e-6
    with recorded(model) as recorder:
        model(**batch).loss.backward()
    seen = (law(recorder.calls[0]).attention > 0).sum(-1)
    assert int(seen.max()) == 4  # index_topk keys, never more


@pytest.mark.parametrize(
    ("family", "layer", "expected"),
    [
        ("mistral", 0, [1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4]),
        ("gemma2", 0, [1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4]),
        ("gemma2", 1, list(range(1, 13))),
        ("llama4", 0, [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4]),
        ("llama4", 3, list(range(1, 13))),
    ],
)
def test_windows_and_chunks_show_the_keys_that_the_model_shows(family: str, layer: int, expected: list[int]) -> None:
    kernel = "eager" if family == "gemma2" else "sdpa"
    model = getattr(zoo, family)(attn_implementation=kernel)
    batch = zoo.batch("llama", length=12)
    with recorded(model) as recorder:
        model(**batch).loss.backward()
    call = next(call for call in recorder.calls if call.site.layer == layer)
    terms = law(call)
    assert (terms.attention[0, 0] > 0).sum(-1).tolist() == expected
    assert terms.visible[0, 0].sum(-1).tolist() == expected


def test_gated_heads_are_read_before_their_gate() -> None:
    model = zoo.qwen3_next()
    table = ap.verify(model, zoo.batch("llama"))
    assert (table["verdict"] == "ok").all()


def test_one_module_used_three_times_is_three_rows_and_its_bias_gradient_is_their_sum() -> None:
    model = zoo.albert()
    with recorded(model) as recorder:
        model(**zoo.batch("albert")).loss.backward()
    assert sorted(call.use for call in recorder.calls) == [0, 1, 2]
    pulled = sum(law(call).value_gradient.sum((0, 2)).flatten() for call in recorder.calls)
    bias = next(parameter for name, parameter in model.named_parameters() if name.endswith("value.bias"))
    assert relative(pulled, bias.grad) < 1e-5
    last = max(recorder.calls, key=lambda call: call.use)
    assert relative(law(last).value_gradient.sum((0, 2)).flatten(), bias.grad) > 0.1


def test_encoder_decoder_and_cross_attention_are_told_apart() -> None:
    for family, build in (("t5", zoo.t5), ("bart", zoo.bart)):
        model = build()
        batch = zoo.batch(family)
        with ap.watch(model, detail="tokens") as watch:
            model(**batch).loss.backward()
        table = watch.heads()
        assert table.groupby("kind", observed=True).size().to_dict() == {
            "cross": 8,
            "decoder_self": 8,
            "encoder_self": 8,
        }
        assert table.loc[table["kind"] == "cross", "mean_distance"].isna().all()
        rows = watch.tokens()
        cross = rows[(rows["kind"] == "cross") & (rows["head"] == 0) & (rows["layer"] == 0)]
        keys = cross[(cross["side"] == "key") & (cross["sequence"] == 0)]
        assert keys["token_id"].tolist() == batch["input_ids"][0].tolist()
        assert len(cross[(cross["side"] == "query") & (cross["sequence"] == 0)]) == 5


def test_an_image_model_runs_without_tokens_and_idle_rows_are_zero() -> None:
    model = zoo.vit()
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with ap.watch(model, detail="tokens") as watch:
        model(pixel_values=pixels, labels=torch.tensor([0, 2])).loss.backward()
    table = watch.heads()
    assert (table["status"] == "ok").all()
    rows = watch.tokens()
    patches = rows[(rows["side"] == "query") & (rows["position"] > 0)]
    assert (patches["upstream_norm"] == 0).all()
    assert (patches["advantage_missed"] == 0).all()
    assert rows["token_id"].isna().all()


def test_generation_inside_a_watch_is_left_alone() -> None:
    model = zoo.llama()
    ids = zoo.batch("llama")["input_ids"][:1]
    with ap.watch(model) as watch:
        model.generate(ids, max_new_tokens=3, do_sample=False)
        assert not watch.state().entries
        model(input_ids=ids, labels=ids).loss.backward()
    assert watch.heads()["queries"].tolist() == [9] * 8


def test_two_forwards_before_one_backward_are_paired_by_their_graph() -> None:
    model = zoo.llama()
    ids = zoo.batch("llama")["input_ids"]
    with recorded(model) as recorder:
        first = model(input_ids=ids[:, :7], labels=ids[:, :7]).loss
        second = model(input_ids=ids[:, :5], labels=ids[:, :5]).loss
        second.backward()
        first.backward()
    assert sorted(call.query.shape[2] for call in recorder.calls) == [5, 5, 7, 7]
    for call in recorder.calls:
        value = call.value.repeat_interleave(call.group, 1)
        assert relative(law(call).weights @ value, call.output) < 1e-5


def test_a_second_backward_is_kept_apart() -> None:
    model = zoo.llama()
    with ap.watch(model) as watch:
        loss = model(**zoo.batch("llama")).loss
        loss.backward(retain_graph=True)
        loss.backward()
    assert watch.heads()["queries"].max() == 18
    again = watch.heads(backward=1)
    assert again["routing_pressure"].tolist() == watch.heads()["routing_pressure"].tolist()


def test_a_gradient_penalty_leaks_nothing() -> None:
    import gc

    model = zoo.llama()
    batch = zoo.batch("llama")

    def live() -> int:
        gc.collect()
        return sum(1 for entry in gc.get_objects() if isinstance(entry, torch.Tensor))

    counts = []
    watch = ap.watch(model)
    for _ in range(12):
        loss = model(**batch).loss
        (gradient,) = torch.autograd.grad(loss, model.lm_head.weight, create_graph=True)
        gradient.square().sum().backward()
        model.zero_grad()
        del loss, gradient
        watch.step(1.0)
        watch.reset()
        counts.append(live())
    watch.close()
    assert counts[-1] <= counts[4]


def test_flex_attention_is_refused_by_name() -> None:
    model = zoo.llama()
    with pytest.raises(ap.UnsupportedKernel, match="flex"):
        read("flex_attention", model, torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), {})
    with pytest.raises(ap.UnsupportedKernel, match="index"):
        read("flash_attention_2", model, torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), {"indices": torch.zeros(1)})
