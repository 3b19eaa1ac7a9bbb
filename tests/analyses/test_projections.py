"""W_K and W_O are those that make the keys and read the outputs, whatever layout a family keeps them in."""

from __future__ import annotations

from typing import Any

import census
import pytest
import torch
from torch import Tensor, nn

from advantage_probe.analyses.weights.projections import chosen, key_maps, output_maps, unembedding
from advantage_probe.hooks.errors import BadRequest, NoAttentionSeen, UnsupportedFamily


def interleaved(weight: Tensor, heads: int, part: int, parts: int = 3) -> Tensor:
    """Head by head [q|k|v]: (heads, D, M)."""
    return weight.unflatten(0, (heads, parts, -1))[:, part]


def side_by_side(weight: Tensor, heads: int, part: int) -> Tensor:
    """[all q | all k | all v]: (heads, D, M)."""
    return weight.chunk(3)[part].unflatten(0, (heads, -1))


def grouped(weight: Tensor) -> Tensor:
    """Two key/value heads of width 8, one after the other."""
    return weight.unflatten(0, (2, 8))


def tiled(weight: Tensor) -> Tensor:
    """The same numbers as if the heads took turns."""
    return weight.unflatten(0, (8, 2)).transpose(0, 1)


def in_turn(weight: Tensor) -> Tensor:
    return interleaved(weight, 4, 1)


def in_blocks(weight: Tensor) -> Tensor:
    return side_by_side(weight, 4, 1)


def shared(weight: Tensor) -> Tensor:
    """[q of four heads | k | v], one key/value head."""
    return weight[32:40][None]


def shared_value(weight: Tensor) -> Tensor:
    return weight[40:48][None]


# family → where the weight is, how its keys are kept (from the modelling code), and how they are not
LAYOUTS: dict[str, tuple[str, Any, Any]] = {
    "GPT-2": ("transformer.h.1.attn.c_attn", lambda w: in_blocks(w.T), lambda w: in_turn(w.T)),
    "GPT-NeoX": ("gpt_neox.layers.1.attention.query_key_value", in_turn, in_blocks),
    "BLOOM": ("transformer.h.1.self_attention.query_key_value", in_turn, in_blocks),
    "Falcon (ALiBi)": ("transformer.h.1.self_attention.query_key_value", in_turn, in_blocks),
    "Falcon (rotary)": ("transformer.h.1.self_attention.query_key_value", shared, shared_value),
    "MPT": ("transformer.blocks.1.attn.Wqkv", in_blocks, in_turn),
    "GPT-BigCode": ("transformer.h.1.attn.c_attn", shared, shared_value),
    "Phi-3": ("model.layers.1.self_attn.qkv_proj", lambda w: grouped(w[32:48]), lambda w: grouped(w[48:])),
    "Llama": ("model.layers.1.self_attn.k_proj", grouped, tiled),
    "Gemma 3": ("model.layers.1.self_attn.k_proj", grouped, tiled),
}


@pytest.mark.parametrize("family", list(LAYOUTS))
def test_keys_are_told_apart_and_the_wrong_layout_is_not_taken(family: str) -> None:
    model = census.build(family)
    name, right, wrong = LAYOUTS[family]
    found = chosen(key_maps(model), 1)
    weight = model.get_submodule(name).weight.detach()
    assert found.linear == name
    assert torch.equal(found.weight, right(weight))
    assert wrong(weight).shape == found.weight.shape
    assert not torch.allclose(found.weight, wrong(weight))
    assert found.normalised == (family == "Gemma 3")


def test_codegen_keeps_its_keys_last_in_pieces() -> None:
    """Four pieces, each [q | v | k]: the keys of head h are the third part of piece h."""
    model = census.build("CodeGen")
    found = chosen(key_maps(model), 0)
    weight = model.transformer.h[0].attn.qkv_proj.weight.detach()
    assert torch.equal(found.weight, interleaved(weight, 4, 2))


@pytest.mark.parametrize("family", ["GPT-2", "GPT-NeoX", "Llama", "Gemma 3", "BLOOM", "Falcon (rotary)"])
def test_output_maps_turn_head_outputs_into_what_the_layer_writes(family: str) -> None:
    model = census.build(family)
    entry = chosen(output_maps(model), 1)
    linear = model.get_submodule(entry.linear)
    heads, width, _ = entry.weight.shape
    output = torch.randn(5, heads, width)
    bias = linear.bias if linear.bias is not None else 0.0
    expected = linear(output.flatten(1)) - bias
    assert torch.allclose(torch.einsum("bhv,hvm->bm", output, entry.weight), expected, atol=1e-5)
    assert (entry.norm is not None) == (family == "Gemma 3")
    last = unembedding(model)
    assert last.weight is model.get_output_embeddings().weight or torch.equal(last.weight, model.lm_head.weight)
    assert last.norm in ("transformer.ln_f", "gpt_neox.final_layer_norm", "model.norm")


def test_what_cannot_be_told_apart_is_refused_by_name() -> None:
    for family in ("Persimmon", "DeepSeek-V3"):
        with pytest.raises(UnsupportedFamily, match="W_K cannot be told apart"):
            key_maps(census.build(family))
    with pytest.raises(UnsupportedFamily, match="gate or norm"):
        output_maps(census.build("Qwen3-Next"))
    with pytest.raises(NoAttentionSeen):
        key_maps(census.build("Mamba-2"))
    with pytest.raises(BadRequest, match="no attention in layer 5"):
        chosen(key_maps(census.build("Llama")), 5)


def test_looking_leaves_no_hook_and_no_mode_behind() -> None:
    model: nn.Module = census.build("Llama").train()
    key_maps(model)
    unembedding(model)
    assert model.training
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
