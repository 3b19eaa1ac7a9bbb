"""One head in your hands: its tensors against a second implementation, its edges against real masked forwards."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import plain
import pytest
import torch
import zoo
from truth import untouched

import advantage_probe as ap
from advantage_probe.analyses.heads.attention_edits import (
    AttentionEdit,
    drop_edges,
    drop_keys,
    edited_attention,
    scale_scores,
    set_pattern,
)

FAMILIES = ("gpt2", "llama", "mistral", "gemma2", "gpt_oss", "bert", "t5")


def build(family: str, **options):
    model = zoo.FAMILIES[family].build(**options).double().eval()
    if family == "gpt_oss":
        model.set_experts_implementation("eager")
    return model, zoo.batch(family, rows=2)


def named(family: str, layer: int, head: int) -> str:
    return {"bert": f"encoder.L{layer}H{head}", "t5": f"decoder.xL{layer}H{head}"}.get(family, f"L{layer}H{head}")


def eager_attentions(family: str, batch):
    """α as the model itself returns it, by module order, from eager attention."""
    model, _ = build(family, attn_implementation="eager")
    out = model(**batch, output_attentions=True)
    if family == "t5":
        return {
            "encoder": out.encoder_attentions,
            "decoder": out.decoder_attentions,
            "cross": out.cross_attentions,
        }
    return {"": out.attentions}


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_what_the_model_itself_returns(family: str) -> None:
    model, batch = build(family)
    found = eager_attentions(family, batch)
    layer = 1
    if family == "t5":
        labels = {"encoder": "encoder.L1H2", "decoder": "decoder.L1H2", "cross": "decoder.xL1H2"}
    else:
        labels = {"": named(family, 1, 2)}
    heads = ap.head(model, batch, list(labels.values()))
    for head, stack in zip(heads, labels):
        expected = found[stack][layer][:, 2].detach()
        shown = head.attention.isfinite()
        assert head.label == labels[stack]
        torch.testing.assert_close(
            head.attention[shown], expected[shown].to(head.attention.dtype), rtol=1e-6, atol=1e-6
        )
        assert expected[~shown].abs().sum() < 1e-6  # what is NaN was not attended to
    untouched()


def test_upstream_and_output_are_those_of_autograd() -> None:
    kept = {}
    llama, batch = build("llama")
    projection = llama.model.layers[1].self_attn.o_proj

    def hook(_, given, __):
        given[0].retain_grad()
        kept["output"] = given[0]

    handle = projection.register_forward_hook(hook)
    count = int((batch["labels"][:, 1:] != -100).sum())
    (llama(**batch).loss * count).backward()
    handle.remove()
    whole = kept["output"].grad.unflatten(-1, (4, -1))[:, :, 3]
    llama.zero_grad(set_to_none=True)
    found = ap.head(llama, batch, "L1H3")
    torch.testing.assert_close(found.upstream, whole, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        found.output, kept["output"].detach().unflatten(-1, (4, -1))[:, :, 3], rtol=1e-9, atol=1e-12
    )
    assert found.loss_weight == pytest.approx(1 / count)
    assert all(parameter.grad is None for parameter in llama.parameters())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "bert", "t5"])
def test_the_knock_out_is_the_derivative_of_removing_the_edge(family: str) -> None:
    """ΔL along o + t Δo at t = 0, with Δo from the definition: weights without the key, renormalised, times values."""
    model, batch = build(family)
    head = ap.head(model, batch, named(family, 0, 1))
    sink = 1 - head.attention.nan_to_num(0).sum(-1)  # the mass on a hidden column, where there is one
    worst = 0.0
    for row, query in ((0, 4), (1, 3), (1, 2)):
        seen = head.attention[row, query].isfinite()
        if seen.sum() < 2:
            continue
        alpha = head.attention[row, query].nan_to_num(0).double()
        for key in seen.nonzero()[:, 0].tolist():
            left = alpha.clone()
            left[key] = 0
            rest = left.sum() + sink[row, query]
            moved = (left / rest) @ head.value[row].double() - head.output[row, query].double()
            expected = float(moved @ head.upstream[row, query].double())
            worst = max(worst, abs(expected - float(head.knockout[row, query, key])))
    assert worst < 1e-5 * float(head.knockout.abs().nan_to_num(0).max())


def test_a_row_with_one_key_has_no_knock_out_and_a_saturated_one_keeps_its_digits() -> None:
    from advantage_probe.probe.law.knockout import knockout

    nearly = torch.tensor([[1 - 1e-15, 1e-15], [1.0, 0.0], [0.3, 0.7]], dtype=torch.float64)
    b = torch.tensor([[2.0, 5.0], [2.0, 5.0], [1.0, -1.0]], dtype=torch.float64)
    found = knockout(nearly, nearly, b, torch.zeros(3, dtype=torch.float64))
    assert float(found[0, 0]) == pytest.approx(3.0, rel=1e-12)  # all mass goes to the other key
    assert math.isnan(float(found[1, 0]))
    mean = 0.3 * 1.0 + 0.7 * -1.0
    assert float(found[2, 0]) == pytest.approx(0.3 * (mean - 1.0) / 0.7)
    assert float(found[2, 1]) == pytest.approx(0.7 * (1.0 - -1.0))
    with_sink = knockout(nearly[1:2], nearly[1:2], b[1:2], torch.tensor([0.5], dtype=torch.float64))
    assert math.isfinite(float(with_sink[0, 0]))


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gpt_oss", "bert"])
def test_dropped_edges_equal_a_mask_of_minus_infinity_on_eager(family: str) -> None:
    """The same forward with an additive −inf in the eager kernel's own mask, on one head."""
    model, batch = build(family)
    eager, _ = build(family, attn_implementation="eager")
    edges = [(0, 6, 2), (1, 7, 0), (1, 7, 3)]
    module = dict(eager.named_modules())[ap.head(model, batch, named(family, 1, 1)).module]
    source = sys.modules[type(module).__module__]
    kernel = source.eager_attention_forward

    def masked(owner, query, key, value, attention_mask, *args, **kwargs):
        if owner is module:
            extra = torch.zeros(query.shape[0], query.shape[1], query.shape[2], key.shape[2], dtype=query.dtype)
            for row, one, other in edges:
                extra[row, 1, one, other] = -torch.inf
            attention_mask = extra if attention_mask is None else attention_mask[..., : key.shape[2]] + extra
        return kernel(owner, query, key, value, attention_mask, *args, **kwargs)

    source.eager_attention_forward = masked
    try:
        expected = eager(**batch).logits
    finally:
        source.eager_attention_forward = kernel
    with edited_attention(model, AttentionEdit(1, drop_edges(edges), heads=(1,))):
        found = model(**batch).logits
    untouched_rows = model(**batch).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # eager softmaxes in float32
    assert not torch.equal(found, untouched_rows)
    untouched()


