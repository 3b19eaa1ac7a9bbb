"""States add up only where they speak of the same model and hold the same things."""

from __future__ import annotations

import pytest
import zoo

import advantage_probe as ap


def backward(model, seed: int = 0) -> None:
    model(**zoo.batch("llama", seed=seed)).loss.backward()


def test_merging_another_model_is_refused() -> None:
    one, other = zoo.llama(), zoo.llama(num_attention_heads=2)
    watches = []
    for model in (one, other):
        with ap.watch(model) as watch:
            backward(model)
        watches.append(watch)
    with pytest.raises(ap.MergeRefused, match="same model"):
        watches[0].merge(watches[1])
    with pytest.raises(ap.MergeRefused, match="watch or a state"):
        watches[0].merge(watches[0].heads())


def test_watches_that_kept_different_things_are_not_merged() -> None:
    model = zoo.llama()
    watches = []
    for options in ({"detail": "edges", "edges": 64}, {"detail": "edges", "edges": 8}, {"detail": "heads"}):
        with ap.watch(model, **options) as watch:
            backward(model)
        watches.append(watch)
    for other in watches[1:]:
        with pytest.raises(ap.MergeRefused, match="open both alike"):
            watches[0].merge(other)
