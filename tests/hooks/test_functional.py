"""Plain PyTorch: the function called by any name, nn.MultiheadAttention in all its paths, attention by hand."""

from __future__ import annotations

import math
import sys
import types
import warnings

import plain
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from truth import recorded

import advantage_probe as ap
from advantage_probe.probe.law.definition import law
from advantage_probe.probe.law.verify import residuals

STYLES = ["module", "name", "gqa", "mask", "window", "bias"]


def build(style: str, **options):
    return plain.gpt(style, kv_heads=2 if style == "gqa" else 4, **options)


def passes(model, batch, **watching):
    """Loss, output and gradients of one step, and its watch if asked for."""
    loss = model(batch)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return loss.detach(), gradients


def clean() -> bool:
    return F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention and (
        plain.by_name is F.scaled_dot_product_attention
    )


@pytest.mark.parametrize("style", STYLES)
def test_a_plain_model_runs_bit_equal_and_both_laws_hold(style: str) -> None:
    model = build(style)
    loss, gradients = passes(model, plain.ids())
    with ap.watch(model) as watch:
        watched, same = passes(model, plain.ids())
        watch.step()
    assert torch.equal(loss, watched)
    assert all(torch.equal(one, other) for one, other in zip(gradients, same))
    table = watch.heads()
    assert len(table) == 8
    assert (table["status"] == "ok").all()
    assert table["law_residual"].max() < 1e-6
    assert set(table["module"]) == {"h.0.attn", "h.1.attn"}
    verdict = ap.verify(model, {"idx": plain.ids()}, loss=lambda found: found)
    assert (verdict["verdict"] == "ok").all(), verdict
    assert verdict[["query_residual", "key_residual", "value_residual"]].max().max() < 1e-5
    assert clean()


def test_kinds_follow_from_the_mask_where_the_module_says_nothing() -> None:
    for style, kind in (("module", "decoder_self"), ("mask", "decoder_self"), ("window", "encoder_self")):
        model = build(style)
        with ap.watch(model) as watch:
            model(plain.ids()).backward()
        assert set(watch.heads()["kind"]) == {kind}, style


def test_a_two_sided_window_shows_its_keys_only() -> None:
    model = build("window")
    with recorded(model) as recorder:
        model(plain.ids()).backward()
    place = torch.arange(9)
    expected = ((place[:, None] - place[None, :]).abs() <= 2).expand(2, 4, 9, 9)
    for call in recorder.calls:
        assert torch.equal(law(call).attention > 0, expected)


def test_functions_imported_by_name_are_put_back_after_an_exception() -> None:
    before = dict(vars(plain))
    model = build("name")
    with pytest.raises(RuntimeError, match="mine"), ap.watch(model):
        assert plain.by_name is not before["by_name"]
        raise RuntimeError("mine")
    assert clean()
    assert {name: value for name, value in vars(plain).items() if before.get(name) is not value} == {}
    assert "__call__" not in vars(plain.Attention)


def test_an_unwatched_model_of_the_same_class_adds_nothing() -> None:
    model, other = build("name"), build("name")
    with ap.watch(model) as watch:
        other(plain.ids()).backward()
        assert not watch.state().entries
        model(plain.ids()).backward()
    assert watch.heads()["queries"].max() == 18


@pytest.mark.parametrize("queries", [3, 7])
def test_is_causal_is_aligned_at_the_top_left(queries: int) -> None:
    class Cross(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 2, queries, 4, generator=generator, requires_grad=True)
    k, v = (torch.randn(2, 2, 5, 4, generator=generator, requires_grad=True) for _ in range(2))
    model = Cross()
    with recorded(model, inputs=True) as recorder:
        model(q, k, v).square().sum().backward()
    (call,) = recorder.calls
    found = residuals(call)
    assert max(float(part.max()) for part in (found.query, found.key, found.value)) < 1e-5
    seen = (law(call).attention[0, 0] > 0).sum(-1).tolist()
    assert seen == [min(i + 1, 5) for i in range(queries)]


def test_boolean_masks_of_both_conventions_give_the_same_attention() -> None:
    class Keep(nn.Module):
        def __init__(self, mha: nn.MultiheadAttention) -> None:
            super().__init__()
            self.inner = [mha]  # not a child: only its weights are used

        def forward(self, x):
            mha = self.inner[0]
            q, k, v = F.linear(x, mha.in_proj_weight, mha.in_proj_bias).view(2, 6, 3, 4, 8).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(6, 6, dtype=torch.bool).tril())

    torch.manual_seed(0)
    mha = nn.MultiheadAttention(32, 4, batch_first=True)
    plain.louder(mha)
    x = torch.randn(2, 6, 32)
    hide = torch.ones(6, 6, dtype=torch.bool).triu(1)
    model = Keep(mha)
    with recorded(model) as keeping:
        model(x).square().sum().backward()
    with recorded(mha) as hiding:
        mha(x, x, x, attn_mask=hide)[0].square().sum().backward()
    one, other = law(keeping.calls[0]).attention, law(hiding.calls[0]).attention
    assert float((one - other).abs().max()) < 1e-6
    assert float(one.triu(1).abs().max()) == 0
    assert {call.site.kind for call in (*keeping.calls, *hiding.calls)} == {"decoder_self"}


