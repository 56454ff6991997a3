"""nnU-Net raw folders, the Decathlon and MONAI datalists."""

from __future__ import annotations

import json
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from layouts import make_msd, make_nnunet, write_json

from medseg.data.case_table import read_case_table, split_cases, write_case_table
from medseg.data.importers.formats import import_dataset
from medseg.data.importers.json_lists import import_msd, import_nnunet
from medseg.errors import UserError


def change(folder: Path, **values: Any) -> None:
    path = folder / "dataset.json"
    about = json.loads(path.read_text(encoding="utf-8")) | values
    write_json(path, {key: value for key, value in about.items() if value is not None})


def test_channels_cases_and_test_cases_of_nnunet(tmp_path: Path) -> None:
    data = import_nnunet(make_nnunet(tmp_path / "Dataset001_Chest", ("CT", "PET")))
    assert [(case.name, case.split, case.labels is None) for case in data.cases] == [
        ("chest_000", None, False),
        ("chest_001", None, False),
        ("chest_002", None, False),
        ("chest_003", "test", True),
    ]
    assert [path.name for path in data.cases[1].images(2)] == [
        "chest_001_0000.nii.gz",
        "chest_001_0001.nii.gz",
    ]
    assert data.labels == {"left_lung": [1], "right_lung": [2]}
    assert [(channel.modality, channel.normalise) for channel in data.channels] == [
        ("ct", "window"),
        ("other", "zscore"),
    ]
    assert (data.name, data.notes) == ("Dataset001_Chest", ())


def test_endings_in_upper_case_and_an_ending_that_no_file_has(tmp_path: Path) -> None:
    folder = make_nnunet(tmp_path)
    for path in folder.glob("*/*.nii.gz"):
        path.rename(path.with_name(path.name.replace(".nii.gz", ".NII.GZ")))
    cases = import_nnunet(folder).cases
    assert [case.name for case in cases] == [f"chest_{number:03d}" for number in range(4)]
    assert all(case.image.is_file() for case in cases)
    change(folder, file_ending=".nrrd")
    with pytest.raises(
        UserError,
        match=r"imagesTr: expected files that end in \.nrrd \(file_ending of .*\), found none",
    ):
        import_nnunet(folder)


def test_overlapping_regions_of_nnunet_become_disjoint_labels(tmp_path: Path) -> None:
    labels = {
        "background": 0,
        "whole_tumor": [1, 2, 3],
        "tumor_core": [2, 3],
        "enhancing_tumor": 3,
        "ignore": 4,
    }
    data = import_nnunet(make_nnunet(tmp_path, labels=labels, regions_class_order=[1, 2, 3]))
    assert data.labels == {"whole_tumor_rest": [1], "tumor_core_rest": [2], "enhancing_tumor": [3]}
    assert data.ignore == 4
    change(tmp_path, labels={"background": 0, "kidney": [1, 2, 3], "masses": [2, 3]})
    assert import_nnunet(tmp_path).labels == {"kidney_rest": [1], "masses": [2, 3]}
    change(tmp_path, labels={"background": 0, "a": [1, 2], "b": [2, 3]})
    assert import_nnunet(tmp_path).labels == {"a_rest": [1], "a_and_b": [2], "b_rest": [3]}
    # A label that has the name which the rest of a region would get: neither may be lost.
    change(tmp_path, labels={"background": 0, "lung": [1, 2], "tumour": 2, "lung_rest": 3})
    rests = {"lung_rest_2": [1], "tumour": [2], "lung_rest": [3]}
    assert import_nnunet(tmp_path).labels == rests
    # The same name for the rest of one region and for the part that it shares with another.
    labels = {"background": 0, "a": [3, 4], "a_rest": [2, 4, 6], "b": [1, 2, 4, 5]}
    change(tmp_path, labels=labels)
    values = [value for members in import_nnunet(tmp_path).labels.values() for value in members]
    assert sorted(values) == [1, 2, 3, 4, 5, 6]


