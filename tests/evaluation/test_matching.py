"""Matching: references in DICOM or as masks, predictions saved as masks, ignored voxels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from layouts import SPACING_MM, blocks, make_dicom, make_totalsegmentator, save

from medseg.data.case_table import Case
from medseg.errors import UserError
from medseg.evaluation.matching import (
    Prediction,
    Reference,
    check_grid,
    find_predictions,
    find_references,
    read_pair,
    task_values,
)
from medseg.evaluation.reports import check_labels
from medseg.geometry.grid import VoxelGrid
from medseg.io.write import write_labels
from medseg.task import Channel, Region, Task


def test_a_prediction_is_compared_with_a_folder_of_masks(tmp_path: Path) -> None:
    folder = make_totalsegmentator(tmp_path / "data") / "s0001"
    regions = (
        Region("left_lung", ("left_lung",), "left"),
        Region("right_lung", ("right_lung",), "right"),
    )
    task = Task(
        "lungs", {"left_lung": 1, "right_lung": 2}, regions, (Channel(window_hu=(-1000.0, 400.0)),)
    )
    labels = blocks(1)[1]
    prediction = save(tmp_path / "s0001.nii.gz", labels)
    case = Case("s0001", folder / "ct.nii.gz", folder / "segmentations", "s0001")
    values = {
        "lung_upper_lobe_left": "left_lung",
        "lung_lower_lobe_left": "left_lung",
        "lung_upper_lobe_right": "right_lung",
        "lung_lower_lobe_right": "right_lung",
        "liver": "liver",
    }
    reference = Reference(case.name, case.labels, case)
    pair = read_pair(Prediction([prediction]), reference, task, {**values})
    assert np.array_equal(pair.pred, labels)
    assert np.array_equal(pair.target, labels)
    assert pair.warnings == []
    for name in ("lung_upper_lobe_left", "lung_lower_lobe_left"):
        (folder / "segmentations" / f"{name}.nii.gz").unlink()
    pair = read_pair(Prediction([prediction]), reference, task, {**values})
    (warning,) = pair.warnings
    assert warning.startswith("reference segmentations: left_lung: ")


def test_structures_are_read_on_the_series_of_the_case(tmp_path: Path) -> None:
    """A folder may hold several series; the structures refer to slices of the case's series."""
    make_dicom(tmp_path / "data")
    for index in (0, 1):
        study = tmp_path / "data" / f"LCTSC-Train-S1-{index:03d}" / f"1.2.826.{index}"
        for path in (study / f"1.2.826.{index}.1").iterdir():
            path.rename(tmp_path / "data" / f"{index}_{path.name}")
    study = tmp_path / "data" / "LCTSC-Train-S1-001" / "1.2.826.1"
    file = study / "1.2.826.1.2" / "1-1.dcm"
    task = Task("lungs", {"left_lung": 1, "right_lung": 2}, (), (Channel(),))
    labels = blocks(1)[1]
    prediction = tmp_path / "p.nii.gz"
    write_labels(
        prediction, labels, VoxelGrid(labels.shape, SPACING_MM, (-60.0, -50.0, -300.0)), None
    )
    case = Case("p", tmp_path / "data", file, "p", series="1.2.826.1.1")
    values = {"Lung_L": "left_lung", "Lung_R": "right_lung"}
    _, target, _, _ = read_pair(
        Prediction([prediction]), Reference(case.name, file, case), task, {**values}
    )
    assert np.array_equal(target, labels)


def test_a_folder_without_label_maps_stands_for_its_case_table(tmp_path: Path) -> None:
    (tmp_path / "cases.csv").write_text(
        "case,image,labels,split\na,a.nii.gz,ref/a.nii.gz,test\nb,b.nii.gz,ref/b.nii.gz,train\n",
        encoding="utf-8",
    )
    references, others = find_references(tmp_path, "labels", "test")
    assert (list(references), others) == (["a"], {"b"})
    assert references["a"].labels == tmp_path / "ref" / "a.nii.gz"
    every, others = find_references(tmp_path, "labels", None)
    assert (list(every), others) == (["a", "b"], set())


