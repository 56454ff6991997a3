"""References of a case table that are no label maps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from layouts import blocks, make_totalsegmentator, save

from medseg.data.case_table import Case
from medseg.evaluation.matching import Reference, read_pair
from medseg.task import Channel, Region, Task


def test_a_prediction_is_compared_with_a_folder_of_masks(tmp_path: Path) -> None:
    folder = make_totalsegmentator(tmp_path / "data") / "s0001"
    regions = (
        Region("left_lung", ("left_lung",), "left"),
        Region("right_lung", ("right_lung",), "right"),
    )
    task = Task(
        "lungs", {"left_lung": 1, "right_lung": 2}, regions, (Channel(window_hu=(-1000.0, 400.0)),)
    )
    labels = blocks(1)[1]
    prediction = save(tmp_path / "s0001.nii.gz", labels)
    case = Case("s0001", folder / "ct.nii.gz", folder / "segmentations", "s0001")
    values = {
        "lung_upper_lobe_left": "left_lung",
        "lung_lower_lobe_left": "left_lung",
        "lung_upper_lobe_right": "right_lung",
        "lung_lower_lobe_right": "right_lung",
        "liver": "liver",
    }
    pred, target, _ = read_pair(
        [prediction], Reference(case.name, case.labels, case), task, {**values}
    )
    assert np.array_equal(pred, labels)
    assert np.array_equal(target, labels)
