"""Which scans a path stands for: names are what users have."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from io_volumes import make_grid, make_hu, make_labels, save_dicom

from medseg.errors import UserError
from medseg.io.inputs import case_name, list_inputs
from medseg.io.read import read_image, read_labels
from medseg.io.write import write_image, write_labels

AWKWARD = [
    "Thorax (1)",
    "Doe, John",
    "a=b",
    "Müller ü",
    "1.2.840.113",
    "x'y\"z",
    "${now}",
    "{a}[0]",
    "nii.gz",
    "#1 %d",
    "LIST",
    "local",
]
SUFFIXES = [".nii.gz", ".nii", ".nrrd", ".mha", ".mhd"]


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_names_of_files_and_folders(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    grid = make_grid(np.eye(3))
    for suffix in SUFFIXES:
        path = folder / suffix.strip(".") / f"{name}{suffix}"
        write_image(path, make_hu(), grid)
        assert case_name(path) == name
        assert list_inputs(path.parent) == [(name, path)]
        assert list_inputs(path) == [(name, path)]
        scan = read_image(path)
        assert np.array_equal(scan.array, make_hu())
        write_labels(path, make_labels(), scan.grid, scan.header)
        assert np.array_equal(read_labels(path).array, make_labels())
    series = tmp_path / "series" / name
    files = save_dicom(series, make_hu(), grid)
    assert list_inputs(series) == [(name, series)]
    assert list_inputs(series.parent) == [(name, series)]
    assert list_inputs(files[0]) == [(name, files[0])]
    assert np.array_equal(read_image(series).array, make_hu())


def test_a_folder_of_scans(tmp_path: Path) -> None:
    grid = make_grid(np.eye(3))
    for name in ("b.nii.gz", "a.mhd", "C.NRRD", "d.1.mha"):
        write_image(tmp_path / name, make_hu(), grid)
    save_dicom(tmp_path / "bb", make_hu(), grid)
    (tmp_path / "empty").mkdir()
    for name in ("cases.csv", "b.json", "._b.nii.gz", ".DS_Store", "notes.txt"):
        (tmp_path / name).write_text("no scan")
    assert [name for name, _ in list_inputs(tmp_path)] == ["C", "a", "b", "bb", "d.1"]
    assert all(
        np.array_equal(read_image(path).array, make_hu()) for _, path in list_inputs(tmp_path)
    )


def test_a_folder_of_each_case_has_its_image(tmp_path: Path) -> None:
    grid = make_grid(np.eye(3))
    for name in (
        "s0001/ct.nii.gz",
        "s0001/segmentations/liver.nii.gz",
        "s0002/mri.nii",
        "other/seg.nii.gz",
        "both/ct.nii.gz",
        "both/ct.nrrd",
    ):
        write_image(tmp_path / name, make_hu(), grid)
    write_image(tmp_path / "plain.nii.gz", make_hu(), grid)
    assert list_inputs(tmp_path) == [
        ("both", tmp_path / "both"),
        ("plain", tmp_path / "plain.nii.gz"),
        ("s0001", tmp_path / "s0001" / "ct.nii.gz"),
        ("s0002", tmp_path / "s0002" / "mri.nii"),
    ]
    # A case is not left out in silence, although none of its images can be chosen.
    with pytest.raises(UserError, match=r"both: .* got a folder with ct\.nii\.gz, ct\.nrrd; name"):
        read_image(tmp_path / "both")


def test_dicom_without_suffix(tmp_path: Path) -> None:
    for index, file in enumerate(save_dicom(tmp_path / "d", make_hu(), make_grid(np.eye(3)))):
        file.rename(file.with_name(f"IM.{index:04d}"))
    (tmp_path / "d" / "DICOMDIR").write_bytes(b"\0" * 128 + b"DICM")
    assert list_inputs(tmp_path / "d") == [("d", tmp_path / "d")]
    assert case_name(tmp_path / "d" / "IM.0001") == "d"
    assert np.array_equal(read_image(tmp_path / "d" / "IM.0003").array, make_hu())


def test_names_that_would_overwrite_each_other(tmp_path: Path) -> None:
    for name in ("ct.nii.gz", "ct.nrrd"):
        write_image(tmp_path / name, make_hu(), make_grid(np.eye(3)))
    with pytest.raises(UserError, match="both be called 'ct'"):
        list_inputs(tmp_path)


def test_a_folder_of_dicom_files_is_one_scan_beside_its_own_label_map_only(tmp_path: Path) -> None:
    """The label map is what `predict` wrote there; other volumes must not be passed over."""
    folder = tmp_path / "thorax"
    save_dicom(folder, make_hu(), make_grid(np.eye(3)))
    write_labels(folder / "thorax.nii.gz", make_labels(), make_grid(np.eye(3)), None)
    assert list_inputs(folder) == [("thorax", folder)]
    assert np.array_equal(read_image(folder).array, make_hu())
    write_image(folder / "p0.nrrd", make_hu(), make_grid(np.eye(3)))
    with pytest.raises(UserError) as caught:
        list_inputs(folder)
    assert str(caught.value) == (
        f"{folder}: holds DICOM files beside 1 volume files such as 'p0.nrrd'; give one of "
        "these files, choose the series with series=, or "
        "move either kind into a folder of its own."
    )


def test_dicom_results_are_no_scans(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (file, *_) = save_dicom(tmp_path / name, make_hu(), make_grid(np.eye(3)))
    (tmp_path / "out").mkdir()
    for result in ("a.seg.dcm", "b.rtstruct.dcm", "out/a.seg.dcm"):
        shutil.copy(file, tmp_path / result)
    assert list_inputs(tmp_path) == [(name, tmp_path / name) for name in ("a", "b")]


def test_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "cases.csv").write_text("case,image\n")
    suffixes = ".nii.gz, .nii, .nrrd, .nhdr, .mha, .mhd"
    for path, said in (
        (
            tmp_path,
            (
                f"expected scans ({suffixes}, or folders of one DICOM series each), but the "
                "folder holds none; check the path."
            ),
        ),
        (tmp_path / "nowhere", "this file or folder does not exist; check the path."),
        (tmp_path / "nowhere.nrrd", "this file or folder does not exist; check the path."),
        (
            tmp_path / "cases.csv",
            f"expected {suffixes} or a DICOM series, got a file of another kind.",
        ),
    ):
        with pytest.raises(UserError) as caught:
            list_inputs(path)
        assert str(caught.value) == f"{path}: {said}"


def test_a_level_too_high_is_answered_with_the_folders_that_hold_scans(tmp_path: Path) -> None:
    write_image(tmp_path / "imagesTs" / "a_0000.nii.gz", make_hu(), make_grid(np.eye(3)))
    with pytest.raises(UserError, match=r"but the folder holds none; give one of .*/imagesTs\.$"):
        list_inputs(tmp_path)


def test_a_folder_that_may_not_be_looked_into_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `lost+found` of a disk does."""
    write_image(tmp_path / "a.nii.gz", make_hu(), make_grid(np.eye(3)))
    (tmp_path / "lost+found").mkdir()
    look = Path.iterdir

    def refuse(folder: Path) -> Iterator[Path]:
        if folder.name == "lost+found":
            raise PermissionError(13, "Permission denied", str(folder))
        return look(folder)

    monkeypatch.setattr(Path, "iterdir", refuse)  # a mode would not stop root
    assert [name for name, _ in list_inputs(tmp_path)] == ["a", "lost+found"]
    with pytest.raises(UserError) as caught:
        read_image(tmp_path / "lost+found")
    said = "cannot be read (Permission denied); check"
    assert (
        str(caught.value) == f"{tmp_path}/lost+found: the file {said} the file and its permissions."
    )
    with pytest.raises(UserError) as caught:
        list_inputs(tmp_path / "lost+found")
    assert str(caught.value) == f"{tmp_path}/lost+found: {said} the path and its permissions."


def test_a_folder_is_named_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Thorax 1.25 mm"
    save_dicom(folder, make_hu(), make_grid(np.eye(3)))
    assert case_name(folder) == "Thorax 1.25 mm"
    monkeypatch.chdir(folder)
    assert case_name(Path()) == "Thorax 1.25 mm"


def test_control_characters_are_no_part_of_a_case_name(tmp_path: Path) -> None:
    image = make_hu()
    for name in ("a\nb.nii", "=c\x1b[2J.nii", "d ü (1).nii", os.fsdecode(b"e\xff.nii")):
        write_image(tmp_path / name, image, make_grid(np.eye(3)))
    assert [name for name, _ in list_inputs(tmp_path)] == ["=c_[2J", "a_b", "d ü (1)", "e_"]
    write_image(tmp_path / "a_b.nrrd", image, make_grid(np.eye(3)))
    with pytest.raises(UserError, match="would both be called 'a_b'"):
        list_inputs(tmp_path)