def test_rows_that_no_edit_changes_stay_bit_equal_and_gradients_flow_through_those_that_are() -> None:
    model, batch = build("llama")
    outputs = []

    def keep(module, given, result):
        outputs.append(given[0])

    handle = model.model.layers[0].self_attn.o_proj.register_forward_hook(keep)
    model(**batch)
    with edited_attention(model, AttentionEdit(0, drop_edges([(0, 5, 1)]), heads=(2,))):
        loss = model(**batch).loss
    handle.remove()
    before, after = (output.unflatten(-1, (4, -1)) for output in outputs)
    changed = (before != after).any(-1)
    assert changed.nonzero().tolist() == [[0, 5, 2]]
    loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_a_check_removes_edges_for_real_and_finds_what_a_small_step_predicts() -> None:
    """At α → 0 the change of the loss is its first order: the ratio of true to predicted tends to 1."""
    model, batch = build("llama")
    head = ap.head(model, batch, "L1H0")
    table = head.check(6)
    assert len(table) == 6
    assert table["predicted"].abs().is_monotonic_decreasing
    np.testing.assert_allclose(table["ratio"], 1.0, atol=0.25)
    chosen = head.frame().query("attention < 0.2").nlargest(5, "knockout")
    again = head.check(chosen)
    np.testing.assert_allclose(again["predicted"], chosen["knockout"], rtol=1e-12)
    mid = head.check([(0, 4, 2)])
    edit = AttentionEdit(head.module, drop_edges([(0, 4, 2)]), heads=(0,))
    with torch.no_grad():
        count = 1 / head.loss_weight
        before = float(model(**batch).loss) * count
        with edited_attention(model, edit):
            after = float(model(**batch).loss) * count
    assert float(mid["true"].iloc[0]) == pytest.approx(after - before, rel=1e-4)  # the model's own loss is float32


