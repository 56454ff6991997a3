"""DICOM folders with RTSTRUCT or SEG files."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from layouts import LEFT, blocks, make_dicom, make_totalsegmentator
from pydicom import dcmread

from medseg.data.importers.dicom import import_dicom
from medseg.data.importers.formats import import_dataset
from medseg.data.reference import file_values, read_reference
from medseg.errors import UserError
from medseg.io.dicom.catalogue import Catalogue, ImageSeries, LabelEntry, is_copy
from tests.io.io_volumes import finding_texts


@pytest.mark.parametrize("kind", ["RTSTRUCT", "SEG"])
def test_the_layout_of_lctsc(tmp_path: Path, kind: str) -> None:
    data = import_dataset(make_dicom(tmp_path, kind=kind))
    assert data.format == "dicom"
    assert [(case.name, case.patient, case.series) for case in data.cases] == [
        (f"LCTSC-Train-S1-{n:03d}", f"LCTSC-Train-S1-{n:03d}", f"1.2.826.{n}.1") for n in range(3)
    ]
    assert data.labels == {"left_lung": ["Lung_L"], "right_lung": ["Lung_R"]}
    assert (data.channels[0].modality, data.notes) == ("ct", ())
    for index, case in enumerate(data.cases):
        assert case.labels is not None
        values = file_values(data.task()["data"]["label_values"])
        volume, names = read_reference(case.labels, values, case.image, case.series)
        assert names == {1: "left_lung", 2: "right_lung"}
        assert np.array_equal(volume.array, blocks(index)[1])


def test_structures_of_other_spellings_and_missing_ones(tmp_path: Path) -> None:
    make_dicom(tmp_path / "a", ("Lung_L", "Lung_R"))
    make_dicom(tmp_path / "b", ("LUNG L", "Heart"))
    shutil.rmtree(tmp_path / "b" / "LCTSC-Train-S1-000")
    for patient in ("LCTSC-Train-S1-001", "LCTSC-Train-S1-002"):
        shutil.rmtree(tmp_path / "a" / patient)
    data = import_dicom(tmp_path)
    assert data.labels == {"Heart": ["Heart"], "left_lung": ["Lung_L"], "right_lung": ["Lung_R"]}
    said = (
        r"LCTSC-Train-S1-000 \(1 of 3 cases\): the structure Heart is missing, and would be "
        "trained on as background"
    )
    with pytest.raises(UserError, match=said):
        data.require_structures()
    with pytest.raises(UserError, match=r"\(2 of 3 cases\): the structure Lung_R is missing"):
        data.keep(["right_lung"]).require_structures()
    data.keep(["left_lung"]).require_structures()
    stated = data.state_absence()
    assert [sorted(case.trust) for case in stated.cases] == [
        ["Heart"],
        ["right_lung"],
        ["right_lung"],
    ]
    case = data.cases[1]
    assert case.labels is not None
    values = file_values(data.task()["data"]["label_values"])
    volume, names = read_reference(case.labels, values, case.image, case.series)
    assert np.array_equal(volume.array == 2, blocks(1)[1] == LEFT)
    assert names == {1: "Heart", 2: "left_lung", 3: "right_lung"}
    assert finding_texts(volume) == ("right_lung: no such structure, taken as absent",)


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    make_dicom(tmp_path)
    study = tmp_path / "LCTSC-Train-S1-000" / "1.2.826.0"
    (study / "again").mkdir()
    shutil.copy(study / "1.2.826.0.2" / "1-1.dcm", study / "again" / "2.dcm")
    shutil.rmtree(tmp_path / "LCTSC-Train-S1-001" / "1.2.826.1" / "1.2.826.1.1")
    shutil.rmtree(tmp_path / "LCTSC-Train-S1-002" / "1.2.826.2" / "1.2.826.2.2")
    data = import_dataset(tmp_path)
    assert [case.name for case in data.cases] == ["LCTSC-Train-S1-000"]
    reasons = {item.name: item.why for item in data.closing_items() if item.fate == "left out"}
    assert (
        reasons["LCTSC-Train-S1-000/1.2.826.0/again/2.dcm"]
        == "a copy of LCTSC-Train-S1-000/1.2.826.0/1.2.826.0.2/1-1.dcm"
    )
    assert (
        reasons["LCTSC-Train-S1-001/1.2.826.1/1.2.826.1.2/1-1.dcm"]
        == "labels a series that is not below the folder"
    )
    assert reasons["1.2.826.2.1"] == "no labels refer to it"


def damage_patient_id(source: Path, target: Path, damage: str) -> None:
    """Copy a DICOM file, with its element Patient ID damaged."""
    content = source.read_bytes()
    at = content.index(b"\x10\x00\x20\x00LO") + 4
    if damage == "unknown kind":
        content = content[:at] + b"ZZ" + content[at + 2 :]
    else:
        # A number of 16 bits in 19 bytes.
        content = content[:at] + b"US" + (19).to_bytes(2, "little") + content[at + 4 :]
    target.write_bytes(content)


@pytest.mark.parametrize("damage", ["unknown kind", "odd number"])
def test_a_damaged_slice_does_not_stop_the_import(tmp_path: Path, damage: str) -> None:
    make_dicom(tmp_path)
    slice_file = next((tmp_path / "LCTSC-Train-S1-000").glob("*/*.1/*"))
    damage_patient_id(slice_file, tmp_path / "damaged.dcm", damage)
    data = import_dataset(tmp_path)
    assert len(data.cases) == 3
    reasons = {item.name: item.why for item in data.closing_items() if item.fate == "left out"}
    assert reasons["damaged.dcm"] == "damaged DICOM, cannot be read"


def test_copies_of_labels_with_an_unknown_element_are_compared(tmp_path: Path) -> None:
    make_dicom(tmp_path, kind="SEG")
    path = next((tmp_path / "LCTSC-Train-S1-000").glob("*/*.2/1-1.dcm"))
    content = path.read_bytes()
    # The kind of the value of Patient Name, which the import does not read.
    at = content.index(b"\x10\x00\x10\x00PN") + 4
    path.write_bytes(content[:at] + b"ZZ" + content[at + 2 :])
    shutil.copy(path, path.with_name("copy.dcm"))
    assert len(import_dicom(tmp_path).cases) == 3
    # The first byte of the preamble has no meaning.
    other = bytearray(path.read_bytes())
    other[0] = 1
    path.with_name("copy.dcm").write_bytes(other)
    with pytest.raises(UserError, match="label the same series of LCTSC-Train-S1-000"):
        import_dicom(tmp_path)


def test_two_scans_of_a_patient_are_two_cases(tmp_path: Path) -> None:
    make_dicom(tmp_path)
    for path in (tmp_path / "LCTSC-Train-S1-001").rglob("*"):
        if path.is_file():
            dataset = dcmread(path)
            dataset.PatientID = "LCTSC-Train-S1-000"
            dataset.save_as(path)
    data = import_dicom(tmp_path)
    assert [(case.name, case.patient) for case in data.cases][:2] == [
        ("LCTSC-Train-S1-000_1", "LCTSC-Train-S1-000"),
        ("LCTSC-Train-S1-000_2", "LCTSC-Train-S1-000"),
    ]


def test_series_of_one_patient_id_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that removes identities has given all patients one ID."""
    catalogue = Catalogue(series={}, labels=[], unreadable={}, others={})
    for uid in ("1", "2"):
        catalogue.series[uid] = ImageSeries(uid, tmp_path / uid, "CT", "ANON", ())
        entry = LabelEntry(tmp_path / f"{uid}.dcm", ("heart",), (), (uid,), "ANON", uid)
        catalogue.labels.append(entry)
    monkeypatch.setattr("medseg.data.importers.dicom.read_catalogue", lambda _: catalogue)
    (note,) = import_dicom(tmp_path).notes
    assert note.startswith("all 2 series are of the patient 'ANON', so none is left for validation")
    del catalogue.labels[1]
    assert import_dicom(tmp_path).notes == ()


