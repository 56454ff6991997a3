"""Names and colours of labels in files of other programs, read by independent readers."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import nibabel
import numpy as np
import pytest
import SimpleITK

from medseg.geometry.grid import VoxelGrid
from medseg.io.inputs import case_name, list_inputs
from medseg.io.label_table import Structure, nifti_extension
from medseg.io.read import read_labels
from medseg.io.write import write_image, write_labels

TABLE = [
    Structure("left_lung", 1, "#38bdf8"),
    Structure("a < b & ]]>", 2, "#fb923c"),
    Structure("empty", 3, "#000000"),
]
GRID = VoxelGrid(
    (5, 7, 9),
    (3.0, 0.5, 0.7),
    (-10.0, 20.0, 30.0),
    ((0.96, -0.28, 0.0), (0.28, 0.96, 0.0), (0.0, 0.0, 1.0)),
)


@pytest.fixture
def labels() -> np.ndarray:
    array = np.zeros(GRID.shape, dtype=np.uint8)
    array[1:3, 2:6, 4:5], array[4, 0, 0] = 1, 2
    return array


@pytest.mark.parametrize("suffix", [".nii.gz", ".nii"])
def test_nifti_carries_the_table_and_the_same_voxels(
    tmp_path: Path, labels: np.ndarray, suffix: str
) -> None:
    path = tmp_path / f"a{suffix}"
    write_labels(path, labels, GRID, structures=TABLE)
    image = nibabel.load(path)
    (extension,) = image.header.extensions
    assert extension.get_code() == 0
    content = extension.get_content()
    entries = ElementTree.fromstring(
        (content if isinstance(content, bytes) else content.encode()).rstrip(b"\0")
    ).iter("Label")
    structures = {
        int(label.get("Key", "")): (
            label.text,
            [round(255 * float(label.get(channel, ""))) for channel in ("Red", "Green", "Blue")],
        )
        for label in entries
    }
    assert structures == {entry.value: (entry.name, list(entry.rgb)) for entry in TABLE}
    assert (labels == np.asarray(image.dataobj).T).all()
    again = read_labels(path)
    assert (again.array == labels).all()
    assert again.grid.is_close(GRID)
    assert (SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(path))) == labels).all()
    plain = tmp_path / f"plain{suffix}"
    write_labels(plain, labels, GRID)
    assert len(nibabel.load(plain).header.extensions) == 0


@pytest.mark.parametrize("order", ["little", "big"])
def test_the_header_of_the_scan_stays(tmp_path: Path, labels: np.ndarray, order: str) -> None:
    header = nibabel.Nifti2Header(endianness="<" if order == "little" else ">")
    header.set_data_shape(GRID.shape[::-1])
    affine = np.diag([-0.7, -0.5, 3.0, 1.0])
    header.set_sform(affine, 1)
    header.set_qform(affine, 1)
    grid = VoxelGrid(GRID.shape, GRID.spacing_mm)
    write_labels(tmp_path / "a.nii.gz", labels, grid, header, TABLE)
    image = nibabel.load(tmp_path / "a.nii.gz")
    assert isinstance(image, nibabel.Nifti2Image)
    assert image.header.endianness == header.endianness
    assert len(image.header.extensions) == 1
    assert (labels == np.asarray(image.dataobj).T).all()


def test_slicer_gets_a_segmentation(tmp_path: Path, labels: np.ndarray) -> None:
    path = tmp_path / "ct.seg.nrrd"
    write_labels(path, labels, GRID, structures=TABLE)
    image = SimpleITK.ReadImage(str(path))
    fields = {key: image.GetMetaData(key) for key in image.GetMetaDataKeys()}
    assert fields["Segment0_Name"] == fields["Segment0_ID"] == "left_lung"
    assert fields["Segment0_LabelValue"] == "1"
    assert fields["Segment0_Extent"] == "4 4 2 5 1 2"
    assert [round(255 * float(part)) for part in fields["Segment1_Color"].split()] == [
        0xFB,
        0x92,
        0x3C,
    ]
    assert fields["Segment2_Extent"] == "0 -1 0 -1 0 -1"
    assert fields["Segmentation_ContainedRepresentationNames"] == "Binary labelmap|"
    assert "Segment3_ID" not in fields
    again = read_labels(path)
    assert (again.array == labels).all()
    assert again.grid.is_close(GRID)


def test_a_plain_nrrd_has_no_segments(tmp_path: Path, labels: np.ndarray) -> None:
    write_labels(tmp_path / "a.nrrd", labels, GRID, structures=TABLE)
    assert b"Segment" not in (tmp_path / "a.nrrd").read_bytes()


def test_a_segmentation_of_slicer_is_no_scan_of_its_folder(
    tmp_path: Path, labels: np.ndarray
) -> None:
    write_image(tmp_path / "ct.nrrd", labels.astype(np.int16), GRID)
    write_labels(tmp_path / "ct.seg.nrrd", labels, GRID, structures=TABLE)
    assert list_inputs(tmp_path) == [("ct", tmp_path / "ct.nrrd")]
    assert case_name(tmp_path / "ct.seg.nrrd") == "ct"


def test_the_extension_is_xml_in_utf_8() -> None:
    text = nifti_extension([Structure("Lunge rechts ü", 1, "#010203")])
    assert text.startswith(b"<?xml version='1.0' encoding='utf-8'?>")
    assert ElementTree.fromstring(text).findtext(".//Label") == "Lunge rechts ü"
