"""Every family the coverage table speaks of: a tiny random model made from its config, and what the probe says of it."""

# ruff: noqa: E501 - one family, one line

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

VOCABULARY = 31
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    **{
        f"{side}_{name}": number
        for side in ("encoder", "decoder")
        for name, number in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 32))
    },
}
_T5: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
_T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "num_decoder_layers": 2}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 8,
}


@dataclass(frozen=True)
class Entry:
    """How to build one family: config and head class of transformers, settings, what it is fed.

    `expected`: "numbers", or the name of the refusal; `silent`: layers of the model that have no softmax attention.
    """

    config: str
    head: str
    settings: dict[str, Any] = field(default_factory=dict)
    feed: str = "text"
    kernel: str | None = None
    expected: str = "numbers"
    silent: int = 0


def _text(name: str, settings: dict[str, Any] | None = None, /, **more: Any) -> Entry:
    kernel, expected, silent = more.pop("kernel", None), more.pop("expected", "numbers"), more.pop("silent", 0)
    head, feed = more.pop("head", f"{name}ForCausalLM"), more.pop("feed", "text")
    config = more.pop("config", f"{name}Config")
    return Entry(config, head, {**(_GROUPED if settings is None else settings), **more}, feed, kernel, expected, silent)


_MAMBA: dict[str, Any] = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}

