"""DICOM studies of a batch: each is a case, in any folders; `series=` chooses within it."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import hydra
import numpy as np
import pytest
from dicom_files import enhanced, save, save_stack
from oracle import CoarseOracle, FineOracle, stage
from pydicom import dcmread
from rich.progress import Progress

from medseg.commands import predict as app
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.data.case_table import read_case_table, write_case_table
from medseg.errors import UserError
from medseg.io.dicom.frames import Frame, NoSlice, read_frames
from medseg.io.dicom.studies import find_studies
from medseg.io.read import read_image
from medseg.prediction.options import PredictConfig
from medseg.prediction.scans import divide_studies, find_scans

SIZE = "(4 slices, 2.5 x 0.8 x 0.648 mm)"


@pytest.fixture(autouse=True)
def oracles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace checkpoints by oracles."""
    networks = {"coarse": CoarseOracle(), "fine": FineOracle()}
    monkeypatch.setattr(
        "medseg.cascade.load.load_stage", lambda path, name, *_: stage(networks[name], name)
    )
    monkeypatch.setattr("medseg.data.audit.image.audit_channels", lambda *_: [])


def series(folder: Path, patient: str, number: int, study: int = 1, **fields: object) -> np.ndarray:
    """Write a CT series and return its voxels, by which a test recognises it."""
    key = sum(map(ord, patient))
    rng = np.random.default_rng(key + 100 * study + number)
    image = rng.integers(-900, 900, (4, 8, 9)).astype(np.int16)
    own = {
        "PatientID": patient,
        "StudyDate": f"2024010{study}",
        "SeriesDescription": f"B{number}0f",
    }
    uid = f"1.2.{key}.{study}"
    heights_mm = [0.0, 2.5, 5.0, 7.5]
    identity = {"uid": f"{uid}.{number}", "StudyInstanceUID": uid, "SeriesNumber": number}
    save_stack(folder, image, heights_mm, **{**identity, **own, **fields})
    return image


def predict(source: Path, output: Path, *overrides: str) -> int:
    arguments = [f"input='{source}'", f"output='{output}'", "coarse=c", "fine=f", "accelerator=cpu"]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return app.predict(
            to_config(hydra.compose("predict", [*arguments, *overrides]), PredictConfig)
        )


def cases(source: Path, choice: str | None = None) -> dict[str, np.ndarray]:
    """Read the scan of each case of a folder."""
    scans = divide_studies(source, find_scans(source, None, choice)[0], "ct")
    images = {
        scan.name: read_image(scan.path, scan.series, files=scan.files).array for scan in scans
    }
    # The report of a case has the path and the series only.
    for scan in scans:
        assert np.array_equal(read_image(scan.path, scan.series).array, images[scan.name])
    return images


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.nii.gz"))


def test_a_series_is_chosen_inside_each_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cohort, out = tmp_path / "cohort", tmp_path / "out"
    images = {}
    for patient in ("anna", "bert"):
        series(cohort / patient / "CT" / "thin", patient, 2)
        images[patient] = series(cohort / patient / "CT" / "thick", patient, 3)
    assert predict(cohort, out) == 1
    messages = capsys.readouterr().err
    for patient in ("anna", "bert"):
        assert (
            f"medseg: {cohort / patient}: expected one CT series, but it holds 2: "
            f"series=2 'B20f' {SIZE}; series=3 'B30f' {SIZE}; choose one with series="
        ) in messages
    assert predict(cohort, out, "series=3") == 0
    assert written(out) == ["anna.nii.gz", "bert.nii.gz"]
    for patient, image in cases(cohort, "3").items():
        assert np.array_equal(image, images[patient])