def test_labels_that_name_no_series_belong_to_the_only_one_of_their_patient(
    tmp_path: Path,
) -> None:
    make_dicom(tmp_path)
    files = sorted(tmp_path.glob("*/*/*.2/1-1.dcm"))
    for path in files:
        dataset = dcmread(path)
        del dataset.ReferencedFrameOfReferenceSequence
        dataset.save_as(path)
    data = import_dicom(tmp_path)
    assert [(case.series, case.labels) for case in data.cases] == [
        (f"1.2.826.{number}.1", path) for number, path in enumerate(files)
    ]
    # With a second series of a patient it is not said which one is meant.
    for path in (tmp_path / "LCTSC-Train-S1-001").rglob("*"):
        if path.is_file() and path != files[1]:
            dataset = dcmread(path)
            dataset.PatientID = "LCTSC-Train-S1-000"
            dataset.save_as(path)
    data = import_dicom(tmp_path)
    assert [case.series for case in data.cases] == ["1.2.826.2.1"]


def test_two_files_without_identity_are_no_copies(tmp_path: Path) -> None:
    make_dicom(tmp_path)
    path = next((tmp_path / "LCTSC-Train-S1-000").glob("*/*.2/1-1.dcm"))
    dataset = dcmread(path)
    dataset.SOPInstanceUID = ""
    dataset.save_as(path)
    dataset.StructureSetROISequence[0].ROIName = "Heart"
    dataset.save_as(path.with_name("1-2.dcm"))
    with pytest.raises(UserError, match="label the same series of LCTSC-Train-S1-000"):
        import_dicom(tmp_path)


def test_a_file_that_has_gone_is_no_copy(tmp_path: Path) -> None:
    """Its header was read before, and then the link or the drive went away."""
    gone = LabelEntry(tmp_path / "gone.dcm", ("left lung",), (), (), "", "1.2.3")
    assert not is_copy(gone, replace(gone, path=tmp_path / "gone_too.dcm"))


def test_mistakes_of_a_dicom_folder(tmp_path: Path) -> None:
    make_dicom(tmp_path / "a")
    for path in (tmp_path / "a").glob("*/*/*.2"):
        shutil.move(path, tmp_path / f"{path.name}.labels")
    with pytest.raises(
        UserError,
        match=r"expected DICOM labels \(SEG or RTSTRUCT\) beside 3 image series, but found none",
    ):
        import_dicom(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(
        UserError, match=r"1-1.dcm and 2 more: the series that it labels is not below"
    ):
        import_dicom(tmp_path)
    path = next(tmp_path.rglob("1-1.dcm"))
    image = make_totalsegmentator(tmp_path / "nifti") / "s0000" / "ct.nii.gz"
    with pytest.raises(
        UserError,
        match=(
            "a DICOM RTSTRUCT is read on the slices of its series, but the image of the case is "
            "not DICOM"
        ),
    ):
        read_reference(path, {"Lung_L": "left_lung"}, image)
