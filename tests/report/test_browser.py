"""The pages in a real browser: content, sorting, filters, keyboard, colours, no errors."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medseg.commands.report import report
from medseg.config.schema import ReportConfig

from .made_runs import make_evaluation, make_sweep


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of a sweep of fourteen jobs and of an evaluation; each file alone in its folder."""
    folder = make_sweep(tmp_path_factory.mktemp("a sweep (1)"))
    report(ReportConfig(str(folder), None, 24, "6"))
    scores = make_evaluation(tmp_path_factory.mktemp("scores"))
    pages = {}
    for name, written in (("runs", folder), ("cases", scores)):
        alone = tmp_path_factory.mktemp(f"{name} alone ")
        pages[name] = Path(shutil.copy(written / "report.html", alone))
    return pages


@pytest.fixture
def page(chromium: Any, pages: dict[str, Path]) -> Any:
    """The report of the sweep, opened from the file."""
    return opened(chromium, pages["runs"])


@pytest.fixture
def cases(chromium: Any, pages: dict[str, Path]) -> Any:
    """The report of the evaluation."""
    return opened(chromium, pages["cases"])


def opened(browser: Any, path: Path) -> Any:
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.get("about:blank")
    browser.get(path.as_uri())
    wait(
        lambda: browser.execute_script(
            "return [...document.querySelectorAll('.chart')].every((one) => "
            "one.querySelector('svg'))"
        )
    )
    return browser


def wait(is_true: Callable[[], Any]) -> None:
    """Wait at most ten seconds."""
    end_s = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def texts(page: Any, selector: str) -> list[str]:
    found: list[str] = page.execute_script(
        (
            "return [...document.querySelectorAll(arguments[0])].filter((one) => "
            "one.checkVisibility()).map((one) => one.textContent.trim())"
        ),
        selector,
    )
    return found


def dots(page: Any, chart: str) -> list[Any]:
    """Points of the chart with this heading."""
    found: list[Any] = page.execute_script(
        """const figures = [...document.querySelectorAll('.charts figure')];
        const figure = figures.find((one) => one.firstChild.textContent === arguments[0]);
        figure.scrollIntoView({block: 'center'});
        const points = [...figure.querySelectorAll('.mark-symbol path')];
        return points.filter((point) => getComputedStyle(point).opacity !== '0')""",
        chart,
    )
    return found


@pytest.mark.slow
def test_tables_pictures_and_charts_are_there(page: Any) -> None:
    assert page.title.endswith("medseg report")
    assert texts(page, "h2") == [
        "Best setting", "Validation cases, worst first", "Pictures of validation cases",
        "Differences to the baseline", "Settings", "Runs", "Failures",
        "Curves", "What it costs", "Dice by key",
    ]  # fmt: skip
    assert len(texts(page, "section:has(#runs) tbody tr")) == 14
    assert texts(page, "section:has(#settings) tbody tr:first-child td")[:4] == [
        "plain",
        "0.005",
        "1",
        "0.9695 ± 0.0021",
    ]
    assert [text.split()[0] for text in texts(page, ".failures li")] == ["out", "not", "refused"]
    page.execute_script("for (const one of document.images) one.loading = 'eager'")
    wait(
        lambda: page.execute_script(
            "return [...document.images].every((one) => one.complete && one.naturalWidth > 100)"
        )
    )
    assert page.execute_script("return document.images.length") == 10
    heights = page.execute_script(
        "return [...document.querySelectorAll('.chart svg')].map((one) => "
        "one.getBoundingClientRect().height)"
    )
    assert len(heights) == 7
    assert all(height > 150 for height in heights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["runs", "cases"])
def test_nothing_is_requested_and_the_console_is_silent(
    chromium: Any, pages: dict[str, Path], name: str
) -> None:
    chromium.get_log("browser")
    opened(chromium, pages[name])
    loaded = chromium.execute_script(
        "return performance.getEntriesByType('resource').map((one) => one.name)"
    )
    assert all(entry.startswith("data:") for entry in loaded)
    assert chromium.get_log("browser") == []


@pytest.mark.slow
def test_a_click_sorts_and_another_reverses_the_order(page: Any) -> None:
    from selenium.webdriver.common.by import By

    def runs() -> list[int]:
        return [
            int(text.split()[0].rstrip("★")) for text in texts(page, "section:has(#runs) tbody th")
        ]

    (button,) = [
        one
        for one in page.find_elements(By.CSS_SELECTOR, "section:has(#runs) thead button")
        if one.text == "Val Dice"
    ]
    button.click()
    assert (runs()[0], runs()[-1]) == (3, 12), "the lowest Dice first, none at all last"
    button.click()
    assert (runs()[0], runs()[-1]) == (0, 12)
    assert button.find_element(By.XPATH, "..").get_attribute("aria-sort") == "descending"


