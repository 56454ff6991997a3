"""Page over a batch: order, words, links; in a browser filters, pictures and 200 scans."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from medseg.io.label_table import Structure
from medseg.report.contact_sheet import Card, worst_first, write_contact_sheet

TABLE = [Structure("left_lung", 1, "#38bdf8"), Structure("right_lung", 2, "#fb923c")]


def card(name: str, status: str = "ok", agreement: float | None = 0.98, **changes: Any) -> Card:
    values: dict[str, Any] = {
        "name": name,
        "status": status,
        "patient": f"P-{name}",
        "date": "2024-01-31",
        "volumes_ml": {"total": 3756.75, "left_lung": 1762.25, "right_lung": 1994.5},
        "warnings": [],
        "information": [],
        "codes": [],
        "least_agreement": agreement,
        "bound": "",
        "preview": f"{name}.preview.png",
        "viewer": f"{name}.html",
    }
    return Card(**(values | changes))


FAILED = card(
    "f", "failed", None, volumes_ml={"total": None}, preview="", viewer="", warnings=["<damaged>"]
)
CARDS = [
    card("fine"),
    card("less sure", agreement=0.9),
    card("cut", "warnings", 0.95, warnings=["it is cut"], codes=["cut_region"]),
    card("empty", "warnings", None, warnings=["nothing found"], codes=["empty_result"]),
    card("two", "warnings", 0.95, warnings=["it is cut", "look"], codes=["cut_region", "reading"]),
    card("offset", "not_hu", 0.99, warnings=["no HU"], codes=["hu_offset"]),
    FAILED,
]


def test_the_worst_scan_comes_first() -> None:
    names = [entry.name for entry in worst_first(CARDS)]
    assert names == ["f", "offset", "empty", "two", "cut", "less sure", "fine"]


def test_words_are_escaped_and_links_lead_to_files_beside_the_page(tmp_path: Path) -> None:
    odd = card("a#1 ü: 50%?", preview="a#1 ü: 50%?.preview.png", viewer="")
    write_contact_sheet(tmp_path / "index.html", [*CARDS, odd], TABLE)
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert page.count('<li class="card"') == len(CARDS) + 1
    assert "<li>&lt;damaged&gt;</li>" in page
    assert 'src="./a%231%20%C3%BC%3A%2050%25%3F.preview.png"' in page
    assert page.count("a%231%20%C3%BC%3A%2050%25%3F.html") == 0
    addresses = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(address.startswith(("./", "data:", "summary.")) for address in addresses), addresses
    assert "cut region (2)" in page


def test_a_small_lesion_has_a_volume(tmp_path: Path) -> None:
    small = card("s", volumes_ml={"total": 1762.25, "left_lung": 1761.9, "right_lung": 0.312})
    write_contact_sheet(tmp_path / "index.html", [small], TABLE)
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "right lung 0.31 ml" in page
    assert "total 1762 ml" in page


def test_a_batch_without_pictures_says_how_to_get_them(tmp_path: Path) -> None:
    write_contact_sheet(tmp_path / "index.html", [card("a", preview="", viewer="")], TABLE)
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "save=[labels,preview,viewer]" in page
    assert "<img" not in page


@pytest.mark.thorough
@pytest.mark.slow
def test_two_hundred_scans_are_filtered_and_sorted_in_a_browser(
    chromium: Any, tmp_path: Path
) -> None:
    many = [*CARDS, *(card(f"scan {number:03d}", agreement=0.99) for number in range(193))]
    for entry in many:
        if entry.preview:
            Image.new("RGB", (1280, 560), "#446").save(tmp_path / entry.preview)
    write_contact_sheet(tmp_path / "index.html", many, TABLE)
    for log in ("browser", "performance"):
        chromium.get_log(log)
    for width in (1280, 390):
        metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        chromium.get((tmp_path / "index.html").as_uri())
        assert chromium.execute_script("return document.documentElement.scrollWidth") <= width
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def choose(name: str, value: str) -> list[str]:
        names: list[str] = chromium.execute_script(
            """const field = document.querySelector(`.choose [name=${arguments[0]}]`);
            field.value = arguments[1];
            field.dispatchEvent(new Event('input', {bubbles: true}));
            return [...document.querySelectorAll('.card')]
                .filter((one) => !one.hidden).map((one) => one.dataset.name)""",
            name,
            value,
        )
        return names

    shown = choose("part", "")
    assert len(shown) == 200
    assert shown[:5] == ["f", "offset", "empty", "two", "cut"]
    assert choose("code", "cut_region") == ["two", "cut"]
    assert choose("part", "p-two 2024") == ["two"]
    assert choose("code", "") == ["two"]
    choose("part", "")
    assert choose("status", "failed") == ["f"]
    choose("status", "")
    assert choose("order", "name")[:3] == ["cut", "empty", "f"]
    assert choose("order", "volume")[-1] == "f", "without a volume"
    end_s = time.monotonic() + 20
    while not chromium.execute_script("return document.images[0].naturalWidth"):
        assert time.monotonic() < end_s, "the first picture is not drawn"
        time.sleep(0.2)
    messages = chromium.get_log("browser")
    assert [message for message in messages if message["level"] == "SEVERE"] == []
