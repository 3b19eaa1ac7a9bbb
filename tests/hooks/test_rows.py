"""Which rows count and which keys are visible: masks of other stacks, finite fills, hidden own keys, other meanings."""

from __future__ import annotations

import pytest
import torch
import zoo
from torch.nn import functional
from truth import recorded, relative

import advantage_probe as ap
from advantage_probe.probe.law.definition import law


class Heads(torch.nn.Module):
    """Attention over given tensors, as a module calls it."""

    def forward(self, query, key, value, mask=None, dropout=0.0):
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)


def tensors(length: int = 6, batch: int = 2, heads: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, heads, length, 8, generator=generator, requires_grad=True) for _ in range(3)]


def table_of(mask: torch.Tensor | None, **options):
    model = Heads()
    with ap.watch(model, **options) as watch:
        model(*tensors(), mask).square().sum().backward()
    return watch.heads()


@pytest.mark.parametrize("fill", [-1e9, -1e4, torch.finfo(torch.float32).min, -torch.inf])
def test_every_usual_fill_hides_like_a_boolean_mask(fill: float) -> None:
    order = torch.ones(6, 6, dtype=torch.bool).tril()
    expected = table_of(order)
    found = table_of(torch.zeros(6, 6).masked_fill(~order, fill))
    assert found["kind"].tolist() == expected["kind"].tolist()
    for name in expected.select_dtypes("float64").columns:
        if name != "law_residual":
            assert found[name].tolist() == pytest.approx(expected[name].tolist(), rel=1e-4, abs=1e-6), name


def test_rows_that_may_not_see_themselves_still_count() -> None:
    before = torch.ones(6, 6, dtype=torch.bool).tril(-1)
    before[0, 0] = True
    assert table_of(before)["queries"].unique().tolist() == [10]  # nobody sees the last key: it looks like padding
    others = ~torch.eye(6, dtype=torch.bool)
    assert table_of(others)["queries"].unique().tolist() == [12]
    padded = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    padded[1, ..., 4:] = False  # keys that nobody sees: padding
    assert table_of(padded)["queries"].unique().tolist() == [10]


def test_a_mask_with_three_axes_belongs_to_the_heads() -> None:
    bias = torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(1))
    model = Heads()
    with recorded(model) as recorder:
        model(*tensors(), bias).square().sum().backward()
    assert not recorder.errors
    query, key, _ = tensors()
    true = torch.softmax(query @ key.transpose(-1, -2) * 8**-0.5 + bias, -1)
    assert relative(law(recorder.calls[0]).attention, true) < 1e-5


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_dropout_under_a_mask_is_replayed_exactly(kind: str) -> None:
    order = torch.ones(6, 6, dtype=torch.bool).tril()
    mask = order if kind == "bool" else torch.zeros(6, 6).masked_fill(~order, -torch.inf)
    model = Heads()
    torch.manual_seed(5)
    with ap.watch(model) as watch:
        model(*tensors(), mask, 0.3).square().sum().backward()
    table = watch.heads()
    assert (table["status"] == "ok").all()
    assert table["law_residual"].max() < 1e-6


def test_a_padded_batch_in_train_mode_with_default_dropout_is_read() -> None:
    model = zoo.gpt2(attn_pdrop=0.2).train()
    batch = zoo.batch("gpt2")
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, -3:] = 0
    batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    with ap.watch(model) as watch:
        model(**batch).loss.backward()
    assert (watch.heads()["status"] == "ok").all()


def test_a_backward_inside_autocast_gives_the_numbers_of_one_outside() -> None:
    model, batch = zoo.llama(), zoo.batch("llama")
    tables = []
    for inside in (True, False):
        with ap.watch(model) as watch:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch).loss
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
        tables.append(watch.heads())
    assert tables[0].equals(tables[1])
    assert (tables[0]["status"] == "ok").all()


