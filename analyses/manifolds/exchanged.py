"""A tunnel model that had nothing to learn: trained like the others, on targets exchanged between episodes.

What its values look like is what architecture, optimiser and token statistics give without any inference. It is trained
on first use and kept in the user's cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, nn

from ...probe.law.cache import cache_folder
from ..wind_tunnels.tasks.protocol import Episodes, Tunnel
from ..wind_tunnels.training.checkpoints import load_weights
from ..wind_tunnels.training.models import Shape, build
from ..wind_tunnels.training.recipes import Recipe
from ..wind_tunnels.training.runner import train

STEPS = 1_500


@dataclass(frozen=True)
class Exchanged:
    """`tunnel` whose episodes are answered by one another's targets, position by position; all else is the tunnel's."""

    tunnel: Tunnel

    def sample(self, n: int, generator: Generator, length: int | None = None) -> Episodes:
        drawn = self.tunnel.sample(n, generator, length)
        order = torch.randperm(n, generator=generator)
        return replace(drawn, targets=drawn.targets[order])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tunnel, name)


def exchanged_model(tunnel: Tunnel, card: dict[str, Any], steps: int = STEPS, folder: Path | None = None) -> nn.Module:
    """The control of a shipped model: its shape, recipe and seed, `steps` steps on exchanged targets, in eval mode.

    Args:
        card: the shipped model's card. folder: where to keep it (default: the cache).
    """
    settings = dict(card["recipe"])
    shape = Shape(**settings.pop("shape"))
    growth = min(int(settings["growth"]), steps // 3)
    recipe = Recipe(shape, **(settings | {"steps": steps, "growth": growth, "distilled": False}))
    name = f"{card['tunnel']}-{shape.layers}x{shape.width}-exchanged-{steps}"
    folder = cache_folder() / name if folder is None else folder
    if not (folder / "card.json").is_file():
        train(Exchanged(tunnel), recipe, folder, name=name, resume=True)
    model = build(shape, tunnel, recipe.seed)
    load_weights(folder, model)
    return model.eval()
