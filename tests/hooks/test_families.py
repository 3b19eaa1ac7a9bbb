"""At least forty families: each gives numbers that agree with its own autograd, or a refusal that names it."""

from __future__ import annotations

import census
import pytest
import torch
from truth import recorded

import advantage_probe as ap
from advantage_probe.hooks.adapters.families import by_hand
from advantage_probe.probe.law.definition import law

HAND = [
    name for name, entry in census.FAMILIES.items() if entry.expected == "numbers" and entry.feed in ("text", "pair")
]


@pytest.mark.parametrize("name", census.FAMILIES)
def test_every_family_gives_numbers_or_a_refusal(name: str) -> None:
    found = census.examine(name)
    assert found.outcome == census.FAMILIES[name].expected, (found.fault, found.message)
    if found.outcome == "numbers":
        assert found.residual < 1e-5
        assert len(found.silent) == census.FAMILIES[name].silent
    else:
        assert len(found.message) > 20


def test_there_are_forty_families_and_most_give_numbers() -> None:
    assert len(census.FAMILIES) >= 40
    assert sum(entry.expected == "numbers" for entry in census.FAMILIES.values()) >= 40


def by_hand_families() -> list[str]:
    with census.quiet():
        return [name for name in HAND if any(by_hand(type(module)) for module in census.build(name).modules())]


@pytest.mark.parametrize("name", by_hand_families())
def test_families_that_attend_by_hand_run_bit_equal(name: str) -> None:
    with census.quiet():
        model, batch = census.build(name), census.batch(name)

        def once() -> list[torch.Tensor]:
            found = model(**batch)
            found.loss.backward()
            gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            model.zero_grad(set_to_none=True)
            return [found.logits.detach(), *gradients]

        expected = once()
        with ap.watch(model) as watch:
            found = once()
    assert all(torch.equal(one, other) for one, other in zip(expected, found))
    assert (watch.heads()["status"] == "ok").all()
    assert watch.heads()["law_residual"].max() < 1e-5


@pytest.mark.parametrize(
    "name",
    ["GPT-1", "XGLM", "GPT-Neo", "BLOOM", "MPT", "Falcon (ALiBi)", "Falcon (ALiBi, eager)", "Falcon (rotary, eager)"],
)
def test_hidden_keys_are_hidden_however_the_family_writes_its_mask(name: str) -> None:
    with census.quiet():
        model, batch = census.build(name), census.batch(name)
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, -2:] = 0
        with recorded(model) as recorder:
            model(**batch).loss.backward()
    for call in recorder.calls:
        assert call.site.kind == "decoder_self"
        seen = law(call).visible.any(1).sum(-1)
        if name == "GPT-Neo" and call.site.layer == 1:
            assert seen[0].tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4]
        else:
            assert seen[0].tolist() == list(range(1, 10))
            assert seen[1, :7].tolist() == list(range(1, 8))
        assert call.visibility.counted(2, torch.device("cpu"))[1].tolist() == [True] * 7 + [False] * 2


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["BLOOM", "GPT-Neo", "Falcon (ALiBi)"])
def test_families_by_hand_under_both_kinds_of_checkpointing(name: str, reentrant: bool) -> None:
    with census.quiet():
        model, batch = census.build(name).train(), census.batch(name)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        batch["use_cache"] = False
        tables, losses = [], []
        for saving in (False, True):
            if saving:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                model.enable_input_require_grads()
            with ap.watch(model) as watch:
                loss = model(**batch).loss
                loss.backward()
            tables.append(watch.heads())
            losses.append(loss.detach())
        loss = model(**batch).loss
        watch = ap.watch(model)  # opened between forward and backward
        loss.backward()
        watch.close()
    assert torch.equal(*losses)
    assert tables[0].equals(tables[1])


@pytest.mark.parametrize("name", ["BLOOM", "GPT-Neo"])
def test_dropout_of_a_family_by_hand_is_read_off_its_weights(name: str) -> None:
    with census.quiet():
        model, batch = census.build(name).train(), census.batch(name)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.3
        torch.manual_seed(1)
        with recorded(model, inputs=True) as recorder:
            model(**batch).loss.backward()
    from advantage_probe.probe.law.verify import residuals

    for call in recorder.calls:
        assert call.weights is not None
        found = residuals(call)
        assert max(float(part.nan_to_num().max()) for part in (found.query, found.key, found.value)) < 1e-5


@pytest.mark.parametrize("name", [name for name, entry in census.FAMILIES.items() if entry.silent])
def test_hybrids_list_the_layers_that_have_no_softmax_attention(name: str) -> None:
    with census.quiet():
        model, batch = census.build(name), census.batch(name)
        with ap.watch(model) as watch:
            model(**batch).loss.backward()
    table = watch.modules()
    without = table[table["status"] == "no softmax attention"]
    assert len(without) == census.FAMILIES[name].silent
    assert without["heads"].isna().all()
    seen = table[table["status"] == "softmax attention"]
    assert set(seen["module"]) == set(watch.heads()["module"])
    assert seen["heads"].sum() == len(watch.heads())
    assert (watch.heads()["status"] == "ok").all()
    assert len(table) == len(without) + len(seen)


@pytest.mark.parametrize(("layers", "missed"), [(None, ["layers.0"]), ([1], [])])
def test_attention_that_makes_no_call_that_can_be_read_is_listed(layers: list[int] | None, missed: list[str]) -> None:
    class Attention(torch.nn.Module):
        """Weighted means that no adapter reads."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = (x @ x.mT).exp()
            return (scores / scores.sum(-1, keepdim=True)) @ x

    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Attention(), torch.nn.MultiheadAttention(8, 2)])})
    x = torch.randn(1, 5, 8)
    with ap.watch(model, layers=layers) as watch:
        (model["layers"][0](x) + model["layers"][1](x, x, x)[0]).sum().backward()
    status = watch.modules().set_index("module")["status"].astype(str)
    assert status[status == "no attention call was seen"].index.tolist() == missed
    assert status["layers.1"] == "softmax attention"