def test_a_text_mask_does_not_leave_out_patches() -> None:
    import transformers

    text = {
        "vocab_size": 31,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    text |= {"max_position_embeddings": 16, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision |= {"image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    ids = torch.tensor([[1, 5, 6, 7, 2], [1, 5, 2, 0, 0], [1, 2, 0, 0, 0]])
    with ap.watch(model) as watch:
        inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "pixel_values": torch.randn(3, 3, 32, 32)}
        model(**inputs, return_loss=True).loss.backward()
    table = watch.heads()
    assert table.loc[table["stack"] == "vision", "queries"].unique().tolist() == [3 * 17]
    assert table.loc[table["stack"] != "vision", "queries"].unique().tolist() == [10]


def test_an_encoder_mask_does_not_leave_out_decoder_rows() -> None:
    model = zoo.t5()
    batch = zoo.batch("t5")
    mask = torch.ones_like(batch["input_ids"])
    mask[1, -4:] = 0
    embedded = model.get_input_embeddings()(batch["labels"])
    with ap.watch(model) as watch:
        result = model(input_ids=batch["input_ids"], attention_mask=mask, decoder_inputs_embeds=embedded)
        result.logits.square().mean().backward()
    counts = watch.heads().groupby("kind", observed=True)["queries"].unique()
    assert {kind: numbers.tolist() for kind, numbers in counts.items()} == {
        "encoder_self": [14],
        "decoder_self": [10],
        "cross": [10],
    }


def test_a_square_order_mask_is_no_padding() -> None:
    class Own(torch.nn.Module):
        def forward(self, x, attention_mask):
            query = x.unflatten(-1, (4, 8)).transpose(1, 2)
            return functional.scaled_dot_product_attention(query, query, query, attn_mask=attention_mask)

    x = torch.randn(8, 8, 32, requires_grad=True)
    model = Own()
    with ap.watch(model) as watch:
        model(x, torch.ones(8, 8, dtype=torch.bool).tril()).square().sum().backward()
    assert watch.heads()["queries"].unique().tolist() == [64]


def test_edges_and_token_rows_name_the_same_positions() -> None:
    model = zoo.llama()
    batch = zoo.batch("llama")
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][:, :3] = 0
    batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"].roll(1, 1) == 0, -100)
    with ap.watch(model, detail="edges") as watch:
        model(**batch).loss.backward()
    rows, pairs = watch.tokens(), watch.edges(20)
    for side in ("query", "key"):
        part = rows[rows["side"] == side]
        known = set(zip(part["sequence"], part["position"], part["token_id"]))
        assert set(zip(pairs["sequence"], pairs[f"{side}_position"], pairs[f"{side}_token_id"])) <= known


def test_positions_of_cross_attention_count_from_zero_on_both_sides() -> None:
    model = zoo.t5()
    with ap.watch(model, detail="tokens") as watch:
        model(**zoo.batch("t5")).loss.backward()
    rows = watch.tokens()
    cross = rows[rows["kind"] == "cross"]
    assert sorted(cross.loc[cross["side"] == "query", "position"].unique()) == [0, 1, 2, 3, 4]
    assert sorted(cross.loc[cross["side"] == "key", "position"].unique()) == list(range(9))


def test_forwards_that_share_position_ids_keep_their_own_documents() -> None:
    model = zoo.llama()
    ids = zoo.batch("llama", length=12)["input_ids"][:2]
    positions = torch.arange(6).repeat(2)[None].expand(2, -1).contiguous()

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits.logsumexp(-1).sum()

    tables = []
    for together in (True, False):
        with ap.watch(model, singly=True) as watch:
            if together:
                (loss(ids[:1].expand(2, -1)) + loss(ids.flip(1))).backward()
            else:
                loss(ids[:1].expand(2, -1)).backward()
                loss(ids.flip(1)).backward()
            watch.step(loss_weight=1.0)
        tables.append(watch.sequences().sort_values(["sequence", "module", "head"], ignore_index=True))
    assert tables[0]["sequence"].nunique() == 6
    assert tables[0]["sequence"].tolist() == tables[1]["sequence"].tolist()


@pytest.mark.parametrize("name", ["position_ids", "attention_mask"])
def test_masks_and_positions_that_were_made_in_inference_mode_are_read(name: str) -> None:
    model = zoo.llama()
    ids = zoo.batch("llama", length=12)["input_ids"]
    kept = torch.arange(12)[None] if name == "position_ids" else torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    tables = []
    for inference in (False, True):
        with torch.inference_mode(inference):
            given = kept.clone()
        with ap.watch(model) as watch:
            model(input_ids=ids, labels=ids, use_cache=False, **{name: given}).loss.backward()
        tables.append(watch.heads())
    assert tables[0].equals(tables[1])