def test_patterns_keys_and_scales_do_what_they_say() -> None:
    model, batch = build("llama")
    head = ap.head(model, batch, "L0H1")
    length = head.attention.shape[1]
    causal = torch.ones(length, length, dtype=torch.float64).tril()
    uniform = causal / causal.sum(-1, keepdim=True)
    same = head.attention.nan_to_num(0).double()
    left = same.clone()
    left[:, 1:, 0] = 0
    kept = left / left.sum(-1, keepdim=True)
    outputs = []
    handle = model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda _, given, __: outputs.append(given[0]))
    for change, expected in (
        (set_pattern(uniform), uniform.expand(2, -1, -1)),
        (scale_scores(0.0), uniform.expand(2, -1, -1)),
        (drop_keys([0]), kept),  # row 0 sees nothing else and stays
    ):
        with torch.no_grad(), edited_attention(model, AttentionEdit(0, change, heads=(1,))):
            model(**batch)
        found = outputs.pop().unflatten(-1, (4, -1))[:, :, 1]
        torch.testing.assert_close(found, expected @ head.value.double(), rtol=1e-5, atol=1e-7)
    handle.remove()


def test_a_scale_before_the_cap_is_not_one_after_it() -> None:
    model, batch = build("gemma2")
    outputs = []
    for before_cap in (False, True):
        with edited_attention(model, AttentionEdit(0, scale_scores(40.0, before_cap=before_cap))):
            outputs.append(model(**batch).logits)
    assert not torch.allclose(*outputs)


def test_generation_edits_the_query_of_its_own_forward() -> None:
    model = zoo.llama().double().eval()
    ids = zoo.batch("llama", rows=1)["input_ids"]
    with torch.no_grad(), edited_attention(model, AttentionEdit(0, drop_edges([(6, 1)]), heads=(0,))):
        whole = model(input_ids=ids[:, :7], use_cache=False).logits[:, -1]
        cached = model(input_ids=ids[:, :6], use_cache=True)
        step = model(input_ids=ids[:, 6:7], past_key_values=cached.past_key_values, use_cache=True).logits[:, -1]
    torch.testing.assert_close(step, whole, rtol=1e-9, atol=1e-11)
    plain_step = model(input_ids=ids[:, :7], use_cache=False).logits[:, -1]
    assert not torch.allclose(plain_step, whole)


def test_every_form_of_a_batch_gives_the_same_head() -> None:
    model = zoo.llama().double().eval()
    ids = zoo.batch("llama", rows=2)["input_ids"]
    wanted = ap.head(model, {"input_ids": ids, "labels": ids}, "L1H1")
    summed = ap.head(
        model,
        {"input_ids": ids},
        "L1H1",
        loss=lambda out: torch.nn.functional.cross_entropy(
            out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
        ),
    )
    shifted = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
    for other in (summed, ap.head(model, ids, "L1H1"), ap.head(model, ids, "L1H1", targets=shifted)):
        torch.testing.assert_close(other.advantage, wanted.advantage, rtol=1e-5, atol=1e-7, equal_nan=True)
    assert wanted.loss_weight == pytest.approx(1 / (2 * (ids.shape[1] - 1)))
    assert summed.loss_weight == "unknown"
    assert ap.head(model, ids, "L1H1").loss_weight == 1.0
    last = ap.head(model, ids, "L1H1", targets="last")
    assert last.loss < wanted.loss * 2
    assert "1.0" not in repr(summed)
    differences = ap.head(model, ids, "L1H1", targets="last", against=torch.full_like(ids, -1))
    assert differences.loss != last.loss
    by_number = ap.head(model, ids, layer=1, head=1)
    assert torch.equal(by_number.score_gradient.nan_to_num(0), ap.head(model, ids, "L1H1").score_gradient.nan_to_num(0))


