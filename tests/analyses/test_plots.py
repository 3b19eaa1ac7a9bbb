"""Pictures: what is drawn is what was given, text can be read and does no harm, files hold data and caption."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest

from advantage_probe.analyses.files.numbers import thinned
from advantage_probe.analyses.pictures import figures, plots
from advantage_probe.analyses.pictures.figures import COLUMN, PAGE, Caption, limit, save, smallest_text, token
from advantage_probe.hooks.errors import BadInput, BadRequest

CAPTION = Caption("what it shows", "12 sequences", "loss", "95 % over sequences", "none", "analyze x")
HARMFUL = ["$x$", "\\frac{1}{2}", "a_b^c", "مرحبا", "\u202eevil", "😀", "", " the", "a\nb", "x\ud83dy", "$"]


def heads(layers: int = 3, width: int = 4) -> pd.DataFrame:
    rows = [
        {
            "module": f"m{layer}",
            "use": 0,
            "head": head,
            "label": f"L{layer}H{head}",
            "routing_pressure": layer + head / 10,
        }
        for layer in range(layers)
        for head in range(width)
    ]
    return pd.DataFrame(rows).assign(alignment=lambda table: table["routing_pressure"] - 1.0)


def tokens() -> pd.DataFrame:
    count = len(HARMFUL)
    words = pd.Series(HARMFUL, dtype=object)  # pandas' strings refuse a lone surrogate
    return pd.DataFrame(
        {"label": "L0H0", "sequence": 0, "position": range(count), "token": words, "usage": np.arange(count) + 1.0}
    )


def history() -> pd.DataFrame:
    return pd.concat(
        [heads().assign(step=step, routing_pressure=lambda t, s=step: 2.0**-s + t["head"]) for step in range(5)]
    )


def every_picture() -> dict[str, object]:
    generator = np.random.default_rng(0)
    curves = pd.DataFrame(
        {"arm": ["a"] * 6 + ["b"] * 6, "seed": [0, 1] * 6, "passes": [0, 0, 1, 1, 2, 2] * 2, "heldout_loss": range(12)}
    )
    errors = pd.DataFrame({"kl": [0.3, 0.2], "kl_low": [0.2, 0.1], "kl_high": [0.4, 0.3]})
    square = np.tril(generator.normal(size=(11, 11)))
    return {
        "layer_head": plots.layer_head(heads(), unresolved=["L1H1"]),
        "head_map": plots.head_map(square, "advantage", query_tokens=HARMFUL, key_tokens=HARMFUL),
        "along": plots.along_sequence(tokens(), "L0H0"),
        "manifold": plots.manifold(generator.normal(size=(30, 3)), generator.random(30), shares=[0.5, 0.3, 0.2]),
        "trajectories": plots.trajectories(history()),
        "timescales": plots.two_timescales([1, 10, 100], [1, 0.5, 0.1], [1, 0.9, 0.2]),
        "arms": plots.arms(curves, oracle=1.8),
        "calibration": plots.calibration(errors),
        "simplex": plots.simplex(generator.dirichlet([1, 1, 1], 20)),
        "predicted": plots.predicted_actual([1e-6, 1e-3], [1e-6, 2e-3]),
    }


@pytest.fixture(scope="module")
def drawn() -> dict[str, object]:
    return every_picture()


def test_every_picture_fits_a_column_or_a_page_with_readable_text(drawn) -> None:
    for name, ax in drawn.items():
        width = ax.figure.get_figwidth()
        assert width in (COLUMN, PAGE), name
        assert 7.0 <= smallest_text(ax.figure) <= 8.0, name
        assert smallest_text(ax.figure, COLUMN) == pytest.approx(smallest_text(ax.figure) * COLUMN / width)


def test_axes_say_what_they_measure_in_which_unit(drawn) -> None:
    for name, ax in drawn.items():
        if name == "simplex":
            continue
        assert ax.get_xlabel(), name
        assert ax.get_ylabel(), name
    bars = [other.get_ylabel() for other in drawn["layer_head"].figure.axes]
    assert "routing_pressure (loss)" in bars


def test_files_hold_the_picture_its_data_and_its_caption_without_a_display(drawn, tmp_path: Path) -> None:
    data = heads()
    for name, ax in drawn.items():
        written = save(ax, tmp_path / name, data, CAPTION)
        assert [path.suffix for path in written] == [".png", ".svg", ".pdf", ".csv", ".txt"]
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        pdf = (tmp_path / f"{name}.pdf").read_bytes()
        assert b"/FontFile2" in pdf or b"/Type /Font" not in pdf, name  # fonts embedded, as TrueType
        assert b"/Type3" not in pdf
        assert b"<text" not in (tmp_path / f"{name}.svg").read_bytes()  # drawn as paths: no font is needed
    for name in ("layer_head", "head_map"):
        assert b"<image" in (tmp_path / f"{name}.svg").read_bytes()  # rasterised inside the vector file
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "arms.csv"), data)
    caption = (tmp_path / "arms.txt").read_text(encoding="utf-8")
    for word in (
        "what it shows",
        "n: 12 sequences",
        "unit: loss",
        "95 %",
        "null: none",
        "command: analyze x",
        "advantage-probe",
    ):
        assert word in caption
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_maps_show_the_numbers_and_signed_ones_are_centred_on_zero() -> None:
    ax = plots.layer_head(heads(), "alignment")
    image = ax.images[0]
    expected = heads()["alignment"].to_numpy().reshape(3, 4)
    np.testing.assert_array_equal(image.get_array(), expected)
    assert image.get_clim() == (-expected.max(), expected.max())
    assert plots.layer_head(heads()).images[0].get_clim()[0] == 0.0
    assert plots.head_map(np.eye(3), "score_gradient", most=5.0).images[0].get_clim() == (-5.0, 5.0)
    assert limit([1, -7], [[3, np.nan], [np.inf, 0]]) == 7.0
    assert limit([0.0, np.nan]) == 1.0


def test_intervals_are_drawn_where_the_data_have_them(drawn) -> None:
    band = drawn["calibration"].collections[0].get_paths()[0].vertices
    assert {0.2, 0.4, 0.1, 0.3} <= set(band[:, 1].round(6))


def test_tokens_become_labels_that_stay_what_they_are() -> None:
    assert token("$x$") == r"\$x\$"
    assert token(" the") == "␣the"
    assert token("a\nb") == "a↵b"
    assert token("") == "∅"
    assert token("\u202eevil") == "·evil"
    assert token("x\ud83dy") == "x�y"
    assert token("a" * 30) == "a" * 11 + "…"
    assert token("naïve 😀") == "naïve 😀"
    ax = plots.head_map(np.eye(2), query_tokens=["$x$", "a_b^c"], key_tokens=["$", "\\frac"])
    ax.figure.canvas.draw()
    shown = [label.get_text() for label in ax.get_yticklabels()]
    assert shown == [r"\$x\$", "a_b^c"]


def test_long_sequences_are_thinned_to_labels_that_do_not_touch() -> None:
    assert thinned(3, 5) == [0, 1, 2]
    assert thinned(2_000, 16)[0] == 0
    assert thinned(2_000, 16)[-1] == 1_999
    ax = plots.head_map(np.zeros((2_000, 2_000)), query_tokens=["word"] * 2_000, key_tokens=["word"] * 2_000)
    ax.figure.canvas.draw()
    boxes = [label.get_window_extent() for label in ax.get_yticklabels()]
    assert len(boxes) == 16
    assert all(not one.overlaps(other) for one, other in pairwise(boxes))


def test_nothing_of_the_users_matplotlib_changes() -> None:
    code = (
        "import matplotlib as m, pandas as pd, numpy as np; before = m.rcParams.copy()\n"
        "from advantage_probe.analyses.pictures import plots\n"
        "ax = plots.predicted_actual([1e-3], [1e-3])\n"
        "import sys; print(m.rcParams.copy() == before, 'matplotlib.pyplot' in sys.modules)"
    )
    clean = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "MPLBACKEND")}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True False", done.stderr
    before = matplotlib.rcParams.copy()
    plots.simplex(np.eye(3))
    assert matplotlib.rcParams.copy() == before


def test_an_ax_of_ones_own_is_used() -> None:
    figure = figures.new_figure(PAGE, 2)
    left, right = figure.subplots(1, 2)
    assert plots.predicted_actual([1e-3], [1e-3], ax=left) is left
    assert plots.simplex(np.eye(3), ax=right) is right


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    for call, message in (
        (lambda: plots.layer_head(heads(), "nonsense"), "no column 'nonsense'"),
        (lambda: plots.head_map(np.zeros(3)), "two axes"),
        (lambda: plots.head_map(np.zeros((2, 2)), "beta"), "kind must be one of"),
        (lambda: plots.along_sequence(tokens(), "L9H9"), "no usage of L9H9"),
        (lambda: plots.manifold(np.zeros((5, 1))), "no axes"),
        (lambda: plots.trajectories(history(), labels=["L9H9"]), "no head 'L9H9'"),
        (lambda: plots.simplex(np.zeros((4, 2))), "three states"),
        (lambda: plots.predicted_actual([0.0], [np.nan]), "finite and not zero"),
    ):
        with pytest.raises(BadRequest, match=message):
            call()
    ax = plots.predicted_actual([1e-3], [1e-3])
    with pytest.raises(BadRequest, match="not docx"):
        save(ax, tmp_path / "x", heads(), CAPTION, formats=["docx"])
    with pytest.raises(BadRequest, match=r"would be 3\.\d pt in print, below 6"):
        save(ax, tmp_path / "x", heads(), CAPTION, printed=COLUMN / 2)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="could not be written"):
        save(ax, tmp_path / "file" / "x", heads(), CAPTION)
