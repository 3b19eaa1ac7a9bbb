"""Tiny random models of many families, made from config: seeded, no network, weights large enough for uneven attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCABULARY = 31
_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}


def finish(model: nn.Module, scale: float = 4.0) -> nn.Module:
    """Matrices times `scale`, so that attention is far from uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(scale)
    return model.eval()


def _made(build: Callable[[], nn.Module], seed: int = 0, scale: float = 4.0) -> nn.Module:
    torch.manual_seed(seed)
    return finish(build(), scale)


def gpt2(**changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 3, "n_head": 4, "n_embd": 32, "n_positions": 64, "vocab_size": VOCABULARY}
    sizes |= {"scale_attn_by_inverse_layer_idx": True, "bos_token_id": 0, "eos_token_id": 0}
    implementation = changes.pop("attn_implementation", None)
    config = GPT2Config(**{**sizes, **changes})
    return _made(lambda: GPT2LMHeadModel._from_config(config, attn_implementation=implementation), seed=1)


def _causal(name: str, config_name: str | None = None, **settings: Any) -> Callable[..., nn.Module]:
    def build(**changes: Any) -> nn.Module:
        import transformers

        implementation = changes.pop("attn_implementation", None)
        config = getattr(transformers, f"{config_name or name}Config")(**{**settings, **changes})
        kind = getattr(transformers, f"{name}ForCausalLM")
        return _made(lambda: kind._from_config(config, attn_implementation=implementation), scale=3.0)

    return build


llama = _causal("Llama", **_SIZES, **_HEADS, max_position_embeddings=64)
mistral = _causal("Mistral", **_SIZES, **_HEADS, max_position_embeddings=64, sliding_window=4)
gemma2 = _causal(
    "Gemma2",
    **_SIZES,
    **_HEADS,
    head_dim=8,
    max_position_embeddings=64,
    sliding_window=4,
    attn_logit_softcapping=0.5,
    query_pre_attn_scalar=1,
)
gemma3 = _causal(
    "Gemma3",
    "Gemma3Text",
    **_SIZES,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=64,
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"],
)
gpt_oss = _causal(
    "GptOss",
    **_SIZES,
    **_HEADS,
    head_dim=8,
    max_position_embeddings=64,
    sliding_window=4,
    num_local_experts=2,
    num_experts_per_tok=1,
)
_LATENT: dict[str, Any] = {
    **_SIZES,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "first_k_dense_replace": 2,
    "max_position_embeddings": 64,
}
deepseek_v3 = _causal("DeepseekV3", **_LATENT)
deepseek_v32 = _causal("DeepseekV32", **_LATENT, index_topk=4, index_n_heads=2, index_head_dim=8)
qwen3_next = _causal(
    "Qwen3Next",
    **{**_SIZES, "num_hidden_layers": 1},
    **_HEADS,
    head_dim=8,
    layer_types=["full_attention"],
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    linear_num_value_heads=2,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
llama4 = _causal(
    "Llama4",
    "Llama4Text",
    **{**_SIZES, "num_hidden_layers": 4},
    **_HEADS,
    intermediate_size_mlp=32,
    head_dim=8,
    num_local_experts=2,
    num_experts_per_tok=1,
    attention_chunk_size=4,
    max_position_embeddings=64,
    moe_layers=[],
    attn_temperature_tuning=False,
)


def t5(**changes: Any) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    sizes |= {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
    implementation = changes.pop("attn_implementation", None)
    config = T5Config(**{**sizes, **changes})
    build = T5ForConditionalGeneration._from_config
    return _made(lambda: build(config, attn_implementation=implementation), scale=2.0)


def bart(**changes: Any) -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 64, "dropout": 0.0}
    sizes |= {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in _BART_SIDE.items()}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    implementation = changes.pop("attn_implementation", None)
    config = BartConfig(**{**sizes, **changes})
    build = BartForConditionalGeneration._from_config
    return _made(lambda: build(config, attn_implementation=implementation))


_BART_SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 32}


def bert(**changes: Any) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {**_SIZES, "num_attention_heads": 4, "max_position_embeddings": 64}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0}
    implementation = changes.pop("attn_implementation", None)
    config = BertConfig(**{**sizes, **changes})
    return _made(lambda: BertForMaskedLM._from_config(config, attn_implementation=implementation))


def albert(**changes: Any) -> nn.Module:
    from transformers import AlbertConfig, AlbertForMaskedLM

    sizes = {**_SIZES, "num_hidden_layers": 3, "num_attention_heads": 4, "embedding_size": 16}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    implementation = changes.pop("attn_implementation", None)
    config = AlbertConfig(**{**sizes, **changes})
    return _made(lambda: AlbertForMaskedLM._from_config(config, attn_implementation=implementation), scale=5.0)


def vit(**changes: Any) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    config = ViTConfig(**{**sizes, "image_size": 16, "patch_size": 8, "num_labels": 3, **changes})
    return _made(lambda: ViTForImageClassification._from_config(config), scale=2.0)


@dataclass(frozen=True)
class Family:
    """A model family and the kernels it runs with."""

    build: Callable[..., nn.Module]
    kernels: tuple[str, ...] = ("sdpa", "eager")
    encoder_decoder: bool = False


FAMILIES = {
    "gpt2": Family(gpt2),
    "llama": Family(llama),
    "mistral": Family(mistral),
    "gemma2": Family(gemma2, ("eager",)),
    "gemma3": Family(gemma3),
    "gpt_oss": Family(gpt_oss, ("eager",)),
    "deepseek_v3": Family(deepseek_v3),
    "t5": Family(t5, encoder_decoder=True),
    "bart": Family(bart, encoder_decoder=True),
    "bert": Family(bert),
    "albert": Family(albert),
}


def batch(family: str, *, seed: int = 0, rows: int = 2, length: int = 9) -> dict[str, torch.Tensor]:
    """Keyword arguments for a family's forward, labels included."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    if FAMILIES[family].encoder_decoder:
        return {"input_ids": ids, "labels": torch.randint(3, VOCABULARY, (rows, 5), generator=generator)}
    return {"input_ids": ids, "labels": ids.clone()}


class Words:
    """A tokenizer of words: ids from a hash, full stops on their own."""

    bos_token_id = None
    unk_token_id = None

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        for mark in ".,:":
            text = text.replace(mark, f" {mark}")
        parts = text.split()
        return {"input_ids": [4 if part == "." else 5 + sum(map(ord, part)) % 26 for part in parts]}

    def convert_ids_to_tokens(self, ids: object) -> str:
        return str(ids)

    def decode(self, ids: list[int]) -> str:
        return f"w{ids[0]}"

    def __len__(self) -> int:
        return 31


def tokenizer(words: int) -> Any:
    """A tokenizer of whole words w0, w1, …"""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{number}": number for number in range(words)}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="w0", pad_token="w0")
