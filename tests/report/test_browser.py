"""The report page in a real browser: tables, charts, pictures, sorting, hover, both colour schemes, no errors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from medseg.commands.report import report
from medseg.config.schema import ReportConfig

from .made_runs import make_sweep

ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--window-size=1280,900",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium without a window, with the driver of its own version."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver_program = shutil.which("chromedriver")
    if program is None or driver_program is None:
        pytest.skip("no Chromium with its chromedriver here (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in (*ARGUMENTS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_program))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The report of a sweep of fourteen jobs, opened from the file."""
    folder = make_sweep(tmp_path_factory.mktemp("a sweep (1)"))
    report(ReportConfig(str(folder), None, 24))
    for path in [path for path in folder.iterdir() if path.name != "report.html"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()  # whole in itself
    browser.get((folder / "report.html").as_uri())
    return browser


def texts(page: Any, selector: str) -> list[str]:
    found: list[str] = page.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent.trim())", selector
    )
    return found


@pytest.mark.slow
def test_tables_pictures_and_charts_are_there(page: Any) -> None:
    assert page.title == "a sweep (1)0 · medseg report"
    assert texts(page, "h2") == [
        "Best setting", "Settings", "Runs", "Failures", "Curves", "What it costs", "Dice by key", "Validation cases",
    ]  # fmt: skip
    assert len(texts(page, "section:has(#runs) tbody tr")) == 14
    assert texts(page, "section:has(#settings) tbody tr:first-child td")[:4] == ["plain", "0.005", "1", "0.9695 ± 0.0021"]
    assert [text.split()[0] for text in texts(page, ".failures li")] == ["out", "not", "refused"]
    widths = page.execute_script("return [...document.images].map((one) => one.complete && one.naturalWidth)")
    assert len(widths) == 10
    assert all(width > 100 for width in widths)
    assert page.execute_script("return document.querySelectorAll('svg.chart').length") == 6
    heights = page.execute_script(
        "return [...document.querySelectorAll('svg.chart')].map((one) => one.getBoundingClientRect().height)"
    )
    assert all(height > 150 for height in heights)
    loaded = page.execute_script("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert all(name.startswith("data:") for name in loaded)


@pytest.mark.slow
def test_a_click_sorts_and_another_reverses_the_order(page: Any) -> None:
    from selenium.webdriver.common.by import By

    def runs() -> list[int]:
        return [int(text.split()[0]) for text in texts(page, "section:has(#runs) tbody th")]

    (button,) = [one for one in page.find_elements(By.CSS_SELECTOR, "section:has(#runs) thead button") if one.text == "Val Dice"]
    button.click()
    assert (runs()[0], runs()[-1]) == (3, 12), "the lowest Dice first, none at all last"
    button.click()
    assert (runs()[0], runs()[-1]) == (0, 12)
    assert button.find_element(By.XPATH, "..").get_attribute("aria-sort") == "descending"


@pytest.mark.slow
def test_a_setting_is_brought_to_the_front_and_a_picture_enlarged(page: Any) -> None:
    from selenium.webdriver.common.by import By

    button = page.find_elements(By.CSS_SELECTOR, ".legend button")[0]
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    lit = page.execute_script("return document.querySelectorAll('figure:first-child .mark.lit').length")
    assert lit > 0
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    picture = page.find_element(By.CSS_SELECTOR, ".pictures button")
    before = picture.size["width"]
    page.execute_script("arguments[0].click()", picture)
    assert picture.size["width"] > 2 * before


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_narrow_and_wide_light_and_dark(page: Any, scheme: str, width: int) -> None:
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    colour = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in colour.removeprefix("rgb(").rstrip(")").split(",")) / 3
    assert (brightness > 128) == (scheme == "light")


@pytest.mark.slow
@pytest.mark.parametrize("figure", [0, 2])
def test_the_pointer_meets_a_line_and_a_dot_with_the_name_of_their_run(page: Any, figure: int) -> None:
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    name = page.execute_script(
        """
        const mark = document.querySelectorAll('.charts figure')[arguments[0]].querySelector('.mark use');
        mark.scrollIntoView({block: 'center'});
        const box = mark.getBoundingClientRect();
        const met = document.elementFromPoint((box.left + box.right) / 2 - 4, (box.top + box.bottom) / 2);
        return met.closest('.series').querySelector('title').textContent;
        """,
        figure,
    )
    run, _, figures = name.partition(" · memory plain, lr 0.005")
    assert run.isdigit()
    assert "0.9" in figures


@pytest.mark.slow
def test_the_console_is_silent(page: Any) -> None:
    assert page.get_log("browser") == []