def test_the_older_description_of_nnunet(tmp_path: Path) -> None:
    make_nnunet(tmp_path)
    change(
        tmp_path,
        channel_names=None,
        file_ending=None,
        modality={"0": "CT"},
        labels={"0": "background", "1": "a", "2": "b"},
    )
    data = import_dataset(tmp_path)
    assert (data.format, data.labels, len(data.cases)) == ("nnunet", {"a": [1], "b": [2]}, 4)


def test_cases_that_the_description_lists_may_lie_anywhere(tmp_path: Path) -> None:
    make_nnunet(tmp_path / "source")
    image, labels = (
        tmp_path / "source/imagesTr/chest_000_0000.nii.gz",
        tmp_path / "source/labelsTr/chest_000.nii.gz",
    )
    listed = {"one": {"images": [str(image)], "label": "../source/labelsTr/chest_000.nii.gz"}}
    write_json(
        tmp_path / "listed" / "dataset.json",
        {
            "channel_names": {"0": "CT"},
            "labels": {"background": 0, "a": 1, "b": 2},
            "file_ending": ".nii.gz",
            "dataset": listed,
        },
    )
    data = import_dataset(tmp_path / "listed")
    assert [case.name for case in data.cases] == ["one"]
    assert data.cases[0].image == image
    assert data.cases[0].labels is not None
    assert data.cases[0].labels.samefile(labels)
    outside = [item.name for item in data.closing_items() if item.why.startswith("outside of")]
    assert outside == [str(image), str(labels)]


@pytest.mark.parametrize(
    "place", ["nnUNet_raw/D1/splits_final.json", "nnUNet_preprocessed/D1/splits_final.json"]
)
def test_folds_of_nnunet(tmp_path: Path, place: str) -> None:
    folder = make_nnunet(tmp_path / "nnUNet_raw" / "D1")
    folds = [
        {"train": ["chest_001", "chest_002"], "val": ["chest_000"]},
        {"train": ["chest_000"], "val": ["chest_001", "chest_002"]},
    ]
    write_json(tmp_path / place, folds)
    assert [(case.fold, case.split) for case in import_nnunet(folder).cases] == [
        (0, None),
        (1, None),
        (1, None),
        (None, "test"),
    ]
    # A copy in the other place says the same; a different one would leave the folds unknown.
    other = {
        "nnUNet_raw/D1/splits_final.json": "nnUNet_preprocessed/D1/splits_final.json",
        "nnUNet_preprocessed/D1/splits_final.json": "nnUNet_raw/D1/splits_final.json",
    }[place]
    write_json(tmp_path / other, folds)
    data = import_nnunet(folder)
    assert [case.fold for case in data.cases] == [0, 1, 1, None]
    merged = [item.name for item in data.account.items if item.fate == "merged"]
    assert merged == [str(tmp_path / "nnUNet_preprocessed/D1/splits_final.json")]
    write_json(tmp_path / other, folds[::-1])
    with pytest.raises(UserError, match="hold different folds"):
        import_nnunet(folder)
    (tmp_path / other).unlink()
    twice = [
        {"train": ["chest_001"], "val": ["chest_000"]},
        {"train": ["chest_002"], "val": ["chest_000"]},
    ]
    write_json(tmp_path / place, twice)
    data = import_nnunet(folder)
    assert [case.fold_sides for case in data.cases] == [
        ("val", "val"),
        ("train", None),
        (None, "train"),
        (None, None),
    ]
    assert data.notes == (
        (
            "the folds of splits_final.json are in the case table: data.fold=0 … data.fold=1 "
            "chooses one, together with data.num_folds=2"
        ),
    )


def test_a_fold_trains_on_its_list_alone(tmp_path: Path) -> None:
    folder = make_nnunet(tmp_path / "D")
    fold = {"train": ["chest_001"], "val": ["chest_000"]}
    write_json(folder / "splits_final.json", [fold])
    data = import_dataset(folder)
    lists = {item.name: item.why for item in data.account.items if item.kind == "list"}
    assert lists["val of fold 0"] == "names 1 case of splits_final.json"
    table = write_case_table(tmp_path / "cases.csv", data.cases)
    cases = read_case_table(table)
    for choice in ({}, {"fold": 0, "num_folds": 1}):
        split = split_cases(cases, **choice)
        sides = [[case.name for case in side] for side in (split.train, split.val, split.test)]
        assert sides == [["chest_001"], ["chest_000"], ["chest_003"]]
    everybody = split_cases(cases, fold="all")
    assert [case.name for case in everybody.train] == ["chest_000", "chest_001"]


