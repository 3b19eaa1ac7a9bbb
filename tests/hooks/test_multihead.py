"""nn.MultiheadAttention and nn.Transformer: every path, every mask, columns that are no tokens."""

from __future__ import annotations

import plain
import pytest
import torch
from torch import nn
from truth import recorded, relative

import advantage_probe as ap
from advantage_probe.probe.law.definition import law
from advantage_probe.probe.law.verify import residuals


def attend(mha: nn.MultiheadAttention, x: torch.Tensor, **arguments) -> torch.Tensor:
    return mha(x, x, x, **arguments)[0]


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("masked", ["none", "bool", "float", "padding", "both", "per head"])
@pytest.mark.parametrize("columns", [False, True])
def test_multihead_attention_is_bit_equal_and_the_laws_hold(weights: bool, masked: str, columns: bool) -> None:
    torch.manual_seed(0)
    mha = nn.MultiheadAttention(32, 4, batch_first=True, add_bias_kv=columns, add_zero_attn=columns)
    plain.louder(mha)
    x = torch.randn(2, 6, 32)
    arguments: dict = {"need_weights": weights}
    hide = torch.ones(6, 6, dtype=torch.bool).triu(1)
    if masked in ("bool", "both"):
        arguments["attn_mask"] = hide
    if masked == "float":
        arguments["attn_mask"] = torch.zeros(6, 6).masked_fill(hide, -torch.inf)
    if masked == "per head":
        arguments["attn_mask"] = torch.randn(8, 6, 6)
    if masked in ("padding", "both"):
        arguments["key_padding_mask"] = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])

    def once() -> tuple[torch.Tensor, list[torch.Tensor]]:
        out = attend(mha, x, **arguments)
        out.square().sum().backward()
        found = [parameter.grad.clone() for parameter in mha.parameters()]
        mha.zero_grad()
        return out.detach(), found

    expected, gradients = once()
    with recorded(mha) as recorder:
        out, same = once()
    assert not recorder.errors
    assert torch.equal(out, expected)
    assert all(torch.equal(one, other) for one, other in zip(gradients, same))
    with recorded(mha, inputs=True) as recorder:
        once()
    (call,) = recorder.calls
    assert call.key.shape[2] == 6 + 2 * columns
    found = residuals(call)
    assert max(float(part.max()) for part in (found.query, found.key, found.value)) < 1e-5
    terms = law(call)
    assert terms.attention.shape == (2, 4, 6, 6 + 2 * columns)
    reference = mha(x, x, x, **{**arguments, "need_weights": True}, average_attn_weights=False)[1]
    assert relative(terms.attention, reference) < 1e-5
    assert float(terms.score_gradient.sum(-1).abs().max()) < 1e-5 * float(terms.score_gradient.abs().max())


def test_appended_columns_are_named_and_shift_nothing() -> None:
    torch.manual_seed(0)
    mha = nn.MultiheadAttention(32, 4, batch_first=True, add_bias_kv=True, add_zero_attn=True)

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mha = nn.Embedding(31, 32), mha

        def forward(self, idx):
            x = self.embed(idx)
            return self.mha(x, x, x, need_weights=False)[0]

    model = Tokens()
    batch = plain.ids(2, 6)
    with recorded(model) as recorder:
        model(batch).square().sum().backward()
    (call,) = recorder.calls
    sequences = call.sequences
    assert sequences.added == ("bias_k", "zero_attn")
    assert sequences.key_ids[:, :6].tolist() == batch.tolist()
    assert (sequences.key_ids[:, 6:] < -1).all()
    own, other = call.visibility.positions(torch.device("cpu"))
    assert own.tolist() == other[:6].tolist()
    with ap.watch(model, detail="tokens") as watch:
        model(batch).square().sum().backward()
    rows = watch.tokens()
    keys = rows[(rows["side"] == "key") & (rows["head"] == 0) & (rows["sequence"] == 0)]
    assert keys["token_id"].tolist()[:6] == batch[0].tolist()
    assert keys["token_id"].isna().tolist() == [False] * 6 + [True] * 2
    assert keys["token"].tolist()[6:] == ["<bias_k>", "<zero_attn>"]
    alpha = law(call).attention[..., :6]
    distance = (own[:, None] - own[None, :]).abs()
    by_hand = (alpha * distance).sum((0, 2, 3)) / 12
    assert watch.heads()["mean_distance"].tolist() == pytest.approx(by_hand.tolist(), rel=1e-5)


