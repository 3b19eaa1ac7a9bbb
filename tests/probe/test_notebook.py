"""Results show themselves in a notebook and in a paper, whatever their strings hold."""

from __future__ import annotations

import pandas as pd
import zoo

import advantage_probe as ap
from advantage_probe.analyses.files.latex import escaped, heads_table, number
from advantage_probe.probe import notebook


def test_a_watch_shows_its_strongest_heads_and_its_state() -> None:
    model = zoo.llama()
    with ap.watch(model) as watch:
        assert "closed steps: 0" in watch._repr_html_()
        model(**zoo.batch("llama")).loss.backward()
        watch.step(loss_weight=1 / 16)
        page = watch._repr_html_()
    heads = watch.heads().sort_values("routing_pressure", ascending=False)
    assert page.index(str(heads["label"].iloc[0])) < page.index(str(heads["label"].iloc[1]))
    assert "loss weight: 0.0625" in page
    watch._recorder.refuse(ap.LawViolated("<b>broken</b>"))
    assert "&lt;b&gt;broken&lt;/b&gt;" in watch._repr_html_()
    assert "<b>broken" not in watch._repr_html_()


def test_cells_are_escaped_and_missing_numbers_are_dashes() -> None:
    page = notebook.table(pd.DataFrame({"<i>": ["<script>", "&"], "x": [float("nan"), 0.123456]}))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "<i>" not in page
    assert "0.123<" in page
    assert "–" in page


def test_latex_prints_text_as_it_is_and_numbers_as_mathematics() -> None:
    assert escaped(r"50% of a_b & {c}$\x^~#") == (
        r"50\% of a\_b \& \{c\}\$\textbackslash{}x\textasciicircum{}\textasciitilde{}\#"
    )
    assert number(1234567.0) == r"$1.23\times 10^{6}$"
    assert number(0.5) == "$0.5$"
    assert number(float("nan")) == "--"
    heads = pd.DataFrame({"label": ["L0H0", "L0H1"], "routing_pressure": [1.0, 2.0]})
    heads["routing_pressure_low"], heads["routing_pressure_high"] = [0.5, None], [1.5, None]
    table = heads_table(heads, ["L0H1", "L0H0"], "100% of them")
    lines = [line for line in table.splitlines() if line.startswith("L0")]
    assert lines == [r"L0H1 & $2$ \\", r"L0H0 & $1$ [$0.5$, $1.5$] \\"]
    assert r"\caption{100\% of them}" in table
