"""Plot of the scores: colours, order, the fewest rows."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from medseg.report import plots
from medseg.report.plots import Panel, draw_lr_range, draw_panels, score_plot


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


def test_names_with_dollars_are_no_formulas(tmp_path: Path) -> None:
    broken = r"$\frac$"
    panels = [Panel(broken, f"{{:.1f}} {broken}", [1.0])]
    draw_panels([broken], panels, broken, tmp_path / "a.png")
    score_plot([score("a", broken, "", 0.5)], tmp_path / "b.png")


def test_a_name_that_is_not_utf8_is_drawn_as_codes(tmp_path: Path) -> None:
    name = "M\udcfcller"
    score_plot([score(name, "heart", "", 0.5)], tmp_path / "a.png")
    draw_lr_range([0.1, 0.2], [1.0, 0.5], [1.0, 0.5], 0.1, name, tmp_path / "b.png")
    draw_lr_range([0.1, 0.2], [1.0, 0.5], [1.0, 0.5], 0.1, "M\\udcfcller", tmp_path / "c.png")
    assert (tmp_path / "a.png").is_file()
    assert (tmp_path / "b.png").read_bytes() == (tmp_path / "c.png").read_bytes()


def test_letters_that_the_font_lacks_cause_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        score_plot([score("患者 1", "heart", "", 0.5)], tmp_path / "a.png")
    assert not caught


def test_one_perfect_case_is_enough(tmp_path: Path) -> None:
    score_plot([score("a", "heart", "absent", 1.0)], tmp_path / "a.png")
    assert np.ptp(np.asarray(Image.open(tmp_path / "a.png").convert("L"))) > 100


@pytest.mark.parametrize(
    ("losses", "is_last_shown"),
    [
        ([1.0, 0.6, 0.4], True),
        ([-0.2, -0.5, -0.8], True),
        ([0.0, 0.0, 0.0], True),
        ([1.0, 1.2, 1.4], True),
        ([1.0, 0.5, 90.0], False),
        ([-0.2, -0.4, 90.0], False),
    ],
)
def test_only_a_loss_that_exploded_lies_beyond_the_plot(
    losses: list[float], is_last_shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plots, "write_png", lambda figure, _: figures.append(figure))
    draw_lr_range([1e-3, 1e-2, 1e-1], losses, losses, 1e-2, "test", tmp_path / "a.png")
    low, high = figures[0].axes[0].get_ylim()
    assert all(low < loss < high for loss in losses[:-1])
    assert bool(low < losses[-1] < high) is is_last_shown
    assert high - low < 5


def test_no_row_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        score_plot([], tmp_path / "a.png")