def encoder(**options) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 32, dropout=0.0, batch_first=True)
    return plain.louder(nn.TransformerEncoder(layer, 2, **options))


@pytest.mark.parametrize("mode", ["train", "eval", "padding", "no_grad", "inference_mode", "nested"])
def test_an_encoder_is_captured_once_per_layer_or_says_that_no_gradient_can_come(mode: str) -> None:
    model = encoder(enable_nested_tensor=mode == "nested").train(mode == "train")
    x = torch.randn(2, 6, 32)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2]) if mode in ("padding", "nested") else None
    without = {"no_grad": torch.no_grad, "nested": torch.no_grad, "inference_mode": torch.inference_mode}
    if mode in without:
        with without[mode]():
            expected = model(x, src_key_padding_mask=padding)
        with pytest.raises(ap.NoGradientReached, match="no gradient"), ap.watch(model) as watch:
            with without[mode]():
                found = model(x, src_key_padding_mask=padding)
            assert torch.equal(found, expected)  # the fused path is still the one that runs
            watch.step()
        return
    expected = model(x, src_key_padding_mask=padding)
    with ap.watch(model) as watch:
        found = model(x, src_key_padding_mask=padding)
        found.square().sum().backward()
        watch.step()
    assert torch.equal(found, expected)
    table = watch.heads()
    assert table.groupby("module", observed=True).size().to_dict() == {
        "layers.0.self_attn": 4,
        "layers.1.self_attn": 4,
    }
    assert (table["use"] == 0).all()
    assert (table["status"] == "ok").all()
    assert set(table["kind"]) == {"encoder_self"}
    assert table["queries"].tolist() == [10 if padding is not None else 12] * 8


def test_a_frozen_encoder_in_eval_mode_is_refused_by_name() -> None:
    model = encoder().eval().requires_grad_(False)
    with pytest.raises(ap.UnsupportedKernel, match="fused inference path"), ap.watch(model) as watch:
        model(torch.randn(2, 6, 32))
        watch.step()
    model.train()
    with ap.watch(model) as watch:
        model(torch.randn(2, 6, 32)).square().sum().backward()
    assert (watch.heads()["status"] == "ok").all()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_transformer_has_three_kinds_and_cross_attention_is_not_square() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(32, 4, 1, 1, 32, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    arguments = {"src": torch.randn(2, 7, 32), "tgt": torch.randn(2, 5, 32), "tgt_mask": mask, "tgt_is_causal": True}
    with recorded(model) as recorder:
        model(**arguments).square().sum().backward()
    kinds = {
        call.site.module: (call.site.kind, *call.query.shape[2:3], *call.key.shape[2:3]) for call in recorder.calls
    }
    assert kinds == {
        "encoder.layers.0.self_attn": ("encoder_self", 7, 7),
        "decoder.layers.0.self_attn": ("decoder_self", 5, 5),
        "decoder.layers.0.multihead_attn": ("cross", 5, 7),
    }
    arguments["src"] = torch.randn(2, 5, 32)  # as long as the target: still another sequence
    with ap.watch(model) as watch:
        model(**arguments).square().sum().backward()
    table = watch.heads()
    assert set(table.loc[table["module"] == "decoder.layers.0.multihead_attn", "kind"]) == {"cross"}
    assert (ap.verify(model, arguments, loss=lambda out: out.square().sum())["verdict"] == "ok").all()


@pytest.mark.parametrize("weights", [False, True])
def test_a_fully_masked_sequence_is_counted_apart_and_leaves_the_other_alone(weights: bool) -> None:
    torch.manual_seed(0)
    mha = nn.MultiheadAttention(32, 4, batch_first=True)
    plain.louder(mha)
    x = torch.randn(2, 6, 32)
    padding = torch.tensor([[False] * 6, [True] * 6])

    def watched(batch: torch.Tensor, hidden: torch.Tensor | None):
        with ap.watch(mha) as watch:
            out = attend(mha, batch, key_padding_mask=hidden, need_weights=weights)
            out[:1].square().sum().backward()
        return watch.heads()

    both, alone = watched(x, padding), watched(x[:1], None)
    numbers = ["attention_entropy", "routing_pressure", "content_pressure", "alignment", "usage_effective"]
    for name in numbers:
        assert both[name].tolist() == pytest.approx(alone[name].tolist(), rel=1e-5), name
    assert both["queries"].tolist() == [6] * 4