def test_a_split_that_writes_letters_in_another_way_is_found(tmp_path: Path) -> None:
    folder = make_nnunet(tmp_path)
    for path in [*folder.glob("*/chest_000*")]:
        path.rename(
            path.with_name(path.name.replace("chest_000", unicodedata.normalize("NFD", "Müller")))
        )
    write_json(
        folder / "splits_final.json",
        [{"train": ["chest_001", "chest_002"], "val": [unicodedata.normalize("NFC", "Müller")]}],
    )
    folds = {case.patient: case.fold for case in import_dataset(folder).cases}
    assert folds == {"Müller": 0, "chest_001": None, "chest_002": None, "chest_003": None}


MISTAKES: list[tuple[Callable[[Path], Any], str]] = [
    (
        lambda at: (at / "imagesTr/chest_001_0001.nii.gz").unlink(),
        "imagesTr: chest_001 lacks the channel 0001, expected 2 channels",
    ),
    (
        lambda at: shutil.copy(
            at / "imagesTr/chest_001_0000.nii.gz", at / "imagesTr/chest_001_0002.nii.gz"
        ),
        "has a channel 0002, but",
    ),
    (
        lambda at: (at / "labelsTr/chest_001.nii.gz").unlink(),
        "labelsTr: no labels for chest_001, which imagesTr holds; add them",
    ),
    (
        lambda at: [path.unlink() for path in at.glob("imagesTr/chest_001*")],
        "imagesTr: no image for chest_001, which labelsTr holds",
    ),
    (
        lambda at: shutil.copy(at / "labelsTr/chest_001.nii.gz", at / "imagesTr/x.nii.gz"),
        "such as x_0000.nii.gz; rename the file",
    ),
    (
        lambda at: shutil.rmtree(at / "labelsTr"),
        "labelsTr does not exist, but an nnU-Net data set needs it",
    ),
    (lambda at: change(at, file_ending=".png"), "expected file_ending to be one of .nii.gz"),
    (
        lambda at: change(at, labels={"a": 1.5}),
        "expected whole numbers from 0 as values of the label 'a', got 1.5",
    ),
    (
        lambda at: change(at, labels={"background": 0}),
        "expected at least one label beside the background",
    ),
    (lambda at: change(at, labels=["a"]), "expected 'labels' as a mapping, got \"['a']\""),
    (lambda at: change(at, channel_names=["CT"]), "expected 'channel_names' as a mapping"),
    (lambda at: (at / "dataset.json").write_text("{"), "expected JSON, but the file is damaged"),
    (lambda at: (at / "dataset.json").write_text("[]"), "expected a description of a data set"),
    (
        lambda at: write_json(at / "splits_final.json", {}),
        "splits_final.json: expected a list of folds",
    ),
    (
        lambda at: write_json(at / "splits_final.json", [{"train": 3, "val": []}]),
        "splits_final.json: expected a list of folds",
    ),
    (
        lambda at: change(
            at, dataset={"x": {"images": ["imagesTr/chest_000_0000.nii.gz"], "label": "x"}}
        ),
        "expected 2 images of x",
    ),
    (
        lambda at: change(at, dataset={"x": {"images": [3, 4], "label": "x"}}),
        "expected the path of an image or a label map, got '3'",
    ),
]


@pytest.mark.parametrize(("spoil", "said"), MISTAKES)
def test_each_way_in_which_an_nnunet_folder_is_wrong_has_its_sentence(
    tmp_path: Path, spoil: Callable[[Path], Any], said: str
) -> None:
    make_nnunet(tmp_path, ("CT", "PET"))
    spoil(tmp_path)
    with pytest.raises(UserError) as error:
        import_nnunet(tmp_path)
    assert said in str(error.value)


