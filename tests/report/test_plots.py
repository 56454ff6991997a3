"""Plot of the scores: colours, order, the fewest rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medseg.report.plots import score_plot


def score(case: str, region: str, trust: str, dice: float) -> dict[str, str | float]:
    return {"case": case, "region": region, "trust": trust, "dice": dice}


def test_each_region_gets_its_colour_and_a_low_score_lies_low(tmp_path: Path) -> None:
    rows = [score(f"case {i}", "left_lung", "reference", 0.99 - i / 1000) for i in range(6)]
    rows += [score("Doe, John $x_1$", "right_lung", "", 0.2)]
    score_plot(rows, tmp_path / "a.png")
    picture = np.asarray(Image.open(tmp_path / "a.png").convert("RGB")).astype(int)
    is_blue = (picture[..., 2] - picture[..., 0]) > 100
    is_red = (picture[..., 0] - picture[..., 2]) > 100
    assert is_blue.any()
    assert is_red.any()
    blue, red = np.argwhere(is_blue).mean(axis=0), np.argwhere(is_red).mean(axis=0)
    assert blue[0] < picture.shape[0] / 3 < 2 * picture.shape[0] / 3 < red[0]
    assert blue[1] < red[1]


def test_one_perfect_case_is_enough(tmp_path: Path) -> None:
    score_plot([score("a", "heart", "absent", 1.0)], tmp_path / "a.png")
    assert np.ptp(np.asarray(Image.open(tmp_path / "a.png").convert("L"))) > 100


def test_no_row_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        score_plot([], tmp_path / "a.png")