def test_a_text_is_encoded_and_its_tokens_are_shown() -> None:
    model = zoo.llama().eval()
    tokenizer = zoo.tokenizer(zoo.VOCABULARY)
    head = ap.head(model, "w3 w5 w7 w5 w3 w9", "L0H0", tokenizer=tokenizer)
    pairs = head.frame()
    assert set(pairs["key_token"]) <= {"w3", "w5", "w7", "w9"}
    square = pairs.pivot("attention")
    assert square.shape == (6, 6)
    assert square.index[1] == "1 w5"
    assert np.isnan(square.iloc[0, 1])
    assert square.sum(axis=1).tolist() == pytest.approx([1.0] * 6, abs=1e-5)


def test_a_head_comes_back_from_its_folder_and_draws_itself(tmp_path: Path) -> None:
    model, batch = build("llama")
    head = ap.head(model, batch, "L1H3")
    head.save(tmp_path / "head")
    again = ap.load_head(tmp_path / "head")
    for name in ("attention", "advantage", "score_gradient", "knockout", "query", "key", "value", "upstream", "output"):
        assert torch.equal(getattr(again, name).nan_to_num(7.0), getattr(head, name).nan_to_num(7.0))
    assert (again.label, again.loss_weight, again.module) == (head.label, head.loss_weight, head.module)
    stored = pd.read_parquet(tmp_path / "head" / "pairs.parquet")
    pd.testing.assert_frame_equal(pd.DataFrame(stored), pd.DataFrame(head.frame()), check_dtype=False)
    with pytest.raises(ap.BadInput, match="has no model to check it on"):
        again.check(1)
    with pytest.raises(ap.BadInput, match="holds no head"):
        ap.load_head(tmp_path)
    (tmp_path / "head" / "head.json").write_text("{")
    with pytest.raises(ap.BadInput, match="damaged head"):
        ap.load_head(tmp_path / "head")
    assert head._repr_png_().startswith(b"\x89PNG")
    assert head.plot("knockout").get_title() == "L1H3"


def test_the_table_in_one_line_is_that_of_a_watch() -> None:
    model, batch = build("llama")
    count = int((batch["labels"][:, 1:] != -100).sum())
    with ap.watch(model, reach_all=True) as watch:
        model(**batch).loss.backward()
        watch.step(loss_weight=1 / count)
    pd.testing.assert_frame_equal(
        ap.heads(model, batch).drop(columns="law_residual"), watch.heads().drop(columns="law_residual"), rtol=1e-9
    )


def test_the_run_is_left_as_it_was() -> None:
    model, batch = build("llama")
    model.model.layers[0].self_attn.q_proj.weight.grad = torch.ones_like(model.model.layers[0].self_attn.q_proj.weight)
    model.register_buffer("count", torch.zeros(()))
    model.register_forward_hook(lambda module, _, result: module.count.add_(1) and None)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    ap.head(model, batch, "L0H0").check(2)
    ap.heads(model, batch)
    after = [p.grad for p in model.parameters()]
    assert all(
        (one is None and other is None) or torch.equal(one, other) for one, other in zip(before, after, strict=True)
    )
    assert float(model.count) == 0.0
    assert torch.equal(torch.get_rng_state(), state)
    untouched()