def test_a_flat_folder_of_several_patients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each patient is a case; a study of two series is refused, with arguments that work."""
    flat, out = tmp_path / "flat", tmp_path / "out"
    chosen = {"anna": series(flat, "anna", 3), "bert": series(flat, "bert", 3)}
    assert {name.partition("_")[0] for name in cases(flat)} == set(chosen)
    series(flat, "anna", 2)
    with pytest.raises(UserError, match="the input has 2 cases, so give a folder"):
        predict(flat, tmp_path / "o.nii.gz")
    capsys.readouterr()
    assert predict(flat, out) == 1
    messages = capsys.readouterr().err
    assert (
        f"medseg: {flat}: by the patients and studies in their headers the DICOM files are 2 "
        "cases: "
        "anna_20240101, bert_20240101\n"
    ) in messages
    assert (
        f"medseg: anna_20240101: {flat}: expected one CT series, but it holds 2: series=2 'B20f'"
        in messages
    )
    assert predict(flat, out, "series=3") == 0
    assert written(out) == ["anna_20240101.nii.gz", "bert_20240101.nii.gz"]
    for name, image in cases(flat, "3").items():
        assert np.array_equal(image, chosen[name.partition("_")[0]])


def test_the_output_folder_of_several_studies_may_have_a_dot_in_its_name(tmp_path: Path) -> None:
    flat, out = tmp_path / "flat", tmp_path / "labels.v2"
    for patient in ("anna", "bert"):
        series(flat, patient, 3)
    assert predict(flat, out) == 0
    assert written(out) == ["anna_20240101.nii.gz", "bert_20240101.nii.gz"]


def test_one_scan_of_a_flat_folder_is_named_by_patient_and_number(tmp_path: Path) -> None:
    """The row of a case table can name it the same way, in words that people can type."""
    flat = tmp_path / "flat"
    images = {"anna:2": series(flat, "anna", 2), "7": series(flat, "anna", 7)}
    for study in (1, 2):
        images[f"bert:2024010{study}:2"] = series(flat, "bert", 2, study=study)
    with pytest.raises(UserError) as caught:
        read_image(flat)
    assert str(caught.value) == (
        f"{flat}: expected one CT series, but it holds 4: "
        f"series=anna:2 patient anna, 2024-01-01, series 2, 'B20f' {SIZE}; "
        f"series=bert:20240101:2 patient bert, 2024-01-01, series 2, 'B20f' {SIZE}; "
        f"series=bert:20240102:2 patient bert, 2024-01-02, series 2, 'B20f' {SIZE}; "
        f"series=7 patient anna, 2024-01-01, series 7, 'B70f' {SIZE}; "
        "choose one with series=, or in the column series of a case table."
    )
    for choice, image in images.items():
        assert np.array_equal(read_image(flat, choice).array, image)


def test_studies_are_told_apart_by_their_headers_not_by_folders(tmp_path: Path) -> None:
    """Two studies of a patient in one folder, a study in two folders, and one in a folder."""
    cohort = tmp_path / "cohort"
    series(cohort / "twice", "anna", 2, study=1)
    series(cohort / "twice" / "later", "anna", 2, study=2)
    series(cohort / "plain", "bert", 2)
    whole = series(tmp_path / "x", "carl", 2)
    spread(tmp_path / "x", cohort)
    images = cases(cohort)
    assert list(images) == ["carl_20240101", "plain", "twice_anna_20240101", "twice_anna_20240102"]
    assert np.array_equal(images["carl_20240101"], whole)


def test_hidden_files_are_no_slices(tmp_path: Path) -> None:
    """Finder writes `.DS_Store`, and a `._<name>` beside each file on other disks."""
    flat = tmp_path / "flat"
    images = {f"{name}_20240101": series(flat, name, 2) for name in ("anna", "bert")}
    for file in list(flat.iterdir()):
        file.with_name(f"._{file.name}").write_bytes(b"\0\5\x16\7")
        file.with_name(f"._copy {file.name}").write_bytes(file.read_bytes())
    (flat / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    read_images = cases(flat)
    assert list(read_images) == list(images)
    for name, image in images.items():
        assert np.array_equal(read_images[name], image)


def test_folders_of_one_study_with_whole_series_stay_apart(tmp_path: Path) -> None:
    """Archives export studies so; a series number is searched in all folders of the study."""
    study, out = tmp_path / "study", tmp_path / "out"
    images = {
        "thick": series(study / "thick", "anna", 3),
        "thin": series(study / "thin", "anna", 2),
    }
    assert predict(study, out) == 0
    assert written(out) == ["thick.nii.gz", "thin.nii.gz"]
    for name, image in cases(study).items():
        assert np.array_equal(image, images[name])
    assert list(cases(study, "3")) == ["thick"]


def test_a_copied_series_is_not_spread(tmp_path: Path) -> None:
    cohort = tmp_path / "cohort"
    series(cohort / "a", "anna", 2)
    shutil.copytree(cohort / "a", cohort / "b")
    assert list(cases(cohort)) == ["a", "b"]


def spread(whole: Path, cohort: Path) -> None:
    """Move the slices of a series into two folders, as on a CD."""
    for number, file in enumerate(sorted(whole.iterdir())):
        folder = cohort / f"ST{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        file.rename(folder / file.name)


def test_a_summary_depends_on_the_kind_of_input_not_on_headers(tmp_path: Path) -> None:
    """A folder gets a summary even if it is one scan; a single file does not."""
    spread_over, flat = tmp_path / "spread", tmp_path / "flat"
    series(tmp_path / "whole", "anna", 2)
    spread(tmp_path / "whole", spread_over)
    series(flat, "bert", 2)
    file = min(flat.iterdir())
    for number, source in enumerate((spread_over, flat, file)):
        out = tmp_path / f"out{number}"
        assert predict(source, out) == 0
        assert (out / "summary.csv").exists() == source.is_dir()
    with pytest.raises(UserError, match="give a name that ends in"):
        predict(flat, tmp_path / "anna.nii.gzz")


def listed(message: str) -> list[str]:
    """List the values of `series=` in a refusal."""
    return [
        word.rstrip(",")
        for word in re.findall(r"series=(\S+) ", message.partition("; choose one")[0])
    ]


def test_the_values_of_a_listing_work_on_the_folder(tmp_path: Path) -> None:
    """Each value is either the series number with patient and date, or the UID."""
    flat = tmp_path / "flat"
    chosen = [series(flat, "anna", 3), series(flat, "bert", 3), series(flat, "bert", 3, study=2)]
    chosen.append(series(flat, "no ID: x", 3))
    with pytest.raises(UserError) as caught:
        read_image(flat)
    values = listed(str(caught.value))
    assert len(values) == 4
    for value, image in zip(values, chosen, strict=True):
        (array,) = cases(flat, value).values()
        assert np.array_equal(array, image), value
    assert predict(flat, tmp_path / "out", "series=anna:3") == 0
    assert written(tmp_path / "out") == ["anna_20240101.nii.gz"]


def test_the_values_of_a_listing_work_on_the_batch(tmp_path: Path) -> None:
    """Two series with the same number differ by their UIDs, each of which is in one case."""
    cohort = tmp_path / "cohort"
    image = series(cohort / "anna", "anna", 3)
    series(cohort / "anna" / "more", "anna", 4, SeriesNumber=3)
    series(cohort / "bert", "bert", 3)
    with pytest.raises(UserError) as caught:
        cases(cohort)
    (array,) = cases(cohort, listed(str(caught.value))[0]).values()
    assert np.array_equal(array, image)
    assert list(cases(cohort, "bert:3")) == ["bert"]


def test_a_choice_that_nothing_meets_is_refused_with_the_list(tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    series(flat, "anna", 3)
    series(flat, "bert", 3)
    with pytest.raises(UserError, match="there is no series=carl:3 among series=anna:3 "):
        read_image(flat, "carl:3")
    with pytest.raises(UserError, match="there is no series=7 among series=3 "):
        cases(flat, "7")
    # A mistyped patient must not choose series 3 of every patient.
    with pytest.raises(UserError, match="there is no series=carl:3 among "):
        cases(flat, "carl:3")


def test_a_choice_does_not_change_the_name_of_a_case(tmp_path: Path) -> None:
    """Two studies of a patient on one day: no result overwrites the other."""
    flat = tmp_path / "flat"
    for study in (1, 2):
        series(flat, "anna", 3, study=study, StudyDate="20240101")
    names = list(cases(flat))
    assert [*cases(flat, "1.2.414.1.3"), *cases(flat, "1.2.414.2.3")] == names


def test_what_is_no_scan_makes_no_case(tmp_path: Path) -> None:
    """An MR and a localiser: studies of the patient without a CT volume."""
    cohort = tmp_path / "cohort"
    series(cohort / "anna", "anna", 2)
    series(cohort / "anna" / "mr", "anna", 3, study=2, Modality="MR")
    series(cohort / "anna" / "scout", "anna", 4, study=3, ImageType="ORIGINAL\\PRIMARY\\LOCALIZER")
    assert list(cases(cohort)) == ["anna"]


def test_files_without_identities_stay_apart(tmp_path: Path) -> None:
    cohort = tmp_path / "cohort"
    series(cohort / "a", "anna", 2)
    for file in cohort.rglob("*.dcm"):
        dataset = dcmread(file)
        dataset.PatientID = dataset.StudyInstanceUID = ""
        dataset.save_as(file)
    shutil.copytree(cohort / "a", cohort / "b")
    assert list(cases(cohort)) == ["a", "b"]


def test_anonymised_series_beside_a_patient(tmp_path: Path) -> None:
    """Files without identity are a separate case, which `series=` can name too."""
    flat = tmp_path / "flat"
    series(flat, "anna", 2)
    image = series(flat, "", 3, StudyInstanceUID="", StudyDate="")
    read_images = cases(flat)
    assert list(read_images) == ["anna_20240101", "study"]
    assert np.array_equal(read_images["study"], image)
    (array,) = cases(flat, "::3").values()
    assert np.array_equal(array, image)
    assert predict(flat, tmp_path / "out", "series='::3'") == 0
    assert written(tmp_path / "out") == ["study.nii.gz"]


def test_a_case_of_a_flat_folder_reads_the_files_of_its_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of a further patient do not make the other cases outdated, nor are read with them."""
    flat, out = tmp_path / "flat", tmp_path / "out"
    series(flat, "anna", 3)
    series(flat, "bert", 3)
    assert predict(flat, out) == 0
    first = {path.name: path.stat().st_mtime_ns for path in out.glob("*.nii.gz")}
    series(flat, "carl", 3)
    headers = Counter[str]()

    def counted(path: Path, modality: str) -> list[Frame | NoSlice]:
        headers[path.name] += 1
        return read_frames(path, modality)

    monkeypatch.setattr("medseg.io.dicom.stacks.read_frames", counted)
    assert predict(flat, out) == 0
    assert len(headers) == 4, "the headers of carl"
    assert len(written(out)) == 3
    for name, written_ns in first.items():
        assert (out / name).stat().st_mtime_ns == written_ns