def test_the_decathlon_has_channels_in_one_file(tmp_path: Path) -> None:
    data = import_dataset(make_msd(tmp_path))
    assert (data.format, data.name) == ("msd", "BRATS")
    assert data.labels == {"edema": [1], "non-enhancing_tumor": [2]}
    assert [channel.modality for channel in data.channels] == ["mr", "mr"]
    assert [(case.name, case.split) for case in data.cases][2:] == [
        ("BRATS_002", None),
        ("BRATS_003", "test"),
    ]
    assert data.cases[0].images(2) == [data.cases[0].image] * 2


def test_patients_of_a_datalist_may_be_numbers(tmp_path: Path) -> None:
    make_nnunet(tmp_path)
    entries: list[dict[str, Any]] = [
        {"image": f"imagesTr/chest_{n:03d}_0000.nii.gz", "label": f"labelsTr/chest_{n:03d}.nii.gz"}
        for n in range(3)
    ]
    for entry, patient in zip(entries, (0, 0, None), strict=True):
        entry["patient"] = patient
    data = import_dataset(write_json(tmp_path / "list.json", {"training": entries}))
    assert [case.patient for case in data.cases] == ["0", "0", "chest_002"]


def test_a_datalist_of_monai(tmp_path: Path) -> None:
    make_nnunet(tmp_path / "data")
    entries = [
        {
            "image": f"data/imagesTr/chest_{n:03d}_0000.nii.gz",
            "label": f"data/labelsTr/chest_{n:03d}.nii.gz",
        }
        for n in range(3)
    ]
    path = write_json(
        tmp_path / "folds.json",
        {"training": [{**entry, "fold": n} for n, entry in enumerate(entries)], "testing": []},
    )
    data = import_dataset(path)
    assert [(case.name, case.fold) for case in data.cases] == [
        ("chest_000", 0),
        ("chest_001", 1),
        ("chest_002", 2),
    ]
    assert (data.labels, data.channels[0].modality) == ({"label_1": [1], "label_2": [2]}, "ct")
    assert len(data.notes) == 2
    path = write_json(
        tmp_path / "split.json",
        {
            "training": entries[:2],
            "validation": entries[2:],
            "test": ["data/imagesTs/chest_003_0000.nii.gz"],
        },
    )
    assert [(case.name, case.split) for case in import_msd(path).cases][2:] == [
        ("chest_002", "val"),
        ("chest_003", "test"),
    ]
    path = write_json(
        tmp_path / "partly.json",
        {
            "training": [{**entries[0], "fold": 0}, {**entries[1], "fold": 1}, entries[2]],
            "testing": ["data/imagesTs/chest_003_0000.nii.gz"],
        },
    )
    named = [item.name for item in import_dataset(path).account.items if "every fold" in item.why]
    assert named == ["fold of chest_002"], "neither a case of a fold nor a test case"
    many = {"image": [entries[0]["image"]] * 2, "label": entries[0]["label"]}
    path = write_json(
        tmp_path / "channels.json",
        {"training": [many], "modality": {"0": "CT", "1": "PET"}, "labels": {"1": "a", "2": "b"}},
    )
    assert [path.name for path in import_msd(path).cases[0].images(2)] == [
        "chest_000_0000.nii.gz"
    ] * 2


