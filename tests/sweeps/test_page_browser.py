"""Promises of the page in a browser: it works by mouse and keyboard, offline, narrow and wide, light and dark.

These tests need a Chromium: $HEADLAB_CHROMIUM, or one on the path. Without it they alone are skipped.
"""

import json
import os
import shutil

import pytest
from synthetic_runs import write_run

from headlab.sweeps.page import write_report

pytestmark = pytest.mark.xdist_group("browser")
EVIL = "</script><script>alert(1)</script>"
EVIL_NAME = "<img src=x onerror=alert(1)>"
PLOTS = ("differences", "curves", "parameters", "size", "bands", "spectra")
# plots follow the width of the page some frames later; the page's policy forbids Playwright's own waiting by eval
PLOTS_FOLLOW = """() => new Promise((done) => {
    let frames = 0;
    const look = () => {
        const fits = document.documentElement.scrollWidth <= innerWidth;
        if (fits || ++frames === 600) done(); else requestAnimationFrame(look);
    };
    look();
})"""


@pytest.fixture(scope="module")
def browser():
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("HEADLAB_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("no Chromium on the path, and $HEADLAB_CHROMIUM names none")
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    # the more expensive group is the better one, so that no order of the table equals another
    for number, head in enumerate(("tied", "untied", "sigsoftmax")):
        for seed in range(2):
            path = write_run(
                folder / f"{head}-{seed}",
                head=head,
                seed=seed,
                loss=4 - number / 10 + seed / 100 + number * seed / 1000,
            )
    (path / "rank.json").write_text(json.dumps({"spectrum": [3, 2, 1]}))
    write_run(folder / EVIL_NAME, seed=5, reached=40, finished=False)
    sample = {"head": "tied", "prompt": EVIL, "temperature": 0.0, "text": EVIL}
    (folder / "samples.json").write_text(json.dumps([sample]))
    sweep = {
        "question": EVIL,
        "command": "headlab sweep " + "x" * 300,
        "baseline": {"head.name": "tied"},
    }
    (folder / "sweep.json").write_text(json.dumps(sweep))
    return write_report(folder, tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture(scope="module")
def problems():
    """Errors, dialogs, and requests for anything but the file itself, since the last test."""
    return []


@pytest.fixture(scope="module")
def opened(browser, file, problems):
    """The page with all its plots drawn, opened once: compiling the library of plots takes longest."""

    def request(request):
        if not request.url.startswith(("data:", "blob:")) and request.url != file.as_uri():
            problems.append(request.url)

    def dialog(dialog):
        problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page.set_default_timeout(120_000)
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", request)
    page.on("dialog", dialog)
    page.goto(file.as_uri())
    for name in PLOTS:  # drawn when a reader comes near
        page.locator(f"#plot-{name}").scroll_into_view_if_needed()
        page.wait_for_selector(f"#plot-{name}.js-plotly-plot .main-svg")
    yield page
    page.close()


@pytest.fixture
def page(opened, problems):
    """The page, wide and light; tests leave its buttons as they found them."""
    opened.set_viewport_size({"width": 1280, "height": 900})
    opened.evaluate("localStorage.clear()")
    set_scheme(opened, "light")
    yield opened
    found = list(problems)
    problems.clear()
    assert found == []


def set_scheme(page, scheme):
    """Changes the system's theme, and waits until the page has followed."""
    from playwright.sync_api import expect

    page.emulate_media(color_scheme=scheme)
    expect(page.locator("html")).to_have_attribute("data-theme", scheme, timeout=60_000)


def groups(page):
    return page.locator("#results tbody th").all_inner_texts()


def heading(page, title):
    return page.locator("#results th", has_text=title)


def curves(page):
    """What is drawn in the plot of loss curves."""
    return page.evaluate(
        """() => { const plot = document.getElementById("plot-curves");
        return { x: plot.layout.xaxis.type, y: plot.layout.yaxis.type, range: plot.layout.xaxis.range,
                 traces: plot.data.map((trace) => trace.visible) } }"""
    )


def test_every_plot_is_drawn_without_errors_or_requests(page):
    for name in PLOTS:
        drawn = "path.point, .point path, path.js-line"
        assert page.locator(f"#plot-{name}").locator(drawn).count() > 0, name


def test_text_of_runs_runs_nothing(page):
    assert page.locator("img").count() == 0
    assert page.locator("#samples dd").inner_text() == EVIL
    assert page.locator("#legend").get_by_text("not finished").count() == 1
    assert EVIL_NAME in page.locator("#runs").inner_text()


def test_a_table_sorts_by_click_both_ways_and_says_so(page):
    best_first = ["head=sigsoftmax", "head=untied", "head=tied"]
    column = heading(page, "Held-out loss")
    column.get_by_role("button").click()
    assert column.get_attribute("aria-sort") == "ascending"
    assert groups(page) == best_first
    column.get_by_role("button").click()
    assert column.get_attribute("aria-sort") == "descending"
    assert groups(page) == best_first[::-1]


def test_a_table_sorts_by_keyboard(page):
    button = heading(page, "Group").get_by_role("button")
    button.focus()
    page.keyboard.press("Enter")
    assert groups(page) == ["head=sigsoftmax", "head=tied", "head=untied"]
    page.keyboard.press("Space")
    assert groups(page) == ["head=untied", "head=tied", "head=sigsoftmax"]
    assert page.locator("#results [aria-sort]").count() == 1


def test_what_is_not_known_sorts_last_either_way(page):
    button = heading(page, "Difference").get_by_role("button")
    for _ in range(2):
        button.click()
        assert groups(page)[-1] == "head=tied"  # the baseline, which has none


def test_runs_and_groups_toggle(page):
    assert curves(page)["traces"] == [True] * 14
    seed = page.get_by_role("button", name="seed 1, untied-1")
    seed.click()
    assert seed.get_attribute("aria-pressed") == "false"
    assert curves(page)["traces"].count(False) == 2  # its training and its held-out curve
    group = page.get_by_role("button", name="head=tied", exact=True)
    group.press("Enter")
    assert curves(page)["traces"].count(False) == 6
    group.press("Enter")
    seed.press("Space")
    assert curves(page)["traces"] == [True] * 14


def test_axes_become_logarithmic_and_the_second_half_is_shown(page):
    assert (curves(page)["x"], curves(page)["y"]) == ("linear", "linear")
    page.get_by_role("button", name="Log steps").click()
    page.get_by_role("button", name="Log loss").press("Enter")
    assert (curves(page)["x"], curves(page)["y"]) == ("log", "log")
    page.get_by_role("button", name="Log steps").click()
    page.get_by_role("button", name="Second half").click()
    assert curves(page)["range"] == [50, 101]
    page.get_by_role("button", name="Held-out only").click()
    assert len(curves(page)["traces"]) == 7
    for name in ("Held-out only", "Second half", "Log loss"):
        page.get_by_role("button", name=name).click()
    assert (curves(page)["x"], curves(page)["y"]) == ("linear", "linear")
    assert len(curves(page)["traces"]) == 14


def test_groups_are_drawn_against_each_measure_of_size(page):
    titles = []
    for name in ("Training FLOPs", "Rank bound", "Parameters"):
        button = page.locator("#size").get_by_role("button", name=name)
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        titles.append(page.evaluate("document.getElementById('plot-size').layout.xaxis.title.text"))
    assert len(set(titles)) == 3


def test_the_reading_of_a_point_is_its_run_step_and_loss(page):
    page.get_by_role("button", name="Held-out only").click()
    point = page.locator("#plot-curves .scatterlayer .trace").first.locator(".point").last
    point.hover(force=True)
    reading = page.locator("#plot-curves .hoverlayer .hovertext").first
    reading.wait_for()
    assert reading.text_content() == f"{EVIL_NAME}held-out, step 40: 4.0000"
    page.get_by_role("button", name="Held-out only").click()


def test_the_theme_is_the_systems_and_can_be_changed(page):
    def ink():
        return page.evaluate("document.getElementById('plot-curves').layout.font.color")

    theme = page.locator("html")
    light = ink()
    set_scheme(page, "dark")
    dark = ink()
    assert dark != light
    page.locator("#theme").press("Enter")
    assert theme.get_attribute("data-theme") == "light"
    assert ink() == light
    page.locator("#theme").click()
    assert theme.get_attribute("data-theme") == "dark"
    assert ink() == dark


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_the_page_does_not_scroll_sideways(page, scheme, width):
    from axe_playwright_python.sync_playwright import Axe

    page.set_viewport_size({"width": width, "height": 900})
    set_scheme(page, scheme)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    page.evaluate(PLOTS_FOLLOW)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_print_is_light_and_has_every_plot(browser, file):
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="dark")
    page.set_default_timeout(120_000)
    page.goto(file.as_uri())
    page.wait_for_selector(".js-plotly-plot")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("html").get_attribute("data-theme") == "light"
    assert page.locator(".plot.js-plotly-plot").count() == len(PLOTS)
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("html").get_attribute("data-theme") == "dark"
    page.close()
