"""Does the probe see attention on this machine: one tiny random model per adapter, held against its own autograd."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...hooks.adapters.expose import expose
from ...hooks.errors import ProbeError
from ...probe.law.verify import verify
from ...probe.watch import watch

IDS = torch.arange(24).view(2, 12) % 16 + 1  # no 0: some families take it for padding
_SIZES: dict[str, Any] = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
Subject = tuple[nn.Module, dict[str, Any]]


def _llama(attention: str) -> Callable[[], Subject]:
    def build() -> Subject:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(**_SIZES, num_attention_heads=4, num_key_value_heads=2)
        return LlamaForCausalLM._from_config(config, attn_implementation=attention), {"input_ids": IDS, "labels": IDS}

    return build


def _bloom() -> Subject:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=17, hidden_size=16, n_layer=2, n_head=4)
    return BloomForCausalLM(config), {"input_ids": IDS, "labels": IDS}


class _Plain(nn.Module):
    """Attention of one layer over embedded ids; `by_hand` writes the softmax out."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.embedding, self.projection, self.by_hand = nn.Embedding(17, 16), nn.Linear(16, 48), by_hand

    def forward(self, input_ids: Tensor) -> Tensor:
        parts = self.projection(self.embedding(input_ids)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in parts)
        if not self.by_hand:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        output = (q @ k.mT / 2).masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return expose(self, q, k, v, output, is_causal=True)


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 16, dropout=0.0, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.layer(self.embedding(input_ids))


def _bridge() -> Subject:
    from tokenizers import Tokenizer, models
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    config = GPT2Config(vocab_size=17, n_embd=16, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0)
    words = Tokenizer(models.WordLevel({str(number): number for number in range(17)}, unk_token="0"))
    with tempfile.TemporaryDirectory() as folder:  # it loads from a folder with a tokenizer, and from nothing else
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", pad_token="0").save_pretrained(folder)
        GPT2LMHeadModel(config).save_pretrained(folder)
        bridge = TransformerBridge.boot_transformers(folder, device="cpu")
    return bridge, {"input": IDS, "return_type": "loss"}


def _t5() -> Subject:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=17, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4, decoder_start_token_id=0)  # type: ignore[call-arg]
    return T5ForConditionalGeneration(config).eval(), {"input_ids": IDS, "labels": IDS}


ADAPTERS: dict[str, Callable[[], Subject]] = {
    "transformers registry, sdpa": _llama("sdpa"),
    "transformers registry, eager": _llama("eager"),
    "encoder and decoder (T5)": _t5,
    "families that compute by hand (BLOOM)": _bloom,
    "scaled_dot_product_attention in plain PyTorch": lambda: (_Plain(False), {"input_ids": IDS}),
    "attention by hand, exposed": lambda: (_Plain(True), {"input_ids": IDS}),
    "nn.TransformerEncoderLayer": lambda: (_Encoder(), {"input_ids": IDS}),
    "TransformerLens bridge": _bridge,
}


def _loss(result: Any) -> Tensor:
    given = getattr(result, "loss", None)
    value = given if given is not None else result
    return value if value.dim() == 0 else value.sin().sum()


def examine() -> Iterator[dict[str, Any]]:
    """One row per adapter: heads seen, the worst residual of both laws, and the verdict."""
    for name, build in ADAPTERS.items():
        row: dict[str, Any] = {"adapter": name, "heads": 0, "worst_residual": float("nan"), "verdict": ""}
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model, batch = build()
            table = verify(model, batch, loss=_loss)
            with watch(model) as seen:
                _loss(model(**batch)).backward()
            known = table[["query_residual", "key_residual", "value_residual"]].max().max()
            row |= {"heads": len(seen.heads()), "worst_residual": float(known)}
            row["verdict"] = "ok" if (table["verdict"] == "ok").all() else "fails"
        except ProbeError as error:
            row["verdict"] = f"refused: {error}"
        except Exception as error:
            row["verdict"] = f"fails: {type(error).__name__}: {error}"
        yield row


def examined(told: Callable[[dict[str, Any]], None] | None = None) -> pd.DataFrame:
    """All rows of `examine` as a table; `told` hears of each."""
    rows = []
    for row in examine():
        rows.append(row)
        if told is not None:
            told(row)
    return pd.DataFrame(rows)
