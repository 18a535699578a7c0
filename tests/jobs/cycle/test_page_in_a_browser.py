"""The page in headless Chromium: nothing leaves, the console is empty, mouse and keys work, axe finds nothing serious.

Needs playwright, a Chromium, and axe-core (axe-core-python); without them it is skipped.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.cycle_page import T0
from jobs.cycle.page.publish import INDEX_PAGE, report_key
from pipeline.io.storage import open_storage
from tests.jobs.cycle.test_messages import HOSTILE
from tests.jobs.cycle.test_page import written

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    storage = open_storage(str(folder))
    written(storage, "first", steps=400)
    written(storage, "second", began=T0 + 1e5, parent="first", steps=400)
    written(storage, "hostile", began=T0 + 2e5, parent="first", text=HOSTILE[0] + HOSTILE[3])
    names = {"page": report_key("second"), "hostile": report_key("hostile"), "index": INDEX_PAGE}
    return {name: folder / key for name, key in names.items()}


def opened(browser: Any, place: Path, **context: Any) -> tuple[Any, list[str], list[str]]:
    """The page, what was asked for and what the console said."""
    page = browser.new_context(viewport={"width": 1100, "height": 900}, **context).new_page()
    asked, said = list[str](), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(f"dialog {dialog.message}"))
    page.goto(place.as_uri())
    return page, asked, said


@pytest.mark.parametrize("name", ["page", "hostile", "index"])
def test_nothing_leaves_and_nothing_is_said(browser: Any, places: dict[str, Path], name: str) -> None:
    _, asked, said = opened(browser, places[name])
    assert [url for url in asked if not url.startswith("data:")] == [places[name].as_uri()] and said == []


def test_mouse_and_keys(browser: Any, places: dict[str, Path]) -> None:
    page, _, said = opened(browser, places["page"])
    chart = page.query_selector("svg.lines")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
    assert "loss" in page.inner_text("#tip") and "loss of cycle first" in page.inner_text("#tip")
    chart.focus()
    page.keyboard.press("End")
    assert page.inner_text("#tip").startswith("step 400:")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#tip").startswith("step 399:")
    page.reload()
    charts = page.evaluate("[...document.querySelectorAll('svg[tabindex]')].length")
    reached = set()
    for _ in range(1000):
        page.keyboard.press("Tab")
        tag, label = page.evaluate(
            "(a => [a.tagName, a.tagName == 'svg' ? [...document.querySelectorAll('svg')].indexOf(a) : 0])"
            "(document.activeElement)"
        )
        if tag == "BODY":
            break
        reached |= {label} if tag == "svg" else set()
    assert len(reached) == charts > 10
    first = "document.querySelector('#what-it-cost tbody tr td').textContent"
    page.click("#what-it-cost thead th:nth-child(5) button")
    assert page.evaluate(first) != "prepare", "sorted by time"
    assert said == []


def test_light_dark_and_print_differ(browser: Any, places: dict[str, Path]) -> None:
    shots = set()
    for media in ({"color_scheme": "light"}, {"color_scheme": "dark"}, {"media": "print"}):
        page, _, _ = opened(browser, places["page"])
        page.emulate_media(**media)
        shots.add(page.screenshot())
    assert len(shots) == 3


def test_it_reads_without_its_script(browser: Any, places: dict[str, Path]) -> None:
    page, _, _ = opened(browser, places["page"], java_script_enabled=False)
    assert "Promoted" in page.inner_text("main, header") and page.locator("svg.lines").count() > 3


@pytest.mark.parametrize("name", ["page", "index"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Any, places: dict[str, Path], name: str, scheme: str) -> None:
    package = pytest.importorskip("axe_core_python")
    script = (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    page, _, _ = opened(browser, places[name], bypass_csp=True, color_scheme=scheme)
    page.evaluate(script)
    found = page.evaluate("axe.run()")["violations"]
    assert [(one["impact"], one["id"], one["nodes"][0]["html"]) for one in found] == []
