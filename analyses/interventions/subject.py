"""What is intervened on: a model and sequences of one length, of a tunnel or of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...hooks.errors import BadInput
from ..inputs.corpus import Batch
from ..inputs.corpus import batches as window_batches
from ..runs.analyze import cut
from ..wind_tunnels.truth.against_truth import Names
from ..wind_tunnels.truth.against_truth import batches as episode_batches
from ..wind_tunnels.truth.shipped import load as load_tunnel

SIZE = 16  # sequences of a batch


@dataclass(frozen=True, eq=False)
class Subject:
    """A frozen model in eval mode, batches without padding, what decodes ids, and where the sequences come from."""

    model: nn.Module
    batches: tuple[Batch, ...]
    tokenizer: Any
    name: str
    origin: str

    @property
    def sequences(self) -> int:
        return sum(len(batch.ids) for batch in self.batches)


def of_tunnel(name: str, episodes: int, seed: int) -> Subject:
    """A shipped tunnel model (or a run's folder) on fresh episodes.

    Raises:
        TunnelError: for a name that holds none.
    """
    task, model, _ = load_tunnel(name)
    drawn = task.sample(episodes, torch.Generator().manual_seed(seed))
    model = model.eval().requires_grad_(False)
    told = f"{episodes} fresh episodes, seed {seed}"
    return Subject(model, tuple(episode_batches(drawn, SIZE)), Names(task.vocabulary), name, told)


def of_text(found: Any, texts: Sequence[tuple[str, str]], name: str, window: int, most: int | None) -> Subject:
    """A loaded model on the whole windows of its texts.

    Raises:
        BadInput: where no window is whole. Whatever `cut` refuses.
    """
    items = cut(texts, found.model, found.tokenizer, length=window, most=most)
    longest = max((len(item.ids) for item in items), default=0)
    whole = [item for item in items if len(item.ids) == longest]
    if not whole or longest < 2:
        raise BadInput("No window of the text is whole; give a longer text or a shorter --window.")
    model = found.model.eval().requires_grad_(False)
    told = f"{len(whole)} windows of {longest} tokens of {', '.join(title for title, _ in texts)}"
    return Subject(model, tuple(window_batches(whole, SIZE, 0)), found.tokenizer, name, told)