@pytest.mark.parametrize("num_bytes", [0, 132])
def test_a_broken_file_of_an_unknown_series_stops_no_study_of_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_bytes: int
) -> None:
    """An empty file named like a slice, or a truncated header: one message, all cases go on."""
    flat, out = tmp_path / "flat", tmp_path / "out"
    images = {patient: series(flat, patient, 3) for patient in ("anna", "bert")}
    broken = min(flat.iterdir()).with_name("99.dcm")
    broken.write_bytes((bytes(128) + b"DICM")[:num_bytes])
    for name, image in cases(flat).items():
        assert np.array_equal(image, images[name.partition("_")[0]])
    assert predict(flat, out) == 0
    assert len(written(out)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "99.dcm" in line]
    assert line.startswith(
        f"medseg: {flat}: the scans go on without 1 file that may be a slice of any of them, "
        "since nothing tells the series: '99.dcm': "
    )


def test_a_broken_file_in_the_folder_of_one_study_is_refused_with_it(tmp_path: Path) -> None:
    """The file can only belong to that series; the study in the other folder goes on."""
    cohort, out = tmp_path / "cohort", tmp_path / "out"
    for patient in ("anna", "bert"):
        series(cohort / patient, patient, 3)
    (cohort / "anna" / "99.dcm").write_bytes(b"")
    assert predict(cohort, out) == 1
    assert written(out) == ["bert.nii.gz"]


