"""TransformerLens: a bridge shows the values, gradients and weights that the plain model shows."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import census
import pytest
import torch
import zoo
from torch import nn
from truth import recorded, relative

import advantage_probe as ap
from advantage_probe.hooks.adapters import transformer_lens as adapter
from advantage_probe.probe.columns import COLUMNS
from advantage_probe.probe.law.definition import law
from advantage_probe.probe.law.verify import residuals

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: zoo.gpt2(scale_attn_by_inverse_layer_idx=False, attn_implementation="eager"),
    "llama": lambda: zoo.llama(attn_implementation="eager"),
    "gemma2": lambda: zoo.gemma2(attn_implementation="eager"),
    "gpt_oss": lambda: zoo.gpt_oss(attn_implementation="eager"),
    "qwen3_next": lambda: zoo.qwen3_next(attn_implementation="eager"),
    "deepseek_v3": lambda: zoo.deepseek_v3(attn_implementation="eager"),
    "bloom": lambda: census.build("BLOOM"),
    "neox": lambda: census.build("GPT-NeoX"),
    "t5": lambda: zoo.t5(attn_implementation="eager"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of 31 words."""
    import transformers
    from tokenizers import Tokenizer, models

    path = tmp_path_factory.mktemp("tokenizer")
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(31)}, unk_token="t0"))
    special = {"bos_token": "t1", "eos_token": "t2", "pad_token": "t0", "unk_token": "t0"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(path)
    return path


def bridged(model: nn.Module, folder: Path) -> Any:
    import transformers
    from transformer_lens.model_bridge import TransformerBridge

    model.config.architectures = [type(model).__name__]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with census.quiet():
        return TransformerBridge.boot_transformers("tiny", hf_model=model, tokenizer=tokenizer, device="cpu")


@cache
def ids() -> torch.Tensor:
    return zoo.batch("llama")["input_ids"]


def plain_loss(model: nn.Module) -> torch.Tensor:
    more = {"decoder_input_ids": ids()[:, :5]} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids(), **more).logits.square().mean()


def bridge_loss(model: Any) -> torch.Tensor:
    more = {"decoder_input": ids()[:, :5]} if model.original_model.config.is_encoder_decoder else {}
    return model(ids(), return_type="logits", **more).square().mean()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bridge_shows_what_the_plain_model_shows(family: str, folder: Path) -> None:
    model = FAMILIES[family]()
    bridge = bridged(copy.deepcopy(model), folder)
    with recorded(model) as plain:
        plain_loss(model).backward()
    with recorded(bridge, inputs=True) as seen:
        bridge_loss(bridge).backward()
    assert not seen.errors
    assert len(seen.calls) == len(plain.calls) > 0
    for one, other in zip(sorted(plain.calls, key=order), sorted(seen.calls, key=order)):
        assert one.site.layer == other.site.layer
        assert relative(other.value, one.value) < 1e-6
        assert relative(other.upstream, one.upstream) < 1e-6
        assert float((law(other).attention - law(one).attention).abs().max()) < 1e-6
        assert other.group == one.group
        assert other.site.kind == one.site.kind
        if other.implementation == "by hand":
            found = residuals(other)
            assert max(float(part.nan_to_num().max()) for part in (found.query, found.key, found.value)) < 1e-5
        assert other.sequences.key_ids is not None or family == "t5"


def order(call: Any) -> tuple:
    return call.site.kind, call.site.layer, call.site.stack


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_oss"])
def test_a_bridge_runs_bit_equal_and_is_put_back(family: str, folder: Path) -> None:
    bridge = bridged(FAMILIES[family](), folder)
    kinds = {type(module) for module in bridge.modules()}
    before = {kind: (kind.__dict__.get("forward"), kind.__dict__.get("__call__")) for kind in kinds}

    def once() -> list[torch.Tensor]:
        loss = bridge_loss(bridge)
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in bridge.parameters() if parameter.grad is not None]
        bridge.zero_grad(set_to_none=True)
        return [loss.detach(), *gradients]

    expected = once()
    with ap.watch(bridge) as watch:
        found = once()
    assert all(torch.equal(one, other) for one, other in zip(expected, found))
    assert (watch.heads()["status"] == "ok").all()
    assert {kind: (kind.__dict__.get("forward"), kind.__dict__.get("__call__")) for kind in kinds} == before