def test_edges_of_a_watch_carry_the_knock_out_and_are_ranked_by_it() -> None:
    model, batch = build("llama")
    count = int((batch["labels"][:, 1:] != -100).sum())
    head = ap.head(model, batch, "L1H2")
    pairs = head.frame().dropna()
    pairs = pairs[pairs["knockout"].notna()]
    tables = {}
    for rank_by in ("score_gradient", "knockout"):
        with ap.watch(model, detail="edges", edges=4, rank_by=rank_by) as watch:
            model(**batch).loss.backward()
            watch.step(loss_weight=1 / count)
        tables[rank_by] = watch.edges(4).query("label == 'L1H2'")
    for rank_by, table in tables.items():
        for direction, sign in (("routed", -1), ("anti_routed", 1)):
            own = pairs[np.sign(pairs["score_gradient"]) == sign]
            expected = own[rank_by].abs().nlargest(4)
            found = table[table["direction"] == direction]
            np.testing.assert_allclose(found[rank_by].abs(), expected, rtol=1e-6)
            assert found["rank"].tolist() == [1, 2, 3, 4]
        where = table.merge(pairs, on=["sequence", "query_position", "key_position"], suffixes=("", "_head"))
        assert len(where) == len(table)
        np.testing.assert_allclose(where["knockout"], where["knockout_head"], rtol=1e-5)


