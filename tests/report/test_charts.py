"""Charts of the report: places of points, scales of axes, escaped text of users."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from medseg.report.charts import by_key, costs, curves, draw, progress
from medseg.report.compare import Comparison, Run, compare

EVIL = '<script>alert("x")</script> & "quoted" #030303 <g id="mark-0">'
DICES = (0.0, 0.9, 0.95, 0.98, 0.99)


def made(values: Sequence[object], dices: Sequence[float] = DICES, status: str = "finished") -> Comparison:
    """Runs that differ in one or two keys."""
    return compare(
        [
            Run(f"{EVIL}{number}", Path(), status, settings={"key": value, "other": number}, summary={"val_dice_best": dice, "peak_gib": value})
            for number, (value, dice) in enumerate(zip(values, dices, strict=False))
        ]
    )  # fmt: skip


def marks(svg: str) -> list[ElementTree.Element]:
    """The drawn series."""
    return [group for group in ElementTree.fromstring(svg).iter() if "mark" in group.get("class", "").split()]


def dots(svg: str) -> list[tuple[float, float]]:
    """Places (right, down) of the dots of a drawing, a dot per series."""
    return [
        (float(dot.get("x", "")), float(dot.get("y", "")))
        for mark in marks(svg)
        for dot in mark.iter()
        if dot.tag.endswith("}use")
    ]


def line(svg: str) -> list[tuple[float, float]]:
    """Corners (right, down) of the first line of a drawing."""
    path = next(path for path in marks(svg)[0].iter() if path.tag.endswith("}path"))
    words = path.get("d", "").replace("M", " ").replace("L", " ").split()
    return list(zip(map(float, words[::2]), map(float, words[1::2]), strict=True))


def draw_line(points: Sequence[tuple[float, float]], y_title: str = "loss", status: str = "finished") -> str:
    return draw(made([1], status=status), {0: points}, EVIL, "step", y_title, is_line=True)


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter() if text.tag.endswith("}text")]


def test_a_line_runs_through_its_points_and_its_end_is_marked() -> None:
    svg = draw_line([(0, 0.0), (50, 1.0), (100, 0.5)])
    left, middle, right = line(svg)
    assert middle[0] == pytest.approx((left[0] + right[0]) / 2)
    assert right[1] == pytest.approx((left[1] + middle[1]) / 2)
    assert middle[1] < left[1], "more is higher"
    assert dots(svg)[0] == pytest.approx(right, abs=0.01)
    assert "dasharray" not in svg
    assert "dasharray" in draw_line([(0, 0.0), (50, 1.0)], status="running")


def test_text_of_users_stays_text_and_colours_are_those_of_the_page() -> None:
    svg = draw_line([(0, 0.5), (3, 0.25)])
    drawing = ElementTree.fromstring(svg)
    assert (drawing.get("role"), drawing.get("aria-label")) == ("img", EVIL)
    (mark,) = marks(svg)
    assert mark.get("class") == "series mark s0"
    assert mark[0].text == f"{EVIL}0: 0.25"
    assert "stroke: var(--c)" in svg
    assert {"0.25", "0.50", "step", "loss"} <= set(texts(svg))
    assert "http" not in svg.replace("http://www.w3.org/", "")


def test_long_histories_are_thinned_and_keep_their_end() -> None:
    svg = draw_line([(float(step), step / 1e4) for step in range(10_001)])
    assert len(svg) < 20_000
    assert line(svg)[-1][0] == max(right for right, _ in line(svg))
    assert dots(svg)[0] == pytest.approx(line(svg)[-1], abs=0.01)


def test_a_dice_near_one_is_stretched() -> None:
    svg = draw(made(range(5)), {n: [(n, dice)] for n, dice in enumerate(DICES)}, "t", "x")
    down = [place[1] for place in dots(svg)]
    assert down == sorted(down, reverse=True)
    assert down[1] - down[2] == pytest.approx(down[3] - down[4], rel=1e-3)
    assert {"0", "0.9", "0.99"} <= set(texts(svg))
    low = draw(made([1, 2, 3], [0.2, 0.5, 0.8]), {n: [(n, dice)] for n, dice in enumerate((0.2, 0.5, 0.8))}, "t", "x")
    down = [place[1] for place in dots(low)]
    assert down[0] - down[1] == pytest.approx(down[1] - down[2]), "far from 1 the axis is even"
    assert all(float(text) <= 1 for text in texts(draw_line([(1, 0.8875)], "validation Dice"))[1:-1] if text[0] == "0")


@pytest.mark.parametrize(("values", "is_even"), [([1e-4, 1e-3, 1e-2], False), ([1, 10, 100], False), ([1.0, 4.0, 7.0], True)])
def test_an_axis_of_several_magnitudes_is_logarithmic(values: list[float], is_even: bool) -> None:
    (_, svg), _ = by_key(made([*values, values[0]], [0.5, 0.6, 0.7, 0.8]))
    right = [place[0] for place in dots(svg)]
    assert right[1] - right[0] == pytest.approx(right[2] - right[1])
    assert right[3] == right[0]
    assert ("1" in texts(svg) or is_even) or "0.001" in texts(svg)


def test_names_stand_in_the_order_of_their_appearance_and_counts_have_whole_ticks() -> None:
    (_, svg), (_, other) = by_key(made(["plain", "amp" * 30, "plain", "4"], [0.5, 0.6, 0.7, 0.8]))
    right = [place[0] for place in dots(svg)]
    assert right[0] == right[2] < right[1] < right[3]
    assert right[1] - right[0] == pytest.approx(right[3] - right[1])
    assert [text for text in texts(svg) if text in ("plain", "4")] == ["plain", "4"]
    assert any(text.startswith("ampamp") and text.endswith("…") for text in texts(svg))
    assert [text for text in texts(other) if "." not in text and text.isdigit()] == ["0", "1", "2", "3"]


def test_few_results_or_one_key_have_no_chart_by_key() -> None:
    assert by_key(made([1, 2, 3])) == []
    assert by_key(made([1] * 4)) == []
    assert costs(made([1] * 4)) == []
    assert len(costs(made([1.0, 1.0, 2.0]))) == 1
    assert curves(made([1, 2])) == []


def test_the_best_so_far_never_falls() -> None:
    runs = [Run(str(n), Path(), "finished", summary={"val_dice_best": dice}) for n, dice in enumerate((0.5, 0.4, 0.9, 0.6))]
    ((heading, svg),) = progress(compare(runs), {"objectives": {"val_dice": "maximize"}})
    assert heading == "Val Dice of 4 trials, and the best so far"
    (best,) = (group for group in ElementTree.fromstring(svg).iter() if group.get("id") == "best")
    words = best[0].get("d", "").replace("M", " ").replace("L", " ").split()
    down = [float(word) for word in words[1::2]]
    assert down == sorted(down, reverse=True)
    assert len(set(down)) == 2
    assert progress(compare(runs[:1]), {"objectives": {"val_dice": "maximize"}}) == []


def test_a_loss_that_is_not_finite_leaves_a_gap() -> None:
    nan, inf = float("nan"), float("inf")
    svg = draw_line([(0, 4.0), (10, 2.0), (20, inf), (30, nan)])
    assert len(line(svg)) == 2
    assert line(svg)[1][1] > line(svg)[0][1]
    assert len(marks(draw_line([(0, nan)]))) == 1
