"""Comparison of spacing strategies: means by slice thickness, and the tables."""

from __future__ import annotations

import math

from medseg.report.spacings import ALL, Strategy, markdown, means_of, prediction_costs

COST = {
    "spacing": "1×1×1", "saved_bytes_per_voxel": 300.0, "step_peak_mib": 900.0,
    "whole_peak_mib": 2000.0, "step_s": 0.5, "train_s": 60.0,
}  # fmt: skip


def score(
    case: str,
    slice_mm: float,
    dice: float,
    *,
    region: str = "left_lung",
    trust: str = "reference",
    hd95_mm: float = 2.0,
) -> dict:
    return {
        "case": case, "slice_mm": slice_mm, "region": region, "trust": trust, "dice": dice,
        "nsd_1mm": dice / 2, "nsd_2mm": dice,
        "hd95_mm": hd95_mm, "predict_s": 4.0, "predict_peak_gb": 1.5,
    }  # fmt: skip


FINE = Strategy(
    "fine",
    {"coarse": COST, "fine": COST},
    [
        score("thin", 0.8, 0.9),
        score("thin", 0.8, 0.8, region="right_lung", hd95_mm=math.inf),
        score("thin", 0.8, 0.7, region="heart", hd95_mm=4.0),
        score("thick", 8.0, 0.6),
        score("thick", 8.0, 0.1, region="right_lung", trust="approximate"),
    ],
    {},
)
ROUGH = Strategy(
    "rough",
    {"coarse": COST, "fine": COST},
    [score("thin", 0.8, 0.5), score("thick", 8.0, 0.95)],
    {"x|y": "no prediction"},
)


def test_means_of_a_class_leave_out_regions_without_a_sure_reference() -> None:
    means = means_of(FINE)
    assert list(means) == ["≤ 1.5 mm", "> 3 mm", ALL]
    thin, thick, every = means.values()
    assert (thin["number"], thin["hd95_mm"]) == (3, 4.0)
    assert math.isclose(thin["dice"], 0.8)
    assert (thick["number"], thick["dice"]) == (1, 0.6)
    assert (every["number"], every["dice"]) == (4, 0.75)


def test_markdown_names_the_best_of_each_class_missing_cases_and_failures() -> None:
    text = markdown([FINE, Strategy("huge", {}, [], {}, "out of memory"), ROUGH])
    assert "* ≤ 1.5 mm: fine has the best mean Dice, 0.8000 over 3 regions" in text
    assert "* > 3 mm: rough has the best mean Dice, 0.9500 over 1 regions" in text
    assert "1.5–3 mm" not in text, "no case has such slices"
    assert "* rough: no result of x|y (no prediction)" in text
    assert "* huge: failed, out of memory" in text
    assert (
        "| fine | 0.8000 / 0.400 / 4.0 | 0.6000 / 0.300 / 2.0 | 0.7500 / 0.375 / 3.0 | 4.0 | 1.50 |"
        in text
    )
    lines = text.splitlines()
    assert lines.index(
        "| thin | 0.8 | right_lung | reference | 0.8000 / none | none |"
    ) < lines.index("| thick | 8 | right_lung | approximate | 0.1000 / 2.0 | none |")
    assert (
        markdown([Strategy("huge", {}, [], {}, "out of memory")])
        == "* huge: failed, out of memory\n"
    )


def test_the_best_row_is_judged_by_patients() -> None:
    """Six scans of two patients: as independent cases their difference would be established."""
    scans = {f"{patient}_{scan}": patient for patient in "ab" for scan in range(3)}
    gains = {"a": 0.03, "b": 0.01}
    low = Strategy("low", {}, [score(case, 0.8, 0.8) for case in scans], {})
    high = Strategy(
        "high", {}, [score(case, 0.8, 0.8 + gains[patient]) for case, patient in scans.items()], {}
    )
    best = "* all: high has the best mean Dice, 0.8200 over 6 regions"
    assert f"{best}\n" in markdown([low, high])
    assert f"{best}; not established against low (paired t-test over the patients)\n" in markdown(
        [low, high], scans
    )


def test_every_pair_of_rows_counts_as_a_comparison() -> None:
    """Three rows make three pairs: p = 0.020 is below a half of 0.05, and above a third of it."""
    gains = {"a": 0.03, "b": 0.022, "c": 0.0185}
    rows = [
        Strategy(name, {}, [score(case, 0.8, 0.8) for case in gains], {})
        for name in ("low", "same")
    ]
    high = Strategy("high", {}, [score(case, 0.8, 0.8 + gain) for case, gain in gains.items()], {})
    best = "* all: high has the best mean Dice, 0.8235 over 3 regions"
    assert f"{best}\n" in markdown([rows[0], high])
    assert f"{best}; not established against low, same" in markdown([*rows, high])


def test_the_costs_of_a_row_are_mean_seconds_and_the_largest_peak_of_its_cases() -> None:
    scores = [
        {**score(case, 1.0, 0.9, region=region), "predict_s": seconds, "predict_peak_gb": peak_gb}
        for case, seconds, peak_gb in (("a", 2.0, 0.5), ("b", 6.0, 2.5), ("c", 1.0, 0.75))
        for region in ("left_lung", "right_lung")[: 1 + (case == "b")]
    ]
    assert prediction_costs(Strategy("row", {}, scores, {})) == (3.0, 2.5)
    assert all(map(math.isnan, prediction_costs(Strategy("row", {}, [], {}))))
