"""The page in a real browser: Chromium, opened from a file, with no network needed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason='needs Selenium: pip install "quorem[dev]"')
pytest.importorskip("matplotlib", reason='needs matplotlib: pip install "quorem[report]"')

from made_up_results import DATA, figure, result, sweep
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from quorem.experiments.report.page import page

EVIL = "</script><script>document.title = 'no'</script>"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    curve = [[10 * k, 0.5 - 0.002 * k, 0.001] for k in range(1, 11)]
    curves = figure([result("mult", None, curve=curve)], name="figure4", title="Figure 4: curves", x="step")
    page([sweep(), curves], folder / "page.html")
    points, data = [result(EVIL, 1), result("mult", 2, network="dlrm")], replace(DATA, name=EVIL, identity="2")
    own = figure(points, data, name="my sweep", title="Mine")
    page([sweep(("hash", "feature", "concat", "add", "mult")), own], folder / "two.html")
    return folder


@pytest.fixture
def opened(browser: Any, files: Path) -> Iterator[Callable[..., Any]]:
    """Opens a page at a width and in a scheme; afterwards the console must have been silent."""

    def open_page(name: str = "page.html", width: int = 1300, scheme: str = "light") -> Any:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        media = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in media.items()]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        browser.get((files / name).as_uri())
        browser.execute_script("try { localStorage.clear() } catch {}")
        browser.refresh()
        wait(browser, "return document.documentElement.dataset.ready === 'yes'")
        return browser

    browser.get_log("browser")
    yield open_page
    assert browser.get_log("browser") == []


def wait(browser: Any, script: str, *arguments: Any) -> Any:
    return WebDriverWait(browser, 60).until(lambda driver: driver.execute_script(script, *arguments))


def shown_points(browser: Any) -> list[Any]:
    return [row for row in browser.find_elements(By.CSS_SELECTOR, "tbody.point") if row.is_displayed()]


def losses(browser: Any) -> list[float]:
    cells = "document.querySelectorAll('tbody.point [data-label=\"test log loss\"]')"
    return browser.execute_script(f"return [...{cells}].map(cell => Number(cell.textContent.split(' ')[0]))")


def test_headings_sort_by_keyboard_and_the_focus_is_seen(opened):
    browser = opened()
    browser.find_element(By.CSS_SELECTOR, "#filters select:last-of-type").send_keys(Keys.TAB)
    for _ in range(40):
        active = browser.switch_to.active_element
        if active.text.startswith("test log loss"):
            break
        active.send_keys(Keys.TAB)
    assert browser.execute_script("return getComputedStyle(arguments[0]).outlineStyle", active) == "solid"
    head = browser.find_element(By.XPATH, "//table[@id='points']//th[button[starts-with(., 'test log loss')]]")
    before = losses(browser)
    assert before != sorted(before) and head.get_attribute("aria-sort") == "none"
    active.send_keys(Keys.ENTER)
    assert losses(browser) == sorted(before) and head.get_attribute("aria-sort") == "ascending"
    active.send_keys(Keys.SPACE)
    assert losses(browser) == sorted(before, reverse=True) and head.get_attribute("aria-sort") == "descending"


def test_search_finds_the_points_that_have_every_word(opened):
    browser = opened("two.html")
    search = browser.find_element(By.CSS_SELECTOR, "#filters input")

    def matches(text: str) -> list[tuple[str, str]]:
        search.clear()
        search.send_keys(text)
        texts = {
            tuple(row.find_element(By.CSS_SELECTOR, f"[data-label='{name}']").text for name in ("series", "x"))
            for row in shown_points(browser)
        }
        return sorted((series.split()[-1], x) for series, x in texts)

    assert matches("MULT 20") == [("mult", "20")]  # not 200, and not every loss that ends in 20
    assert matches("mul 200") == [("mult", "200")]  # the beginning of a word is enough, of a number it is not
    assert matches("20 mult dlrm") == [("mult", "20")] and len(shown_points(browser)) == 1
    assert matches("num_collisions=4 hash 1") == [("hash", "1")]
    assert matches("nothing") == [] and browser.find_element(By.ID, "shown").text == "0 of 34 points"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_until_it_is_chosen(opened, scheme):
    browser = opened(scheme=scheme)
    other = {"light": "dark", "dark": "light"}[scheme]
    theme = "return document.documentElement.dataset.theme"
    ground = "return getComputedStyle(document.body).backgroundColor"
    colour = "return getComputedStyle([...document.querySelectorAll('#d0f0 [data-about]')].at(-1)).fill"
    assert browser.execute_script(theme) == scheme
    button = browser.find_element(By.ID, "theme")
    assert button.text == f"◐ {other.capitalize()} theme"
    before = browser.execute_script(ground), browser.execute_script(colour)
    button.send_keys(Keys.ENTER)
    assert browser.execute_script(theme) == other and browser.execute_script(ground) != before[0]
    wait(browser, colour + " !== arguments[0]", before[1])
    browser.refresh()
    wait(browser, "return document.documentElement.dataset.ready === 'yes'")
    assert browser.execute_script(theme) == other


@pytest.mark.parametrize(("name", "width"), [("two.html", 360), ("page.html", 768), ("two.html", 1300)])
def test_nothing_scrolls_sideways(opened, name, width):
    browser = opened(name, width)
    boxes = "[...document.querySelectorAll('.box, .box td, .box th')]"
    over = f"{boxes}.filter(b => b.scrollWidth > b.clientWidth + 1 || b.scrollHeight > b.clientHeight + 1).length"
    assert browser.execute_script(f"return {over}") == 0
    first = shown_points(browser)[0].find_elements(By.TAG_NAME, "td")[0]
    label = browser.execute_script("return getComputedStyle(arguments[0], '::before').content", first)
    assert (label == '"figure"') is (width < 992)  # a cell that has no heading above it carries its label
    for details in browser.find_elements(By.TAG_NAME, "details")[:2]:
        browser.execute_script("arguments[0].open = true", details)
    root, body = "document.documentElement", "document.body"
    over = f"return Math.max({root}.scrollWidth, {body}.scrollWidth) - {root}.clientWidth"
    assert browser.execute_script(over) == 0
    widest = "return Math.max(...[...document.querySelectorAll('.plot')].map(p => p.clientWidth))"
    assert browser.execute_script(widest) < width
