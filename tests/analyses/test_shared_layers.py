"""Two attention modules in one layer stay apart in tables, maps, pairs and on the page."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import zoo
from torch import Tensor, nn

from advantage_probe.analyses.inputs.corpus import Window
from advantage_probe.analyses.page.report import html
from advantage_probe.analyses.runs.analyze import analyze
from advantage_probe.analyses.runs.run import Run
from advantage_probe.analyses.vectors.collecting import collect

LENGTH = 10


class Attention(nn.Module):
    """Causal attention of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.inner(x).chunk(3, -1))
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.outer(output.transpose(1, 2).flatten(2))


class Twice(nn.Module):
    """A language model whose only layer attends twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(zoo.VOCABULARY, 8), nn.Linear(8, zoo.VOCABULARY, bias=False)
        self.layers = nn.ModuleList([nn.ModuleDict({"near": Attention(), "far": Attention()})])

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.last

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: object) -> object:
        stream = self.layers[0]["near"](self.embedding(input_ids))
        return SimpleNamespace(logits=self.last(self.layers[0]["far"](stream)))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return zoo.finish(Twice())


@pytest.fixture(scope="module")
def run(model: nn.Module) -> Run:
    ids = torch.randint(1, zoo.VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    items = [Window(tuple(row), "text", LENGTH * place) for place, row in enumerate(ids)]
    return analyze(model, zoo.tokenizer(zoo.VOCABULARY), items, name="twice")


def test_every_table_calls_the_heads_by_their_modules(run: Run) -> None:
    expected = {f"layers.0.{name}.H{head}" for name in ("near", "far") for head in range(2)}
    for name, table in run.frames.items():
        assert set(table["label"].astype(str)) == expected, name
    assert set(run.maps.pooled) == set(run.maps.fine) == expected
    assert run.edges["direct_logit"].notna().any()


def test_the_map_of_each_is_its_own_attention(run: Run, model: nn.Module) -> None:
    ids = torch.tensor([run.maps.tokens])
    with torch.no_grad():
        stream = model.embedding(ids)
        for name in ("near", "far"):
            module = model.layers[0][name]
            query, key, _ = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in module.inner(stream).chunk(3, -1))
            hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
            weights = (query @ key.mT / 2).masked_fill(hidden, -torch.inf).softmax(-1)[0]
            # the last token has no target: the loss asks nothing of it, and it counts all the same
            for head in range(2):
                found = run.maps.pooled[f"layers.0.{name}.H{head}"].attention
                np.testing.assert_allclose(found, weights[head], atol=1e-6)
            stream = module(stream)


def test_the_page_has_a_line_and_pairs_for_each(run: Run) -> None:
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', html(run), re.S).group(1))
    assert data["rows"] == ["layers.0.far", "layers.0.near"]
    for name in data["edges"]:
        own = run.edges[(run.edges["label"] == name) & (run.edges["rank"] == 1)]
        first = own[own["direction"] == "routed"].iloc[0]
        assert data["edges"][name]["routed"][0][2:4] == [first["query_position"], first["key_position"]]
    assert len(data["edges"]) == len(data["points"]) == 4


def test_manifolds_keep_their_values_apart(model: nn.Module) -> None:
    from advantage_probe.analyses.inputs.corpus import batches

    items = [Window(tuple(range(1, LENGTH)), "text", 0)]
    found = collect(model, batches(items, 1, 0), "value", "all").by("head")
    assert sorted(found) == [f"layers.0.{name}.H{head}" for name in ("far", "near") for head in range(2)]
    assert not np.allclose(found["layers.0.near.H0"], found["layers.0.far.H0"])