def test_an_unreadable_file_is_one_of_the_study_whose_volume_alone_lies_beside_it(
    tmp_path: Path,
) -> None:
    for patient in ("anna", "bert"):
        series(tmp_path / patient, patient, 3)
    broken = tmp_path / "bert" / "99.dcm"
    broken.write_bytes(b"")
    (studies,) = find_studies([tmp_path], "ct", on_loose=lambda file: pytest.fail(str(file)))
    files = {study.patient: set(study.files) for study in studies}
    assert files == {
        "anna": set((tmp_path / "anna").iterdir()),
        "bert": set((tmp_path / "bert").iterdir()),
    }
    assert broken in files["bert"]


def test_an_unreadable_file_is_one_of_the_study_of_a_multi_frame_file_beside_it(
    tmp_path: Path,
) -> None:
    """A multi-frame file is a volume; because of the other file, `read_image` refuses it."""
    positions_xyz_mm = [(0.0, 0.0, 2.5 * index) for index in range(3)]
    stored = np.zeros((3, 8, 9), np.int16)
    scan = save(enhanced(stored, positions_xyz_mm, [(1.0, 0.0)] * 3), tmp_path / "1.dcm")
    broken = tmp_path / "99.dcm"
    broken.write_bytes(b"")
    ((study,),) = find_studies([tmp_path], "ct", on_loose=lambda file: pytest.fail(str(file)))
    assert study.files == (scan, broken)
    with pytest.raises(UserError, match=r"99\.dcm"):
        read_image(tmp_path)


