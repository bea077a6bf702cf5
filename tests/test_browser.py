"""The page in a real browser: every control used, axe satisfied, nothing fetched, no error.

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
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


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


def places(page):
    """Where the visible points of the first frontier are, by what they are."""
    found = shown(page.query_selector(".frontier"), ".chart .point")
    return {e.get_attribute("aria-label"): e.get_attribute("transform") for e in found}


# --- seen ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["many", "one", "mixture"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_axe_finds_nothing_and_nothing_is_wider_than_the_page(visit, name, scheme, size):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = visit(name, size, color_scheme=scheme)
    PICTURES.mkdir(parents=True, exist_ok=True)
    kind = "phone" if size is PHONE else "desk"
    page.screenshot(path=PICTURES / f"{name}-{scheme}-{kind}.png", full_page=True)
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    found = axe.Axe().run(page).response["violations"]
    told = [
        f"{v['impact']} {v['id']}: {node['html'][:160]} {node['failureSummary'][:300]}"
        for v in found
        for node in v["nodes"][:3]
    ]
    assert not told, "\n".join(told)


def test_without_a_script_everything_is_there(visit):
    page = visit("many", java_script_enabled=False)
    assert len(shown(page, ".plot")) == len(page.query_selector_all(".frontier")) == 2
    assert places(page)
    assert not shown(page, "input, button")
    assert len(shown(page, "#overview tbody tr")) == len(runs())


def test_on_paper_every_run_is_open(visit):
    page = visit("many")
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert all(d.get_attribute("open") is not None for d in page.query_selector_all("details"))
    assert page.pdf()[:5] == b"%PDF-"


# --- used ----------------------------------------------------------------------------------------


def test_the_frontier_is_switched_by_mouse_and_by_keys(visit):
    page = visit("many")
    other = page.query_selector_all(".frontier")[1]
    there = other.inner_html()
    one = page.query_selector(".frontier")
    seen = set()
    for lost in one.query_selector_all("[name=lost]"):
        for saved in one.query_selector_all("[name=saved]"):
            lost.check(force=True)
            saved.check(force=True)
            (plot,) = shown(one, ".plot")
            said = one.query_selector(".said").inner_text()
            assert said == plot.query_selector("desc").text_content()
            seen.add(said)
            for label, at in places(page).items():
                x, y = map(float, at.removeprefix("translate(").rstrip(")").split())
                assert 0 <= x <= 680, label
                assert 0 <= y <= 400, label
    count = [len(one.query_selector_all(f"[name={name}]")) for name in ("lost", "saved")]
    assert len(seen) == count[0] * count[1] > 3
    assert other.inner_html() == there  # each is switched alone
    one.query_selector("[name=saved]:checked").focus()
    before = one.query_selector(".said").inner_text()
    page.keyboard.press("ArrowRight")
    assert one.query_selector(".said").inner_text() != before


def test_comparisons_are_hidden_and_shown(visit):
    page = visit("many")
    every = len(places(page))
    page.uncheck("[name=comparisons]")
    assert not shown(page.query_selector(".frontier"), ".chart .comparison")
    assert 0 < len(places(page)) < every
    page.check("[name=comparisons]")
    assert len(places(page)) == every


def test_a_point_leads_to_its_run(visit):
    page = visit("many")
    point = page.query_selector("a.point.result[data-run='2']")
    point.focus()
    assert "hot" in page.query_selector("tr[data-run='2']").get_attribute("class")
    page.keyboard.press("Enter")
    page.wait_for_selector("#run-2[open]")
    assert page.evaluate("document.activeElement.parentNode.id") == "run-2"
    assert page.query_selector("#run-1[open]") is None
    page = visit("many", anchor="#run-3")
    page.wait_for_selector("#run-3[open]")


def test_tables_are_sorted_by_every_column(visit):
    page = visit("many")
    heads = page.query_selector_all("#overview thead th")
    for j, head in enumerate(heads):
        orders = []
        for order in ("ascending", "descending"):
            head.query_selector("button").click()
            assert head.get_attribute("aria-sort") == order
            assert len(page.query_selector_all("#overview [aria-sort]")) == 1
            cells = page.query_selector_all(f"#overview tbody tr > :nth-child({j + 1})")
            assert len(cells) == len(runs())
            told = [c.get_attribute("data-value") or c.inner_text() for c in cells]
            known = [t for t in told if t != "–"]
            assert told == known + ["–"] * (len(told) - len(known))  # unknown comes last
            orders.append(known)
            if all(
                c.get_attribute("data-value") for c, t in zip(cells, told, strict=True) if t != "–"
            ):
                assert known == sorted(known, key=float, reverse=order == "descending")
        assert sorted(orders[0]) == sorted(orders[1])


def test_runs_are_searched(visit):
    page = visit("many")
    every = len(runs())
    page.fill("#find", "MIXTURE condensed")
    assert len(shown(page, "#overview tbody tr")) == 2
    assert len(shown(page, "details.run")) == len(shown(page, ".card[data-run]")) == 2
    assert page.inner_text("output[for=find]") == f"2 of {every}"
    assert {e.get_attribute("data-run") for e in shown(page, ".chart .point")} <= {"0", "6", "7"}
    page.fill("#find", "nothing like this")
    assert not shown(page, "#overview tbody tr")
    assert page.inner_text("output[for=find]") == f"0 of {every}"
    page.fill("#find", "")
    assert len(shown(page, "#overview tbody tr")) == every
    assert page.inner_text("output[for=find]") == ""


def test_runs_are_opened_and_closed_together(visit):
    page = visit("many")
    page.click("text=Open all")
    assert len(page.query_selector_all("details.run[open]")) == len(runs())
    page.click("text=Close all")
    assert not page.query_selector_all("details.run[open]")
    page.click("#run-1 summary")
    assert len(page.query_selector_all("details.run[open]")) == 1


def test_layers_are_sorted_and_searched(visit):
    page = visit("one")
    page.click("text=Layer by layer, as a table")
    rows = "#layers-1 tbody tr"
    assert len(shown(page, rows)) == 8
    page.click("#layers-1 thead button >> nth=0")
    page.click("#layers-1 thead button >> nth=0")
    assert shown(page, f"{rows} th")[0].inner_text() == "7"


def test_tokens_change_colour_with_the_layer(visit):
    page = visit("one")
    colours = "document.querySelector('.text').innerHTML"
    first = page.evaluate(colours)
    page.focus("section.tokens input")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("section.tokens output") == "3"
    assert page.evaluate(colours) != first
    spans = page.query_selector_all(".text span")
    assert [s.get_attribute("class") for s in spans] == [f"p{(3 + j) % 4}" for j in range(8)]
    page.click("section.tokens button >> nth=2")
    assert page.query_selector("section.tokens button[aria-pressed=true]").inner_text() == "2"
    assert len(page.query_selector_all(".text span.off")) == 6
    page.click("section.tokens button >> nth=2")
    assert not page.query_selector_all(".text span.off")


def test_tab_reaches_everything_in_reading_order(visit):
    page = visit("same")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    heights = []
    for _ in range(400):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break
        heights.append(
            page.evaluate(
                "document.activeElement.closest('section,footer,header,.runs')"
                ".getBoundingClientRect().top + scrollY"
            )
        )
    assert len(heights) > 20
    assert heights == sorted(heights)
