"""The figure of one head as a paper's printer takes it: fonts embedded, maps at 300 dpi, nothing cut off."""

from __future__ import annotations

import base64
import re
import struct
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from advantage_probe.analyses.files.export import read_table
from advantage_probe.analyses.pictures import figures
from advantage_probe.analyses.pictures.head_figure import head_data, head_figure, starts, write_head
from advantage_probe.analyses.runs.maps import HeadMap

TOKENS = ["$x$", "a_b^c", "مرحبا", " the", "\n", "", "</script>", "word" * 9]


def one(cells: int, length: int) -> HeadMap:
    generator = np.random.default_rng(0)
    attention = np.tril(generator.random((cells, cells)) + 0.1).astype("float32")
    attention /= attention.sum(1, keepdims=True)
    return HeadMap(attention, np.tril(generator.normal(size=(cells, cells))).astype("float32"), (length, length))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("head")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # an Arabic token without its font is a box
        write_head(one(64, 200), "L0H1", [TOKENS[n % 8] for n in range(200)], "a model", place / "head", "a command")
    return place


def test_fonts_are_embedded_as_outlines_and_none_is_of_type_three(written: Path) -> None:
    pdf = (written / "head.pdf").read_bytes()
    assert b"/Subtype /Type3" not in pdf
    descriptors = re.findall(rb"/Type /FontDescriptor.*?endobj", pdf, re.S)
    assert descriptors
    assert all(b"/FontFile2" in one for one in descriptors)
    assert b"<text" not in (written / "head.svg").read_bytes()


def test_maps_are_raster_inside_vectors_at_300_dpi(written: Path) -> None:
    svg = (written / "head.svg").read_text(encoding="utf-8")
    images = re.findall(r"<image [^>]*?>", svg, re.S)
    maps = []
    for image in images:
        data = base64.b64decode(re.search(r"base64,([^\"]+)", image)[1])  # type: ignore[index]
        pixels = struct.unpack(">II", data[16:24])
        inches = [float(re.search(rf'\b{name}="([\d.]+)', image)[1]) / 72 for name in ("width", "height")]  # type: ignore[index]
        assert np.allclose([one / other for one, other in zip(pixels, inches, strict=True)], 300, atol=8)
        maps.append(min(inches))
    assert sum(size > 0.9 for size in maps) == 3
    assert svg.count("<path") > 40  # axes, ticks and text stay vectors
    assert len(re.findall(rb"/Subtype /Image", (written / "head.pdf").read_bytes())) >= 3
    assert (written / "head.pdf").stat().st_size < 1_000_000


@pytest.mark.parametrize(("cells", "length"), [(8, 8), (64, 200)])
def test_nothing_is_cut_off_and_text_has_seven_to_eight_points(cells: int, length: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        drawn = head_figure(one(cells, length), "L0H1", [TOKENS[n % 8] for n in range(length)])
        drawn.draw_without_rendering()
        inked = drawn.get_tightbbox()
    assert drawn.get_figwidth() == figures.PAGE
    assert inked.x0 >= 0
    assert inked.y0 >= 0
    assert inked.x1 <= figures.PAGE
    assert inked.y1 <= drawn.get_figheight()
    sizes = [text.get_fontsize() for text in drawn.findobj(Text) if text.get_text().strip()]
    assert min(sizes) >= 7
    assert max(sizes) <= 8


def test_panels_and_data_show_what_the_maps_hold_and_hidden_keys_are_blank(written: Path) -> None:
    given = one(8, 20)
    drawn = head_figure(given, "L0H1", list(range(20)))
    shown = [axis.images[0].get_array() for axis in drawn.axes[:3]]
    seen = np.tril(np.ones((8, 8), bool))
    for values, kind in zip(shown, ("attention", "advantage", "score_gradient"), strict=True):
        np.testing.assert_array_equal(np.ma.getmaskarray(np.ma.masked_invalid(values)), ~seen)
        np.testing.assert_array_equal(np.asarray(values)[seen], getattr(given, kind)[seen])
    np.testing.assert_allclose((given.attention * given.advantage)[seen], -given.score_gradient[seen], atol=1e-5)
    assert starts(20, 8) == [0, 3, 6, 9, 12, 14, 16, 18]
    assert [text.get_text() for text in drawn.axes[0].get_yticklabels()] == [str(n) for n in starts(20, 8)]
    data = head_data(given)
    assert len(data) == 36
    row = data[(data["query"] == 12) & (data["key"] == 3)].iloc[0]
    assert row["score_gradient"] == given.score_gradient[4, 1]
    pd.testing.assert_frame_equal(read_table(written / "head.csv"), head_data(one(64, 200)), check_dtype=False)
    assert "pooled to 64 × 64 cells" in (written / "head.txt").read_text(encoding="utf-8")
