"""The transformers that run in tunnels: ordinary Hugging Face models built from a configuration, never downloaded.

They stay `GPT2LMHeadModel` and `LlamaForCausalLM` so that every attention adapter works on them; rotary positions
(Llama) where a task is to be tried at lengths it was not trained on. Embedded tasks enter through `inputs_embeds`,
padded with zeros to the model's width.

Shapes: n episodes, L positions, d input dimensions, W width.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import TunnelError
from ..tasks.protocol import Tunnel


@dataclass(frozen=True)
class Shape:
    """`family` "gpt2" has learned positions, "llama" rotary ones; the feed-forward is 4 widths (gpt2) or matched to
    that (llama).
    """

    family: Literal["gpt2", "llama"] = "gpt2"
    layers: int = 2
    heads: int = 4
    width: int = 96

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise TunnelError(f"width {self.width} is no multiple of {self.heads} heads")


def build(shape: Shape, tunnel: Tunnel, seed: int, positions: int | None = None) -> nn.Module:
    """A fresh model of `shape` for `tunnel`, initialised from `seed` without touching the global generator."""
    positions = tunnel.length if positions is None else positions
    vocabulary = max(len(tunnel.vocabulary), max(tunnel.outcomes) + 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _gpt2(shape, vocabulary, positions) if shape.family == "gpt2" else _llama(shape, vocabulary, positions)


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """(n, L, vocabulary) logits for (n, L) ids or, zero-padded to the model's width, (n, L, d) inputs."""
    if tokens.dim() == 2:
        output = model(input_ids=tokens)
    else:
        width = model.get_input_embeddings().embedding_dim  # type: ignore[operator]
        if tokens.shape[-1] > width:
            raise TunnelError(f"inputs of {tokens.shape[-1]} dimensions do not fit a width of {width}")
        padding = (0, width - tokens.shape[-1])
        output = model(inputs_embeds=functional.pad(tokens.to(next(model.parameters()).dtype), padding))
    return output.logits


def parameter_count(model: nn.Module) -> int:
    """Trainable numbers, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def _gpt2(shape: Shape, vocabulary: int, positions: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=positions,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def _llama(shape: Shape, vocabulary: int, positions: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        hidden_size=shape.width,
        intermediate_size=8 * shape.width // 3,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)
