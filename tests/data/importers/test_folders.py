"""TotalSegmentator, LUNA16, and folders of images and labels."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import SimpleITK
from layouts import blocks, make_luna16, make_pairs, make_slicer, make_totalsegmentator, save

from medseg.data.importers.folders import import_luna16, import_pairs, import_totalsegmentator
from medseg.data.importers.formats import import_dataset
from medseg.errors import UserError
from medseg.io import simpleitk


def test_lobes_are_merged_and_the_split_is_that_of_the_table(tmp_path: Path) -> None:
    data = import_totalsegmentator(make_totalsegmentator(tmp_path))
    assert data.labels == {
        "liver": ["liver"],
        "left_lung": ["lung_lower_lobe_left", "lung_upper_lobe_left"],
        "right_lung": ["lung_lower_lobe_right", "lung_upper_lobe_right"],
    }
    assert [(case.name, case.split, case.image.name) for case in data.cases] == [
        ("s0000", "train", "ct.nii.gz"),
        ("s0001", "train", "ct.nii.gz"),
        ("s0002", "val", "ct.nii.gz"),
    ]
    assert data.channels[0].modality == "ct"


def test_the_mr_data_set_has_mr_images(tmp_path: Path) -> None:
    for image in make_totalsegmentator(tmp_path).glob("*/ct.nii.gz"):
        image.rename(image.with_name("mri.nii.gz"))
    assert import_totalsegmentator(tmp_path).channels[0].modality == "mr"


def test_mistakes_of_totalsegmentator(tmp_path: Path) -> None:
    make_totalsegmentator(tmp_path)
    (tmp_path / "meta.csv").write_text("image_id;split\ns0000;training\n", encoding="utf-8")
    with pytest.raises(
        UserError, match="expected train, val, test as the split of s0000, got 'training'"
    ):
        import_totalsegmentator(tmp_path)
    (tmp_path / "meta.csv").write_text("image_id,split\ns0000,train\n", encoding="utf-8")
    with pytest.raises(
        UserError, match="expected the columns image_id and split, separated by ';'"
    ):
        import_totalsegmentator(tmp_path)
    (tmp_path / "meta.csv").unlink()
    shutil.rmtree(tmp_path / "s0001" / "segmentations")
    (tmp_path / "s0001" / "segmentations").mkdir()
    with pytest.raises(
        UserError, match=r"s0001/segmentations: expected masks such as liver.nii.gz"
    ):
        import_totalsegmentator(tmp_path)
    (tmp_path / "s0000" / "ct.nii.gz").unlink()
    with pytest.raises(
        UserError, match=r"s0000: expected an image ct or mri \(.nii.gz\) beside segmentations"
    ):
        import_totalsegmentator(tmp_path)


def test_subsets_of_luna16_are_folds_and_its_masks_approximate(tmp_path: Path) -> None:
    data = import_luna16(make_luna16(tmp_path))
    assert (data.labels, data.background) == (
        {"left_lung": [3], "right_lung": [4]},
        {"trachea": [5]},
    )
    assert [case.fold for case in data.cases] == [0, 0, 1, 1]
    assert data.cases[0].trust == {"left_lung": "approximate", "right_lung": "approximate"}
    shutil.rmtree(tmp_path / "subset1")  # a part of the download is a data set too
    assert [(case.name[-1], case.fold) for case in import_luna16(tmp_path).cases] == [
        ("0", None),
        ("1", None),
    ]


def test_mistakes_of_luna16(tmp_path: Path) -> None:
    make_luna16(tmp_path)
    next((tmp_path / "seg-lungs-LUNA16").glob("*.mhd")).unlink()
    with pytest.raises(UserError, match="no mask of the scan 1"):
        import_luna16(tmp_path)
    shutil.rmtree(tmp_path / "seg-lungs-LUNA16")
    with pytest.raises(
        UserError,
        match="expected lung masks in seg-lungs-LUNA16, which LUNA16 offers as a file of its own",
    ):
        import_luna16(tmp_path)


def test_pairs_take_the_values_of_their_label_maps(tmp_path: Path) -> None:
    data = import_pairs(make_pairs(tmp_path))
    assert ([case.name for case in data.cases], data.labels) == (
        ["p0", "p1", "p2"],
        {"label_1": [1], "label_2": [2]},
    )
    assert data.channels[0].modality == "ct"
    assert data.notes[0] == (
        "the data set does not name its labels; its label maps hold 1, 2: name them with "
        "labels={<name>: <value>, …}"
    )
    for path in (tmp_path / "labels").iterdir():
        path.rename(path.with_name(f"{path.stem}_seg.nrrd"))
    assert len(import_pairs(tmp_path).cases) == 3
    # Where the images have the same ending, it is a part of the names.
    for path in (tmp_path / "images").iterdir():
        path.rename(path.with_name(f"{path.stem}_seg.nrrd"))
    assert [case.name for case in import_pairs(tmp_path).cases] == ["p0_seg", "p1_seg", "p2_seg"]
    for path in (tmp_path / "images").iterdir():
        path.rename(path.with_name(f"{path.stem.removesuffix('_seg')}.nrrd"))
    (tmp_path / "images" / "p1.nrrd").unlink()
    with pytest.raises(UserError, match="images: no image for p1, which labels holds"):
        import_pairs(tmp_path)


def test_a_damaged_label_map_or_image_does_not_stop_the_import_of_the_others(
    tmp_path: Path,
) -> None:
    make_pairs(tmp_path)
    for name in ("images/p0.nrrd", "labels/p1.nrrd"):
        (tmp_path / name).write_bytes(b"damaged")
    data = import_dataset(tmp_path)
    assert ([case.name for case in data.cases], data.labels) == (
        ["p0", "p1", "p2"],
        {"label_1": [1], "label_2": [2]},
    )
    assert data.channels[0].modality == "ct"
    assert data.notes[0].startswith("p1: the label map cannot be read")
    assert "labels/p1.nrrd: expected a NRRD file" in data.notes[0]
    for name in ("labels/p0.nrrd", "labels/p2.nrrd"):
        (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"labels/p0\.nrrd: expected a NRRD file"):
        import_pairs(tmp_path)


def test_a_damaged_header_is_told_for_its_case_alone(tmp_path: Path) -> None:
    make_luna16(tmp_path)
    header = next(tmp_path.glob("subset1/*.mhd"))
    header.write_bytes(b"damaged\n")
    data = import_dataset(tmp_path)
    assert len(data.cases) == 4
    (line,) = (item for item in data.closing_items() if item.name.endswith(header.name))
    assert (line.kind, line.fate) == ("file", "left out")
    assert line.why.startswith("damaged, prepare will refuse its case")


def test_a_header_that_cannot_be_opened_is_told_for_its_case_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_luna16(tmp_path)
    header = next(tmp_path.glob("subset1/*.mhd"))

    def read(path: Path) -> simpleitk.TextHeader:
        if path.name == header.name:
            raise PermissionError(13, "Permission denied", str(path))
        return read_header(path)

    read_header = simpleitk.read_header
    monkeypatch.setattr(simpleitk, "read_header", read)
    data = import_dataset(tmp_path)
    assert len(data.cases) == 4
    whys = [item.why for item in data.closing_items() if item.name.endswith(header.name)]
    assert any("Permission denied" in why for why in whys)


def test_pairs_of_an_image_and_a_folder_of_masks(tmp_path: Path) -> None:
    image, labels = blocks()
    save(tmp_path / "images" / "a.nii.gz", image + np.int16(2000))
    for name, value in (("Lung_L", 1), ("Lung_R", 2)):
        save(tmp_path / "labels" / "a" / f"{name}.nii.gz", (labels == value).astype(np.uint8))
    data = import_pairs(tmp_path)
    assert data.labels == {"left_lung": ["Lung_L"], "right_lung": ["Lung_R"]}
    assert data.channels[0].modality == "other"


def test_segmentations_that_slicer_saves_beside_their_volumes(tmp_path: Path) -> None:
    data = import_pairs(make_slicer(tmp_path))
    assert data.labels == {"left_lung": [1], "right_lung": [2]}
    assert [
        (case.name, case.image.name, case.labels and case.labels.name) for case in data.cases
    ] == [(f"p{n}", f"p{n}.nrrd", f"p{n}.seg.nrrd") for n in range(3)]
    for path in tmp_path.glob("*.seg.nrrd"):
        (tmp_path / "labels").mkdir(exist_ok=True)
        path.rename(tmp_path / "labels" / path.name)
    for path in tmp_path.glob("*.nrrd"):
        (tmp_path / "images").mkdir(exist_ok=True)
        path.rename(tmp_path / "images" / path.name)
    assert import_pairs(tmp_path).labels == data.labels
    other = SimpleITK.ReadImage(str(tmp_path / "labels" / "p1.seg.nrrd"))
    other.SetMetaData("Segment0_Name", "heart")
    SimpleITK.WriteImage(other, str(tmp_path / "labels" / "p1.seg.nrrd"))
    data = import_pairs(tmp_path)
    assert data.labels == {
        "heart": ["heart"],
        "left_lung": ["left lung"],
        "right_lung": ["right lung"],
    }
    with pytest.raises(UserError, match=r"p0, p2 \(2 of 3 cases\): the structure heart is missing"):
        data.require_structures()
