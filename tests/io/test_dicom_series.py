"""Which files make the series, what is left out, and how one of several is chosen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dicom_files import NATIVE, header, place, save, save_slice, save_stack, save_stored
from io_volumes import finding_texts, make_grid, make_hu, save_itk
from pydicom.uid import MediaStorageDirectoryStorage

from medseg.errors import UserError
from medseg.findings import Severity
from medseg.io.dicom.stacks import choose_stack
from medseg.io.inputs import case_name, input_format, list_inputs
from medseg.io.read import read_image, read_labels
from medseg.io.write import write_image

HEIGHTS = list(2.5 * np.arange(5))
CHOICE = "choose one with series=, or in the column series of a case table."
ONLY = (
    "expected a CT series of at least two slices, but found only {}; give the folder of a CT "
    "series."
)
LEFT_OUT = "left out, because they are not slices of the scan: "


def said(path: Path, series: str | None = None) -> str:
    """The sentence that refuses, without the path."""
    with pytest.raises(UserError) as caught:
        read_image(path, series)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def other(path: Path, **fields: object) -> Path:
    """An object beside the slices."""
    return save(header(np.zeros((4, 6), np.uint16), **fields), path)


def test_a_medium_with_nested_folders_and_foreign_files(tmp_path: Path) -> None:
    medium = tmp_path / "CD 1"
    for index, file in enumerate(save_stack(tmp_path / "x", make_hu(), HEIGHTS, SeriesNumber=3)):
        folder = medium / "DICOM" / "PA0" / f"ST{index % 2}" / "SE0"
        folder.mkdir(parents=True, exist_ok=True)
        file.rename(folder / f"IM{index:04d}")
    directory = header(
        np.zeros((4, 6), np.uint16), SOPClassUID=MediaStorageDirectoryStorage, Modality=None
    )
    save(directory, medium / "DICOMDIR")
    save(directory, medium / "INDEX.DIR")
    for name in ("AUTORUN.INF", "VIEWER.EXE", "DICOM/notes.txt", "DICOM/PA0/._IM0000", ".DS_Store"):
        (medium / name).write_bytes(b"\x08\0some other file" * 20)
    save_itk(medium / "DICOM" / "preview.nii", make_hu(), make_grid(np.eye(3)))
    (medium / "DICOM" / "again").symlink_to(medium / "DICOM", target_is_directory=True)
    for path in (medium, medium / "DICOMDIR", medium / "DICOM" / "PA0"):
        volume = read_image(path)
        assert np.array_equal(volume.array, make_hu())
        assert finding_texts(volume) == ()
    assert list_inputs(medium) == [("CD 1", medium)]
    assert list_inputs(medium / "DICOMDIR") == [("CD 1", medium / "DICOMDIR")]
    assert list_inputs(medium / "DICOM" / "PA0") == [
        (f"ST{i}", medium / "DICOM" / "PA0" / f"ST{i}") for i in range(2)
    ]
    one = medium / "DICOM" / "PA0" / "ST1" / "SE0" / "IM0003"
    assert case_name(one) == "SE0"
    assert np.array_equal(read_image(one).array, make_hu()[1::2])


@pytest.mark.parametrize("syntax", ["implicit", "explicit"])
def test_files_without_preamble(tmp_path: Path, syntax: str) -> None:
    for index, pixels in enumerate(make_hu()):
        dataset = header((pixels + 1024).astype(np.uint16))
        place(dataset, (0, 0, 2.5 * index))
        file = save(dataset, tmp_path / "old" / f"{index}.ima", NATIVE[syntax])
        data = file.read_bytes()
        file.write_bytes(data[data.index(b"\x08\0\x08\0", 132) :])
    assert input_format(tmp_path / "old") == "dicom"
    assert np.array_equal(read_image(tmp_path / "old").array, make_hu())


def test_what_is_no_slice_is_left_out_and_said(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    save_stack(folder, make_hu(), HEIGHTS, SeriesNumber=3, SeriesDescription="Thorax  B40f")
    for index in range(2):
        save_slice(
            folder / f"topogram{index}", make_hu((1, 12, 5))[0], (0, 0, 0), ((0, 1, 0), (0, 0, -1)),
            uid="1.2.3.1", SeriesNumber=1, SeriesDescription="Topogram",
            ImageType="ORIGINAL\\PRIMARY\\LOCALIZER",
        )  # fmt: skip
    own = {"SeriesNumber": 3, "SeriesDescription": "Thorax  B40f"}
    save_slice(
        folder / "topogram in the series",
        make_hu((1, 12, 5))[0],
        (0, 0, 0),
        ((0, 1, 0), (0, 0, -1)),
        **own,
    )
    for index in range(3):
        save_slice(
            folder / f"bolus{index}", make_hu()[index], (0, 0, 99), uid="1.2.3.2", SeriesNumber=2
        )
    other(
        folder / "dose",
        uid="1.2.3.9",
        SeriesNumber=501,
        SOPClassUID="1.2.840.10008.5.1.4.1.1.7",
        SeriesDescription="Dose",
    )
    other(folder / "screen", uid="1.2.3.10", SeriesNumber=502, SamplesPerPixel=3, Rows=4, Columns=2)
    other(folder / "plan", uid="1.2.3.11", SeriesNumber=503, Modality="RTSTRUCT", Rows=None)
    other(folder / "mip", uid="1.2.3.12", SeriesNumber=504)
    volume = read_image(folder)
    assert np.array_equal(volume.array, make_hu())
    others, own_slice = volume.findings
    assert (others.code, others.severity) == ("left_out", Severity.information)
    assert others.message.startswith(LEFT_OUT)
    assert set(others.message.removeprefix(LEFT_OUT).split(", ")) == {
        "2 x localiser (series 1 'Topogram')",
        "3 x single slice without neighbours (series 2)",
        "1 x secondary capture (series 501 'Dose')",
        "1 x colour image (series 502)",
        "1 x RTSTRUCT object (series 503)",
        "1 x image without a position and an orientation (series 504)",
    }
    assert own_slice.severity is Severity.warning, "it may have been a slice of the scan"
    assert (
        str(own_slice) == f"{LEFT_OUT}1 x single slice without neighbours (series 3 'Thorax B40f')"
    )
    assert read_image(folder, "3").findings == (own_slice,)


@pytest.mark.parametrize("modality", ["MR", "PT", "US"])
def test_another_modality_is_refused_by_name(tmp_path: Path, modality: str) -> None:
    save_stack(
        tmp_path / "d",
        make_hu(),
        HEIGHTS,
        Modality=modality,
        SeriesNumber=7,
        SeriesDescription="T1",
    )
    assert said(tmp_path / "d") == ONLY.format(f"5 x {modality} image (series 7 'T1')")


def test_only_scouts_or_one_slice(tmp_path: Path) -> None:
    save_stack(
        tmp_path / "d", make_hu(), HEIGHTS, ImageType="ORIGINAL\\PRIMARY\\LOCALIZER", SeriesNumber=1
    )
    assert said(tmp_path / "d") == ONLY.format("5 x localiser (series 1)")
    save_stack(tmp_path / "e", make_hu()[:1], HEIGHTS[:1])
    assert said(tmp_path / "e") == ONLY.format(
        "1 x single slice without neighbours (series 1.2.3.4)"
    )
    other(tmp_path / "f" / "palette", SeriesNumber=5, PhotometricInterpretation="PALETTE COLOR")
    assert said(tmp_path / "f") == ONLY.format("1 x colour image (series 5)")


def test_a_modality_that_is_not_noted(tmp_path: Path) -> None:
    save_stack(tmp_path / "d", make_hu(), HEIGHTS, Modality=None)
    assert np.array_equal(read_image(tmp_path / "d").array, make_hu())
    save_stack(
        tmp_path / "e", make_hu(), HEIGHTS, Modality=None, SOPClassUID="1.2.840.10008.5.1.4.1.1.4"
    )
    assert said(tmp_path / "e") == ONLY.format("5 x image of unknown modality (series 1.2.3.4)")


def test_one_of_several_series_is_chosen(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    soft, sharp = make_hu(), make_hu((7, 7, 9), seed=5)
    files = save_stack(
        folder, soft, HEIGHTS, uid="1.2.3.4", SeriesNumber=3, SeriesDescription="Thorax B40f"
    )
    save_stack(
        folder / "sharp",
        sharp,
        list(1.25 * np.arange(7)),
        uid="1.2.3.5",
        SeriesNumber=12,
        SeriesDescription="Thorax B70f",
    )
    names = (
        "series=3 'Thorax B40f' (5 slices, 2.5 x 0.8 x 0.648 mm); series=12 'Thorax B70f' (7 "
        "slices, 1.25 x 0.8 x 0.648 mm)"
    )
    assert said(folder) == f"expected one CT series, but it holds 2: {names}; {CHOICE}"
    assert said(folder, "4") == f"there is no series=4 among {names}; give one of them."
    for series in ("3", "1.2.3.4"):
        assert np.array_equal(read_image(folder, series).array, soft)
    for series in ("12", "1.2.3.5"):
        assert np.array_equal(read_image(folder, series).array, sharp)
    assert np.array_equal(read_image(files[0]).array, soft)
    assert finding_texts(read_image(folder, "12")) == ()


def test_numbers_that_are_not_unique(tmp_path: Path) -> None:
    for uid in ("1.2.3.4", "1.2.3.5"):
        save_stack(tmp_path / "d", make_hu(), HEIGHTS, uid=uid, SeriesNumber=1)
    names = (
        "series=1.2.3.4 (5 slices, 2.5 x 0.8 x 0.648 mm); series=1.2.3.5 (5 slices, 2.5 x 0.8 x "
        "0.648 mm)"
    )
    assert said(tmp_path / "d", "1") == f"expected one CT series, but it holds 2: {names}; {CHOICE}"


def test_series_is_for_dicom_only(tmp_path: Path) -> None:
    save_itk(tmp_path / "ct.nii.gz", make_hu(), make_grid(np.eye(3)))
    expected = "series=3 chooses among DICOM series, but this is a nifti file; leave series out."
    assert said(tmp_path / "ct.nii.gz", "3") == expected


@pytest.mark.parametrize(
    ("keyword", "values", "names"),
    [
        ("AcquisitionNumber", [9, 10], ["acquisition 9", "acquisition 10"]),
        ("TemporalPositionIdentifier", [1, 2], ["time point 1", "time point 2"]),
        ("NominalPercentageOfCardiacPhase", [0.0, 50.0], ["phase 0", "phase 50"]),
        ("ConvolutionKernel", ["B40f", "B70f"], ["kernel B40f", "kernel B70f"]),
        ("KVP", [80, 140], ["kVp 80", "kVp 140"]),
    ],
)
@pytest.mark.parametrize("offset_mm", [0.0, 1.25])
def test_phases_of_one_series_are_told_apart(
    tmp_path: Path, keyword: str, values: list[object], names: list[str], offset_mm: float
) -> None:
    """At the same places, or in between."""
    scans = {str(value): make_hu(seed=seed) for seed, value in enumerate(values)}
    for (_, scan), value in zip(scans.items(), values, strict=True):
        heights = list(np.array(HEIGHTS) + (offset_mm if value == values[1] else 0))
        save_stack(tmp_path / "d" / str(value), scan, heights, SeriesNumber=4, **{keyword: value})
    size = "(5 slices, 2.5 x 0.8 x 0.648 mm)"
    listed = f"series=4/1 {names[0]} {size}; series=4/2 {names[1]} {size}"
    assert said(tmp_path / "d") == f"expected one CT series, but it holds 2: {listed}; {CHOICE}"
    for part, wanted in enumerate(scans.values(), start=1):
        assert np.array_equal(read_image(tmp_path / "d", f"4/{part}").array, wanted)
        assert np.array_equal(read_image(tmp_path / "d", f"1.2.3.4/{part}").array, wanted)
    assert np.array_equal(
        read_image(next((tmp_path / "d" / str(values[0])).iterdir())).array, scans[str(values[0])]
    )
    assert "there is no series=4/3 among series=4/1" in said(tmp_path / "d", "4/3")


def test_rotations_that_follow_each_other_are_one_scan(tmp_path: Path) -> None:
    numbers, times = [1, 1, 2, 2, 3], [f"1200{index:02d}.5" for index in range(5)]
    save_stack(tmp_path / "d", make_hu(), HEIGHTS, AcquisitionNumber=numbers, AcquisitionTime=times)
    volume = read_image(tmp_path / "d")
    assert np.array_equal(volume.array, make_hu())
    assert finding_texts(volume) == ()


@pytest.mark.parametrize(
    ("keyword", "values"),
    [("AcquisitionNumber", ("1", "2")), ("AcquisitionTime", ("120000", "120500"))],
)
def test_slices_acquired_in_turns_are_one_scan(
    tmp_path: Path, keyword: str, values: tuple[str, str]
) -> None:
    """Unless they are thicker than their distance or far thinner, as two scans may be."""
    first, second = values
    fields = {"SeriesNumber": 4, "Modality": "MR", keyword: [first, second, first, second, first]}
    save_stack(tmp_path / "d", make_hu(), HEIGHTS, SliceThickness="2.4", **fields)
    stack, _ = choose_stack(tmp_path / "d", None, "MR")
    assert stack.heights_mm.tolist() == HEIGHTS
    for thickness in ("5", "1"):
        save_stack(tmp_path / thickness, make_hu(), HEIGHTS, SliceThickness=thickness, **fields)
        with pytest.raises(UserError, match="series=4/2 "):
            choose_stack(tmp_path / thickness, None, "MR")


@pytest.mark.parametrize(
    ("modality", "keyword", "values"),
    [
        ("CT", "AcquisitionNumber", ("1", "2")),
        ("CT", "AcquisitionTime", ("120000", "120500")),
        ("CT", "KVP", ("80", "140")),
        ("CT", "ConvolutionKernel", ("B40f", "B70f")),
        ("MR", "TemporalPositionIdentifier", ("1", "2")),
        ("MR", "EchoTime", ("10", "80")),
        ("MR", "DiffusionBValue", (0.0, 1000.0)),
    ],
)
def test_scans_whose_slices_alternate_are_two(
    tmp_path: Path, modality: str, keyword: str, values: tuple[object, object]
) -> None:
    """Each fills the gaps of the other evenly."""
    first, second = values
    fields = {"SeriesNumber": 4, keyword: [first, second, first, second, first]}
    save_stack(tmp_path, make_hu(), HEIGHTS, SliceThickness="2.5", Modality=modality, **fields)
    with pytest.raises(UserError, match="series=4/2 "):
        choose_stack(tmp_path, None, modality)


def test_a_value_of_nearly_every_slice_tells_no_volumes_apart(tmp_path: Path) -> None:
    """Slices that were made in turns: the first and the last share a time."""
    times = ["120000", "120001", "120002", "120003", "120000"]
    save_stack(tmp_path / "d", make_hu(), HEIGHTS, SeriesNumber=4, AcquisitionTime=times)
    for series in (None, "4", "4/1"):
        assert np.array_equal(read_image(tmp_path / "d", series).array, make_hu())
    assert "there is no series=4/2 among series=4 " in said(tmp_path / "d", "4/2")


def test_stacks_of_other_size_or_direction(tmp_path: Path) -> None:
    save_stack(tmp_path / "d", make_hu(), HEIGHTS, SeriesNumber=4)
    for index in range(3):
        axes = ((1, 0, 0), (0, 0, -1))
        save_slice(
            tmp_path / "d" / f"coronal{index}",
            make_hu((3, 8, 6))[index],
            (0, 3.0 * index, 0),
            axes,
            SeriesNumber=4,
        )
    listed = (
        "series=4/1 (5 slices, 2.5 x 0.8 x 0.648 mm); series=4/2 (3 slices, 3 x 0.8 x 0.648 mm)"
    )
    assert said(tmp_path / "d") == f"expected one CT series, but it holds 2: {listed}; {CHOICE}"
    assert read_image(tmp_path / "d", "4/2").grid.shape == (3, 8, 6)


@pytest.mark.parametrize("modality", ["CT", "MR", "PT"])
def test_labels_may_be_a_series(tmp_path: Path, modality: str) -> None:
    save_stack(tmp_path / "d", make_hu() % 3, HEIGHTS, Modality=modality)
    labels = read_labels(tmp_path / "d").array
    assert labels.dtype == np.uint8
    assert np.array_equal(labels, make_hu() % 3)


CLEAR = "\x1b[2J"  # clears a terminal


@pytest.mark.filterwarnings(
    "ignore:Invalid value for VR", "ignore:The value length"
)  # pydicom's, when it writes
def test_no_text_of_a_header_reaches_the_terminal_as_it_is(tmp_path: Path) -> None:
    """In choices, remarks and refusals alike."""
    kernels = {"ConvolutionKernel": f"B{CLEAR}"}, {"ConvolutionKernel": "B70f"}
    for kernel in kernels:
        save_stack(
            tmp_path / "d" / kernel["ConvolutionKernel"][-1],
            make_hu(),
            HEIGHTS,
            SeriesNumber=4,
            SeriesDescription=f"T1{CLEAR}",
            **kernel,
        )
    size = "(5 slices, 2.5 x 0.8 x 0.648 mm)"
    listed = (
        rf"series=4/1 'T1\x1b[2J', kernel 'B\x1b[2J' {size}; series=4/2 'T1\x1b[2J', kernel B70f "
        f"{size}"
    )
    assert said(tmp_path / "d") == f"expected one CT series, but it holds 2: {listed}; {CHOICE}"
    save_stack(
        tmp_path / "e",
        make_hu(),
        HEIGHTS,
        uid=f"1.2{CLEAR}",
        Modality=f"MR{CLEAR}",
        SeriesDescription=70 * "x",
    )
    found = rf"5 x 'MR\x1b[2J' image (series '1.2\x1b[2J' '{57 * 'x'}...')"
    assert said(tmp_path / "e") == (
        f"expected a CT series of at least two slices, but found only {found}; give the "
        "folder of a CT series."
    )
    save_stack(tmp_path / "f", make_hu(), HEIGHTS, SeriesNumber=3)
    other(tmp_path / "f" / "plan", uid="1.2.3.9", SeriesDescription=CLEAR, Modality="SR")
    assert finding_texts(read_image(tmp_path / "f")) == (
        rf"{LEFT_OUT}1 x SR object (series 1.2.3.9 '\x1b[2J')",
    )


@pytest.mark.filterwarnings("ignore:Invalid value for VR")
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"RescaleType": CLEAR}, r"the slices have '\x1b[2J'; choose or export"),
        (
            {"PixelSpacing": [1] * 200},
            "cannot be read ('PixelSpacing should hold 2 numbers and holds [1.0, 1.0, 1...')",
        ),
    ],
)
def test_a_field_of_any_length_or_content_is_told_in_short(
    tmp_path: Path, fields: dict[str, object], says: str
) -> None:
    for index in range(2):
        dataset = header(make_hu()[index])
        place(dataset, (0, 0, 2.5 * index))
        for keyword, value in fields.items():
            setattr(dataset, keyword, value)
        save(dataset, tmp_path / f"{index}")
    with pytest.raises(UserError) as caught:
        read_image(tmp_path)
    assert says in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < len(str(tmp_path)) + 250


def test_descriptions_in_another_alphabet(tmp_path: Path) -> None:
    fields = {"SpecificCharacterSet": "ISO_IR 144", "SeriesDescription": "Грудь"}
    for uid in ("1.2.3.4", "1.2.3.5"):
        save_stack(tmp_path / "d", make_hu(), HEIGHTS, uid=uid, SeriesNumber=int(uid[-1]), **fields)
    assert "series=4 'Грудь' (5 slices" in said(tmp_path / "d")


def test_slices_of_two_patients_are_no_scan(tmp_path: Path) -> None:
    for index, pixels in enumerate(make_hu()):
        save_slice(
            tmp_path / "d" / f"{index}",
            pixels,
            (0, 0, 2.5 * index),
            PatientID=["A", "B", None][index % 3],
        )
    assert said(tmp_path / "d") == (
        "expected a series of one patient, but its slices carry 2 different Patient IDs; put "
        "the files of each patient into a folder of "
        "their own."
    )
    for index in (1, 4):
        (tmp_path / "d" / f"{index}").unlink()
    assert read_image(tmp_path / "d").grid.shape[0] == 4


def test_slices_of_two_studies_are_told(tmp_path: Path) -> None:
    for index, pixels in enumerate(make_hu()):
        study = {"StudyInstanceUID": ["1.2.3", "1.2.4", None][index % 3]}
        save_slice(tmp_path / "d" / f"{index}", pixels, (0, 0, 2.5 * index), **study)
    volume = read_image(tmp_path / "d")
    assert np.array_equal(volume.array, make_hu())
    assert finding_texts(volume) == (
        "the slices carry 2 different Study Instance UIDs; check that they are of one scan",
    )
    for index in (1, 4):
        (tmp_path / "d" / f"{index}").unlink()
    assert not any("Study" in text for text in finding_texts(read_image(tmp_path / "d")))


def test_a_series_of_another_modality_is_read_where_it_is_asked_for(tmp_path: Path) -> None:
    """Values are no HU: none is taken for negative, padding is 0, no rescale is no remark."""
    stored = np.random.default_rng(3).integers(0, 65535, (5, 7, 9), dtype=np.uint16)
    fields = {"Modality": "MR", "SOPClassUID": "1.2.840.10008.5.1.4.1.1.4", "SeriesNumber": 7}
    save_stored(tmp_path / "d", stored, RescaleSlope=None, RescaleIntercept=None, **fields)
    volume = read_image(tmp_path / "d", modality="mr")
    assert np.array_equal(volume.array, stored)
    assert finding_texts(volume) == ()
    assert said(tmp_path / "d") == ONLY.format("5 x MR image (series 7)")
    save_stored(
        tmp_path / "p",
        stored,
        RescaleSlope=2,
        RescaleIntercept=0,
        RescaleType="normalized",
        PixelPaddingValue=int(stored[0, 0, 0]),
        **fields,
    )
    expected = np.where(stored == stored[0, 0, 0], 0.0, 2.0 * stored)
    assert np.array_equal(read_image(tmp_path / "p", modality="mr").array, expected)
    save_stored(tmp_path / "p", stored, SeriesNumber=8, uid="1.2.3.8")
    with pytest.raises(
        UserError, match="expected a MR series of at least two slices, but found only 5 x CT image"
    ):
        read_image(tmp_path / "p", modality="mr")


def test_echoes_of_one_series_are_told_apart(tmp_path: Path) -> None:
    for echo_ms in (10.0, 90.0):
        save_stack(
            tmp_path / f"d/{echo_ms}",
            make_hu(seed=int(echo_ms)),
            HEIGHTS,
            Modality="MR",
            SeriesNumber=2,
            EchoTime=echo_ms,
        )
    with pytest.raises(
        UserError,
        match=(
            r"expected one MR series, but it holds 2: series=2/1 echo time 10 .*; "
            r"series=2/2 echo time 90 "
        ),
    ):
        read_image(tmp_path / "d", modality="mr")
    assert np.array_equal(read_image(tmp_path / "d", "2/2", "mr").array, make_hu(seed=90))


def test_any_modality_but_no_object_without_an_image(tmp_path: Path) -> None:
    save_stack(tmp_path / "d", make_hu(), HEIGHTS, Modality="PT", SeriesNumber=2)
    other(tmp_path / "d" / "dose", uid="1.2.3.9", SeriesNumber=9, Modality="RTDOSE")
    volume = read_image(tmp_path / "d", modality="other")
    assert np.array_equal(volume.array, make_hu())
    assert finding_texts(volume) == (LEFT_OUT + "1 x RTDOSE object (series 9)",)
    (tmp_path / "d" / "dose").rename(tmp_path / "dose")
    with pytest.raises(
        UserError,
        match="expected a scan series of at least two slices, but found only 1 x RTDOSE object",
    ):
        read_image(tmp_path / "dose", modality="other")


def test_a_scan_says_whose_it_is(tmp_path: Path) -> None:
    """Patient, date and series reach who reads the scan; a scan of another format has none."""
    image = np.zeros((2, 4, 5), np.int16)
    image[0, 0, 0] = 1
    about = {"PatientID": "P 1", "StudyDate": "20240131", "SeriesNumber": 3}
    save_stack(tmp_path, image, [0.0, 2.5], SeriesDescription="Lung 1.0", **about)
    identity = read_image(tmp_path).identity
    assert identity == ("P 1", "2024-01-31", "3", "Lung 1.0")
    assert str(identity) == "patient P 1, 2024-01-31"
    write_image(tmp_path / "a.nii.gz", image, read_image(tmp_path).grid)
    assert not any(read_image(tmp_path / "a.nii.gz").identity)
