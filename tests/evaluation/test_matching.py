"""References of a case table that are no label maps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from layouts import SPACING_MM, blocks, make_dicom, make_totalsegmentator, save

from medseg.data.case_table import Case
from medseg.evaluation.matching import Reference, read_pair
from medseg.geometry.grid import VoxelGrid
from medseg.io.write import write_labels
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


def test_structures_are_read_on_the_series_of_the_case(tmp_path: Path) -> None:
    """A folder may hold several series: that of the case has the slices of its structures."""
    make_dicom(tmp_path / "data")
    for index in (0, 1):
        study = tmp_path / "data" / f"LCTSC-Train-S1-{index:03d}" / f"1.2.826.{index}"
        for path in (study / f"1.2.826.{index}.1").iterdir():
            path.rename(tmp_path / "data" / f"{index}_{path.name}")
    study = tmp_path / "data" / "LCTSC-Train-S1-001" / "1.2.826.1"
    file = study / "1.2.826.1.2" / "1-1.dcm"
    task = Task("lungs", {"left_lung": 1, "right_lung": 2}, (), (Channel(),))
    labels = blocks(1)[1]
    prediction = tmp_path / "p.nii.gz"
    write_labels(
        prediction, labels, VoxelGrid(labels.shape, SPACING_MM, (-60.0, -50.0, -300.0)), None
    )
    case = Case("p", tmp_path / "data", file, "p", series="1.2.826.1.1")
    values = {"Lung_L": "left_lung", "Lung_R": "right_lung"}
    _, target, _ = read_pair([prediction], Reference(case.name, file, case), task, {**values})
    assert np.array_equal(target, labels)
