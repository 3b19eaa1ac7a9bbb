"""The page in a real browser: no error, no request, and controls that do what they should."""

from __future__ import annotations

import html as markup
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from advantage_probe.analyses.page.report import LIMIT, html
from advantage_probe.analyses.runs.maps import FINE, POOLED, HeadMap, Maps
from advantage_probe.analyses.runs.run import Run
from advantage_probe.probe.columns import COLUMNS, SUMS, columns_of

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine: apt-get install chromium")
EVIL = [
    "</script><script>window.broken = 1</script>",
    "<img src=x onerror=window.broken=1>",
    "$x$",
    "\u202eab",
    "😀",
    "a\nb",
]


def made(layers: int, width: int, length: int, *, edges: int, windows: int = 16, everything: bool = True) -> Run:
    """A run of random numbers, with every part that a page can show."""
    generator = np.random.default_rng(0)
    labels = [f"L{layer}H{head}" for layer in range(layers) for head in range(width)]
    layer, head = np.repeat(np.arange(layers), width), np.tile(np.arange(width), layers)
    count = len(labels)
    base = {
        "module": [f"<b>m{number}</b>" for number in layer],
        "use": 0,
        "head": head,
        "label": labels,
        "layer": layer,
    }
    heads = pd.DataFrame({**base, "kind": "decoder_self", "status": "ok"})
    for place, name in enumerate(columns_of("page")):
        heads[name] = generator.lognormal(size=count) * (-1 if COLUMNS[name].signed else 1) ** (
            place + np.arange(count)
        )
        heads[f"{name}_low"], heads[f"{name}_high"] = heads[name] - 0.1, heads[name] + 0.1
    heads.loc[1, "alignment"], heads.loc[2, "status"] = np.nan, "non-finite (1 step)"
    tokens = pd.DataFrame({"token_id": range(len(EVIL)), "token": pd.Series(EVIL, dtype=object)})
    size = 2 * edges * count
    query = generator.integers(1, length, size)
    pairs = pd.DataFrame(
        {
            "label": np.repeat(labels, 2 * edges),
            "direction": np.tile(np.repeat(["routed", "anti_routed"], edges), count),
            "rank": np.tile(np.arange(1, edges + 1), 2 * count),
            "sequence": 0,
            "query_position": query,
            "key_position": (query * generator.random(size)).astype(int),
            "query_token": np.array(EVIL, dtype=object)[generator.integers(0, len(EVIL), size)],
            "key_token": np.array(EVIL, dtype=object)[generator.integers(0, len(EVIL), size)],
            "attention": generator.random(size) ** 3,
            "advantage": generator.normal(size=size),
            "compatibility": 0.0,
            "score_gradient": generator.normal(size=size),
        }
    )
    sums = generator.lognormal(size=(windows, count, len(SUMS)))
    sums[:, :, list(SUMS).index("hidden_queries")] = 0
    sequences = pd.DataFrame(sums.reshape(-1, len(SUMS)), columns=list(SUMS))
    for name, values in base.items():
        sequences[name] = np.tile(values, windows) if not isinstance(values, int) else values
    sequences["sequence"] = np.repeat([f"{number:016x}" for number in range(windows)], count)

    def one(cells: int) -> HeadMap:
        side = min(cells, length)
        attention = np.tril(generator.dirichlet(np.full(side, 0.05), side)).astype(np.float32)
        return HeadMap(attention, attention * generator.normal(size=(side, side)).astype(np.float32), (length, length))

    maps = Maps({name: one(POOLED) for name in labels}, {name: one(FINE) for name in labels[:4]}, tuple(range(length)))
    more = {}
    if everything:
        points = generator.normal(size=(500, 3))
        more["manifold"] = pd.DataFrame(points, columns=["axis_1", "axis_2", "axis_3"]).assign(
            label=labels[0], entropy=generator.random(500), token=pd.Series(EVIL * 84, dtype=object)[:500]
        )
        more["vocabulary"] = pd.DataFrame(
            {
                "label": np.repeat(labels, 4),
                "direction": np.tile(["promoted", "promoted", "suppressed", "suppressed"], count),
                "rank": np.tile([1, 2, 1, 2], count),
                "token": np.array(EVIL, dtype=object)[generator.integers(0, len(EVIL), 4 * count)],
                "strength": 0.5,
                "p": np.tile([0.01, 0.5], 2 * count),
            }
        )
        falling = heads.assign(backward=0)
        more["history"] = pd.concat(
            [falling.assign(step=step, routing_pressure=heads["routing_pressure"] / (1 + step)) for step in range(9)]
        )
    record = {"model": "<i>model</i>", "windows": windows, "targets": 99, "loss": float("nan"), "texts": ["<u>"]}
    return Run(heads, tokens, pairs, pd.DataFrame(), sequences, record, maps, more)


