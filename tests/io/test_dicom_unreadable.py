"""Unreadable files are refused with their series; other series beside them stay readable."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dicom_files import header, place, save, save_by_gdcm, save_slice, save_stack
from io_volumes import finding_texts, make_hu

from medseg.errors import UserError
from medseg.io.dicom.frames import NoSlice, read_frames
from medseg.io.read import read_image

HEIGHTS = list(2.5 * np.arange(5))
NOT_HU = (
    "expected a rescale slope and intercept to HU, but the slices have MGML; choose or export a "
    "series in HU"
)
NO_SPACING = "expected two positive numbers in PixelSpacing, got None; export the series again"
CUT_PIXELS = "the DICOM file is truncated: it ends within its pixels; copy or export it again"
NO_IMAGE = (
    "the DICOM file is truncated or damaged: its header ends before an image; copy or export it "
    "again"
)
CUT_HEADER = "the DICOM file is truncated: it ends within its header; copy or export it again"
NO_PIXELS = (
    "the DICOM file is truncated or damaged: expected 1 x 7 x 9 pixels of 16 bits; copy or export "
    "it again"
)


def no_dicom(num_bytes: int) -> str:
    """What is said of a file that is a slice by its name alone."""
    return (
        "expected a slice, as its name is like those of the slices beside it, but its "
        f"{num_bytes} bytes are no DICOM; copy it "
        "again or remove it"
    )


def said(path: Path, series: str | None = None) -> str:
    """The sentence that refuses, without its full stop."""
    with pytest.raises(UserError) as caught:
        read_image(path, series)
    assert "\n" not in str(caught.value)
    return str(caught.value).removesuffix(".")


def cut(file: Path, num_bytes: int) -> None:
    file.write_bytes(file.read_bytes()[:num_bytes])


def add_unreadable(folder: Path, kind: str) -> tuple[list[Path], str]:
    """Write a series 9 of which no file can be read; give its files and their sentences."""
    files = []
    for index, pixels in enumerate(make_hu()):
        fields: dict[str, Any] = {"RescaleType": "MGML"} if kind == "no HU" else {}
        dataset = header(pixels, uid="1.2.3.9", SeriesNumber=9, SeriesDescription="Map", **fields)
        place(dataset, (0, 0, 2.5 * index))
        if kind == "no spacing":
            del dataset.PixelSpacing
        files.append(save(dataset, folder / f"map{index}"))
        if kind == "truncated":
            cut(files[-1], -20)
    return files, {"no HU": NOT_HU, "no spacing": NO_SPACING, "truncated": CUT_PIXELS}[kind]


@pytest.mark.parametrize("kind", ["no HU", "no spacing", "truncated"])
def test_a_series_that_cannot_be_read_is_refused_where_it_is_chosen(
    tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "d"
    chest = save_stack(folder, make_hu(), HEIGHTS, SeriesNumber=3)
    files, sentence = add_unreadable(folder, kind)
    for path, series in ((folder, "3"), (folder, "1.2.3.4"), (chest[0], None), (chest[0], "3")):
        volume = read_image(path, series)
        assert np.array_equal(volume.array, make_hu())
        assert finding_texts(volume) == ()
    for path, series in ((folder, "9"), (folder, "1.2.3.9"), (files[2], None)):
        assert said(path, series) == f"{files[0]} and 4 more: {sentence}"
    # Whoever asks for a series that is not there is told so, not of damage to another one.
    assert said(folder, "7").startswith(f"{folder}: there is no series=7 among series=3 ")


@pytest.mark.parametrize("kind", ["no HU", "no spacing", "truncated"])
def test_the_only_series_that_can_be_read_needs_no_choice(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "d"
    save_stack(folder, make_hu(), HEIGHTS, SeriesNumber=3)
    _, sentence = add_unreadable(folder, kind)
    volume = read_image(folder)
    assert np.array_equal(volume.array, make_hu())
    says = f"series 9 'Map' was left out, since it cannot be read: 'map0' and 4 more: {sentence}"
    assert finding_texts(volume) == (says,)


def test_alone_it_is_refused(tmp_path: Path) -> None:
    files, sentence = add_unreadable(tmp_path / "d", "no HU")
    for series in (None, "9", "3"):
        assert said(tmp_path / "d", series) == f"{files[0]} and 4 more: {sentence}"


def test_a_damaged_scan_remains_one_to_choose(tmp_path: Path) -> None:
    """Which of two scans is meant is not for a copy that broke off to decide."""
    folder = tmp_path / "d"
    save_stack(folder, make_hu(), HEIGHTS, uid="1.2.3.4", SeriesNumber=2)
    files = save_stack(folder, make_hu(seed=1), HEIGHTS, uid="1.2.3.5", SeriesNumber=3)
    cut(files[2], -20)
    assert said(folder) == (
        f"{folder}: expected one CT series, but it holds 2: series=2 (5 slices, 2.5 x 0.8 x "
        "0.648 mm); series=3 (4 slices, 3.33 x 0.8 x 0.648 mm); choose one with series=, or "
        "in the column series of a case table"
    )
    assert np.array_equal(read_image(folder, "2").array, make_hu())
    assert said(folder, "3") == f"{files[2]}: {CUT_PIXELS}"


def names(style: str) -> list[str]:
    """Names of five slices, in order of place."""
    if style == "suffix":
        return ["apex.dcm", "b.DCM", "c.dcm", "d.dcm", "base.dcm"]
    if style == "letters":
        return ["IM00000E", "IM00000F", "IM00000G", "IM00000Z", "IM000010"]
    return [
        {"plain": f"IM{index:04d}", "uid": f"1.2.840.{index}", "hash": f"{index}f0c{9 - index}ab"}[
            style
        ]
        for index in range(5)
    ]


FOREIGN = {
    "README": b"",
    "readme.txt": b"CT",
    "Thumbs.db": b"\xd0\xcf",
    "DICOMDIR": b"",
    "._IM0001": b"\0",
    ".dcm": b"",
    "IM0001.db": b"",
    "1.json": b"{}",
}


def write(folder: Path, style: str) -> list[Path]:
    """Write five slices, and what lies beside slices."""
    files = [
        save_slice(folder / name, pixels, (0, 0, height))
        for name, pixels, height in zip(names(style), make_hu(), HEIGHTS, strict=True)
    ]
    for name, data in FOREIGN.items():
        (folder / name).write_bytes(data)
    return files


@pytest.mark.parametrize("style", ["plain", "suffix", "letters", "uid", "hash"])
def test_foreign_files_are_passed_over(tmp_path: Path, style: str) -> None:
    write(tmp_path / "d", style)
    volume = read_image(tmp_path / "d")
    assert np.array_equal(volume.array, make_hu())
    assert finding_texts(volume) == ()


@pytest.mark.parametrize("style", ["plain", "suffix", "letters", "uid", "hash"])
@pytest.mark.parametrize("which", [[0], [2], [4], [3, 4]])
@pytest.mark.parametrize("num_bytes", [0, 100, 131])
def test_a_copy_that_broke_off_before_its_header(
    tmp_path: Path, style: str, which: list[int], num_bytes: int
) -> None:
    files = write(tmp_path / "d", style)
    for index in which:
        cut(files[index], num_bytes)
    first = min(files[index] for index in which)
    more = " and 1 more" if len(which) > 1 else ""
    for path in (tmp_path / "d", files[1]):
        assert said(path) == f"{first}{more}: {no_dicom(num_bytes)}"


@pytest.mark.parametrize("which", [0, 2, 4])
@pytest.mark.parametrize(
    ("num_bytes", "sentence"),
    [
        (132, NO_IMAGE),
        (300, CUT_HEADER),
        (594, NO_IMAGE),
        (645, NO_PIXELS),
        (720, CUT_PIXELS),
        (-1, CUT_PIXELS),
    ],
)
def test_a_copy_that_broke_off_later(
    tmp_path: Path, which: int, num_bytes: int, sentence: str
) -> None:
    files = write(tmp_path / "d", "plain")
    cut(files[which], num_bytes)
    for path in (tmp_path / "d", files[1]):
        assert said(path) == f"{files[which]}: {sentence}"


def test_no_length_of_a_broken_copy_is_missed(tmp_path: Path) -> None:
    last = write(tmp_path / "d", "plain")[4]
    data = last.read_bytes()
    for num_bytes in range(0, len(data), 9):
        last.write_bytes(data[:num_bytes])
        assert re.fullmatch(
            (
                f"{last}: (expected a slice|the DICOM file (is truncated|cannot be read)).* "
                "again( or remove it)?"
            ),
            said(last.parent),
        )


@pytest.mark.parametrize(
    "syntax",
    [
        "JPEGLosslessProcess14_1",
        "JPEGLSLossless",
        "JPEG2000Lossless",
        "DeflatedExplicitVRLittleEndian",
    ],
)
@pytest.mark.parametrize("which", [0, 2, 4])
def test_a_copy_of_a_compressed_slice_that_broke_off(
    tmp_path: Path, syntax: str, which: int
) -> None:
    plain = save_stack(tmp_path / "plain", make_hu((5, 16, 24)), HEIGHTS)
    (tmp_path / "d").mkdir()
    files = [
        save_by_gdcm(file, tmp_path / "d" / f"{index}", syntax) for index, file in enumerate(plain)
    ]
    assert read_image(tmp_path / "d").grid.shape == (5, 16, 24)
    data = files[which].read_bytes()
    for share in (0.05, 0.2, 0.5, 0.9, 0.97):
        files[which].write_bytes(data[: int(share * len(data))])
        assert said(tmp_path / "d").startswith(f"{files[which]}: "), share


def test_a_header_that_broke_off_behind_its_series_hinders_no_other_one(tmp_path: Path) -> None:
    """Within PixelSpacing (0028,0030): the UID and the number of its series have been read."""
    folder = tmp_path / "d"
    save_stack(folder, make_hu(), HEIGHTS, SeriesNumber=3)
    files, _ = add_unreadable(folder, "no HU")
    cut(files[1], files[1].read_bytes().index(b"\x28\0\x30\0") + 10)
    assert np.array_equal(read_image(folder, "3").array, make_hu())
    assert said(folder, "9").startswith(f"{files[0]} and 4 more: ")


def test_a_file_that_the_system_does_not_let_read_is_not_called_damaged(tmp_path: Path) -> None:
    (image,) = read_frames(tmp_path / "missing.dcm")
    assert isinstance(image, NoSlice)
    assert image.reason == (
        "the DICOM file cannot be read (No such file or directory); "
        "check the file and its permissions."
    )


def test_a_dangling_link_is_a_slice_that_is_missing(tmp_path: Path) -> None:
    """Stores that fetch files on demand leave such links."""
    files = write(tmp_path / "d", "plain")
    files[4].unlink()
    files[4].symlink_to(tmp_path / "nowhere")
    assert said(tmp_path / "d") == f"{files[4]}: {no_dicom(0)}"


def test_a_broken_file_belongs_to_the_only_volume_of_its_folder(tmp_path: Path) -> None:
    """Alone in a folder it may be a slice of any volume, and each goes on with a warning."""
    chest = save_stack(tmp_path / "d" / "a", make_hu(), HEIGHTS, uid="1.2.3.4", SeriesNumber=3)
    other = save_stack(tmp_path / "d" / "b", make_hu(), HEIGHTS, uid="1.2.3.5", SeriesNumber=4)
    for num_bytes in (200, 100):
        cut(other[4], num_bytes)
        volume = read_image(tmp_path / "d", "3")
        assert np.array_equal(volume.array, make_hu())
        assert finding_texts(volume) == ()
        assert np.array_equal(read_image(chest[0]).array, make_hu())
        assert said(tmp_path / "d", "4").startswith(f"{other[4]}: ")
    alone = save_slice(tmp_path / "d" / "c" / "1", make_hu()[0], (0, 0, 0))
    cut(alone, 200)
    volume = read_image(tmp_path / "d", "3")
    assert np.array_equal(volume.array, make_hu())
    (text,) = finding_texts(volume)
    assert text.startswith("a file that does not tell its series may be a slice of the scan: '1'")
    # Of one volume alone it can only be a slice.
    for file in other:
        file.unlink()
    assert said(tmp_path / "d").startswith(f"{alone}: ")


def test_a_protocol_of_ct_is_no_damaged_image(tmp_path: Path) -> None:
    save_stack(tmp_path, make_hu(), HEIGHTS)
    protocol = header(
        make_hu()[0], SOPClassUID="1.2.840.10008.5.1.4.1.1.200.2", Modality="CTPROTOCOL"
    )
    del protocol.Rows, protocol.Columns, protocol.PixelData
    save(protocol, tmp_path / "protocol")
    assert finding_texts(read_image(tmp_path)) == (
        (
            "left out, because they are not slices of the scan: 1 x object without an image "
            "(series 1.2.3.4)"
        ),
    )


def test_objects_without_an_image_are_left_out(tmp_path: Path) -> None:
    """What is no CT image may well have no pixels."""
    save_stack(tmp_path / "d", make_hu(), HEIGHTS, SeriesNumber=3)
    raw = header(
        np.zeros((4, 6), np.uint16),
        uid="1.2.3.6",
        SeriesNumber=6,
        SOPClassUID="1.2.840.10008.5.1.4.1.1.66",
        Rows=None,
    )
    del raw.PixelData
    save(raw, tmp_path / "d" / "raw")
    volume = read_image(tmp_path / "d")
    assert np.array_equal(volume.array, make_hu())
    assert finding_texts(volume) == (
        "left out, because they are not slices of the scan: 1 x object without an image (series 6)",
    )


def test_a_file_of_unknown_series_beside_two_volumes_stops_neither(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    chest = save_stack(folder, make_hu(), HEIGHTS, SeriesNumber=3, PatientID="a")
    other = {"uid": "1.2.4.4", "StudyInstanceUID": "1.2.4"}
    save_stack(folder, make_hu(), HEIGHTS, SeriesNumber=3, PatientID="b", **other)
    assert np.array_equal(read_image(folder, "a:3").array, make_hu())
    cut(chest[2], 300)
    doubt = (
        f"a file that does not tell its series may be a slice of the scan: '{chest[2].name}': "
        f"{CUT_HEADER}"
    )
    assert np.array_equal(read_image(folder, "b:3").array, make_hu())
    assert finding_texts(read_image(folder, "b:3")) == (doubt,)
    texts = finding_texts(read_image(folder, "a:3"))
    assert texts[0] == doubt
    assert "slices missing: 1 of 5" in texts[1]


@pytest.mark.parametrize("choice", ["a:3", "a:1.2.3:3"])
def test_a_file_cut_off_behind_its_series_number_is_refused_with_its_series(
    choice: str, tmp_path: Path
) -> None:
    """Its patient and study are not taken from it, since other values may be cut too."""
    folder = tmp_path / "d"
    chest = save_stack(folder, make_hu(), HEIGHTS, SeriesNumber=3, PatientID="a")
    other = {"uid": "1.2.4.4", "StudyInstanceUID": "1.2.4"}
    save_stack(folder, make_hu(), HEIGHTS, SeriesNumber=3, PatientID="b", **other)
    # The last slice: an inner one would be noticed as a gap.
    data = chest[4].read_bytes()
    position = data.index(b"\x20\x00\x32\x00DS")  # (0020,0032), behind the number (0020,0011)
    cut(chest[4], position + 12)
    assert said(folder, choice) == f"{chest[4]}: {CUT_HEADER}"
    assert np.array_equal(read_image(folder, "b:3").array, make_hu())
    assert finding_texts(read_image(folder, "b:3")) == ()