def test_two_label_maps_of_a_case_are_refused(tmp_path: Path) -> None:
    paths = [save(tmp_path / f"a{ending}", blocks()[1]) for ending in (".nii.gz", ".nrrd")]
    (prediction,) = find_predictions(tmp_path).values()
    reference = Reference("a", paths[0])
    with pytest.raises(UserError, match=r"two predictions, a\.nii\.gz and a\.nrrd; keep one"):
        read_pair(prediction, reference, LUNGS, {1: "left_lung", 2: "right_lung"})
    with pytest.raises(UserError, match=r"holds a\.nii\.gz and a\.nrrd for one case; keep one"):
        find_references(tmp_path, "labels", None)


LUNGS = Task("lungs", {"left_lung": 1, "right_lung": 2}, (), (Channel(),))


def save_prediction(folder: Path, case: str) -> np.ndarray:
    """Write the files of `save=[labels,masks,probabilities]` and the report of a case."""
    labels = blocks(1)[1]
    folder.mkdir(exist_ok=True)
    save(folder / f"{case}.nii.gz", labels)
    for name, value in LUNGS.labels.items():
        save(folder / f"{case}.{name}.nii.gz", (labels == value).astype(np.uint8))
        save(folder / f"{case}.{name}.probability.nii.gz", labels)
    report = {"volume_ml": dict.fromkeys(LUNGS.labels, 1.0)}
    (folder / f"{case}.json").write_text(json.dumps(report), encoding="utf-8")
    return labels


def test_masks_beside_a_label_map_are_no_further_cases(tmp_path: Path) -> None:
    save_prediction(tmp_path / "out", "Müller (1.5)")
    predictions = find_predictions(tmp_path / "out")
    assert list(predictions) == ["Müller (1.5)"]
    assert not predictions["Müller (1.5)"].masks
    references, _ = find_references(tmp_path / "out", "labels", None)
    assert list(references) == ["Müller (1.5)"]


def test_a_case_may_be_called_like_the_mask_of_another(tmp_path: Path) -> None:
    save_prediction(tmp_path / "out", "a")
    save_prediction(tmp_path / "out", "a.left_lung")
    assert set(find_predictions(tmp_path / "out")) == {"a", "a.left_lung"}


def test_masks_of_another_program_stay_cases(tmp_path: Path) -> None:
    save_prediction(tmp_path / "out", "a")
    (tmp_path / "out" / "a.json").write_text("[1]", encoding="utf-8")
    assert {"a", "a.left_lung", "a.right_lung"} <= set(find_predictions(tmp_path / "out"))


