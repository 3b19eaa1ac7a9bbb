"""What the EM experiment says: intervals are Student's, sentences follow them, files and the printed object are whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from matplotlib.text import Text
from scipy import stats
from terminal import command, refused

from advantage_probe.analyses.em import chain as em_chain
from advantage_probe.analyses.em import experiment as em
from advantage_probe.analyses.em import pictures as em_pictures
from advantage_probe.analyses.em import report as em_report
from advantage_probe.analyses.intervals import paired
from advantage_probe.analyses.pictures import figures

SHORT = (42, 2024)


def test_t_quantiles_are_those_of_scipy() -> None:
    for freedom in (1, 2, 3, 4, 7, 30):
        for confidence in (0.5, 0.95, 0.9833):
            expected = stats.t.ppf((1 + confidence) / 2, freedom)
            assert paired.quantile(confidence, freedom) == pytest.approx(expected, rel=1e-9)


def test_paired_intervals_are_those_of_the_paired_t_test() -> None:
    first, second = [1.0, 2.0, 4.0, 3.5, 2.2], [0.5, 2.1, 3.0, 3.1, 1.0]
    interval = stats.ttest_rel(first, second).confidence_interval(0.95)
    found = paired.paired(first, second)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def arms_with(leads: dict[str, list[float]]) -> dict[str, Any]:
    """Synthetic arms: SGD at 2.0 nats, values_x10 and closed_form .1 below it, every control `leads` above those."""
    base = [1.90, 1.93, 1.88, 1.91, 1.92]
    flat = dict.fromkeys(("output_x10", "all_x10", "matched_length", "closed_form_length"), AHEAD) | leads
    arms: dict[str, Any] = {name: {"heldout_loss": base} for name in ("values_x10", "closed_form")}
    for name, lead in (flat | {"sgd": [0.1] * 5}).items():
        arms[name] = {"heldout_loss": [one + other for one, other in zip(base, lead, strict=True)]}
    for record in arms.values():
        record["passes_to_own_sgd_loss"] = [10, 12, None, 9, 20]
    return arms


AHEAD = [0.05, 0.06, 0.05, 0.04, 0.05]
UNSURE = [0.05, -0.06, 0.05, -0.04, 0.01]
BEHIND = [-one for one in AHEAD]
LITTLE = [0.010, 0.012, 0.011, 0.010, 0.009]  # surely more than nothing, and surely less than a quarter
RELEASED = ("output_x10", "all_x10", "matched_length")


@pytest.mark.parametrize(
    ("leads", "word"),
    [
        ({}, "survives its controls"),
        ({"all_x10": UNSURE}, "cannot be told"),
        ({"all_x10": [0.0] * 5}, "does not survive"),
        ({"output_x10": LITTLE}, "does not survive"),
        ({"matched_length": BEHIND}, "does not survive"),
        ({"all_x10": UNSURE, "matched_length": BEHIND}, "does not survive"),
        ({"sgd": [-0.1] * 5}, "cannot be told"),
    ],
)
def test_the_three_templates_follow_the_intervals(leads: dict[str, list[float]], word: str) -> None:
    arms = arms_with(leads)
    if "sgd" in leads:  # an arm that is worse than SGD has no speed-up to speak of
        arms["sgd"]["heldout_loss"] = [1.7] * 5
    said = em_report.verdict(arms, "values_x10", RELEASED, 1_000)
    words = ("survives its controls", "cannot be told", "does not survive")
    assert [one for one in words if one in said] == [word]
    assert said.count(". ") == 0
    assert said.endswith(").")
    assert "9–20 (4 of 5 seeds)" in said


def test_the_closed_form_has_a_sentence_of_its_own() -> None:
    first, second = em_report.sentences(arms_with({"closed_form_length": BEHIND, "all_x10": UNSURE}), 1_000)
    assert "cannot be told" in first
    assert "does not survive" in second
    assert "M-step" in second


def test_one_control_in_three_must_explain_more_surely_than_a_single_one() -> None:
    # below a quarter of the gain at 95 %, not at 1 − .05 / 3
    lead = [0.005, 0.020, -0.035, -0.010, -0.005]
    over = [one - 0.25 * 0.1 for one in lead]
    single, corrected = (paired.paired(over, [0.0] * 5, confidence) for confidence in (0.95, 1 - 0.05 / 3))
    assert single.high < 0 < corrected.high
    assert "cannot be told" in em_report.verdict(arms_with({"all_x10": lead}), "values_x10", RELEASED, 9)
    assert "does not survive" in em_report.verdict(arms_with({"all_x10": lead}), "values_x10", ("all_x10",), 9)


def test_one_seed_decides_nothing() -> None:
    arms = arms_with({})
    for record in arms.values():
        record["heldout_loss"] = record["heldout_loss"][:1]
    assert "cannot be told from one seed" in em_report.verdict(arms, "values_x10", RELEASED, 9)


@pytest.fixture(scope="module")
def finished() -> em.Experiment:
    return em.run(SHORT, 4)


def test_the_object_has_every_arm_and_a_number_per_seed(finished: em.Experiment) -> None:
    found = em_report.summary(finished)
    wanted = {"sgd", "values_x10", "closed_form", "closed_form_length", "output_x10", "all_x10", "matched_length"}
    assert wanted | {"routing_frozen", "adam"} == set(found["arms"])
    assert round(found["oracle_entropy"], 4) == 1.8292
    for record in found["arms"].values():
        for name in ("loss", "heldout_loss", "entropy", "accuracy", "kl", "steps_to_own_sgd_loss"):
            assert len(record[name]) == 2
            assert record["passes"] == record["passes_per_step"] * 4
    sgd = found["arms"]["sgd"]
    assert sgd["steps_to_own_sgd_loss"] == [4, 4]
    assert found["arms"]["closed_form"]["passes_per_step"] == 2
    assert sgd["excess"] == pytest.approx([a - b for a, b in zip(sgd["loss"], found["filter_loss"], strict=True)])


def test_trajectories_hold_the_share_that_an_svd_gives(finished: em.Experiment) -> None:
    paths = em.trajectories(finished)
    own = paths[(paths["arm"] == "sgd") & (paths["seed"] == 42)]
    points = em_chain.task().embedding.double() @ finished.arms["sgd"].values[:, 0].double()
    values = torch.linalg.eigvalsh(points.flatten(0, 1).T.cov()).flip(0)
    assert own["shown"].iloc[0] == pytest.approx(float(values[:2].sum() / values.sum()))
    assert own["first"].var() == pytest.approx(float(values[0]), rel=1e-6)


def test_the_command_prints_one_object_and_writes_figure_and_tables(tmp_path: Path) -> None:
    out = tmp_path / "em"
    result = command("em", "--json", "--seeds", "42,7", "--steps", "2", "--out", out)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["seeds"] == [42, 7]
    assert len(found["sentences"]) == 2
    names = {path.name for path in out.iterdir()}
    tables = {f"{table}.{end}" for table in ("arms", "paired", "curves", "trajectories") for end in ("csv", "parquet")}
    pictures = {f"{name}.{end}" for name in ("em", "em-values") for end in ("png", "svg", "pdf", "csv", "txt")}
    assert names == {"run.json"} | pictures | tables
    curves = pd.read_parquet(out / "curves.parquet")
    pd.testing.assert_frame_equal(pd.read_csv(out / "em.csv", float_precision="round_trip"), curves, check_dtype=False)
    caption = (out / "em.txt").read_text(encoding="utf-8")
    assert "n: 2 seeds" in caption
    assert f"command: advantage-probe em --json --seeds 42,7 --steps 2 --out {out}\n" in caption


def test_the_pictures_show_the_curves_with_their_intervals(finished: em.Experiment) -> None:
    found, curves = em_report.summary(finished), em.curves(finished)
    names = em_report.names(found)
    assert len(set(names.values())) == 9
    figure = em_pictures.losses(curves, found, names)
    assert figure.get_figwidth() == figures.PAGE
    drawn = {line.get_label(): line for line in figure.axes[0].lines}
    own = curves[(curves["arm"] == "values_x10") & (curves["passes"] > 0)].groupby("passes")["heldout_loss"]
    assert drawn[names["values_x10"]].get_ydata() == pytest.approx(own.mean().to_numpy())
    half = stats.t.ppf(0.975, 1) * own.std() / 2**0.5
    band = figure.axes[0].collections[list(names).index("values_x10")].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx((own.mean() + half).max())
    paths = em_pictures.values(em.trajectories(finished), 42, names)
    assert len(paths.axes) == 3
    assert {text.get_text() for text in paths.axes[0].texts} == set("01234567")
    for drawing in (figure, paths):
        sizes = [text.get_fontsize() for text in drawing.findobj(Text) if text.get_text().strip()]
        assert min(sizes) >= 7
        assert max(sizes) <= 8


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--seeds", "forty"), "forty"),
        (("--seeds", "1,1"), "differ"),
        (("--seeds", "-1"), "0 or above"),
        (("--steps", "0"), "1 or more"),
        (("--damping", "0"), "above 0"),
        (("--damping", "1.5"), "at most 1"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], word: str) -> None:
    refused(command("em", *arguments), word)
