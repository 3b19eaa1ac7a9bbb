"""Plain PyTorch models as people write them: a GPT with a fused kernel, a vision transformer, attention by hand."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as by_name

WIDTH, HEADS, VOCABULARY = 32, 4, 31


class Attention(nn.Module):
    """nanoGPT's attention; `style` picks how the kernel is called."""

    def __init__(self, style: str = "module", kv_heads: int = HEADS, dropout: float = 0.0) -> None:
        super().__init__()
        self.style, self.kv_heads, self.dropout = style, kv_heads, dropout
        self.c_attn = nn.Linear(WIDTH, WIDTH + 2 * kv_heads * WIDTH // HEADS)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.seen: list[dict[str, Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        width = WIDTH // HEADS
        q, k, v = self.c_attn(x).split([WIDTH, self.kv_heads * width, self.kv_heads * width], -1)
        q = q.view(batch, length, HEADS, width).transpose(1, 2)
        k, v = (part.view(batch, length, self.kv_heads, width).transpose(1, 2) for part in (k, v))
        p = self.dropout if self.training else 0.0
        if self.style == "module":
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        elif self.style == "name":
            y = by_name(q, k, v, None, p, True)
        elif self.style == "gqa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.7)
        elif self.style == "mask":
            keep = torch.ones(length, length, dtype=torch.bool).tril()
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        elif self.style == "window":
            place = torch.arange(length)
            keep = (place[:, None] - place[None, :]).abs() <= 2
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        elif self.style == "bias":
            place = torch.arange(length)
            slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]
            bias = -slopes * (place[:, None] - place[None, :]).abs()
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None].masked_fill(place > place[:, None], -1e38))
        else:
            raise ValueError(self.style)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Hand(nn.Module):
    """Softmax attention written out; `exposed` adds the one line that lets it be seen."""

    def __init__(self, exposed: bool = True) -> None:
        super().__init__()
        self.exposed = exposed
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        import advantage_probe as ap

        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        score = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        score = score.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf)
        y = torch.softmax(score, -1) @ v
        if self.exposed:
            y = ap.expose(self, q, k, v, y, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    """Pre-norm block; `direct` calls the attention's forward without its hooks."""

    def __init__(self, attention: nn.Module, direct: bool = False) -> None:
        super().__init__()
        self.direct = direct
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = attention
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        attend = self.attn.forward if self.direct else self.attn
        x = x + attend(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Ids to loss."""

    def __init__(self, blocks: list[nn.Module], checkpoint: bool | None = None) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.checkpoint = checkpoint

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx)
        for block in self.h:
            if self.checkpoint is None:
                x = block(x)
            else:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.checkpoint)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), idx[:, 1:].flatten())


def gpt(style: str = "module", *, layers: int = 2, direct: bool = False, **options: Any) -> GPT:
    torch.manual_seed(0)
    checkpoint = options.pop("checkpoint", None)
    model = GPT([Block(Attention(style, **options), direct) for _ in range(layers)], checkpoint)
    return louder(model)


def hand(*, exposed: bool = True, direct: bool = False) -> GPT:
    torch.manual_seed(0)
    return louder(GPT([Block(Hand(exposed), direct) for _ in range(2)]))


def louder(model: Any, scale: float = 3.0) -> Any:
    """Matrices times `scale`, so that attention is far from uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(scale)
    return model


def ids(rows: int = 2, length: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
