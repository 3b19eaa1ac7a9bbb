"""What a tunnel is worth: rivals without attention, trained on the same data for as many steps with as many
parameters.

A per-position network sees one token and its place; where answers depend on earlier tokens its floor is the uniform
row. A network on the flattened prefix sees everything and has no way to compare. An LSTM accumulates. Each is sized to
within two per cent of the transformer's parameters, and the best of three learning rates counts.

Shapes: n episodes, L positions, e embedding width, h hidden width.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pandas as pd
import torch
from torch import Generator, Tensor, nn

from ..errors import TunnelError
from ..tasks.protocol import Tunnel
from .models import build, parameter_count
from .recipes import Recipe
from .runner import train

Kind = Literal["per-position MLP", "prefix MLP", "LSTM"]
KINDS: tuple[Kind, ...] = ("per-position MLP", "prefix MLP", "LSTM")
RATES = (3e-4, 1e-3, 3e-3)
EMBEDDING, LAYERS, TOLERANCE = 32, 3, 0.02


class PerPosition(nn.Module):
    """Token and place in, logits out; nothing from other positions."""

    def __init__(self, source: nn.Module, vocabulary: int, positions: int, hidden: int) -> None:
        super().__init__()
        self.source, self.place = source, nn.Embedding(positions, EMBEDDING)
        self.body = _body(EMBEDDING, hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.source(tokens) + self.place.weight[: tokens.shape[1]])


class Prefix(nn.Module):
    """A dense layer on the flattened prefix, then more; the first layer is a running sum of one matrix per place."""

    def __init__(self, source: nn.Module, vocabulary: int, positions: int, hidden: int) -> None:
        super().__init__()
        self.source = source
        self.first = nn.Parameter(torch.randn(positions, EMBEDDING, hidden) / EMBEDDING**0.5)
        self.place = nn.Embedding(positions, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.body = _body(hidden, hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        summed = torch.einsum("nle,leh->nlh", self.source(tokens), self.first[:length]).cumsum(1)
        return self.body(self.norm(summed + self.place.weight[:length]))


class Recurrent(nn.Module):
    """Two LSTM layers between an embedding and logits."""

    def __init__(self, source: nn.Module, vocabulary: int, positions: int, hidden: int) -> None:
        super().__init__()
        self.source = source
        self.lstm = nn.LSTM(EMBEDDING, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.source(tokens))[0])


def control(kind: Kind, tunnel: Tunnel, parameters: int, seed: int) -> nn.Module:
    """A fresh control within two per cent of `parameters`; raises `TunnelError` where no hidden width is that close."""
    maker: Callable[..., nn.Module] = {"per-position MLP": PerPosition, "prefix MLP": Prefix, "LSTM": Recurrent}[kind]
    example = tunnel.sample(1, Generator().manual_seed(0)).tokens
    vocabulary = max(len(tunnel.vocabulary), max(tunnel.outcomes) + 1)

    def make(hidden: int) -> nn.Module:
        source = nn.Embedding(vocabulary, EMBEDDING) if example.dim() == 2 else nn.Linear(example.shape[-1], EMBEDDING)
        return maker(source, vocabulary, tunnel.length, hidden)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        low, high = 1, 4_096
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if parameter_count(make(middle)) <= parameters else (low, middle)
        best = min((low, high), key=lambda hidden: abs(parameter_count(make(hidden)) - parameters))
        torch.manual_seed(seed)
        made = make(best)
    if abs(parameter_count(made) - parameters) > TOLERANCE * parameters:
        raise TunnelError(f"no {kind} of {parameters} parameters: the nearest has {parameter_count(made)}")
    return made


def called(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits of a control, in the place of `models.logits`."""
    return model(tokens)


def sized_like(tunnel: Tunnel, recipe: Recipe) -> int:
    """Parameters of the transformer that `recipe` trains on `tunnel`."""
    return parameter_count(build(recipe.shape, tunnel, recipe.seed))


def train_control(
    kind: Kind, tunnel: Tunnel, recipe: Recipe, parameters: int
) -> tuple[nn.Module, list[dict[str, float]]]:
    """One control of `parameters` under the transformer's own recipe: same data, same steps."""
    return train(tunnel, recipe, model=control(kind, tunnel, parameters, recipe.seed), forward=called)


def train_controls(
    tunnel: Tunnel, recipe: Recipe, kinds: tuple[Kind, ...] = KINDS, rates: tuple[float, ...] = RATES
) -> tuple[dict[str, nn.Module], pd.DataFrame]:
    """The best control of each kind by final held-out KL over `rates`, and the final figures of every run."""
    parameters = sized_like(tunnel, recipe)
    best: dict[str, tuple[float, nn.Module]] = {}
    lines = []
    for kind in kinds:
        for rate in rates:
            model, curve = train_control(kind, tunnel, replace(recipe, learning_rate=rate), parameters)
            last = curve[-1]
            lines.append({"control": kind, "learning_rate": rate, "parameters": parameter_count(model), **last})
            if kind not in best or last["kl"] < best[kind][0]:
                best[kind] = (last["kl"], model)
    return {kind: model for kind, (_, model) in best.items()}, pd.DataFrame(lines)


def _body(entry: int, hidden: int, vocabulary: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(entry, hidden), nn.GELU()]
    for _ in range(LAYERS - 1):
        layers += [nn.Linear(hidden, hidden), nn.GELU()]
    return nn.Sequential(*layers, nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary))
