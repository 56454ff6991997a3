"""HTML page of the report: well-formed, without other files, with escaped text of users."""

from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

import medseg.report
from medseg.report.compare import Picture, Run, compare
from medseg.report.runs_page import render

EVIL = '<script>alert("x")</script> & "quoted"'


class Outline(HTMLParser):
    """Tags with their attributes; every tag that is opened must be closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def made(tmp_path: Path, count: int) -> list[Run]:
    Image.new("RGB", (1280, 700), "navy").save(tmp_path / "step_000040_0.png")
    history = tuple(
        {
            "step": float(step),
            "loss": 1.0 / step,
            "val_dice": 1 - 1.0 / step,
            "seconds_per_step": 0.1,
        }
        for step in range(2, 40)
    )
    return [
        Run(
            f"run {number} {EVIL}", tmp_path, "failed" if number == 1 else "finished", message=EVIL,
            settings={"task.name": f"{EVIL}{number % 5}", "lr": number, "seed": number % 2,
                "steps": 40},
            summary={"val_dice_best": 0.8 + number / 100, "peak_gib": 1.0 + number, "train_s": 10.0,
                "checkpoint": EVIL},
            history=history,
            pictures=(Picture(tmp_path / "step_000040_0.png", 40, EVIL, {"left": 0.75}),),
        )
        for number in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 3, 24])
def test_the_page_is_well_formed_and_loads_nothing(count: int, tmp_path: Path) -> None:
    page = render(compare(made(tmp_path, count)), None, EVIL, EVIL, 5, pytest.fail)
    outline = Outline(page)
    libraries = re.findall(r"<script>!function.*?</script>", page, flags=re.DOTALL)
    assert len(libraries) == 3
    assert sum(tag == "script" for tag, _ in outline.tags) == 5, (
        "the library of the charts, their data, and the page's own"
    )
    specs = re.findall(
        r'<script type="application/json" id="specs">(.*?)</script>', page, flags=re.DOTALL
    )
    assert len(json.loads(specs[0])) == page.count("data-spec=")
    for tag, attributes in outline.tags:
        for name in ("src", "href", "srcset", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), f"{tag} loads {value}"
    own = page
    for library in libraries:
        own = own.replace(library, "")
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org)", own)
    assert EVIL not in own
    pictures = [attributes for tag, attributes in outline.tags if tag == "img"]
    assert len(pictures) == min(5, count)
    assert page.count("left <b>0.7500</b>") == min(5, count), "Dice in the captions"
    for picture in pictures:
        assert picture["alt"]
        assert (
            Image.open(io.BytesIO(base64.b64decode((picture["src"] or "").partition(",")[2]))).width
            <= 960
        )
    headings = [attributes for tag, attributes in outline.tags if tag == "th"]
    assert headings
    assert all(heading.get("scope") in ("row", "col") for heading in headings)
    assert len(page) < 2_000_000


def test_every_run_is_in_the_table_and_in_the_curves(tmp_path: Path) -> None:
    page = render(compare(made(tmp_path, 24)), None, "t", "f", 0, pytest.fail)
    body = page[page.index('<h2 id="runs">') :]
    assert body[: body.index("</table>")].count("<tr ") == 24
    specs = json.loads(
        page[page.index('id="specs">') + 11 : page.index("</script>", page.index('id="specs">'))]
    )
    assert len({row["run"] for row in specs[0]["data"]["values"]}) == 24
    assert all(f'id="{row["link"][1:]}"' in page for row in specs[0]["data"]["values"])
    assert "broken lines" in page.lower()
    assert '<img src="data:' not in page


def test_a_search_shows_its_space_its_best_trials_and_the_best_so_far(tmp_path: Path) -> None:
    runs = [
        Run(
            str(number),
            tmp_path,
            status,
            settings={"lr": lr},
            overrides={"lr": str(lr)},
            summary={"val_dice_best": dice, "peak_gib": 2.0},
        )
        for number, (lr, dice, status) in enumerate(
            [
                (0.123456789, 0.5, "finished"),
                (0.2, 0.4, "finished"),
                (0.3, 0.9, "pruned"),
                (0.4, 0.6, "finished"),
            ],
        )
    ]  # fmt: skip
    space = {"lr": f"0.1 … 0.5 {EVIL}"}
    study = {
        "name": "mine", "objectives": {"val_dice": "maximize"}, "space": space, "num_trials": 9,
        "best": ["3"], "importances": {"lr": 0.75}
    }  # fmt: skip
    page = render(compare(runs), study, "t", "f", 0, pytest.fail)
    Outline(page)
    section = page[page.index('<h2 id="search">') : page.index('<h2 id="runs">')]
    for text in (
        "mine: 4 of 9 trials",
        "width: 75.0%",
        "Best: trial 3",
        "<td>0.4</td>",
        "<b>0.6000</b>",
        "Val Dice of 3 trials",
    ):
        assert text in section, text
    front = study | {
        "objectives": {"val_dice": "maximize", "peak_gib": "minimize"},
        "best": ["0", "3"],
        "importances": {},
    }
    page = render(compare(runs), front, "t", "f", 0, pytest.fail)
    Outline(page)
    for text in (
        "Front: trial 0",
        "Front: trial 3",
        "<td>0.1235</td>",
        "<b>2.00</b>",
        "less <code>peak_gib</code>",
    ):
        assert text in page, text
    assert "Importance" not in page


def test_a_page_without_a_finished_run_says_so(tmp_path: Path) -> None:
    page = render(
        compare([Run("0", tmp_path, "running"), Run("1", tmp_path, "unfinished")]),
        None,
        "t",
        "f",
        5,
        pytest.fail,
    )
    Outline(page)
    assert "No run has finished yet" in page


def test_a_damaged_picture_is_reported_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "step_000001_0.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n half")
    said: list[str] = []
    page = render(
        compare([Run("0", tmp_path, "finished", pictures=(Picture(path, 1),))]),
        None,
        "t",
        "f",
        5,
        said.append,
    )
    assert "<img" not in page
    assert str(path) in said[0]


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours #rrggbb. Source: WCAG 2.2, relative luminance."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])
def test_colours_of_text_and_marks_have_enough_contrast(scheme: int) -> None:
    css = (Path(medseg.report.__file__).parent / "page" / "page.css").read_text(encoding="utf-8")
    colours = dict(
        re.findall(r"--([\w-]+): (#[0-9a-f]{6})", css.split("@media")[scheme].partition("}")[0])
    )
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    for background in (colours["paper"], colours["card"], colours["hover"]):
        for text in ("ink", "quiet", "accent", "good", "open", "bad"):
            assert contrast(colours[text], background) >= 4.5, text
        for number in range(8):
            assert contrast(colours[f"hue-{number}"], background) >= 3, number