def test_masks_alone_are_scored_as_the_label_map_that_they_make(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    labels = save_prediction(folder, "a")
    reference = Reference("a", save(tmp_path / "a.nii.gz", labels))
    (folder / "a.nii.gz").unlink()
    prediction = find_predictions(folder)["a"]
    values = {1: "left_lung", 2: "right_lung"}
    pred, target, _, _ = read_pair(prediction, reference, LUNGS, {**values})
    assert np.array_equal(pred, target)
    # A mask is missing: otherwise its label would be scored as not found.
    (folder / "a.right_lung.nii.gz").unlink()
    with pytest.raises(UserError, match=r"a\.right_lung\.nii\.gz"):
        read_pair(prediction, reference, LUNGS, {**values})
    # With one mask left the case is still found, and fails instead of being left out.
    assert list(find_predictions(folder)["a"].masks) == ["left_lung", "right_lung"]


def test_masks_get_the_values_that_their_report_states(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    labels = save_prediction(folder, "a")
    (folder / "a.nii.gz").unlink()
    report = {"volume_ml": {"right_lung": 1.0}, "settings": {"labels": {"right_lung": 2}}}
    (folder / "a.json").write_text(json.dumps(report), encoding="utf-8")
    reference = Reference("a", save(tmp_path / "a.nii.gz", labels))
    values: dict[int | str, str] = {1: "left_lung", 2: "right_lung"}
    pred, target, _, _ = read_pair(find_predictions(folder)["a"], reference, LUNGS, values)
    assert np.array_equal(pred, np.where(target == 2, 2, 0))


def two_slabs(values: tuple[int, int]) -> np.ndarray:
    """Label map of two slabs along z, with background in front of both along y."""
    labels = np.zeros((4, 5, 6), dtype=np.uint8)
    labels[:2, 1:] = values[0]
    labels[2:, 1:] = values[1]
    return labels


def test_ignored_voxels_are_background_in_both_maps_and_each_keeps_its_others(
    tmp_path: Path,
) -> None:
    """The prediction differs from the reference inside and outside of the ignored voxels."""
    task = replace(LUNGS, ignore_label=255)
    prediction = Prediction([save(tmp_path / "pred.nii.gz", two_slabs((1, 1)))])
    reference = Reference("a", save(tmp_path / "a.nii.gz", two_slabs((2, 9))))
    values = {1: "left_lung", 2: "right_lung", 9: "ignore"}
    pred, target, _, _ = read_pair(prediction, reference, task, {**values})
    assert np.array_equal(pred, two_slabs((1, 0)))
    assert np.array_equal(target, two_slabs((2, 0)))


@pytest.mark.parametrize(("value", "is_refused"), [(2, False), (3, True)])
def test_a_prediction_may_hold_the_values_of_its_task_alone(
    tmp_path: Path, value: int, is_refused: bool
) -> None:
    prediction = Prediction([save(tmp_path / "pred.nii.gz", two_slabs((1, value)))])
    reference = Reference("a", save(tmp_path / "a.nii.gz", two_slabs((1, 2))))
    values = {1: "left_lung", 2: "right_lung"}
    if not is_refused:
        read_pair(prediction, reference, LUNGS, {**values})
        return
    with pytest.raises(UserError, match="holds values from 0 to 3, expected 0 to 2"):
        read_pair(prediction, reference, LUNGS, {**values})


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(("off_mm", "is_refused"), [(0.09, False), (0.11, True)])
def test_grids_agree_within_a_tenth_of_a_millimetre(
    axis: int, off_mm: float, is_refused: bool
) -> None:
    origin_mm = [-10.0, 20.0, 7.0]
    grid = VoxelGrid((4, 5, 6), (3.0, 1.5, 2.0), tuple(origin_mm))
    origin_mm[axis] += off_mm
    moved = replace(grid, origin_xyz_mm=tuple(origin_mm))
    if not is_refused:
        check_grid("prediction's", moved, "reference's", grid)
        return
    with pytest.raises(UserError, match=r"the prediction's grid .* is not the reference's"):
        check_grid("prediction's", moved, "reference's", grid)


def test_a_single_label_map_is_no_reference(tmp_path: Path) -> None:
    (tmp_path / "a.nii.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(UserError, match="is a single label map; give its folder"):
        find_references(tmp_path / "a.nii.gz", "labels", None)


@pytest.mark.parametrize(
    ("value", "advice"), [(-1, "write it again without negative"), (7, "add it, also if it is")]
)
def test_a_value_without_a_name_is_refused_with_what_helps(value: int, advice: str) -> None:
    task = Task("lungs", {"left_lung": 1}, (), (Channel(window_hu=(-1000.0, 400.0)),))
    labels = np.full((2, 2, 2), value, np.int16)
    with pytest.raises(UserError, match=advice):
        task_values(labels, Path("a.nii.gz"), task, {1: "left_lung"})


def test_a_negative_value_may_be_background() -> None:
    """The audit advises to name it, and `prepare` accepts it."""
    task = Task("lungs", {"left_lung": 1}, (), (Channel(window_hu=(-1000.0, 400.0)),))
    values = {1: "left_lung", -1: "background"}
    for stored, mapped in (([0, 1, 1], [0, 1, 1]), ([-1, 0, 1], [0, 0, 1])):
        labels = np.array(stored, np.int16).reshape(1, 1, 3)
        assert task_values(labels, Path("a.nii.gz"), task, values).ravel().tolist() == mapped
    unsigned = np.array([[[0, 1, 1]]], np.uint8)
    assert task_values(unsigned, Path("a.nii.gz"), task, values).ravel().tolist() == [0, 1, 1]
    with pytest.raises(UserError, match=r"holds the value -2, .* names -1, 1"):
        task_values(np.full((1, 1, 1), -2), Path("a.nii.gz"), task, values)


GRID_10 = VoxelGrid((6, 8, 10), (3.0, 1.5, 2.0), (-10.0, 20.0, 7.0))
HELPED = Task(
    "kidneys",
    {"left": 1, "spine": 2, "right": 3},
    (Region("left", ("left",), "left"), Region("right", ("right",), "right")),
    (Channel(window_hu=(-160.0, 240.0)),),
)
HELPED_VALUES: dict[int | str, str] = {1: "left", 2: "spine", 3: "right"}


def _helped_labels() -> np.ndarray:
    labels = np.zeros((6, 8, 10), dtype=np.uint8)
    labels[1:5, 1:3, 1:4] = 3
    labels[:, 4:7, 4:6] = 2
    labels[1:5, 1:3, 6:9] = 1
    return labels


@pytest.mark.parametrize("saved", ["labels", "masks", "stage=single"])
def test_a_helper_label_between_others_is_background_in_both_maps(
    tmp_path: Path, saved: str
) -> None:
    labels = _helped_labels()
    results = np.where(labels == 2, 0, labels)
    names = ["left", "right"]
    if saved == "masks":
        for name in names:
            mask = (labels == HELPED.labels[name]).astype(np.uint8)
            write_labels(tmp_path / f"pred/a.{name}.nii.gz", mask, GRID_10)
    elif saved == "labels":
        write_labels(tmp_path / "pred/a.nii.gz", results, GRID_10)
    else:
        # A network of one stage predicts the helper label too.
        names = list(HELPED.labels)
        write_labels(tmp_path / "pred/a.nii.gz", labels, GRID_10)
    report = json.dumps({"volume_ml": dict.fromkeys(names, 1.0)})
    (tmp_path / "pred/a.json").write_text(report)
    write_labels(tmp_path / "a.nii.gz", labels, GRID_10)
    prediction = find_predictions(tmp_path / "pred")["a"]
    check_labels(prediction.path, HELPED)
    reference = Reference("a", tmp_path / "a.nii.gz")
    pair = read_pair(prediction, reference, HELPED, HELPED_VALUES)
    assert np.array_equal(pair.pred, results)
    assert np.array_equal(pair.target, results)


def test_the_value_of_a_helper_label_that_the_report_does_not_name_is_refused(
    tmp_path: Path,
) -> None:
    # The labels of another task: its right kidney has the value 2.
    labels = _helped_labels()
    labels[labels == 3] = 2
    write_labels(tmp_path / "pred/a.nii.gz", labels, GRID_10)
    (tmp_path / "pred/a.json").write_text(json.dumps({"volume_ml": {"left": 1.0, "right": 1.0}}))
    write_labels(tmp_path / "a.nii.gz", _helped_labels(), GRID_10)
    prediction = find_predictions(tmp_path / "pred")["a"]
    with pytest.raises(UserError, match=r"a\.nii\.gz holds the value 2, which is spine"):
        read_pair(prediction, Reference("a", tmp_path / "a.nii.gz"), HELPED, HELPED_VALUES)