def test_the_page_of_144_heads_and_2048_tokens_stays_under_five_megabytes() -> None:
    page = html(made(12, 12, 2_048, edges=1_000))
    size = len(page.encode("utf-8"))
    assert size <= LIMIT == 5_000_000, size
    assert "pooled to at most 64 × 64 cells" in page


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html(made(4, 4, 80, edges=20)), encoding="utf-8")
    return path


def opened(browser, file: Path):
    """A file in a new page, and the list of what it logs as an error or asks the network for."""
    found = browser.new_context(viewport={"width": 1200, "height": 900}).new_page()
    trouble: list[str] = []
    found.on("console", lambda message: trouble.append(message.text) if message.type == "error" else None)
    found.on("pageerror", lambda error: trouble.append(str(error)))
    found.on("request", lambda request: trouble.append(request.url) if request.url.startswith("http") else None)
    found.goto(file.as_uri())
    return found, trouble


@pytest.fixture
def page(browser, file):
    """The page, opened; what it logged and what it asked for is checked at the end."""
    found, trouble = opened(browser, file)
    found.wait_for_function("window.Plotly && document.querySelector('#cloud .plotly, #cloud canvas, #cloud svg')")
    yield found
    assert not trouble
    assert found.evaluate("window.broken") is None
    found.context.close()


def labels(page) -> list[str]:
    return page.locator("#heads tbody tr td:first-child").all_inner_texts()


