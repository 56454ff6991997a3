"""Charts of the report: points and links, scales of axes, text of users."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import medseg.report
from medseg.report.charts import (
    Chart,
    by_key,
    case_differences,
    costs,
    curves,
    dice_by_region,
    differences,
    progress,
    volume_errors,
)
from medseg.report.compare import Comparison, Run, compare

EVIL = '<script>alert("x")</script> & "quoted"'
DICES = (0.0, 0.9, 0.95, 0.98, 0.99)


def made(
    values: Sequence[object],
    dices: Sequence[float] = DICES,
    status: str = "finished",
    key: str = "key",
) -> Comparison:
    """Runs that differ in one or two keys."""
    return compare(
        [
            Run(
                f"{EVIL}{number}",
                Path(),
                status,
                settings={key: value, "other": number},
                summary={"val_dice_best": dice, "peak_gib": value},
            )
            for number, (value, dice) in enumerate(zip(values, dices, strict=False))
        ]
    )  # fmt: skip


def curve(
    points: Sequence[tuple[float, float]], column: str = "loss", status: str = "finished"
) -> Chart:
    (chart,) = curves(
        compare(
            [Run("0", Path(), status, history=tuple({"step": x, column: y} for x, y in points))]
        )
    )
    return chart


def rows(chart: Chart) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chart.spec["data"]["values"]
    return found


def axes(chart: Chart) -> tuple[dict[str, Any], dict[str, Any]]:
    encoding = chart.spec["encoding"]
    return encoding["x"], encoding["y"]


def test_a_curve_has_its_points_and_leads_to_its_run() -> None:
    chart = curve([(0, 0.0), (50, 1.0), (100, 0.5)], status="running")
    assert [(row["x"], row["y"]) for row in rows(chart)] == [(0, 0.0), (50, 1.0), (100, 0.5)]
    assert {(row["run"], row["link"], row["colour"], row["finished"]) for row in rows(chart)} == {
        ("0", "#run-0", "var(--s0)", False)
    }
    assert chart.spec["description"] == "Training loss over the optimiser steps of 1 runs"
    assert axes(chart)[0]["scale"].get("type") is None, "steps are counted on a linear axis"


def test_text_of_users_is_data_only() -> None:
    for chart in (*costs(made([1.0, 2.0])), *by_key(made([1, 2, 1, 2, 1]))):
        without = {key: value for key, value in chart.spec.items() if key != "data"}
        assert "alert" not in json.dumps(without)
        assert rows(chart)[0]["run"] == f"{EVIL}0"


def test_long_histories_are_thinned_and_keep_both_ends() -> None:
    points = rows(curve([(float(step), step / 1e4) for step in range(10_001)]))
    assert len(points) == 200
    assert (points[0]["x"], points[-1]["x"]) == (0, 10_000)


def test_a_dice_near_one_is_stretched() -> None:
    chart = costs(made([1.0, 2.0, 3.0, 4.0, 5.0]))[0]
    _, y = axes(chart)
    assert (y["field"], y["scale"]["type"]) == ("error", "log")
    down = [math.log(row["error"]) for row in rows(chart)]
    assert down[1] - down[2] == pytest.approx(down[3] - down[4], abs=0.3), (
        "0.98 is as far from 0.99 as 0.90 from 0.95"
    )
    worst, best = y["scale"]["domain"]
    assert worst == max(row["error"] for row in rows(chart)) == 1.0
    assert best <= min(row["error"] for row in rows(chart))
    ticks = [1 - value for value in y["axis"]["values"]]
    assert {0.0, 0.9, 0.99} <= {round(tick, 6) for tick in ticks}
    assert all(best - 1e-9 <= value <= worst for value in y["axis"]["values"]), (
        "no tick outside the axis"
    )
    low = costs(made([1.0, 2.0, 3.0], [0.2, 0.5, 0.8]))[0]
    assert axes(low)[1]["field"] == "y", "far from 1 the axis is linear"


@pytest.mark.parametrize(
    ("key", "values", "is_log"),
    [
        ("key", [1e-4, 1e-3, 1e-2], True), ("key", [1, 10, 100], True),
        ("key", [1.0, 4.0, 7.0], False), ("key", [0.0, 1.0, 10.0], False),
        ("optimizer.lr", [1e-3, 2e-3, 3e-3], True), ("schedule.max_lr", [1e-3, 2e-3, 3e-3], True),
    ],
)  # fmt: skip
def test_learning_rates_and_several_magnitudes_have_a_logarithmic_axis(
    key: str, values: list[float], is_log: bool
) -> None:
    x, _ = axes(by_key(made([*values, values[0]], [0.5, 0.6, 0.7, 0.8], key=key))[0])
    assert (x["scale"].get("type") == "log") is is_log
    if is_log:
        low, high = x["scale"]["domain"]
        assert low <= min(values) < max(values) <= high
        assert (
            len([tick for tick in x["axis"]["values"] if low <= tick <= high])
            == len(x["axis"]["values"])
            >= 2
        )


def test_names_stand_in_the_order_of_their_appearance_and_counts_have_whole_ticks() -> None:
    chart, other = by_key(made(["plain", "amp" * 30, "plain", "4"], [0.5, 0.6, 0.7, 0.8]))
    x, _ = axes(chart)
    assert (x["type"], x["sort"]) == ("nominal", None)
    assert [row["x"] for row in rows(chart)] == ["plain", "amp" * 30, "plain", "4"]
    assert axes(other)[0]["axis"]["tickMinStep"] == 1


def test_few_results_or_one_key_have_no_chart_by_key() -> None:
    assert by_key(made([1, 2, 3])) == []
    assert by_key(made([1] * 4)) == []
    assert costs(made([1] * 4)) == []
    assert len(costs(made([1.0, 1.0, 2.0]))) == 1
    assert curves(made([1, 2])) == []


def test_the_best_so_far_never_falls() -> None:
    runs = [
        Run(str(n), Path(), "finished", summary={"val_dice_best": dice})
        for n, dice in enumerate((0.5, 0.4, 0.9, 0.6))
    ]
    (chart,) = progress(compare(runs), {"objectives": {"val_dice": "maximize"}})
    assert chart.heading == "Val Dice of 4 trials, and the best so far"
    assert [row["best"]["y"] for row in rows(chart)] == [0.5, 0.5, 0.9, 0.9]
    assert progress(compare(runs[:1]), {"objectives": {"val_dice": "maximize"}}) == []


def test_a_folder_with_a_raised_digit_as_name_is_no_trial() -> None:
    """`"²".isdigit()` is true, but `int("²")` raises an error."""
    runs = [
        Run(name, Path(), "finished", summary={"val_dice_best": 0.5}) for name in ("0", "1", "²")
    ]
    (chart,) = progress(compare(runs), {"objectives": {"val_dice": "maximize"}})
    assert [row["x"] for row in rows(chart)] == [0, 1]


def test_a_loss_that_is_not_finite_leaves_a_gap() -> None:
    assert [
        row["x"] for row in rows(curve([(0, 4.0), (10, 2.0), (20, math.inf), (30, math.nan)]))
    ] == [0, 10]
    assert (
        curves(compare([Run("0", Path(), "finished", history=({"step": 0.0, "loss": math.nan},))]))
        == []
    )


def test_charts_of_cases_lead_to_the_cases_and_follow_the_filters() -> None:
    names = ("a", "b", "c")
    results = [
        {"case": case, "region": "left_lung", "dice": dice, "volume_ref_ml": 2000.0,
            "error_ml": -3.0, "delta": delta, "row": row, "link": f"#case-{row}",
         "colour": "var(--hue-0)"}
        for row, (case, dice,
            delta) in enumerate(zip(names, (0.5, 0.97, 0.99), (0.1, -0.2, 0.0), strict=True))
    ]  # fmt: skip
    for chart in (dice_by_region(results), volume_errors(results), case_differences(results)):
        assert "indexof(shown, datum.row)" in chart.spec["transform"][0]["filter"]
        assert [row["link"] for row in sorted(rows(chart), key=lambda row: row["row"])] == [
            "#case-0",
            "#case-1",
            "#case-2",
        ]
    assert [row["delta"] for row in rows(case_differences(results))] == [-0.2, 0.0, 0.1]
    assert len({row["offset"] for row in rows(dice_by_region(results))}) == 3
    assert differences([], "t") == []
    row = {
        "name": "lr 1",
        "difference": -0.1,
        "ci95_low": None,
        "ci95_high": None,
        "setting": 0,
        "colour": "var(--s0)",
        "cases": 1,
    }
    marks = [
        [layer["mark"]["type"] for layer in chart.spec["layer"]]
        for one in (row, row | {"ci95_low": -0.2, "ci95_high": 0.0})
        for chart in differences([one], "t")
    ]
    assert marks == [["rule", "point"], ["rule", "rule", "point"]], "a single case has no interval"


def test_bundled_scripts_are_the_published_ones() -> None:
    folder = Path(medseg.report.__file__).parent / "page" / "vega"
    sums = dict(
        line.split("  ")[::-1]
        for line in (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    )
    assert sorted(sums) == sorted(path.name for path in folder.glob("*.js"))
    for name, checksum in sums.items():
        source = (folder / name).read_bytes()
        assert hashlib.sha256(source).hexdigest() == checksum
        assert b"</script" not in source.lower()
    assert "University of Washington" in (folder / "LICENSE.txt").read_text(encoding="utf-8")
