"""The pages as a browser shows them: Debian's Chromium, without a window."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cclis.cli import main
from cclis.engine.records import Epoch
from cclis.experiment.loop import train
from cclis.methods import make_config
from cclis.report.drawing import picture
from cclis.report.page import render
from cclis.report.study import Row, study_figure, study_page
from cclis.runs.directory import Run
from cclis.runs.records import Record, Result
from cclis.study.catalogue import ACCURACY
from tests.conftest import QUICK

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
SCREENSHOTS = Path(os.environ.get("CCLIS_SCREENSHOTS", "build/screenshots")).absolute()
DRAWN = "body[data-drawn]"
MARKS = ".scatterlayer path, .barlayer path, .boxlayer path, .heatmaplayer image"
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
PANELS = ("matrix", "curves", "forgetting", "confusion", "losses", "importance", "map")

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and os.environ.get("CCLIS_BROWSER") != "required",
    reason="there is no Chromium here",
)


class Window:
    """A page, and what went wrong on it."""

    def __init__(self, page: Any):
        self.page = page
        self.complaints: list[str] = []
        page.on(
            "console",
            lambda said: (
                self.complaints.append(said.text) if said.type in ("error", "warning") else None
            ),
        )
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._local)

    def _local(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.complaints.append(f"asked for {request.url}")

    def open(self, path: Path) -> Any:
        self.page.goto(path.absolute().as_uri())
        self.page.wait_for_selector(DRAWN)
        return self.page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-quic"]
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield found
        found.close()


@pytest.fixture
def window(browser: Any, request: pytest.FixtureRequest) -> Iterator[Window]:
    settings = getattr(request, "param", {})
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **settings})
    found = Window(context.new_page())
    yield found
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    found.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
    context.close()
    assert found.complaints == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    output = str(tmp_path_factory.mktemp("browser") / "run")
    return train(make_config("cclis", {**QUICK, "map_samples": 60, "memory": 20, "output": output}))


def shown(page: Any, panel: str) -> list[str]:
    """The texts within the cells of a heat map."""
    texts: list[str] = page.locator(f"#{panel} .heatmap-label").all_text_contents()
    return texts


def numbers(result: Result, scenario: str, head: str) -> list[str]:
    matrix = result.scores(scenario)[head].matrix
    return [f"{value:.1f}" for row in matrix for value in row if value is not None]


def a_sample(page: Any) -> tuple[float, float]:
    """Where one is on the map, once it is at the lower edge of the window."""
    point = page.locator("#map .scatterlayer .trace .point").first
    point.evaluate("point => point.scrollIntoView({ block: 'end' })")
    box = point.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_every_panel_is_drawn_and_holds_the_results_numbers(window: Window, run: Run) -> None:
    page = window.open(run.path / "report.html")
    for panel in PANELS:
        assert page.locator(f"#{panel} .main-svg").count() >= 1, panel
        # Something of every figure's data, not its axes alone.
        marks = page.locator(f"#{panel}").locator(MARKS)
        assert marks.count() >= 1, panel
    head = run.result.main_head
    assert sorted(shown(page, "matrix")) == sorted(numbers(run.result, "class_il", head))
    assert page.locator(".kept i").count() == 20
    for key in ("class_il", "task_il"):
        assert f"{run.result.number(key, head, 'accuracy'):.1f} %" in page.inner_text(".cards")


def test_toggles_choose_what_is_shown(window: Window, run: Run) -> None:
    page = window.open(run.path / "report.html")
    page.get_by_role("button", name="Task-IL").click()
    page.get_by_role("button", name="means").click()
    assert sorted(shown(page, "matrix")) == sorted(numbers(run.result, "task_il", "means"))
    pressed = page.locator('.choice [aria-pressed="true"]').all_text_contents()
    assert pressed == ["Task-IL", "means"]
    page.get_by_role("button", name="error of the denominator").click()
    assert page.locator("#importance .bars path").count() >= 10
    # A click in the legend hides a line.
    from playwright.sync_api import expect

    lines = page.locator("#curves .scatterlayer .trace")
    before = lines.count()
    page.locator("#curves .legendtoggle").first.click()
    expect(lines).not_to_have_count(before)


def test_a_figure_can_be_saved_for_a_paper(window: Window, run: Run) -> None:
    page = window.open(run.path / "report.html")
    page.hover("#confusion")
    buttons = page.locator("#confusion .modebar-btn")
    offered = [buttons.nth(n).get_attribute("data-title") for n in range(buttons.count())]
    assert "Zoom" in offered
    assert not any("Share" in (title or "") for title in offered)
    with page.expect_download() as saved:
        page.locator('#confusion [data-title*="ownload"]').click()
    assert saved.value.suggested_filename == "confusion.svg"
    assert "<svg" in Path(saved.value.path()).read_text()


def test_pointing_at_a_sample_shows_its_image(window: Window, run: Run) -> None:
    page = window.open(run.path / "report.html")
    assert page.locator("#picture").is_hidden()
    x, y = a_sample(page)
    page.mouse.move(x - 3, y)
    page.mouse.move(x, y)
    page.wait_for_selector("#picture:not([hidden])")
    image = page.evaluate("getComputedStyle(document.getElementById('picture')).backgroundImage")
    assert image.startswith('url("data:image/')
    box = page.locator("#picture").bounding_box()
    assert box["y"] + box["height"] <= 900
    page.mouse.move(2, 2)
    page.wait_for_selector("#picture[hidden]", state="attached")


@pytest.mark.parametrize("window", [PHONE], indirect=True)
def test_a_tap_on_a_sample_shows_its_image(window: Window, run: Run) -> None:
    page = window.open(run.path / "report.html")
    page.touchscreen.tap(*a_sample(page))
    page.wait_for_selector("#picture:not([hidden])")
    box = page.locator("#picture").bounding_box()
    assert 0 <= box["x"] <= 390 - box["width"]
    assert 0 <= box["y"] <= 844 - box["height"]
    page.touchscreen.tap(2, 100)
    page.wait_for_selector("#picture[hidden]", state="attached")


def test_the_toolbar_lies_above_the_legend(window: Window, run: Run) -> None:
    page = window.open(run.path / "report.html")
    for panel in ("map", "curves", "losses"):
        page.hover(f"#{panel}")
        bar = page.locator(f"#{panel} .modebar").bounding_box()
        legend = page.locator(f"#{panel} .legend").bounding_box()
        assert bar["y"] + bar["height"] <= legend["y"], panel
        page.locator(f"#{panel} .legendtoggle").first.click(timeout=5000)


def test_numbers_along_axes_can_be_read(window: Window, run: Run, tmp_path: Path) -> None:
    def other(number: int, record: Record) -> Record:
        if isinstance(record, Epoch):
            losses, rate = {"contrast": 5.581 + number}, 0.104 * number
            return dataclasses.replace(record, losses=losses, learning_rate=rate)
        spread = [[0.15, 0.5, 1.0, 1.5, 4.0]] * len(record.diagnosis["spread"])
        return dataclasses.replace(record, diagnosis={**record.diagnosis, "spread": spread})

    records = [other(number, record) for number, record in enumerate(run.records)]
    path = tmp_path / "report.html"
    path.write_text(render(run.result, records))
    page = window.open(path)
    rates = page.locator("#losses .y2tick").all_text_contents()
    assert 3 <= len(rates) <= 7
    assert all(len(rate) <= 4 for rate in rates)
    page.get_by_role("button", name="spread of g").click()
    shares = [float(text) for text in page.locator("#importance .ytick").all_text_contents()]
    assert {0.2, 0.5, 1, 2} <= set(shares)
    assert len(set(shares)) == len(shares)


def test_runs_side_by_side(window: Window, run: Run, tmp_path: Path) -> None:
    other = dataclasses.replace(run.result, seed=1, method="er", changed={})
    (tmp_path / "er.json").write_text(json.dumps(other.to_json()))
    output = tmp_path / "out"
    assert main(["report", str(run.path), str(tmp_path / "er.json"), "--output", str(output)]) == 0
    page = window.open(output / "comparison.html")
    curves = page.locator(".drawn svg").bounding_box()
    assert curves["width"] > 300
    assert curves["height"] > 150
    before = shown(page, "matrix-0")
    assert len(before) == 15
    page.get_by_role("button", name="er", exact=True).click()
    assert page.locator('.toggles [aria-pressed="true"]').all_text_contents() == ["er"]


@pytest.mark.parametrize("window", [PHONE], indirect=True)
def test_a_phone_is_wide_enough(window: Window, run: Run) -> None:
    page = window.open(run.path / "report.html")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for panel in PANELS:
        assert page.locator(f"#{panel}").bounding_box()["width"] <= 390
        assert page.evaluate(f"document.getElementById('{panel}')._fullLayout.dragmode") is False
    assert page.locator(".choice").bounding_box()["height"] < 50
    for name in ("effective sample size", "spread of g", "error of the denominator"):
        page.get_by_role("button", name=name).click()
        for panel in PANELS:
            figure = page.locator(f"#{panel}").bounding_box()
            titles = page.locator(f"#{panel} .infolayer [class$=title]")
            for box in [title.bounding_box() for title in titles.all() if title.is_visible()]:
                assert figure["x"] <= box["x"]
                assert box["x"] + box["width"] <= figure["x"] + figure["width"]
                assert figure["y"] <= box["y"]
                assert box["y"] + box["height"] <= figure["y"] + figure["height"]


@pytest.mark.parametrize("window", [{"color_scheme": "dark"}], indirect=True)
def test_at_night_the_page_is_dark(window: Window, run: Run) -> None:
    from playwright.sync_api import expect

    page = window.open(run.path / "report.html")

    def brightness(selector: str, what: str) -> int:
        found = page.evaluate(f"getComputedStyle(document.querySelector('{selector}')).{what}")
        return sum(map(int, re.findall(r"\d+", found)[:3]))

    assert brightness("body", "backgroundColor") < 150
    assert brightness("#curves .legendtext", "fill") > 500
    page.emulate_media(color_scheme="light")
    expect(page.locator("#curves .legendtext").first).to_have_css("fill", "rgb(28, 32, 36)")


def test_what_is_planted_in_a_page_neither_runs_nor_loads(
    window: Window, run: Run, tmp_path: Path
) -> None:
    planted = """<script>document.title = "planted"</script>
        <img src="https://example.org/a.png" onerror="document.title = 'planted'">
        <link rel="stylesheet" href="https://example.org/a.css">
        <iframe src="data:text/html,planted"></iframe><body>"""
    text = (run.path / "report.html").read_text(encoding="utf-8")
    (tmp_path / "report.html").write_text(text.replace("<body>", planted, 1), encoding="utf-8")
    failed: list[tuple[str, str]] = []
    window.page.on("requestfailed", lambda asked: failed.append((asked.url, asked.failure)))
    page = window.open(tmp_path / "report.html")
    page.wait_for_load_state("networkidle")
    assert page.title() == "cclis on split-digits"
    refused = [text for text in window.complaints if "Content Security Policy" in text]
    for what in ("inline script", "image", "stylesheet", "data:"):
        assert [text for text in refused if what in text], what
    assert {failure for _, failure in failed} == {"csp"}
    window.complaints.clear()


def test_a_study_shows_its_figure_and_its_table(window: Window, run: Run, tmp_path: Path) -> None:
    result = run.result
    rows = [
        Row("split-digits", 20, f"λ = {place}", {"a": result}, {}, {}, "CCLIS", place)
        for place in (0.0, 0.6)
    ]
    svg = picture(study_figure(rows, "λ"), "svg")
    page = study_page(rows, ACCURACY, title="Figure 2", about="", scale="", svg=svg)
    (tmp_path / "study.html").write_text(page, encoding="utf-8")
    window.page.goto((tmp_path / "study.html").as_uri())
    figure = window.page.locator("svg").first.bounding_box()
    assert figure["width"] > 300
    assert figure["height"] > 200
    texts = window.page.locator("table").first.locator("td").all_text_contents()
    assert f"{result.class_il[rows[0].head].accuracy:.2f}" in texts
    assert texts.count("split-digits") == 2