def test_the_gate_of_a_gated_head_stays_outside(folder: Path) -> None:
    bridge = bridged(FAMILIES["qwen3_next"](), folder)
    gated: dict[str, torch.Tensor] = {}
    attention = bridge.blocks[0].self_attn if hasattr(bridge.blocks[0], "self_attn") else bridge.blocks[0].attn
    handle = attention.o.register_forward_pre_hook(lambda _, args: gated.update(z=args[0]) or args[0].retain_grad())
    with recorded(bridge) as recorder:
        bridge_loss(bridge).backward()
    handle.remove()
    (call,) = recorder.calls
    after = gated["z"].grad.view(2, 9, 4, 8).transpose(1, 2)
    assert relative(after, call.upstream) > 0.1  # what stands at the output projection is not ∂L/∂(head output)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_dropout_inside_a_bridge_is_read_off_its_pattern(family: str, folder: Path) -> None:
    model = (
        zoo.gpt2(attn_pdrop=0.3, resid_pdrop=0.0, embd_pdrop=0.0, scale_attn_by_inverse_layer_idx=False)
        if family == "gpt2"
        else zoo.llama(attention_dropout=0.3, attn_implementation="eager")
    )
    bridge = bridged(model, folder).train()
    torch.manual_seed(1)
    with recorded(bridge, inputs=True) as recorder:
        bridge_loss(bridge).backward()
    assert not recorder.errors
    assert recorder.calls
    for call in recorder.calls:
        assert call.weights is not None
        found = residuals(call)
        assert max(float(part.nan_to_num().max()) for part in (found.query, found.key, found.value)) < 1e-5


def test_a_hook_that_edits_the_pattern_is_found_out(folder: Path) -> None:
    bridge = bridged(FAMILIES["gpt2"](), folder)

    def halve(pattern: torch.Tensor, hook: Any) -> torch.Tensor:
        return pattern * 0.5

    with (
        pytest.raises(ap.LawViolated),
        ap.watch(bridge) as watch,
        bridge.hooks([("blocks.0.attn.hook_pattern", halve)]),
    ):
        bridge_loss(bridge).backward()
        watch.step()


def test_processed_weights_are_announced_and_only_the_named_columns_change(folder: Path) -> None:
    bridge = bridged(FAMILIES["gpt2"](), folder)
    assert adapter.processing(bridge) is None

    def table() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with ap.watch(bridge) as watch:
                logits = bridge(ids(), return_type="logits")
                torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids()[:, 1:].flatten()).backward()
        return watch.heads()

    with torch.no_grad():  # biases that folding moves
        for block in bridge.blocks:
            block.attn.v.bias.normal_(generator=torch.Generator().manual_seed(0))
    raw = table()
    with census.quiet():
        bridge.enable_compatibility_mode()
    with pytest.warns(UserWarning, match=r"value biases folded, writing weights centred, norms folded"):
        ap.watch(bridge).close()
    processed = table()
    assert adapter.processing(bridge) == adapter.Processing(True, True, True)
    same = [name for name, column in COLUMNS.items() if column.processed]
    other = [name for name, column in COLUMNS.items() if column.processed is False]
    assert {"routing_pressure", "alignment"} <= set(same)
    assert {"content_relative", "coherence"} <= set(other)
    for name in same:
        numbers = raw[name].astype(float).tolist()
        assert processed[name].astype(float).tolist() == pytest.approx(numbers, rel=2e-3, nan_ok=True), name
    assert not all(
        processed[name].tolist() == pytest.approx(raw[name].tolist(), rel=1e-2, nan_ok=True) for name in other
    )
