"""The page in a real browser: axe satisfied, nothing fetched, no error.

Pictures of what was seen are left in ``build/browser``.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from test_report import make
from test_report_mixtures import condensed, pruned, skipping, tuned

from moesaic import report

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-browser")
ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "build/browser"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PHONE, TABLET = {"width": 390, "height": 844}, {"width": 800, "height": 900}
DESK = {"width": 1200, "height": 900}


def runs():
    """Runs of both halves, of one original and of several, measured and not."""
    ours = [make(), make(result=31.2, static=15.0, prefill=0.8), make(layers=range(8), petals=64)]
    ours[0].measured["scores"]["result"] |= {"kl": 0.4, "top1_agreement": 0.7}
    mixtures = [pruned(), skipping(), condensed(), tuned(earlier=condensed())]
    for n, record in enumerate(mixtures):
        record.model = "org/mixture"
        record.measured["scores"]["result"] |= {"kl": 0.1 * n, "total_bytes": 10**9 - n * 10**8}
        record.measured["scores"]["original"] |= {"total_bytes": 10**9}
    unmeasured = replace(make(), measured={})
    return [*ours, *mixtures, unmeasured]


@pytest.fixture(scope="module")
def browser():
    found = os.environ.get("MOESAIC_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), "")
    if not found:
        pytest.skip(f"no browser: install one of {', '.join(BROWSERS)}, or set MOESAIC_BROWSER")
    with sync_api.sync_playwright() as driver:
        started = driver.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-gpu"], headless=True
        )
        yield started
        started.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    records = runs()
    chosen = {"many": records, "one": records[:1], "mixture": records[5:6], "same": records[:3]}
    for name, of in chosen.items():
        (folder / f"{name}.html").write_text(report.html(of), "utf-8")
    return folder


@pytest.fixture
def visit(browser, files):
    """Opens a page; afterwards nothing may have been fetched and nothing have gone wrong."""
    wrong, contexts = [], []

    def opened(name, size=DESK, anchor="", **options):
        context = browser.new_context(viewport=size, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith("file:") or wrong.append(asked.url))
        page.goto((files / f"{name}.html").as_uri() + anchor)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


def shown(page, selector):
    """What is visible of the elements that a selector finds."""
    return [e for e in page.query_selector_all(selector) if e.is_visible()]


# --- seen ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["many", "one", "mixture"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, TABLET, PHONE], ids=lambda size: str(size["width"]))
def test_axe_finds_nothing_and_nothing_is_wider_than_the_page(visit, name, scheme, size):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = visit(name, size, color_scheme=scheme)
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}-{scheme}-{size['width']}.png", full_page=True)
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    found = axe.Axe().run(page).response["violations"]
    problems = [
        f"{v['impact']} {v['id']}: {node['html'][:160]} {node['failureSummary'][:300]}"
        for v in found
        for node in v["nodes"][:3]
    ]
    assert not problems, "\n".join(problems)


def test_without_a_script_everything_is_there(visit):
    page = visit("many", java_script_enabled=False)
    assert len(shown(page, ".figures svg")) == 2
    assert shown(page, ".figures .point")
    assert not page.query_selector_all("input, button, script")
    assert len(shown(page, "table.layers tbody tr")) == len(runs())


def test_on_paper_every_run_is_open(visit):
    page = visit("many")
    page.emulate_media(media="print")
    assert all(of.bounding_box()["height"] > 0 for of in page.query_selector_all("details section"))
    assert page.pdf()[:5] == b"%PDF-"


# --- used ----------------------------------------------------------------------------------------


def test_a_point_leads_to_its_run(visit):
    """Without a script: the browser opens what the link leads into."""
    page = visit("many", java_script_enabled=False)
    page.click(".desk a.point.result[href='#run-2'] circle")
    assert page.url.endswith("#run-2")
    assert shown(page, "#run-2 .lead")
    assert not shown(page, "#run-1 .lead")


def test_tab_reaches_everything_in_reading_order(visit):
    page = visit("same")
    seen = page.evaluate(
        "[...document.querySelectorAll('a[href],summary,[tabindex]')]"
        ".filter(element => element.checkVisibility()).length"
    )
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    heights = []
    for _ in range(400):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break
        heights.append(
            page.evaluate(
                "document.activeElement.closest('section,footer,header,summary')"
                ".getBoundingClientRect().top + scrollY"
            )
        )
    assert len(heights) + 1 == seen > 10
    assert heights == sorted(heights)
