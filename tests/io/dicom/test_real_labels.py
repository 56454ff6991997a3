"""RTSTRUCT and SEG of real lungs: read back without a changed voxel, and filled by Pillow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dicom_files import save_slice
from dicom_sources import SOURCE_FIELDS
from PIL import Image, ImageDraw
from pydicom import dcmread

from medseg.io.dicom.labels import open_label_file, read_label_file
from medseg.io.dicom.read import open_slices
from medseg.io.dicom.segmentation import write_segmentation
from medseg.io.dicom.structure_set import write_structure_set
from medseg.io.dicom.structures import Structure
from medseg.io.read import read_labels

LUNGS = (
    Path(__file__).resolve().parents[4]
    / "shared"
    / "ct2"
    / "lctsc_009"
    / "lungs_source_sides.nii.gz"
)
SCALE = 4
STRUCTURES = [Structure("left_lung", 1), Structure("right_lung", 2)]


@pytest.mark.slow
@pytest.mark.skipif(not LUNGS.is_file(), reason="no clinical contours beside the checkout")
def test_contours_of_lungs(tmp_path: Path) -> None:
    drawn = read_labels(LUNGS)
    direction = np.array(drawn.grid.direction)
    for index in range(len(drawn.array)):
        position = drawn.grid.index_to_world_xyz_mm((index, 0, 0))
        save_slice(
            tmp_path / "s" / f"{index}.dcm",
            np.zeros(drawn.array.shape[1:], np.int16),
            position,
            (direction[:, 0], direction[:, 1]),
            drawn.grid.spacing_mm[1:],
            SOPInstanceUID=f"1.2.3.{index + 1}",
            **SOURCE_FIELDS,
        )
    slices = open_slices(tmp_path / "s")
    labels = drawn.array if np.linalg.det(direction) > 0 else drawn.array[::-1]
    for name, write in (("seg", write_segmentation), ("rtstruct", write_structure_set)):
        write(tmp_path / name, labels, slices, STRUCTURES)
        assert np.array_equal(
            read_label_file(open_label_file(tmp_path / name), slices, {1: 1, 2: 2}).array, labels
        )
    for item in dcmread(tmp_path / "rtstruct").ROIContourSequence:
        filled = np.zeros(labels.shape, bool)
        for contour in item.ContourSequence:
            points = slices.grid.world_to_index_zyx(
                np.array(contour.ContourData, float).reshape(-1, 3)
            )
            canvas = Image.new("1", (labels.shape[2] * SCALE, labels.shape[1] * SCALE))
            ImageDraw.Draw(canvas).polygon(
                [((x + 0.5) * SCALE, (y + 0.5) * SCALE) for _, y, x in points], fill=1
            )
            filled[round(points[:, 0].mean())] ^= np.array(canvas)[
                SCALE // 2 :: SCALE, SCALE // 2 :: SCALE
            ]
        mask = labels == item.ReferencedROINumber
        num_common = np.count_nonzero(filled & mask)
        dice = 2 * num_common / (np.count_nonzero(filled) + np.count_nonzero(mask))
        assert dice > 0.999
