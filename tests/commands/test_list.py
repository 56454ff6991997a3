"""`medseg list`: every series below a folder by patient, study and series, from headers alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "io"))

from dicom_export import make_export
from dicom_files import save_slice, save_stack

from medseg.commands.list_series import list_series as command
from medseg.config.schema import ListConfig, Modality
from medseg.data.case_table import read_case_table
from medseg.errors import UserError
from medseg.io.dicom.listing import list_series
from medseg.io.dicom.pick import pick, pick_each_study
from medseg.io.read import read_image

KINDS = (
    *["plain", "two kernels", "thin and thick", "with MR", "enhanced", "two studies"],
    *["gap", "MR alone", "damaged", "topogram alone", "two acquisitions"],
)


def config(folder: Path, output: Path | None = None, pick_rule: str | None = None) -> ListConfig:
    return ListConfig(str(folder), None if output is None else str(output), Modality.ct, pick_rule)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_export(tmp_path_factory.mktemp("export"), kinds=KINDS)


@pytest.mark.parametrize("form", ["flat", "folders"])
def test_series_are_told_by_headers_not_by_folders(export: dict[str, Path], form: str) -> None:
    listed = list_series(export[form])
    scans = {
        (row.series.patient, row.series.date, row.series.number, row.part, row.kernel)
        for row in listed
        if not row.fault
    }
    assert scans == {
        ("P01", "20240101", "2", 0, "B40f"),
        ("P02", "20240101", "2", 0, "B40f"),
        ("P02", "20240101", "3", 0, "B70f"),
        ("P03", "20240101", "2", 0, "B40f"),
        ("P03", "20240101", "3", 0, "B70f"),
        ("P04", "20240101", "2", 0, "B40f"),
        ("P05", "20240101", "2", 0, "B40f"),
        ("P06", "20240101", "2", 0, "B40f"),
        ("P06", "20240102", "2", 0, "B40f"),
        ("P11", "20240101", "2", 1, "B40f"),
        ("P11", "20240101", "2", 2, "B40f"),
    }
    faults = {
        (row.series.patient, row.series.number): row.fault
        for row in listed
        if row.fault and row.fault != "localiser"
    }
    assert set(faults) == {("P04", "4"), ("P07", "2"), ("P08", "4"), ("P09", "2")}
    assert faults["P04", "4"] == "MR image"
    assert "22.000 mm apart where 11.000 mm are usual (1 of 4 slices missing)" in faults["P07", "2"]
    assert "the DICOM file is truncated" in faults["P09", "2"]
    assert sum(row.fault == "localiser" for row in listed) == len(KINDS) + 1


def test_a_table_is_printed_and_written_that_a_prediction_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each row reads the slices of its series; the same command again changes nothing."""
    kinds = ("thin and thick", "two studies", "two acquisitions")
    flat = make_export(tmp_path, kinds=kinds)["flat"]
    table = tmp_path / "cases.csv"
    assert command(config(flat, table)) == 0
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith("P01") and "B70f" in line]
    assert " ".join(line.split()) == (
        "P01 2024-01-01 3 Chest B70f B70f 2 5.0 5 x 0.8 x 0.8 9 x 8 x 2 0.0"
    )
    assert "\n10 series: 6 scans of 4 studies\n" in said
    cases = {case.name: case for case in read_case_table(table, None)}
    assert len(cases) == 6
    assert cases["P02_20240102_2"].patient == "P02"
    assert cases["P02_20240102_2"].study_date == "2024-01-02"
    case = cases["P03_20240101_2.2"]
    negative = read_image(case.image, case.series)
    positive = read_image(case.image, cases["P03_20240101_2.1"].series)
    assert np.array_equal(positive.array, -negative.array)
    content = table.read_bytes()
    assert command(config(flat, table)) == 0
    assert table.read_bytes() == content
    table.write_text(table.read_text().replace("P01", "P99"))
    with pytest.raises(UserError, match="holds other cases; remove it, or give another output"):
        command(config(flat, table))
    assert command(config(flat, tmp_path / "picked.csv", "b70f")) == 0
    picked = [case.name for case in read_case_table(tmp_path / "picked.csv", None)]
    assert picked == ["P01_20240101_3"]