FAMILIES: dict[str, Entry] = {
    "GPT-2": _text("GPT2", {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64, "vocab_size": VOCABULARY}, head="GPT2LMHeadModel"),
    "Llama": _text("Llama"),
    "Llama 4": _text(
        "Llama4", config="Llama4TextConfig", intermediate_size_mlp=32, num_local_experts=2, num_experts_per_tok=1,
        attention_chunk_size=4, moe_layers=[],
    ),
    "Mistral": _text("Mistral", sliding_window=4),
    "Mixtral": _text("Mixtral", num_local_experts=2, num_experts_per_tok=1),
    "Qwen2": _text("Qwen2"),
    "Qwen3": _text("Qwen3"),
    "Qwen3-MoE": _text("Qwen3Moe", num_experts=4, **_EXPERTS),
    "Gemma": _text("Gemma"),
    "Gemma 2": _text("Gemma2", sliding_window=4, attn_logit_softcapping=5.0, kernel="eager"),
    "Gemma 3": _text("Gemma3", config="Gemma3TextConfig", sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    "Phi": _text("Phi", _SIZES),
    "Phi-3": _text("Phi3", _SIZES, num_key_value_heads=2, pad_token_id=0),
    "StarCoder2": _text("Starcoder2", sliding_window=4),
    "Cohere": _text("Cohere"),
    "OLMo": _text("Olmo"),
    "OLMo 2": _text("Olmo2"),
    "StableLM": _text("StableLm"),
    "Persimmon": _text("Persimmon", _SIZES),
    "GLM": _text("Glm", pad_token_id=0),
    "Granite": _text("Granite"),
    "GPT-NeoX": _text("GPTNeoX", _SIZES),
    "GPT-J": _text("GPTJ", {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64, "rotary_dim": 4, "vocab_size": VOCABULARY}),
    "CodeGen": _text("CodeGen", {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64, "rotary_dim": 4, "vocab_size": VOCABULARY}),
    "GPT-BigCode": _text("GPTBigCode", {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64, "vocab_size": VOCABULARY}),
    "OPT": _text("OPT", {**_SIZES, "ffn_dim": 32, "word_embed_proj_dim": 32}),
    "BioGPT": _text("BioGpt", _SIZES),
    "CTRL": _text("CTRL", {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "dff": 32, "n_layer": 2, "n_head": 4}, head="CTRLLMHeadModel"),
    "gpt-oss": _text("GptOss", sliding_window=4, num_local_experts=2, num_experts_per_tok=1, kernel="eager"),
    "DeepSeek-V3": _text(
        "DeepseekV3", {**_SIZES, **_EXPERTS}, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, n_group=1,
        topk_group=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6,
        first_k_dense_replace=2,
    ),
    "BLOOM": _text("Bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "Falcon (rotary)": _text("Falcon", _SIZES, alibi=False, multi_query=True),
    "Falcon (rotary, eager)": _text("Falcon", _SIZES, alibi=False, multi_query=True, kernel="eager"),
    "Falcon (ALiBi)": _text("Falcon", _SIZES, alibi=True, multi_query=False, new_decoder_architecture=False),
    "Falcon (ALiBi, eager)": _text("Falcon", _SIZES, alibi=True, multi_query=False, kernel="eager"),
    "MPT": _text("Mpt", {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "GPT-Neo": _text(
        "GPTNeo",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64},
        attention_types=[[["global", "local"], 1]], window_size=4,
    ),
    "XGLM": _text(
        "XGLM",
        {"vocab_size": VOCABULARY, "d_model": 32, "ffn_dim": 32, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 64},
    ),
    "GPT-1": _text("OpenAIGPT", {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}, head="OpenAIGPTLMHeadModel"),
    "BERT": _text("Bert", _SIZES, head="BertForMaskedLM"),
    "RoBERTa": _text("Roberta", _SIZES, head="RobertaForMaskedLM", pad_token_id=0),
    "ALBERT": _text("Albert", _SIZES, embedding_size=16, head="AlbertForMaskedLM"),
    "DistilBERT": _text("DistilBert", {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 32, "max_position_embeddings": 64}, head="DistilBertForMaskedLM"),
    "ELECTRA": _text("Electra", _SIZES, embedding_size=16, head="ElectraForMaskedLM"),
    "ModernBERT": _text("ModernBert", _SIZES, head="ModernBertForMaskedLM", local_attention=4, global_attn_every_n_layers=2, pad_token_id=0),
    "MPNet": _text("MPNet", _SIZES, head="MPNetForMaskedLM", pad_token_id=1),
    "DeBERTa": _text("Deberta", _SIZES, head="DebertaForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "DeBERTa-v2": _text("DebertaV2", _SIZES, head="DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "RemBERT": _text("RemBert", _SIZES, head="RemBertForMaskedLM"),
    "Megatron-BERT": _text("MegatronBert", _SIZES, head="MegatronBertForMaskedLM"),
    "RoFormer": _text("RoFormer", _SIZES, head="RoFormerForMaskedLM"),
    "XLM": _text("XLM", {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}, head="XLMWithLMHeadModel"),
    "SqueezeBERT": _text("SqueezeBert", _SIZES, head="SqueezeBertForMaskedLM", embedding_size=32),
    "XLNet": _text("XLNet", {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 32}, head="XLNetLMHeadModel", expected="UnsupportedFamily"),
    "Funnel": _text("Funnel", {"vocab_size": VOCABULARY, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 32}, head="FunnelForMaskedLM", expected="UnsupportedFamily"),
    "Longformer": _text("Longformer", _SIZES, head="LongformerForMaskedLM", attention_window=4, pad_token_id=1, expected="UnsupportedFamily"),
    "BigBird": _text("BigBird", _SIZES, head="BigBirdForMaskedLM", attention_type="original_full"),
    "Nystromformer": _text("Nystromformer", _SIZES, head="NystromformerForMaskedLM", segment_means_seq_len=9, num_landmarks=3, expected="UnsupportedFamily"),
    "Reformer": _text(
        "Reformer",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "attention_head_size": 8, "num_attention_heads": 4, "feed_forward_size": 32,
         "axial_pos_shape": [3, 4], "axial_pos_embds_dim": [16, 16], "attn_layers": ["local", "lsh"], "is_decoder": False,
         "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2},
        head="ReformerForMaskedLM", feed="twelve", expected="UnsupportedFamily",
    ),
    "T5": _text("T5", _T5, head="T5ForConditionalGeneration", feed="pair"),
    "MT5": _text("MT5", _T5, head="MT5ForConditionalGeneration", feed="pair"),
    "BART": _text("Bart", _SEQ2SEQ, head="BartForConditionalGeneration", feed="pair"),
    "Marian": _text("Marian", _SEQ2SEQ, head="MarianMTModel", feed="pair"),
    "Pegasus": _text("Pegasus", _SEQ2SEQ, head="PegasusForConditionalGeneration", feed="pair"),
    "M2M-100": _text("M2M100", _SEQ2SEQ, head="M2M100ForConditionalGeneration", feed="pair"),
    "MVP": _text("Mvp", _SEQ2SEQ, head="MvpForConditionalGeneration", feed="pair"),
    "ProphetNet": _text(
        "ProphetNet",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "encoder_ffn_dim": 32, "num_encoder_layers": 1, "num_encoder_attention_heads": 4,
         "decoder_ffn_dim": 32, "num_decoder_layers": 1, "num_decoder_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
         "decoder_start_token_id": 0},
        head="ProphetNetForConditionalGeneration", feed="pair", expected="UnsupportedFamily",
    ),
    "Whisper": Entry(
        "WhisperConfig", "WhisperForConditionalGeneration",
        {**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16, "suppress_tokens": None, "begin_suppress_tokens": None},
        "audio",
    ),
    "wav2vec 2.0": Entry(
        "Wav2Vec2Config", "Wav2Vec2ForCTC",
        {**_SIZES, "conv_dim": [16, 16], "conv_kernel": [4, 4], "conv_stride": [2, 2], "num_conv_pos_embeddings": 4,
         "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "mask_time_prob": 0.0, "pad_token_id": 0, "ctc_zero_infinity": True},
        "wave",
    ),
    "ViT": Entry("ViTConfig", "ViTForImageClassification", {**_VISION, "num_labels": 3}, "image"),
    "DeiT": Entry("DeiTConfig", "DeiTForImageClassification", {**_VISION, "num_labels": 3}, "image"),
    "BEiT": Entry("BeitConfig", "BeitForImageClassification", {**_VISION, "num_labels": 3}, "image"),
    "DINOv2": Entry("Dinov2Config", "Dinov2ForImageClassification", {**_VISION, "num_labels": 3}, "image"),
    "Swin": Entry(
        "SwinConfig", "SwinForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4, "num_labels": 3}, "image",
    ),
    "Swin v2": Entry(
        "Swinv2Config", "Swinv2ForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4, "num_labels": 3}, "image",
    ),
    "CLIP": Entry(
        "CLIPConfig", "CLIPModel",
        {"text_config": {**_SIZES, "eos_token_id": 2}, "vision_config": dict(_VISION), "projection_dim": 16}, "contrast",
    ),
    "LLaVA": Entry(
        "LlavaConfig", "LlavaForConditionalGeneration",
        {"text_config": {**_GROUPED, "model_type": "llama"}, "vision_config": {**_VISION, "model_type": "clip_vision_model", "projection_dim": 16},
         "image_token_id": 30, "vision_feature_layer": -1},
        "picture",
    ),
    "Mamba-2": _text("Mamba2", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 4}, expected="NoAttentionSeen"),
    "Qwen3-Next": _text(
        "Qwen3Next", {**_GROUPED, **_EXPERTS}, num_experts=2, layer_types=["linear_attention", "full_attention"], shared_expert_intermediate_size=16,
        linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, silent=1,
    ),
    "Jamba": _text("Jamba", _SIZES, num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, num_experts=2, use_mamba_kernels=False, mamba_d_state=4, mamba_dt_rank=4, pad_token_id=0, silent=1),
    "Bamba": _text("Bamba", _SIZES, num_key_value_heads=2, attn_layer_indices=[1], **_MAMBA, silent=1),
    "Zamba2": _text(
        "Zamba2", _SIZES, num_hidden_layers=3, num_key_value_heads=4, attention_head_dim=16, layers_block_type=["mamba", "hybrid", "hybrid"],
        mamba_ngroups=1, n_mamba_heads=8, mamba_headdim=8, mamba_d_state=8, num_mem_blocks=1, hybrid_layer_ids=[1, 2], chunk_size=4, use_mem_eff_path=False, silent=3,
    ),
    "Granite hybrid": _text(
        "GraniteMoeHybrid", _SIZES, num_key_value_heads=2, layer_types=["mamba", "attention"], num_local_experts=2, num_experts_per_tok=1, shared_intermediate_size=16,
        **_MAMBA, silent=1,
    ),
    "LFM2": _text("Lfm2", _SIZES, num_key_value_heads=2, layer_types=["conv", "full_attention"], silent=1),
    "RecurrentGemma": _text("RecurrentGemma", _SIZES, num_key_value_heads=1, lru_width=32, attention_window_size=8, block_types=["recurrent", "attention"], silent=1),
}  # fmt: skip


def build(name: str, seed: int = 0) -> nn.Module:
    """The family's tiny model, in eval mode, its matrices large enough for uneven attention."""
    import transformers

    entry = FAMILIES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, entry.config)(**entry.settings)
    model: nn.Module = getattr(transformers, entry.head)._from_config(config, attn_implementation=entry.kernel)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(2.0)
    if entry.feed == "contrast":  # its gradients are differences that float32 does not resolve
        model = model.double()
    return model.train(name == "Reformer")  # which refuses to be differentiated otherwise


def batch(name: str) -> dict[str, Any]:
    """Keyword arguments of its forward, labels included."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY - 1, (2, 12 if FAMILIES[name].feed == "twelve" else 9), generator=generator)
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    if FAMILIES[name].feed in ("text", "twelve"):
        return {"input_ids": ids, "labels": ids.clone()}
    if FAMILIES[name].feed == "pair":
        return {"input_ids": ids, "labels": ids[:, :5].clone()}
    if FAMILIES[name].feed == "image":
        return {"pixel_values": pixels, "labels": torch.tensor([0, 2])}
    if FAMILIES[name].feed == "audio":
        return {"input_features": torch.randn(2, 8, 16, generator=generator), "labels": ids[:, :5].clone()}
    if FAMILIES[name].feed == "wave":
        return {"input_values": torch.randn(2, 120, generator=generator), "labels": ids[:, :3].clone()}
    if FAMILIES[name].feed == "contrast":
        return {"input_ids": ids, "pixel_values": pixels.double(), "return_loss": True}
    ids[:, 1:5] = 30
    return {"input_ids": ids, "pixel_values": pixels, "labels": ids.clone()}


@dataclass(frozen=True)
class Finding:
    """What came of one family: calls and the worst residual against autograd, or a refusal; `fault` if neither."""

    name: str
    calls: int = 0
    residual: float = float("nan")
    refusal: str = ""
    message: str = ""
    silent: tuple[str, ...] = ()
    fault: str = ""

    @property
    def outcome(self) -> str:
        return self.refusal or ("numbers" if self.calls and not self.fault else "fault")


@contextlib.contextmanager
def quiet() -> Any:
    """Without the notes that building untrained models prints."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def examine(name: str) -> Finding:
    """Build the family, hold both laws against its autograd, and say what came of it."""
    import advantage_probe as ap
    from advantage_probe.hooks.site import unmixed

    with quiet():
        model, given = build(name), batch(name)
        mixers = tuple(site.module for site in unmixed(model))
        try:
            table = ap.verify(model, given)
        except ap.ProbeError as error:
            return Finding(name, refusal=type(error).__name__, message=str(error), silent=mixers)
        calls = len(table.groupby(["module", "use"], observed=True))
        numbers = table[["query_residual", "key_residual", "value_residual"]]
        worst = float(numbers.max().max())
        fault = "" if (table["verdict"] == "ok").all() else f"verdicts: {sorted(set(table['verdict']))}"
        return Finding(name, calls, worst, silent=mixers, fault=fault)