@needs_browser
def test_no_script_runs_but_the_pages_own_and_nothing_can_be_fetched(browser, file, tmp_path: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert "default-src 'none'; script-src 'sha256-" in markup.unescape(text)
    hostile = text.replace("</body>", "<script>window.broken = true</script></body>")
    (tmp_path / "hostile.html").write_text(hostile, encoding="utf-8")
    found, trouble = opened(browser, tmp_path / "hostile.html")
    assert found.evaluate("window.broken") is None
    assert any("Content Security Policy" in line for line in trouble)


def test_sorting_by_a_column_and_by_name_orders_the_table(page) -> None:
    page.locator("#heads thead button", has_text="coherence").click()
    column = page.locator("#heads thead th").all_inner_texts()
    place = next(number for number, name in enumerate(column) if name.startswith("coherence"))
    shown = [float(text) for text in page.locator(f"#heads tbody td:nth-child({place + 1})").all_inner_texts()]
    assert shown == sorted(shown, reverse=True)
    page.locator("#heads thead button", has_text="coherence").press("Enter")
    again = [float(text) for text in page.locator(f"#heads tbody td:nth-child({place + 1})").all_inner_texts()]
    assert again == sorted(shown)
    assert page.locator("#heads thead th[aria-sort=ascending]").count() == 1
    page.locator("#heads thead button", has_text="label").click()
    assert labels(page)[:2] == ["L3H3", "L3H2"]


@needs_browser
def test_the_filter_keeps_what_it_names_and_says_how_many(page) -> None:
    page.fill("#filter", "l2h")
    assert sorted(labels(page)) == ["L2H0", "L2H1", "L2H2", "L2H3"]
    assert page.inner_text("#count") == "4 of 16 heads"
    page.fill("#filter", "non-finite")
    assert labels(page) == ["L0H2"]
    page.fill("#filter", "<script>")
    assert labels(page) == []


@needs_browser
def test_a_click_on_a_cell_or_a_row_and_the_keyboard_choose_a_head(page) -> None:
    page.locator("#map button[data-label=L1H2]").click()
    assert page.inner_text("#head-title") == "Head L1H2"
    assert page.locator("#heads tr.chosen td").first.inner_text() == "L1H2"
    assert page.locator("#routed tbody tr").count() == 12
    page.locator("#heads tr[data-label=L3H0]").click()
    assert page.inner_text("#head-title") == "Head L3H0"
    page.locator("#map button[data-label=L3H0]").press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.inner_text("#head-title") == "Head L3H1"
    assert page.locator("#map td.chosen button").get_attribute("data-label") == "L3H1"


@needs_browser
def test_pointing_at_the_map_tells_the_tokens_and_the_numbers(page) -> None:
    page.locator("#map button[data-label=L0H0]").click()
    page.wait_for_function("cells && cells.label === 'L0H0'")
    canvas = page.locator("#canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    side = page.evaluate("cells.rows")
    page.mouse.move(box["x"] + box["width"] * 2.5 / side, box["y"] + box["height"] * 4.5 / side)
    text = page.inner_text("#hover")
    assert text.startswith("query 4 😀 → key 2 $x$: α ")
    expected = page.evaluate("format(cells.attention[4 * cells.columns + 2])")
    assert f": α {expected}, A " in text
    canvas.focus()
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#hover").startswith("query 5 ")


@needs_browser
@pytest.mark.parametrize("kind", ["attention", "advantage", "gradient"])
def test_the_maps_pixels_are_the_numbers(page, kind: str) -> None:
    page.select_option("#kind", kind)
    page.locator("#map button[data-label=L2H1]").click()
    page.wait_for_function("cells && cells.label === 'L2H1'")
    run = made(4, 4, 80, edges=20)
    one = run.maps.pooled["L2H1"]
    attention = np.array(page.evaluate("Array.from(cells.attention)")).reshape(64, 64)
    score = np.array(page.evaluate("Array.from(cells.score)")).reshape(64, 64)
    # eight bits of a square root: at most half a step, 2·√(x·top)/510 and a little; the smallest is not rounded to nothing
    for found, true, steps in ((attention, one.attention, 255), (score, one.score_gradient, 127)):
        top = np.abs(true).max()
        limit = 1.01 * (np.sqrt(np.abs(true) / top) / steps + 1 / steps**2) * top + 1e-7 * top
        assert (np.abs(found - true) <= limit).all()
    pixels = page.evaluate("Array.from(byId('canvas').getContext('2d').getImageData(0, 0, 64, 64).data)")
    pixels = np.array(pixels).reshape(64, 64, 4)
    assert len(np.unique(pixels[..., :3].reshape(-1, 3), axis=0)) > 20  # no blank picture
    assert (pixels[np.triu_indices(64, 1)][:, 3] == 0).all()  # hidden keys are empty


@needs_browser
def test_the_manifold_changes_axes_zooms_and_hovers(page) -> None:
    cloud = page.locator("#cloud")
    cloud.scroll_into_view_if_needed()
    assert page.evaluate("document.getElementById('cloud').data[0].x.length") == 500
    texts = page.evaluate("document.getElementById('cloud').data[0].text")
    assert any("&lt;/script>" in text for text in texts)
    page.select_option("#cloud-axes", "2, 3")
    page.wait_for_function("document.getElementById('cloud').layout.xaxis.title.text.startsWith('axis 2')")
    page.locator("#cloud .points path").first.hover(force=True)
    page.wait_for_selector("#cloud .hoverlayer text")
    before = page.evaluate("document.getElementById('cloud')._fullLayout.xaxis.range.join()")
    box = page.locator("#cloud .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 4)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=4)
    page.mouse.up()
    page.wait_for_function(f"document.getElementById('cloud')._fullLayout.xaxis.range.join() !== '{before}'")


@needs_browser
def test_training_is_drawn_for_the_chosen_head_and_column_with_the_others_behind_it(page) -> None:
    assert page.locator("#course svg polyline").count() == 1
    assert page.locator("#course svg path").count() == 15
    page.select_option("#column", "coherence")
    assert "coherence of" in page.inner_text("#course-note")
    points = page.locator("#course svg polyline").get_attribute("points")
    assert len(points.split(" ")) == 9
    page.select_option("#column", "routing_pressure")
    label = page.inner_text("#head-title").removeprefix("Head ")
    values = page.evaluate(f"data.history.heads['{label}'].routing_pressure")
    assert page.inner_text("#course figcaption") == f"routing_pressure of {label}"
    page.check("#course-log")
    assert page.inner_text("#course figcaption") == f"routing_pressure of {label}, log scale"
    points = page.locator("#course svg polyline").get_attribute("points").split(" ")
    heights = [230 - float(point.split(",")[1]) for point in points]
    everyone = page.evaluate("Object.values(data.history.heads).flatMap((head) => head.routing_pressure)")
    low, high = np.log(min(everyone)), np.log(max(everyone))
    assert heights == pytest.approx(220 * (np.log(values) - low) / (high - low), abs=0.1)


@needs_browser
def test_a_page_without_maps_pairs_and_texts_shows_no_empty_room_for_them(browser, tmp_path: Path) -> None:
    full = made(2, 3, 20, edges=4)
    rows = full.more["history"]
    heads = rows[rows["step"] == 8].drop(columns=["kind", "alignment_low"])
    curve = pd.DataFrame({"step": [0, 4, 8], "loss (nats)": [3.0, 2.0, 1.5]})
    bare = pd.DataFrame()
    more = {"history": rows, "curve": curve}
    (tmp_path / "page.html").write_text(
        html(Run(heads, bare, bare, bare, bare, {"model": "m"}, more=more)), encoding="utf-8"
    )
    page, trouble = opened(browser, tmp_path / "page.html")
    for part in ("#map-part", "#pair-part", "#manifold-section"):
        assert not page.locator(part).is_visible(), part
    assert page.locator("#curves figure svg polyline").count() == 1
    assert "this run kept no maps and no pairs" in page.inner_text("#head-note")
    page.locator("#map button[data-label=L1H2]").click()
    assert page.inner_text("#course figcaption") == "routing_pressure of L1H2"
    assert "kind" not in page.locator("#heads thead th").all_inner_texts()
    assert not trouble
    page.context.close()


@needs_browser
@pytest.mark.parametrize("length", [65_536, 65_537, 200_000])
def test_pairs_of_long_texts_keep_their_positions(browser, length: int, tmp_path: Path) -> None:
    run = made(1, 4, 32, edges=30)
    scale = (length - 1) / int(run.edges["query_position"].max())
    far = run.edges.assign(
        **{name: (run.edges[name] * scale).round().astype(int) for name in ("query_position", "key_position")}
    )
    assert far["query_position"].max() == length - 1
    (tmp_path / "page.html").write_text(html(replace(run, edges=far)), encoding="utf-8")
    page, trouble = opened(browser, tmp_path / "page.html")
    for label, rows in far.groupby("label"):
        expected = (
            rows[["query_position", "key_position"]].sort_values(["query_position", "key_position"]).values.tolist()
        )
        found = page.evaluate(f"pairs(data.points['{label}'])")
        assert [row[:2] for row in found] == expected
        assert page.evaluate(f"data.points['{label}'].wide") == (rows["query_position"].max() > 65_535)
    assert not trouble
    page.context.close()


@needs_browser
def test_a_page_of_ten_thousand_heads_is_small_opens_and_says_what_it_leaves_out(browser, tmp_path: Path) -> None:
    run = made(100, 100, 64, edges=4)
    text = html(run)
    assert len(text.encode("utf-8")) < LIMIT
    data = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    assert len(data["heads"]["label"]) == 10_000
    assert 50 < data["drawn"] < 10_000
    assert (
        f"maps, pairs and words are here for the {data['drawn']:,} heads of largest routing pressure of 10,000." in text
    )
    strongest = run.heads.sort_values("routing_pressure", ascending=False)["label"].tolist()
    assert set(data["maps"]) == set(data["edges"]) == set(strongest[: data["drawn"]])
    courses = len(data["history"]["heads"])
    assert f"Courses are drawn at 9 of 9 steps, of {courses:,} of 10,000 heads." in text
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    page, trouble = opened(browser, tmp_path / "page.html")
    assert page.locator("#map button").count() == 10_000
    assert page.inner_text("#head-title") == f"Head {strongest[0]}"
    assert page.inner_text("#count") == "10000 of 10000 heads, the first 2000 shown"
    page.locator(f"#map button[data-label={strongest[1]}]").click()
    assert page.locator("#map td.chosen").count() == 1
    assert page.locator("#heads tr.chosen td").first.inner_text() == strongest[1]
    page.fill("#filter", strongest[-1])
    page.locator(f"#heads tr[data-label={strongest[-1]}]").click()
    page.wait_for_function("byId('hover').textContent === \"This head's map is in the files.\"")
    assert "its pairs are in the files" in page.inner_text("#head-note")
    assert not trouble
    page.context.close()


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_blank_and_nothing_sticks_out_in_any_theme_or_width(browser, file, scheme: str, width: int) -> None:
    import io

    from PIL import Image

    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto(file.as_uri())
    page.wait_for_function("cells !== null")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for part in (".lead", "#map", "#canvas", "#routed", "#heads"):
        picture = Image.open(io.BytesIO(page.locator(part).screenshot())).convert("L")
        pixels = np.asarray(picture)
        assert pixels.std() > 5, part
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in ground[4:-1].split(",")) > 380) == (scheme == "light")
    context.close()


@needs_browser
def test_a_token_that_turns_the_direction_of_writing_turns_nothing_else(page) -> None:
    further = page.evaluate(
        """() => {
            const all = [...document.querySelectorAll("#routed .token")];
            const token = all.find((node) => node.textContent.includes("\\u202e"));
            const after = document.createRange();
            after.selectNodeContents(token.nextSibling);
            return after.getBoundingClientRect().left - token.getBoundingClientRect().left;
        }"""
    )
    assert further > 0


@needs_browser
def test_it_prints_without_its_controls(page) -> None:
    page.emulate_media(media="print")
    assert not page.locator("#filter").is_visible()
    assert page.locator("#heads").is_visible()