def test_a_series_without_a_date_takes_none_from_its_study(tmp_path: Path) -> None:
    series(tmp_path, "anna", 3)
    series(tmp_path, "anna", 4, StudyDate="")
    ((study,),) = find_studies([tmp_path], "ct")
    assert study.date == "20240101"


def test_headers_are_shown_while_many_are_read_and_only_those_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = tmp_path / "flat"
    series(flat, "anna", 3)
    descriptions: list[str] = []

    def update(self: Progress, task_id: int, **fields: object) -> None:
        descriptions.append(str(fields.get("description", "")))

    monkeypatch.setattr("medseg.commands.predict.SLOW_S", 0.0)
    monkeypatch.setattr(Progress, "update", update)
    assert predict(flat, tmp_path / "out") == 0
    assert [text for text in descriptions if "headers" in text] == [
        f"{number} headers of DICOM files read" for number in (1, 2, 3, 4)
    ]
    descriptions.clear()
    assert predict(min(flat.iterdir()), tmp_path / "one") == 0
    assert not any("headers" in text for text in descriptions)


def test_results_and_refusals_name_patient_and_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are in the report of a result, in the message of a refusal and in the summary."""
    flat, out = tmp_path / "flat", tmp_path / "out"
    series(flat, "anna", 2)
    series(flat, "bert", 2)
    series(flat, "bert", 3)
    assert predict(flat, out) == 1
    report = json.loads((out / "anna_20240101.json").read_text())
    assert report["identity"] == {
        "patient": "anna",
        "study_date": "2024-01-01",
        "series_number": "2",
        "series_description": "B20f",
    }
    (refusal,) = [line for line in capsys.readouterr().err.splitlines() if "expected one" in line]
    assert refusal.endswith("(patient bert, 2024-01-01).")
    with (out / "summary.csv").open() as file:
        (failed,) = [row for row in csv.DictReader(file) if row["status"] == "failed"]
    assert failed["warnings"].endswith("(patient bert, 2024-01-01).")


def test_a_case_table_says_whose_a_scan_is(tmp_path: Path) -> None:
    table = tmp_path / "cases.csv"
    table.write_text("case,image,patient,study_date\na,a.nii.gz,P1,2024-01-31\nb,b.nii.gz,,\n")
    scans, _ = find_scans(table, None)
    assert [str(scan.identity) for scan in scans] == ["patient P1, 2024-01-31", ""]
    copy = write_case_table(tmp_path / "copy.csv", read_case_table(table, None))
    assert read_case_table(copy, None) == read_case_table(table, None)