def test_a_damaged_file_is_a_line(tmp_path: Path) -> None:
    """One that does not say its series; those beside it may lack it."""
    save_stack(tmp_path, np.zeros((3, 4, 5), np.int16), [0.0, 2.5, 5.0])
    (tmp_path / "000.dcm").write_bytes(b"\0" * 128 + b"DICM" + b"\xff" * 40)
    whole, damaged = list_series(tmp_path)
    assert whole.fault.startswith("it may lack '000.dcm': the DICOM file is truncated or damaged")
    assert damaged.fault.startswith("'000.dcm': the DICOM file is truncated or damaged")
    assert damaged.num_slices == 0


def test_a_damaged_file_beside_several_series_is_a_line_and_no_more(tmp_path: Path) -> None:
    flat = make_export(tmp_path, kinds=("two kernels", "two studies"))["flat"]
    before = [row.fault for row in list_series(flat)]
    (flat / "IM990000").write_bytes(b"\0" * 128 + b"DICM" + b"\xff" * 40)
    *rows, damaged = list_series(flat)
    assert [row.fault for row in rows] == before
    assert damaged.fault.startswith("'IM990000': the DICOM file is truncated or damaged")


def test_patients_whose_series_share_a_uid_are_apart(tmp_path: Path) -> None:
    """As after an anonymisation that gives all the same; each row of the table reads its own."""
    images = {}
    for value, patient in enumerate(("anna", "bert")):
        images[patient] = np.full((2, 4, 5), value, np.int16)
        images[patient][0, 0, 0] = 9
        save_stack(tmp_path / patient, images[patient], [0.0, 2.5], PatientID=patient)
    listed = list_series(tmp_path)
    assert [row.series.patient for row in listed] == ["anna", "bert"]
    for row in listed:
        array = read_image(tmp_path, row.choice).array
        assert np.array_equal(array, images[row.series.patient])


