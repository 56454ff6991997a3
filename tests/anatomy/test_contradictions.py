"""Contradictions of two stages: which regions are removed, doubted or kept, at the bounds too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from medseg.anatomy.contradictions import remove_contradictions
from medseg.anatomy.rules import MIN_AGREEMENT, MIN_DOUBTFUL_SHARE, USUAL_AGREEMENT
from medseg.task import Channel, Region, Task

TASK = Task(
    "lungs",
    {"left_lung": 1, "right_lung": 2},
    (Region("left_lung", ("left_lung",), "left"), Region("right_lung", ("right_lung",), "right")),
    (Channel(),),
)
LEAST_ML = 1000.0
TINY_ML = MIN_DOUBTFUL_SHARE * LEAST_ML
BOUNDED = replace(TASK, volume_ml={"left_lung": (LEAST_ML, 5000.0)})


def two_regions() -> np.ndarray:
    labels = np.zeros((2, 3, 4), dtype=np.uint8)
    labels[:, :, :2], labels[:, :, 3:] = 1, 2
    return labels


@pytest.mark.parametrize(
    ("dice", "volume_ml", "outcome"),
    [
        (1.0, 3000.0, "kept"),
        (USUAL_AGREEMENT, 3000.0, "kept"),
        (USUAL_AGREEMENT, 0.1 * TINY_ML, "kept"),
        (USUAL_AGREEMENT - 1e-6, 3000.0, "doubted"),
        (USUAL_AGREEMENT - 1e-6, TINY_ML, "doubted"),
        (USUAL_AGREEMENT - 1e-6, TINY_ML - 1e-6, "removed"),
        (MIN_AGREEMENT, 3000.0, "doubted"),
        (MIN_AGREEMENT - 1e-6, 3000.0, "removed"),
    ],
)
def test_a_region_is_kept_doubted_or_removed_by_its_agreement_and_its_volume(
    dice: float, volume_ml: float, outcome: str
) -> None:
    labels = two_regions()
    volumes_ml = {"left_lung": volume_ml, "right_lung": 2500.0}
    absent, warnings = remove_contradictions(
        labels, BOUNDED, volumes_ml, {"left_lung": dice, "right_lung": 1.0}
    )
    is_removed = outcome == "removed"
    assert absent == ["left_lung"] * is_removed
    assert volumes_ml == {"left_lung": volume_ml * (not is_removed), "right_lung": 2500.0}
    expected = two_regions()
    if is_removed:
        expected[expected == 1] = 0
    assert np.array_equal(labels, expected)
    assert len(warnings) == (outcome != "kept")
    if outcome == "doubted":
        assert warnings[0].startswith("left_lung: the two stages agree only to a Dice of ")
    elif is_removed:
        assert warnings[0].startswith(f"no left_lung found: the {volume_ml:.0f} ml of the fine ")


def test_a_region_without_a_range_is_never_tiny_and_an_empty_one_keeps_its_box() -> None:
    labels = two_regions()
    volumes_ml = {"left_lung": 0.0, "right_lung": 0.001}
    agreements = {"left_lung": 0.5, "right_lung": 0.5}
    absent, warnings = remove_contradictions(labels, BOUNDED, volumes_ml, agreements)
    assert absent == [], "the user sees where nothing was found"
    assert [warning.split(":")[0] for warning in warnings] == ["left_lung is empty", "right_lung"]
    assert remove_contradictions(labels, BOUNDED, volumes_ml, {}) == ([], []), "not segmented"
    assert np.array_equal(labels, two_regions())


def test_a_label_of_a_trusted_region_stays_when_another_one_of_its_regions_is_removed() -> None:
    both = Region("lungs", ("left_lung", "right_lung"))
    task = replace(TASK, regions=(both, TASK.regions[0]))
    labels = two_regions()
    volumes_ml = {"left_lung": 2000.0, "right_lung": 2500.0}
    absent, (warning,) = remove_contradictions(
        labels, task, volumes_ml, {"lungs": 0.0, "left_lung": 0.9}
    )
    assert absent == ["lungs"]
    assert warning.startswith("no lungs found: the 4500 ml of the fine stage")
    assert volumes_ml == {"left_lung": 2000.0, "right_lung": 0.0}
    assert np.array_equal(labels, two_regions() * (two_regions() == 1))
