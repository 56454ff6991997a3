"""Names in data sets: spellings of a structure, case names with channel numbers, no names."""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from layouts import make_nnunet, make_pairs

from medseg.data.case_table import Case
from medseg.data.importers.account import Account, closing_rows
from medseg.data.importers.dataset import DataSet, labels_of_structures
from medseg.data.importers.formats import find_format, import_dataset
from medseg.data.reference import file_values
from medseg.errors import UserError
from medseg.io.dicom.labels import _names


def save(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(np.ones((4, 4, 4), np.uint8), np.eye(4)), path)


def decathlon(folder: Path, names: list[str]) -> Path:
    for name in names:
        save(folder / "imagesTr" / name)
        save(folder / "labelsTr" / name)
    training = [{"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"} for name in names]
    labels = {"0": "background", "1": "lung"}
    about = {
        "name": "X",
        "modality": {"0": "CT"},
        "labels": labels,
        "numTraining": len(names),
        "training": training,
        "test": [],
    }
    (folder / "dataset.json").write_text(json.dumps(about))
    return folder


def test_spellings_of_a_structure_are_one_label() -> None:
    account = Account()
    assert labels_of_structures(["Lung_L", "lung left", "Heart"], account) == {
        "Lung_L": ["Lung_L"],
        "Heart": ["Heart"],
    }
    assert labels_of_structures(["Lung_L", "Lung_R"], account) == {
        "left_lung": ["Lung_L"],
        "right_lung": ["Lung_R"],
    }
    assert labels_of_structures(["Spinal-Cord", "spinal cord", "Spinal_Cord"], account) == {
        "Spinal-Cord": ["Spinal-Cord"]
    }
    assert labels_of_structures(["Lung Lt", "Rt Lung"], account) == {
        "left_lung": ["Lung Lt"],
        "right_lung": ["Rt Lung"],
    }
    two_forms = ["\u00d6sophagus", "O\u0308sophagus"]
    assert list(labels_of_structures(two_forms, account).values()) == [["\u00d6sophagus"]]


def test_a_structure_with_a_number_for_a_name_gets_the_name_of_a_label() -> None:
    """`data.label_values` takes a name of digits for a value."""
    labels = labels_of_structures(["1", "heart"], Account())
    assert labels == {"label_1": ["1"], "heart": ["heart"]}
    data = DataSet("pairs", "x", (), labels, (), {})
    assert file_values(data.task()["data"]["label_values"]) == {"1": "label_1", "heart": "heart"}


def test_cases_of_the_decathlon_may_end_in_the_number_of_a_channel(tmp_path: Path) -> None:
    folder = decathlon(tmp_path / "Task01_X", ["lung_0000.nii.gz", "lung_0001.nii.gz"])
    assert find_format(folder) == "msd"
    cases = import_dataset(folder).cases
    assert [case.name for case in cases] == ["lung_0000", "lung_0001"]
    assert [case.labels.name for case in cases if case.labels] == [
        "lung_0000.nii.gz",
        "lung_0001.nii.gz",
    ]


def test_the_folder_one_is_in_has_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = decathlon(tmp_path / "Task01_X", ["a.nii.gz"])
    monkeypatch.chdir(folder)
    assert import_dataset(Path()).cases == import_dataset(folder).cases
    assert os.path.isabs(import_dataset(Path()).cases[0].image)


def test_one_file_for_two_cases_has_a_line(tmp_path: Path) -> None:
    folder = decathlon(tmp_path / "Task01_X", ["a.nii.gz", "b.nii.gz"])
    about = json.loads((folder / "dataset.json").read_text())
    about["training"][1]["label"] = about["training"][0]["label"]
    (folder / "dataset.json").write_text(json.dumps(about))
    rows = closing_rows(import_dataset(folder).account.items)
    assert any("one file is labels of a and labels of b" in row["why"] for row in rows)


def test_structures_of_dicom_labels_are_told_apart_by_their_numbers(tmp_path: Path) -> None:
    assert _names(tmp_path, "RTSTRUCT", [(1, "heart"), (3, None)], {1, 3, 7}) == {
        1: "heart",
        3: "ROI 3",
        7: "ROI 7",
    }
    with pytest.raises(UserError, match="have the number 1; export it again"):
        _names(tmp_path, "SEG", [(1, "heart"), (1, "lung")], ())


def test_the_labels_that_a_refusal_proposes_are_complete_in_all_cases() -> None:
    structures = {"a": ["heart", "lung"], "b": ["heart", "lung 2"]}
    cases = tuple(Case(name, Path(name), Path(name), name) for name in structures)
    labels = {"heart": ["heart"], "lung": ["lung"], "lung_2": ["lung 2"]}
    data = DataSet("dicom", "x", cases, labels, (), {}, structures=structures)
    with pytest.raises(
        UserError, match=r"medseg import … labels=\[heart\]\), .*\(medseg import … missing=absent\)"
    ):
        data.require_structures()
    data.keep(["heart"]).require_structures()


@pytest.mark.parametrize("forms", [("NFD", "NFC"), ("NFC", "NFD")])
@pytest.mark.parametrize("make", [make_nnunet, make_pairs])
def test_names_that_only_look_alike_are_told_so(
    tmp_path: Path, make: Callable[[Path], Path], forms: tuple[str, str]
) -> None:
    """Some systems write a letter with marks as two characters."""
    folder = make(tmp_path / "data")
    images, labels = ("imagesTr", "labelsTr") if make is make_nnunet else ("images", "labels")
    for place, form in zip((images, labels), forms, strict=True):
        path = sorted((folder / place).iterdir())[0]
        case = {make_nnunet: "chest_000", make_pairs: "p0"}[make]
        path.rename(path.with_name(path.name.replace(case, unicodedata.normalize(form, "Müller"))))
    with pytest.raises(UserError, match="rename one of the files"):
        import_dataset(folder)
