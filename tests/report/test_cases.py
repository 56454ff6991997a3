"""Page of an evaluation: order of cases, links, differences, volumes of errors."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from medseg.report.cases import Files, render_cases, worst_first

from .test_runs_page import EVIL, Outline


def score(
    case: str, region: str, dice: float, pred_ml: float = 100.0, ref_ml: float = 100.0, **more: Any
) -> dict[str, Any]:
    scores = {
        "dice": dice,
        "nsd_1mm": dice,
        "nsd_2mm": dice,
        "hd95_mm": math.inf if dice == 0 else 2.0,
    }
    return {
        "case": case,
        "region": region,
        "trust": "",
        **scores,
        "volume_pred_ml": pred_ml,
        "volume_ref_ml": ref_ml,
        **more,
    }


def render(
    rows: list[dict[str, Any]],
    files: dict[str, Files] | None = None,
    num_pictures: int = 5,
    **given: Any,
) -> str:
    arguments: dict[str, Any] = {
        "notes": {},
        "costs": (),
        "baseline": "",
        "baseline_dices": {},
        "compared": (),
        **given,
    }
    files = {row["case"]: Files(None, "", "") for row in rows} | (files or {})
    page = render_cases(rows, [], files, EVIL, EVIL, num_pictures, pytest.fail, **arguments)
    Outline(page)
    return page


def test_the_worst_case_comes_first_and_a_dice_leads_to_its_picture(tmp_path: Path) -> None:
    Image.new("RGB", (1280, 700), "navy").save(tmp_path / "a.png")
    files = {
        name: Files(tmp_path / "a.png", f"overlays/{name}.png", viewer)
        for name, viewer in (("good", ""), ("bad", "../pred/bad.html"), (EVIL, ""))
    }
    rows = [
        score("good", "left", 0.99),
        score("good", "right", 0.98),
        score("bad", "left", 0.97),
        score("bad", "right", 0.0),
        score(EVIL, "left", 0.9),
    ]
    page = render(rows, files, num_pictures=2)
    order = re.findall(r'<tr data-case="([^"]*)" data-region="(\w+)"', page)
    assert [region for _, region in order] == ["right", "left", "left", "right", "left"]
    assert order[0][0] == order[2][0] == "bad"
    figures = re.findall(
        r'<figure id="(case-\d)" data-case="([^"]*)">(.*?)</figure>', page, flags=re.DOTALL
    )
    assert [(identity, name) for identity, name, _ in figures][::2] == [
        ("case-0", "bad"),
        ("case-2", "good"),
    ]
    assert [text.count("<img ") for _, _, text in figures] == [1, 1, 0], (
        "the worst cases have their pictures inside the page"
    )
    assert '<a href="overlays/good.png">' in figures[2][2]
    assert ['href="../pred/bad.html"' in text for _, _, text in figures] == [True, False, False]
    for identity in ("case-0", "case-1", "case-2"):
        assert f'<a href="#{identity}">' in page
    assert EVIL not in page


def test_the_volumes_of_a_small_lesion_are_not_0() -> None:
    page = render([score("a", "lesion", 0.5, pred_ml=0.031, ref_ml=0.042)])
    assert ">0.031</td>" in page
    assert ">0.042</td>" in page


def test_of_equal_overlap_the_larger_distance_is_worse_and_a_case_has_its_worst_region() -> None:
    rows = [
        score("near", "left", 0.8, hd95_mm=2.0),
        score("far", "left", 0.8, hd95_mm=9.0),
        score("missed", "left", 0.99),
        score("missed", "right", 0.0),
        score("good", "left", 0.9),
        score("good", "right", 0.81, hd95_mm=50.0),
    ]
    assert worst_first(rows) == ["missed", "far", "near", "good"]


def test_missed_and_extra_volumes_follow_from_dice_and_volumes() -> None:
    """80 ml in common of 100 ml predicted and 90 ml in the reference."""
    page = render([score("a", "left", 2 * 80 / 190, 100.0, 90.0), score("b", "left", 1.0)])
    assert "missed 10.0 ml" in page
    assert "extra 20.0 ml" in page
    assert page.count("</span>missed") == 1 + 1, "once in the key, once in the caption"


def test_filters_offer_what_differs_and_a_baseline_adds_its_column() -> None:
    rows = [
        score("a", "left", 0.9, trust="sure"),
        score("a", "right", 0.8),
        score("b", "left", 0.7, trust="weak"),
    ]
    page = render(rows)
    assert re.findall(r'<(?:select|input)[^>]* name="(\w+)"', page) == [
        "case",
        "region",
        "trust",
        "below",
    ]
    assert "data-delta" not in page.partition("<script")[0]
    page = render(rows, baseline="old", baseline_dices={("a", "left"): 0.95, ("a", "right"): 0.75})
    assert 'name="worse"' in page
    assert re.findall(r'data-delta="([^"]+)"', page) == ["0.05", "-0.05"]


def test_notes_are_shown_where_there_are_any() -> None:
    page = render(
        [score("a", "left", 0.9)],
        notes={"Failed": [f"b: {EVIL}"], "Warnings": []},
        costs=[("seconds a case", "7.5")],
    )
    assert "<h2>Failed</h2>" in page
    assert "<h2>Warnings</h2>" not in page
    assert "<dd>7.5</dd>" in page


def test_scores_that_are_not_finite_are_none() -> None:
    page = render([score("a", "left", 0.0, jaccard=math.nan)])
    assert 'data-order="Infinity">none' in page
    assert 'data-order="">none' in page
