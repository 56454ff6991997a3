"""Source cases: what is read of a case for its task."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dicom_files import save_grid
from layouts import LEFT, RIGHT, blocks, save

from medseg.data.case_table import Case
from medseg.data.source_case import CaseRefusedError, SourceCase, read_source
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.task import Channel, LabelValues, Region, Task

LUNGS = Task(
    "lungs",
    {"left_lung": LEFT, "right_lung": RIGHT},
    (Region("left_lung", ("left_lung",), "left"), Region("right_lung", ("right_lung",), "right")),
    (Channel(window_hu=(-1000.0, 400.0)),),
)
VALUES: LabelValues = {"left_lung": "left_lung", "right_lung": "right_lung", "tumour": "tumour"}


def read(case: Case) -> SourceCase:
    try:
        return read_source(case, LUNGS, VALUES)
    except CaseRefusedError as refused:  # the blocks are no lungs
        source = refused.source
    assert source is not None
    return source


def test_a_structure_that_the_task_lacks_takes_no_voxel_of_its_labels(tmp_path: Path) -> None:
    image, labels = blocks()
    masks = {"left_lung": labels == LEFT, "right_lung": labels == RIGHT, "tumour": labels == RIGHT}
    for name, mask in masks.items():
        save(tmp_path / "masks" / f"{name}.nii.gz", mask.astype(np.uint8))
    path = save(tmp_path / "ct.nii.gz", image)
    found = read(Case("a", path, tmp_path / "masks", "a")).labels
    assert found is not None
    assert [np.count_nonzero(found == value) for value in (LEFT, RIGHT)] == [
        np.count_nonzero(labels == value) for value in (LEFT, RIGHT)
    ]


def test_an_empty_label_map_of_dicom_slices_is_refused(tmp_path: Path) -> None:
    """Slices name no structures, unlike an RTSTRUCT: an empty series is a failed export."""
    image, _ = blocks()
    path = save(tmp_path / "ct.nii.gz", image)
    # `save_grid` stores HU + 1024 with the matching intercept: these values are zeros.
    save_grid(tmp_path / "labels", np.zeros_like(image), VoxelGrid(image.shape, (6.0, 4.0, 4.5)))
    values: LabelValues = {LEFT: "left_lung", RIGHT: "right_lung"}
    with pytest.raises(CaseRefusedError, match="the label map holds nothing but zeros"):
        read_source(Case("a", path, tmp_path / "labels", "a"), LUNGS, values)


def test_the_series_that_the_table_names_is_read_of_a_folder_with_several(tmp_path: Path) -> None:
    image, _ = blocks()
    for number, depth in ((1, 10), (2, 12)):
        grid = VoxelGrid((depth, *image.shape[1:]), (6.0, 4.0, 4.5))
        save_grid(tmp_path / f"s{number}", image[:depth], grid, uid=f"1.2.3.{number}")
    for number, depth in ((1, 10), (2, 12)):
        case = Case("a", tmp_path, None, "a", series=f"1.2.3.{number}")
        assert read(case).grid.shape == (depth, *image.shape[1:])
    with pytest.raises(UserError, match="series"):
        read(Case("a", tmp_path, None, "a"))
