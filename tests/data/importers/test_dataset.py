"""Labels, regions and channels of an imported task."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from medseg.data.case_table import Case
from medseg.data.importers.dataset import (
    DataSet,
    LabelMembers,
    _voxel_files_of_header,
    channel_of,
    check_dataset,
    label_names,
)
from medseg.errors import UserError
from medseg.task import Channel

CT = Channel("ct", (-1000.0, 1000.0))


def dataset(
    labels: dict[str, list[int | str]], cases: tuple[Case, ...] = (), ignore: int | None = None
) -> DataSet:
    return DataSet("nnunet", "chest", cases, labels, (CT,), {"trachea": [5]}, ignore)


def test_regions_are_made_where_every_label_has_a_side() -> None:
    task = dataset({"left_lung": [3], "right_lung": [4]}).task()
    assert task == {
        "task": {
            "name": "chest",
            "labels": {"left_lung": 1, "right_lung": 2},
            "regions": {
                "left_lung": {"labels": ["left_lung"], "side": "left"},
                "right_lung": {"labels": ["right_lung"], "side": "right"},
            },
            "channels": [{"modality": "ct", "window_hu": [-1000.0, 1000.0]}],
        },
        "data": {"label_values": {"left_lung": 3, "right_lung": 4, "trachea": 5}},
    }
    assert dataset({"left_lung": [1], "heart": [2]}).task()["task"]["regions"] is None


def test_the_ignore_label_lies_above_the_labels_and_keeps_its_value_in_the_files() -> None:
    high, low = (
        dataset({"a": [1], "b": [2]}, ignore=9).task(),
        dataset({"a": [2], "b": [3]}, ignore=1).task(),
    )
    assert high["task"]["ignore_label"] == 9
    assert "ignore" not in high["data"]["label_values"]  # filled in from the task
    assert (low["task"]["ignore_label"], low["data"]["label_values"]["ignore"]) == (3, 1)
    # A label of the task has the value 2, whatever the value in the files.
    taken = dataset({"a": [1], "b": [3]}, ignore=2).task()
    assert (taken["task"]["ignore_label"], taken["data"]["label_values"]["ignore"]) == (3, 2)
    assert dataset({"a": [1]}, ignore=300).task()["task"]["ignore_label"] == 2


def test_labels_are_kept_and_merged_by_name() -> None:
    lobes: dict[str, list[int | str]] = {
        "left_lung": ["a", "b"],
        "right_lung": ["c"],
        "liver": ["liver"],
    }
    some = dataset(lobes).keep(["right_lung"])
    assert some.labels == {"right_lung": ["c"]}
    assert some.background == {"trachea": [5], "left_lung": ["a", "b"], "liver": ["liver"]}
    both = dataset(lobes).keep({"lungs": ["left_lung", "right_lung"], "organ": "liver"})
    assert both.labels == {"lungs": ["a", "b", "c"], "organ": ["liver"]}
    assert both.background == {"trachea": [5]}
    assert dataset(lobes).keep({"lungs": ("a", "c")}).labels == {"lungs": ["a", "c"]}
    assert dataset({"x": [1, 2, 3]}).keep({"y": [2]}).task()["data"]["label_values"] == {
        "y": 2,
        "trachea": 5,
        "x_rest": [1, 3],
    }
    with pytest.raises(
        UserError, match="labels: spleen is not in the data set, which has trachea, left_lung"
    ):
        dataset(lobes).keep(["spleen"])
    assert dataset(lobes).keep("liver").labels == {"liver": ["liver"]}


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (
            {"a/b": "x"},
            "labels: 'a/b' cannot name a label, which has letters, digits, _ and -; write a_b.",
        ),
        (
            {7: "x"},
            "labels: '7' cannot name a label, because a name of digits alone is read as a value; "
            "write label_7.",
        ),
        (
            [1],
            "labels: '1' cannot name a label, because a name of digits alone is read as a value; "
            "write {label_1: [1]}.",
        ),
        (5, "labels: expected names, [a,b], or new labels, {both: [a,b]}, but got 5."),
        (
            "lung",
            "labels: lung is not in the data set, which has trachea, x; give some of these names.",
        ),
        (
            {"y": []},
            "labels: y needs the names or values that it consists of, {y: [a,b]}, but got [].",
        ),
        (
            {"y": {"x": 1}},
            "labels: y needs the names or values that it consists of, {y: [a,b]}, "
            "but got {'x': 1}.",
        ),
        (
            {"y": [True]},
            "labels: True is not in the data set, which has trachea, x; give some of these names.",
        ),
        (
            {"ignore": "x"},
            "labels: ignore names voxels that count nowhere; give the label another name.",
        ),
    ],
)
def test_labels_that_cannot_be_chosen(wanted: Any, said: str) -> None:
    with pytest.raises(UserError) as error:
        dataset({"x": [1]}).keep(wanted)
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("labels", "wanted", "kept", "background"),
    [
        ({"x": [1, 2, 3]}, {"x": [2]}, {"x": [2]}, {"x_rest": [1, 3]}),
        ({"x": [1, 2], "y": [3]}, {"x": ["y"]}, {"x": [3]}, {"x_rest": [1, 2]}),
        ({"x": [1, 2], "x_rest": [3]}, {"x": [2]}, {"x": [2]}, {"x_rest_": [1], "x_rest": [3]}),
        ({"x": [1, 2], "y": [3]}, {"z": ["x", 1]}, {"z": [1, 2]}, {"y": [3]}),
    ],
)
def test_no_member_is_lost_when_a_part_of_a_label_is_kept(
    labels: LabelMembers, wanted: dict[str, Any], kept: LabelMembers, background: LabelMembers
) -> None:
    some = dataset(labels).keep(wanted)
    assert some.labels == kept
    assert some.background == {"trachea": [5], **background}
    lines = [
        item.name
        for item in some.closing_items()
        if (item.kind, item.fate) == ("label", "left out")
    ]
    assert [line.split(" (")[0] for line in lines] == list(some.background)
    named = [int(number) for line in lines for number in re.findall(r"\d+", line.partition("(")[2])]
    assert sorted(named) == sorted(value for values in some.background.values() for value in values)


def test_names_of_labels_are_safe_and_sides_written_out_only_in_pairs() -> None:
    assert label_names(["Lung_L", "Lung_R", "Vessel L", "a/b: c"]) == {
        "Lung_L": "left_lung",
        "Lung_R": "right_lung",
        "Vessel L": "Vessel_L",
        "a/b: c": "a_b_c",
    }
    # Signs in the name of the organ, and a side as a part of another word.
    assert label_names(["Lobe (upper) L", "Lobe (upper) R", "cleft_L", "cleft_R"]) == {
        "Lobe (upper) L": "left_lobe_upper",
        "Lobe (upper) R": "right_lobe_upper",
        "cleft_L": "left_cleft",
        "cleft_R": "right_cleft",
    }
    # The two sides of an organ, written with another case.
    assert label_names(["Femur_L", "femur_R"]) == {
        "Femur_L": "left_femur",
        "femur_R": "right_femur",
    }
    written_out = ("Left lung", "right-Lung", "femur.left", "femur.right")
    assert list(label_names(written_out).values()) == [
        "Left_lung",
        "right-Lung",
        "femur_left",
        "femur_right",
    ]
    with pytest.raises(UserError, match="the labels 'heart' and 'Heart' would both be Heart"):
        label_names(["heart", "Heart"])


@pytest.mark.parametrize(
    ("name", "modality"),
    [
        ("CT", "ct"),
        ("contrast CT", "ct"),
        ("FLAIR", "mr"),
        ("T1w", "mr"),
        ("MRI", "mr"),
        ("PET", "other"),
        ("rgb_to_0_1", "other"),
    ],
)
def test_channels_by_name(name: str, modality: str) -> None:
    channel = channel_of(name)
    assert (channel.modality, channel.normalise) == (
        modality,
        "window" if modality == "ct" else "zscore",
    )


def test_names_that_clash_or_cannot_be_files_are_refused_and_files_elsewhere_are_told(
    tmp_path: Path,
) -> None:
    inside, elsewhere = tmp_path / "data" / "a.nii.gz", tmp_path / "b.nii.gz"
    inside.parent.mkdir()
    inside.touch()
    elsewhere.touch()
    (inside.parent / "link.nii.gz").symlink_to(elsewhere)
    case = Case("a", inside, None, "a")
    with pytest.raises(
        UserError, match=r"a.nii.gz and .*a.nii.gz would both be the case 'a'; rename"
    ):
        check_dataset(dataset({"x": [1]}, (case, case)), inside.parent)
    cases = (case, Case("A", elsewhere, None, "A"), case)
    with pytest.raises(UserError, match=r"would both be the case 'a'; rename"):
        check_dataset(dataset({"x": [1]}, cases), inside.parent)
    with pytest.raises(UserError, match=r"the case name '../a' cannot name a file"):
        check_dataset(dataset({"x": [1]}, (Case("../a", inside, None, "a"),)), inside.parent)
    with pytest.raises(
        UserError, match=r"gone.nii.gz: there is no such file, but the data set names it"
    ):
        check_dataset(
            dataset({"x": [1]}, (Case("a", tmp_path / "gone.nii.gz", None, "a"),)), inside.parent
        )
    with pytest.raises(UserError, match="has no case"):
        check_dataset(dataset({"x": [1]}), inside.parent)
    cases = (case, Case("A", elsewhere, inside.parent / "link.nii.gz", "A"))
    items = check_dataset(dataset({"x": [1]}, cases), inside.parent).closing_items()
    rows = {(item.kind, item.name): (item.fate, item.why) for item in items}
    assert rows["case", "a and A"] == (
        "used",
        "the names differ in upper and lower case only: some systems take their files for one",
    )
    assert rows["file", str(elsewhere)] == ("used", f"outside of {inside.parent}, and read there")
    assert rows["case", "a"] == ("left out", "no labels: not trained on")


def test_names_that_differ_in_case_have_one_line(tmp_path: Path) -> None:
    cases = []
    for name in ("ab", "Ab", "b", "AB"):
        image = tmp_path / f"image {len(cases)}.nii.gz"
        image.touch()
        cases.append(Case(name, image, image, name))
    data = check_dataset(dataset({"x": [1]}, tuple(cases)), tmp_path)
    names = [item.name for item in data.account.items if item.kind == "case"]
    assert names == ["ab and Ab and AB"]


def test_a_file_of_many_cases_names_some_and_counts_the_others(tmp_path: Path) -> None:
    (tmp_path / "labels.nii.gz").touch()
    cases = []
    for name in "abcde":
        image = tmp_path / f"{name}.nii.gz"
        image.touch()
        cases.append(Case(name, image, tmp_path / "labels.nii.gz", name))
    data = check_dataset(dataset({"x": [1]}, tuple(cases)), tmp_path)
    (why,) = [item.why for item in data.account.items if item.fate == "merged"]
    assert why == (
        "one file is labels of a, labels of b, labels of c and 2 more; check that this is meant"
    )


def test_one_image_is_two_cases_by_its_series_alone(tmp_path: Path) -> None:
    """Several series of a folder are several scans; a link to an image is the image itself."""
    folder = tmp_path / "dicom"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    labels = []
    for name in ("first", "second"):
        labels.append(tmp_path / f"{name}.nii.gz")
        labels[-1].touch()
    first = Case("a", folder, labels[0], "a", series="1.2")
    second = Case("b", folder, labels[1], "b", series="1.3")
    data = replace(dataset({"x": [1]}, (first, second)), format="dicom")
    data = check_dataset(data, tmp_path)
    assert not [item for item in data.account.items if item.fate == "merged"]
    again = Case("b", tmp_path / "link", labels[1], "b", series="1.2")
    with pytest.raises(UserError, match="is the image of the case 'a' and of 'b'; keep one"):
        check_dataset(dataset({"x": [1]}, (first, again)), tmp_path)


@pytest.mark.parametrize("num_cases", [3, 4])
def test_a_file_of_few_cases_names_all_of_them(tmp_path: Path, num_cases: int) -> None:
    (tmp_path / "labels.nii.gz").touch()
    cases = []
    for name in "abcd"[:num_cases]:
        image = tmp_path / f"{name}.nii.gz"
        image.touch()
        cases.append(Case(name, image, tmp_path / "labels.nii.gz", name))
    data = check_dataset(dataset({"x": [1]}, tuple(cases)), tmp_path)
    (why,) = [item.why for item in data.account.items if item.fate == "merged"]
    roles = "labels of a and labels of b and labels of c"
    if num_cases == 4:
        roles = "labels of a, labels of b, labels of c and 1 more"
    assert why == f"one file is {roles}; check that this is meant"


def test_a_header_that_cannot_be_opened_names_no_files(tmp_path: Path) -> None:
    """The reader of the case refuses it, and the other cases are imported."""
    link = tmp_path / "a.mhd"
    link.symlink_to(tmp_path / "not fetched.mhd")
    assert _voxel_files_of_header(link) == ()