@pytest.mark.slow
def test_a_setting_is_brought_to_the_front_by_the_keyboard_and_a_picture_enlarged(
    page: Any,
) -> None:
    from selenium.webdriver.common.by import By

    def opacities() -> set[str]:
        lines = (
            "return [...document.querySelectorAll('.charts figure .mark-line path')].map((one) => "
            "getComputedStyle(one).opacity)"
        )
        return set(page.execute_script(lines))

    button = page.find_elements(By.CSS_SELECTOR, ".legend button")[0]
    button.send_keys("\n")
    assert button.get_attribute("aria-pressed") == "true"
    wait(lambda: opacities() == {"0.9", "0.12"})
    button.send_keys("\n")
    assert button.get_attribute("aria-pressed") == "false"
    wait(lambda: opacities() == {"0.9"})
    picture = page.find_element(By.CSS_SELECTOR, ".pictures button")
    before = picture.size["width"]
    picture.send_keys("\n")
    assert picture.size["width"] > 2 * before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["runs", "cases"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1400])
def test_it_fits_narrow_and_wide_light_and_dark(
    chromium: Any, pages: dict[str, Path], name: str, scheme: str, width: int
) -> None:
    chromium.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )
    page = opened(chromium, pages[name])
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    # Until Vega draws a chart anew, the style sheet shrinks the old drawing with its text.
    charts = """return [...document.querySelectorAll('.chart svg')].map((one) => {
      const shown = one.getBoundingClientRect().width;
      const fits = shown <= one.closest('.chart').clientWidth + 1;
      return fits && Math.abs(shown - one.viewBox.baseVal.width) < 2;
    })"""
    wait(lambda: all(page.execute_script(charts)))
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    colour = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in colour.removeprefix("rgb(").rstrip(")").split(",")) / 3
    assert (brightness > 128) == (scheme == "light")
    # Colours of the charts are variables that the browser resolves.
    fills = page.execute_script(
        "return [...document.querySelectorAll('.chart text')].map((one) => "
        "getComputedStyle(one).fill)"
    )
    assert set(fills) == {"rgb(92, 101, 112)" if scheme == "light" else "rgb(154, 164, 176)"}
    # No text of a chart is cut by its edge, and it is as large as on a desktop.
    cut = page.execute_script(
        """const drawings = [...document.querySelectorAll('.chart svg')];
        return drawings.flatMap((svg) => [...svg.querySelectorAll('text')].filter((text) => {
          const [inner, outer] = [text.getBoundingClientRect(), svg.getBoundingClientRect()];
          const leaves = inner.left < outer.left - 1.5 || inner.right > outer.right + 1.5;
          const isSmall = inner.height < 10 && inner.width < 10;
          return leaves || inner.bottom > outer.bottom + 1.5 || isSmall;
        }).map((text) => text.textContent))"""
    )
    assert [text for text in cut if text] == []


@pytest.mark.slow
def test_a_point_tells_its_values_and_leads_to_its_run(page: Any) -> None:
    from selenium.webdriver import ActionChains

    dot = dots(page, "Dice for memory")[0]
    ActionChains(page).move_to_element(dot).perform()
    wait(lambda: texts(page, "#vg-tooltip-element.visible"))
    (told,) = texts(page, "#vg-tooltip-element.visible")
    assert "memory plain, lr 0.005" in told
    assert "0.971" in told
    ActionChains(page).click(dot).perform()
    wait(lambda: page.current_url.endswith("#run-0"))
    assert texts(page, "tr:target th") == ["0 ★best mean"]


@pytest.mark.slow
def test_filters_leave_rows_pictures_and_points(cases: Any) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    assert texts(cases, "tbody tr[data-case] th")[:2] == ["ct_1", "ct_1"], "the worst case first"
    assert len(dots(cases, "Dice by region")) == 6
    cases.find_element(By.NAME, "below").send_keys("0.9")
    wait(lambda: texts(cases, ".filters output") == ["2 of 6 rows"])
    assert set(texts(cases, "tbody tr[data-case] th")) == {"ct_1"}
    assert len(texts(cases, "figure[data-case]")) == 1
    wait(lambda: len(dots(cases, "Dice by region")) == 2)
    cases.find_element(By.NAME, "below").clear()
    cases.find_element(By.NAME, "below").send_keys("2")
    wait(lambda: len(dots(cases, "Dice by region")) == 6)
    cases.find_element(By.NAME, "worse").click()
    wait(lambda: set(texts(cases, "tbody tr[data-case] th")) == {"ct_1"})
    link = cases.find_element(By.CSS_SELECTOR, "tbody tr[data-case] td a")
    link.send_keys("\n")
    wait(lambda: cases.current_url.endswith("#case-0"))
    assert texts(cases, "figure:target b")[0] == "ct_1"
    cases.find_element(By.NAME, "worse").click()
    ActionChains(cases).click(dots(cases, "Volume error")[-1]).perform()
    wait(lambda: cases.current_url.endswith(("#case-1", "#case-2")))


@pytest.mark.slow
def test_charts_have_names_and_labels_for_screen_readers(cases: Any) -> None:
    labels = cases.execute_script(
        "return [...document.querySelectorAll('[role=\"graphics-document\"]')].map((one) => "
        "one.getAttribute('aria-label'))"
    )
    assert len([label for label in labels if "results" in label]) == 3
    assert (
        cases.execute_script(
            "return [...document.querySelectorAll('.mark-symbol path[aria-label]')].length"
        )
        >= 12
    )
    assert all(texts(cases, "caption"))