def test_files_of_one_name_are_named_by_their_folders(tmp_path: Path) -> None:
    listed = [{"image": f"p{n}/ct.nii.gz", "label": f"p{n}/seg.nii.gz"} for n in range(2)]
    path = write_json(
        tmp_path / "list.json", {"training": listed, "labels": {"1": "a"}, "modality": {"0": "CT"}}
    )
    assert [case.name for case in import_msd(path).cases] == ["p0_ct", "p1_ct"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "expected 'training' as a list, got 'None'"),
        (
            {"training": [{"label": "x"}]},
            "expected the path of an image or a label map, got 'None'",
        ),
        (
            {
                "training": [{"image": "a.nii.gz", "label": "b.nii.gz", "fold": "0"}],
                "labels": {"1": "a"},
            },
            "expected a fold >= 0 for a, got '0'",
        ),
        (
            {
                "training": [{"image": "a.nii.gz", "label": "b.nii.gz", "fold": 0}],
                "validation": [{"image": "c.nii.gz"}],
            },
            "expected a list validation or a fold of each case, but it has both",
        ),
        (
            {"training": [{"image": "a.nii.gz"}], "labels": {"one": "a"}},
            "expected labels as name: value or value: name",
        ),
    ],
)
def test_mistakes_of_a_datalist(tmp_path: Path, content: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        import_msd(write_json(tmp_path / "list.json", content))
    assert said in str(error.value)


VALUES: list[Any] = [
    None,
    True,
    -1,
    1.5,
    10**30,
    "",
    "../../x",
    "\0",
    [],
    {},
    [[1]],
    {"a": None},
    {"1": "a"},
    {"a": [1, "b"]},
]


@pytest.mark.parametrize("make", [make_nnunet, make_msd])
def test_any_value_in_a_description_is_read_or_refused(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    folder = make(tmp_path)
    about = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
    refused = 0
    for key in [*about, "dataset", "validation"]:
        for value in VALUES:
            entries = (
                [[{"image": value}], [{"image": "a", "label": value, "fold": value}]]
                if key == "training"
                else [{"0": value}]
            )
            for content in (value, *entries):
                write_json(folder / "dataset.json", {**about, key: content})
                import_dataset.cache_clear()
                try:
                    import_dataset(folder).task()
                except UserError:
                    refused += 1
    assert refused > 80


@pytest.mark.parametrize(
    ("counts", "modality", "said"),
    [
        ([2, 3], None, "expected 3 images of each case, one per channel, got 2"),
        ([2, 2, 1], None, "expected 2 images of each case, one per channel, got 1"),
        ([1, 2], {"0": "CT"}, "expected 1 images of each case, one per channel, got 2"),
        ([3], {"0": "CT", "1": "PET"}, "expected 2 images of each case, one per channel, got 3"),
        ([2, 2], {"0": "CT", "1": "PET"}, None),
        ([1, 1], {"0": "CT"}, None),
    ],
)
def test_the_number_of_images_of_each_case_is_that_of_the_channels(
    tmp_path: Path, counts: list[int], modality: dict[str, str] | None, said: str | None
) -> None:
    listed = [
        {
            "image": [f"case{index}_{number}.nii.gz" for number in range(count)],
            "label": f"labels{index}.nii.gz",
        }
        for index, count in enumerate(counts)
    ]
    content: dict[str, Any] = {"training": listed, "labels": {"1": "a"}}
    path = write_json(
        tmp_path / "list.json", content | ({"modality": modality} if modality else {})
    )
    if said is None:
        assert [len(case.images(max(counts))) for case in import_msd(path).cases] == counts
        return
    with pytest.raises(UserError) as error:
        import_msd(path)
    assert said in str(error.value)


def test_a_fold_counts_in_the_training_list_alone(tmp_path: Path) -> None:
    listed = [{"image": f"{name}.nii.gz", "label": f"{name}_l.nii.gz", "fold": 2} for name in "ab"]
    content = {
        "training": listed[:1],
        "test": listed[1:],
        "labels": {"1": "a"},
        "modality": {"0": "CT"},
    }
    data = import_msd(write_json(tmp_path / "list.json", content))
    places = [(case.name, case.split, case.fold) for case in data.cases]
    assert places == [("a", None, 2), ("b", "test", None)]
    lines = [(item.name, item.why) for item in data.account.items if item.kind == "key"]
    assert ("fold of b", "the case is not in the list training") in lines
    assert "fold of a" not in dict(lines)


def test_an_entry_without_a_label_is_left_out_unless_it_is_a_test_case(tmp_path: Path) -> None:
    """Training would refuse the whole table for its sake."""
    content = {
        "training": [{"image": "a.nii.gz", "label": "a_l.nii.gz"}, {"image": "b.nii.gz"}],
        "validation": [{"image": "c.nii.gz"}],
        "test": [{"image": "d.nii.gz"}],
        "labels": {"1": "a"},
        "modality": {"0": "CT"},
    }
    data = import_msd(write_json(tmp_path / "list.json", content))
    assert [(case.name, case.split) for case in data.cases] == [("a", None), ("d", "test")]
    lines = [(item.name, item.fate) for item in data.account.items if item.kind == "case"]
    assert lines == [("b", "left out"), ("c", "left out")]


@pytest.mark.parametrize("key", ["test", "testing"])
def test_a_stated_number_of_test_cases_is_that_of_their_list(tmp_path: Path, key: str) -> None:
    content = {
        "training": [{"image": "a.nii.gz", "label": "b.nii.gz"}],
        "validation": [{"image": "c.nii.gz", "label": "d.nii.gz"}],
        key: ["e.nii.gz", "f.nii.gz"],
        "labels": {"1": "a"},
        "modality": {"0": "CT"},
        "numTraining": 1,
        "numTest": 2,
    }
    data = import_msd(write_json(tmp_path / "list.json", content))
    fates = {item.name: item.fate for item in data.account.items if item.kind == "key"}
    assert (fates["numTraining"], fates["numTest"]) == ("used", "used")


def test_a_scan_is_told_by_its_first_image(tmp_path: Path) -> None:
    """A further channel, as an atlas, may be that of all; the first may not be listed twice."""
    listed: list[dict[str, Any]] = [
        {"image": [f"{name}.nii.gz", "atlas.nii.gz"], "label": f"{name}_l.nii.gz"} for name in "ab"
    ]
    content = {"labels": {"1": "a"}, "modality": {"0": "CT", "1": "other"}}
    path = write_json(tmp_path / "list.json", {"training": listed, **content})
    assert [case.name for case in import_msd(path).cases] == ["a", "b"]
    listed[1]["image"] = ["a.nii.gz", "b.nii.gz"]
    write_json(path, {"training": listed, **content})
    with pytest.raises(UserError, match=r"a\.nii\.gz is listed twice"):
        import_msd(path)


def test_channels_are_in_the_order_of_their_numbers_also_from_ten_on(tmp_path: Path) -> None:
    """JSON names them by texts, of which "10" comes before "2"."""
    modality = {str(number): "MRI" for number in range(11)} | {"10": "CT"}
    content = {
        "training": [{"image": "a.nii.gz", "label": "b.nii.gz"}],
        "labels": {"1": "a"},
        "modality": dict(reversed(modality.items())),
    }
    channels = import_msd(write_json(tmp_path / "list.json", content)).channels
    assert [channel.modality for channel in channels] == ["mr"] * 10 + ["ct"]


def test_a_datalist_without_cases_and_modality_is_refused(tmp_path: Path) -> None:
    path = write_json(tmp_path / "list.json", {"training": [], "labels": {"1": "a"}})
    with pytest.raises(UserError, match="the msd data set has no case"):
        import_dataset(path)


def test_further_values_of_the_background_and_a_label_at_its_value(tmp_path: Path) -> None:
    data = import_nnunet(
        make_nnunet(tmp_path, labels={"background": [0, 7], "left_lung": 1, "right_lung": 2})
    )
    assert data.labels == {"left_lung": [1], "right_lung": [2]}
    assert data.background == {"background": [7]}
    change(tmp_path, labels={"background": 0, "left_lung": 1, "right_lung": 2, "air": 0})
    data = import_nnunet(tmp_path)
    assert data.labels == {"left_lung": [1], "right_lung": [2]}
    assert data.background == {}
    change(tmp_path, labels={"background": 0, "left_lung": [0, 1], "right_lung": 2})
    with pytest.raises(
        UserError, match="the label 'left_lung' has the value 0, which is the background"
    ):
        import_nnunet(tmp_path)
    change(tmp_path, labels={"background": 0, "left_lung": 1, "right_lung": 2, "ignore": [3, 4]})
    with pytest.raises(UserError, match=r"expected one value of the label 'ignore', got \[3, 4\]"):
        import_nnunet(tmp_path)


def test_a_fold_that_validates_nothing_keeps_its_sides(tmp_path: Path) -> None:
    folder = make_nnunet(tmp_path)
    folds = [
        {"train": ["chest_001", "chest_002"], "val": ["chest_000"]},
        {"train": ["chest_000", "chest_001", "chest_002"], "val": []},
    ]
    write_json(folder / "splits_final.json", folds)
    cases = import_nnunet(folder).cases[:3]
    assert [case.fold_sides for case in cases] == [
        ("val", "train"),
        ("train", "train"),
        ("train", "train"),
    ]
    assert {case.fold for case in cases} == {None}


def test_the_test_list_of_the_older_description_chooses_the_test_cases(tmp_path: Path) -> None:
    folder = make_nnunet(tmp_path)
    listed = [
        {"image": f"./imagesTr/chest_{n:03d}.nii.gz", "label": f"./labelsTr/chest_{n:03d}.nii.gz"}
        for n in range(3)
    ]
    labels = {"0": "background", "1": "left_lung", "2": "right_lung"}
    first_version = {
        "channel_names": None,
        "modality": {"0": "CT"},
        "labels": labels,
        "training": listed,
    }
    change(folder, **first_version, test=["./imagesTs/chest_003.nii.gz"])
    assert [case.name for case in import_nnunet(folder).cases if case.split == "test"] == [
        "chest_003"
    ]
    change(folder, test=[])
    assert not [case for case in import_nnunet(folder).cases if case.split == "test"]
    change(folder, test=["./imagesTs/chest_003.nii.gz"])
    shutil.rmtree(folder / "imagesTs")
    with pytest.raises(
        UserError, match=r"the list test names cases, but .*imagesTs does not exist"
    ):
        import_nnunet(folder)


def test_a_datalist_accounts_for_the_folders_of_its_files_alone(tmp_path: Path) -> None:
    make_nnunet(tmp_path / "data")
    deep = tmp_path / "data" / "imagesTr" / "deep"
    deep.mkdir()
    (deep / "notes.txt").touch()
    (tmp_path / "data" / "imagesTr" / "beside.txt").touch()
    (tmp_path / "elsewhere.txt").touch()
    listed = [
        {"image": "data/imagesTr/chest_000_0000.nii.gz", "label": "data/labelsTr/chest_000.nii.gz"}
    ]
    path = write_json(
        tmp_path / "list.json",
        {"training": listed, "labels": {"1": "a", "2": "b"}, "modality": {"0": "CT"}},
    )
    named = " ".join(f"{item.name} {item.why}" for item in import_dataset(path).account.items)
    assert "beside.txt" in named
    assert "notes.txt" not in named
    assert "elsewhere.txt" not in named


def test_a_case_whose_name_is_not_utf_8_is_told_so(tmp_path: Path) -> None:
    make_nnunet(tmp_path)
    for place, end in (("imagesTr", "_0000"), ("labelsTr", "")):
        (tmp_path / place / f"chest_001{end}.nii.gz").rename(
            tmp_path / place / f"M\udcfcller{end}.nii.gz"
        )
    with pytest.raises(
        UserError, match=r"'M\\udcfcller' cannot name a file; .* letters in UTF-8 alone"
    ):
        import_dataset(tmp_path)


def test_a_datalist_may_name_the_patient_of_each_scan(tmp_path: Path) -> None:
    folder = make_msd(tmp_path / "Task01")
    path = folder / "dataset.json"
    about = json.loads(path.read_text(encoding="utf-8"))
    for entry in about["training"]:
        entry["patient"] = "one"
    path.write_text(json.dumps(about), encoding="utf-8")
    trained = [case for case in import_dataset(folder).cases if case.split is None]
    assert [case.patient for case in trained] == ["one"] * len(about["training"])


def test_the_closing_table_tells_the_old_names_of_renamed_labels(tmp_path: Path) -> None:
    labels = {"background": 0, "🫁": 1, "left atrium": 2, "liver": 3}
    data = import_dataset(make_nnunet(tmp_path / "data", labels=labels))
    reasons = {item.name: item.why for item in data.closing_items() if item.kind == "label"}
    assert reasons["label"] == "value 1, called 🫁 in the data set"
    assert reasons["left_atrium"] == "value 2, called left atrium in the data set"
    assert reasons["liver"] == "value 3"