def test_anonymised_scans_in_folders_of_their_own_are_studies_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in `predict series_pick=…`: without a study UID, each folder counts as one study."""
    image = np.arange(40, dtype=np.int16).reshape(2, 4, 5)
    export = tmp_path / "export"
    for patient, name in enumerate(("a", "b"), start=1):
        for number in (1, 2):
            uid = f"1.2.{patient}.{number}"
            identity = {"uid": uid, "StudyInstanceUID": "", "SeriesNumber": number}
            save_stack(export / name, image, [0.0, 3.0 - number], **identity)
    table = tmp_path / "cases.csv"
    assert command(config(export, table, "thinnest")) == 0
    assert "4 series: 4 scans of 2 studies" in capsys.readouterr().out
    cases = read_case_table(table, None)
    assert sorted(case.image.name for case in cases) == ["a", "b"]


def test_scans_of_one_patient_date_and_number_have_names_of_their_own(tmp_path: Path) -> None:
    image = np.zeros((2, 4, 5), np.int16)
    image[0, 0, 0] = 9
    for number in range(3):
        save_stack(
            tmp_path / f"{number}",
            image,
            [0.0, 2.5],
            uid=f"1.2.3.{number}",
            StudyInstanceUID=f"1.2.9.{number}",
            PatientID="anna",
            StudyDate="20240101",
            SeriesNumber=2,
        )
    table = tmp_path / "cases.csv"
    assert command(config(tmp_path, table)) == 0
    names = [case.name for case in read_case_table(table, None)]
    first = "anna_20240101_2"
    assert names == [first, f"{first}_2", f"{first}_3"]


def test_rules_choose_in_each_study(tmp_path: Path) -> None:
    """The thinnest, the largest, and the thinnest of those with a text or pattern."""
    size = (24, 4, 5)
    for number, (step, kernel, text) in enumerate(
        (
            (5.0, "I30f", "Abdomen"),
            (1.0, "B70f", "Lung"),
            (1.0, "Br40", "Soft"),
            (2.0, "B60s", "Lung"),
        ),
        start=1,
    ):
        # Of the two thinnest one has more slices.
        depth = {1: 24, 2: 6, 3: 8, 4: 24}[number]
        image = np.zeros((depth, *size[1:]), np.int16)
        about = {"SeriesNumber": number, "ConvolutionKernel": kernel, "SeriesDescription": text}
        save_stack(tmp_path, image, list(np.arange(depth) * step), uid=f"1.2.{number}", **about)
    scans = list_series(tmp_path)
    numbers = {}
    for rule in ("thinnest", "largest", "LUNG", "b6?s", "b[67]0", "Y"):
        chosen = pick(scans, rule)
        numbers[rule] = chosen and chosen.series.number
    assert numbers == {
        "thinnest": "3", "largest": "1", "LUNG": "2", "b6?s": "4", "b[67]0": "2", "Y": None,
    }  # fmt: skip
    assert len(pick_each_study(scans, "thinnest")) == 1


def test_scans_that_would_share_a_name_are_numbered(tmp_path: Path) -> None:
    image = np.zeros((3, 4, 5), np.int16)
    # As in an anonymised export: with a suffix for each earlier scan, names would grow too long.
    for number in range(100):
        folder = tmp_path / "export" / str(number)
        save_stack(folder, image, [0.0, 1.0, 2.0], uid=f"1.2.{number}", SeriesNumber=7)
    table = tmp_path / "cases.csv"
    assert command(config(tmp_path / "export", table)) == 0
    names = [case.name for case in read_case_table(table, None)]
    assert names == ["7", *(f"7_{number}" for number in range(2, 101))]


def test_texts_of_headers_do_not_act_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(2):
        save_slice(
            tmp_path / f"{index}",
            np.full((4, 5), index, np.int16),
            (0, 0, index),
            SeriesDescription="\x1b[31mred" + "x" * 60,
            SpecificCharacterSet="ISO_IR 192",
        )
    assert command(config(tmp_path)) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_folder_without_dicom_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ct.nii.gz").write_bytes(b"")
    cure = "; `predict` takes scans of other formats as they are, without a list"
    with pytest.raises(UserError, match=f"got a folder without DICOM files{cure}"):
        command(config(tmp_path))
    with pytest.raises(UserError, match=f"got a volume file{cure}"):
        command(config(tmp_path / "ct.nii.gz"))


def test_what_cannot_be_read_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder and a file of another user, and links that lead nowhere."""
    for patient in "ab":
        stack = np.zeros((3, 4, 5), np.int16)
        save_stack(
            tmp_path / patient, stack, [0.0, 2.5, 5.0], PatientID=patient, uid=f"1.2.{ord(patient)}"
        )
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "a" / "009.dcm").symlink_to(tmp_path / "nowhere")
    (tmp_path / "c.dcm").symlink_to("c.dcm")
    (tmp_path / "b" / "closed.dcm").write_bytes(b"")
    look, open_file = Path.iterdir, Path.open

    def refuse_folder(folder: Path) -> Iterator[Path]:
        if folder.name == "lost+found":
            raise PermissionError(13, "Permission denied", str(folder))
        return look(folder)

    def refuse_file(file: Path, *arguments: Any, **options: Any) -> Any:
        if file.name == "closed.dcm":
            raise PermissionError(13, "Permission denied", str(file))
        return open_file(file, *arguments, **options)

    monkeypatch.setattr(Path, "iterdir", refuse_folder)  # a mode would not stop root
    monkeypatch.setattr(Path, "open", refuse_file)
    assert command(config(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    denied = "cannot be read (Permission denied); check its permissions."
    assert sum(f"'lost+found': {denied}" in line for line in lines) == 1
    assert sum(f"'closed.dcm': {denied}" in line for line in lines) == 2, "itself and its series"
    assert any("'009.dcm': expected a slice" in line for line in lines)
    assert lines[-1] == "5 series: 0 scans of 0 studies"


def test_a_folder_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UserError, match=r"cannot be read \(Permission denied\); check its perm"):
        command(config(tmp_path))