@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("style", ["module", "name"])
def test_plain_models_under_both_kinds_of_checkpointing(checkpoint: bool, style: str) -> None:
    plainly, saving = build(style), build(style, checkpoint=checkpoint)
    with ap.watch(plainly) as watch:
        _, expected = passes(plainly, plain.ids())
    reference = watch.heads()
    with ap.watch(saving) as watch:
        _, gradients = passes(saving, plain.ids())
    assert all(torch.equal(one, other) for one, other in zip(expected, gradients))
    assert watch.heads().equals(reference)


def test_a_checkpointed_function_without_a_module_of_its_own_is_recognised_by_its_query() -> None:
    class Inline(plain.Attention):
        saving = False

        def attend(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def forward(self, x):
            q, k, v = (part.view(2, 9, 4, 8).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
            if self.saving:
                y = torch.utils.checkpoint.checkpoint(self.attend, q, k, v, use_reentrant=False)
            else:
                y = self.attend(q, k, v)
            return self.c_proj(y.transpose(1, 2).reshape(2, 9, 32))

    torch.manual_seed(0)
    model = plain.louder(plain.GPT([plain.Block(Inline()) for _ in range(2)]))
    tables = []
    for Inline.saving in (False, True):
        with ap.watch(model) as watch:
            _, gradients = passes(model, plain.ids())
        tables.append((watch.heads(), gradients))
    assert tables[0][0].equals(tables[1][0])
    assert all(torch.equal(one, other) for one, other in zip(tables[0][1], tables[1][1]))
    loss = model(plain.ids())
    watch = ap.watch(model)  # opened between forward and backward
    loss.backward()
    watch.close()
    watch = ap.watch(model)
    loss = model(plain.ids())
    watch.close()
    loss.backward()
    assert clean()


def test_attention_by_hand_joins_with_one_line_and_is_refused_without_it() -> None:
    for direct in (False, True):
        model = plain.hand(direct=direct)
        unwatched = passes(model, plain.ids())
        with ap.watch(model) as watch:
            watched = passes(model, plain.ids())
        assert torch.equal(unwatched[0], watched[0])
        assert all(torch.equal(one, other) for one, other in zip(unwatched[1], watched[1]))
        assert set(watch.heads()["module"]) == {"h.0.attn", "h.1.attn"}
        assert (watch.heads()["status"] == "ok").all()
        assert (ap.verify(model, {"idx": plain.ids()}, loss=lambda loss: loss)["verdict"] == "ok").all()
        silent = plain.hand(exposed=False, direct=direct)
        with pytest.raises(ap.NoAttentionSeen), ap.watch(silent) as watch:
            silent(plain.ids()).backward()
            watch.step()


def test_an_exposed_call_that_leaves_out_its_mask_is_found_out() -> None:
    class Wrong(plain.Hand):
        def forward(self, x):
            q, k, v = self.qkv(x).view(2, 9, 3, 4, 8).permute(2, 0, 3, 1, 4)
            hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
            y = torch.softmax((q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(hidden, -torch.inf), -1) @ v
            y = ap.expose(self, q, k, v, y)
            return self.out(y.transpose(1, 2).reshape(2, 9, 32))

    torch.manual_seed(0)
    model = plain.louder(plain.GPT([plain.Block(Wrong())]))
    with pytest.raises(ap.LawViolated), ap.watch(model) as watch:
        model(plain.ids()).backward()
        watch.step()
    with pytest.raises(ap.BadRequest, match="batch, heads"):
        ap.expose(model, torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3))


def test_an_attention_whose_forward_is_called_directly_is_found_at_the_module_that_runs() -> None:
    model = build("module", direct=True)
    with ap.watch(model) as watch:
        model(plain.ids()).backward()
    assert set(watch.heads()["module"]) == {"h.0", "h.1"}
    assert (watch.heads()["status"] == "ok").all()


def test_heads_that_share_an_axis_with_the_batch_are_refused_and_one_head_alone_is_not() -> None:
    class Flat(nn.Module):
        def __init__(self, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.qkv = nn.Linear(32, 96)

        def forward(self, x):
            parts = self.qkv(x).view(x.shape[0], 6, 3, self.heads, -1).permute(2, 0, 3, 1, 4).flatten(1, 2)
            return F.scaled_dot_product_attention(*parts)

    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
    model = Flat(4)
    with pytest.raises(ap.UnsupportedKernel, match="one axis"), ap.watch(model) as watch:
        model(x).square().sum().backward()
        watch.step()
    model = Flat(1)
    with ap.watch(model) as watch:
        model(x).square().sum().backward()
    assert watch.heads()["head"].tolist() == [0]
    assert (watch.heads()["status"] == "ok").all()


def test_flex_attention_and_a_model_without_attention_are_refused() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    class Flex(nn.Module):
        def forward(self, x):
            return sys.modules["torch.nn.attention.flex_attention"].flex_attention(x, x, x)

    model = Flex()
    x = torch.randn(1, 2, 16, 8)
    with pytest.raises(ap.UnsupportedKernel, match="flex attention"), ap.watch(model) as watch:
        model(x)
        watch.step()
    assert sys.modules["torch.nn.attention.flex_attention"].flex_attention is flex_attention
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ap.NoAttentionSeen, match="no attention call"), ap.watch(model) as watch:
        model(torch.randn(2, 4)).sum().backward()
        watch.step()


def test_functional_transforms_are_refused_by_name() -> None:
    model = build("module")
    weights = dict(model.named_parameters())
    with pytest.raises(ap.UnsupportedKernel, match=r"torch\.func"), ap.watch(model):
        torch.func.grad(lambda given: torch.func.functional_call(model, given, (plain.ids(),)))(weights)
    assert clean()


def test_attention_that_goes_unseen_beside_other_attention_is_said() -> None:
    class HandAttention(plain.Hand):
        def forward(self, x):
            q, k, v = self.qkv(x).view(2, 9, 3, 4, 8).permute(2, 0, 3, 1, 4)
            y = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(8), -1) @ v
            if self.exposed:
                y = ap.expose(self, q, k, v, y)
            return self.out(y.transpose(1, 2).reshape(2, 9, 32))

    torch.manual_seed(0)
    model = plain.GPT([plain.Block(plain.Attention()), plain.Block(HandAttention(exposed=True))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ap.watch(model) as watch:
            model(plain.ids()).backward()
    assert len(watch.heads()) == 8
    model.h[1].attn.exposed = False
    with pytest.warns(UserWarning, match="HandAttention ran and writes its own softmax"), ap.watch(model) as watch:
        model(plain.ids()).backward()
    assert len(watch.heads()) == 4


def test_a_class_and_its_heir_are_followed_once_each() -> None:
    class Heir(plain.Attention):
        pass

    torch.manual_seed(0)
    model = plain.GPT([plain.Block(plain.Attention()), plain.Block(Heir())])
    with ap.watch(model) as watch:
        assert plain.Attention.__call__ is Heir.__call__
        model(plain.ids()).backward()
    assert len(watch.heads()) == 8
    assert "__call__" not in vars(Heir)
    assert "__call__" not in vars(plain.Attention)


def test_a_family_that_is_extended_in_a_file_of_ones_own_is_still_read() -> None:
    import census
    from transformers.models.bloom.modeling_bloom import BloomAttention

    class Mine(BloomAttention):
        pass

    with census.quiet():
        model, batch = census.build("BLOOM"), census.batch("BLOOM")
        for block in model.transformer.h:
            block.self_attention.__class__ = Mine
        assert (ap.verify(model, batch)["verdict"] == "ok").all()


def test_a_helper_of_another_file_that_took_the_function_by_name_is_found_and_put_back() -> None:
    code = "from torch.nn.functional import scaled_dot_product_attention as fused\n"
    code += "def attend(q, k, v):\n    return fused(q, k, v, is_causal=True)\n"
    helper = types.ModuleType("helper_of_another_file")
    exec(code, helper.__dict__)

    class Attention(nn.Module):  # as torchtitan's: a leaf without parameters
        def forward(self, q, k, v):
            return attend(q, k, v)  # noqa: F821 - put into these globals below

    class Outer(plain.Attention):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attention()

        def forward(self, x):
            q, k, v = (part.view(2, 9, 4, 8).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
            return self.c_proj(self.inner(q, k, v).transpose(1, 2).reshape(2, 9, 32))

    globals()["attend"] = helper.attend
    try:
        torch.manual_seed(0)
        model = plain.GPT([plain.Block(Outer())])
        with ap.watch(model) as watch:
            assert helper.fused is not torch._C._nn.scaled_dot_product_attention
            model(plain.ids()).backward()
        assert set(watch.heads()["module"]) == {"h.0.attn.inner"}
        assert helper.fused is torch._C._nn.scaled_dot_product_attention
    finally:
        del globals()["attend"]


def test_two_watches_on_models_of_different_files_share_one_replacement_and_put_it_back() -> None:
    model, other = build("name"), build("module")
    first, second = ap.watch(model), ap.watch(other)
    first.close()
    other(plain.ids()).backward()
    assert len(second.heads()) == 8
    second.close()
    assert clean()