@pytest.mark.parametrize("family", ["llama"])
def test_under_dropout_the_knock_out_is_that_of_the_mask_that_was_drawn(family: str) -> None:
    """Weights after dropout without the key, renormalised before dropout, times values: what a masked forward under
    the same random state would give."""
    model = zoo.FAMILIES[family].build(attention_dropout=0.4).double().train()
    batch = zoo.batch(family, rows=2)
    torch.manual_seed(5)
    head = ap.head(model, batch, "L0H1")
    from advantage_probe.hooks.attach import calls
    from advantage_probe.probe.law.definition import law

    found = []
    torch.manual_seed(5)
    with calls(model, found.append):
        (model(**batch).loss / head.loss_weight).backward()
    call = next(call for call in found if call.site.layer == 0)
    terms = law(call)
    w, alpha, u = terms.weights[:, 1], terms.attention[:, 1], call.upstream[:, 1]
    value = call.value[:, 1 // call.group]
    kept = torch.where(alpha > 0, w / alpha, 0.0)
    for row, query, key in ((0, 6, 2), (1, 5, 5), (1, 7, 1)):
        left = alpha[row, query].clone()
        left[key] = 0
        left = left / left.sum() * kept[row, query]
        expected = float((left @ value[row] - w[row, query] @ value[row]) @ u[row, query])
        assert float(head.knockout[row, query, key]) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_what_cannot_be_answered_is_one_sentence() -> None:
    model, batch = build("llama")
    with pytest.raises(ap.BadRequest, match="There is no head 'L9H0' here; the model has L0H0"):
        ap.head(model, batch, "L9H0")
    with pytest.raises(ap.BadRequest, match="There is no head 'layer=7, head=0, use=0'"):
        ap.head(model, batch, layer=7, head=0)
    with pytest.raises(ap.BadRequest, match="Name a head"):
        ap.head(model, batch)
    with pytest.raises(ap.BadInput, match="has no labels"):
        ap.head(model, {"input_ids": batch["input_ids"]}, "L0H0")
    with pytest.raises(ap.BadInput, match="needs tokenizer"):
        ap.head(model, "a text", "L0H0")
    with pytest.raises(ap.BadInput, match="is on meta and the model on cpu"):
        ap.head(model, {name: value.to("meta") for name, value in batch.items()}, "L0H0")
    with pytest.raises(ap.NoGradientReached, match="does not depend on it"):
        ap.head(model, batch, "L0H0", loss=lambda out: model.lm_head.weight.sum())
    with pytest.raises(ap.BadInput, match="no scalar loss"):
        ap.head(model, batch, "L0H0", loss=lambda out: out.logits)
    head = ap.head(model, batch, "L0H0")
    with pytest.raises(ap.BadInput, match="Query 2 of sequence 0 does not see key 5"):
        head.check([(0, 2, 5)])
    with pytest.raises(ap.BadRequest, match="maps of attention"):
        head.plot("nonsense")
    with pytest.raises(ap.BadRequest, match="there is no 9"):
        head.plot(sequence=9)
    with (
        pytest.raises(ap.BadRequest, match="No attention of 'nowhere' was edited"),
        edited_attention(model, AttentionEdit("nowhere", drop_keys([0]))),
    ):
        model(**batch)
    with pytest.raises(ap.BadRequest, match="must sum to 1"):
        set_pattern(torch.ones(2, 2))
    long = {"input_ids": torch.zeros(1, 2050, dtype=torch.long), "labels": torch.zeros(1, 2050, dtype=torch.long)}
    with pytest.raises(ap.BadInput, match="pass longer=True"):
        ap.head(zoo.llama(), long, "L0H0")


def test_dropout_is_refused_by_an_edit_and_a_plain_model_is_edited() -> None:
    model = zoo.FAMILIES["llama"].build(attention_dropout=0.4).train()
    with (
        pytest.raises(ap.UnsupportedKernel, match=r"call model\.eval"),
        edited_attention(model, AttentionEdit(0, drop_keys([0]))),
    ):
        model(**zoo.batch("llama"))
    untouched()


def test_many_edges_removed_at_once_in_copies_are_what_one_at_a_time_gives() -> None:
    from advantage_probe.analyses.heads.masked import true_changes

    model = zoo.llama().double().eval()
    ids = zoo.batch("llama", rows=3)["input_ids"]
    targets = torch.cat([ids[:, 1:], torch.full((3, 1), -100)], 1)
    heads = ap.head(model, ids, ["L0H1", "L1H3"])
    rows = []
    for head in heads:
        pairs = head.frame().query("query_position > 2").nlargest(9, "attention")
        rows.append(pairs.assign(module=head.module, use=0, head=head.head, label=head.label))
    edges = pd.concat(rows, ignore_index=True)

    def loss(logits, wanted, rivals):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")

    together = true_changes(model, ids, targets, edges, loss, at_once=5)
    single = pd.concat([head.check(part) for head, part in zip(heads, rows)])
    np.testing.assert_allclose(together, single["true"], rtol=1e-5, atol=1e-6)


def test_interventions_take_attention_edits_beside_their_own() -> None:
    from advantage_probe.analyses.interventions.edits import Edit, ablate, intervene

    model, batch = build("llama")
    with torch.no_grad():
        with intervene(model, AttentionEdit(0, drop_keys([1])), Edit(1, ablate(), "output", (0,))):
            both = model(**batch).logits
        with (
            intervene(model, Edit(1, ablate(), "output", (0,))),
            edited_attention(model, AttentionEdit(0, drop_keys([1]))),
        ):
            apart = model(**batch).logits
    assert torch.equal(both, apart)
    with pytest.raises(ap.BadRequest, match="Nothing was changed in layer 7"), intervene(model, Edit(7, ablate())):
        model(**batch)


def test_a_plain_model_an_exposed_one_and_a_compiled_one_are_taken_in_hand() -> None:
    for model in (plain.gpt("module"), plain.gpt("gqa"), plain.hand()):
        ids = plain.ids()
        head = ap.head(model, {"idx": ids}, layer=1, head=2, loss=lambda out: out if out.dim() == 0 else out.sum())
        rows = head.attention.nan_to_num(0).sum(-1)
        torch.testing.assert_close(rows, torch.ones_like(rows), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(head.attention.nan_to_num(0) @ head.value, head.output, rtol=1e-4, atol=1e-5)
        assert head.loss_weight == "unknown"
        assert head.module
    llama = zoo.llama().eval()
    ids = zoo.batch("llama")["input_ids"]
    compiled = torch.compile(llama, backend="eager")
    one, other = ap.head(compiled, ids, "L1H1"), ap.head(llama, ids, "L1H1")
    assert torch.equal(one.advantage.nan_to_num(0), other.advantage.nan_to_num(0))


def test_the_users_own_hooks_run_as_often_as_without_us() -> None:
    model, batch = build("llama")
    counted = []
    model.model.layers[0].register_forward_hook(lambda *_: counted.append("forward"))
    model.model.layers[0].register_full_backward_hook(lambda *_: counted.append("backward"))
    ap.head(model, batch, "L0H0")
    assert counted == ["forward", "backward"]
