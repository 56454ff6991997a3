"""Laws of the scenes: labels exist, sides are the patient's, channels agree, cases differ."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage

from medseg.io.read import read_image, read_labels
from medseg.phantom.case_folders import write_phantoms
from medseg.phantom.scene import SceneSpec, make_scene, place_organs

KIDNEYS = SceneSpec(4, 0, {"left_kidney": 1, "right_kidney": 2}, {})
MANY = SceneSpec(
    4,
    1,
    {f"organ_{number}": number for number in range(1, 25)},
    {"organ_3": "right", "organ_4": "left"},
)
TWO = replace(KIDNEYS, modalities=("ct", "mr"), has_own_grids=True)


def centre_xyz_mm(spec: SceneSpec, value: int) -> np.ndarray:
    images, labels = make_scene(spec)
    return images[0][1].index_to_world_xyz_mm(np.argwhere(labels == value).mean(axis=0))


@pytest.mark.parametrize(
    "spec", [KIDNEYS, MANY, replace(MANY, index=2, seed=9)], ids=["pair", "many", "other seed"]
)
def test_every_label_is_one_visible_body(spec: SceneSpec) -> None:
    _, labels = make_scene(spec)
    assert set(np.unique(labels)) == {0, *spec.labels.values()}
    for value in spec.labels.values():
        pieces, count = ndimage.label(labels == value)
        assert np.bincount(pieces.ravel())[1:].max() > 20
        assert count == 1


def test_volumes_are_those_that_the_task_calls_plausible() -> None:
    labels = {f"organ_{number}": number for number in range(1, 12)}
    labels |= {"left_kidney": 12, "right_kidney": 13, "gland": 14, "liver": 15}
    kidney = (40.0, 600.0)
    limits = {"left_kidney": kidney, "right_kidney": kidney, "gland": (1.0, 8.0)}
    limits |= {"liver": (500.0, 4000.0)}
    for seed, index in itertools.product(range(3), range(4)):
        images, target = make_scene(SceneSpec(seed, index, labels, {}, volume_ml=limits))
        voxel_ml = math.prod(images[0][1].spacing_mm) / 1000
        for label, (low, high) in limits.items():
            assert low <= (target == labels[label]).sum() * voxel_ml <= high
        for value in labels.values():
            _, count = ndimage.label(target == value)
            assert count == 1, "no organ covers a part of another one"


def test_a_narrow_range_of_volumes_is_kept() -> None:
    for index in range(3):
        spec = replace(KIDNEYS, index=index, volume_ml={"left_kidney": (100.0, 160.0)})
        images, target = make_scene(spec)
        voxel_ml = math.prod(images[0][1].spacing_mm) / 1000
        assert 100 < (target == 1).sum() * voxel_ml < 160


@pytest.mark.parametrize("index", range(4))
def test_sides_are_those_of_the_patient(index: int) -> None:
    left, right = (centre_xyz_mm(replace(KIDNEYS, index=index), value) for value in (1, 2))
    assert left[0] - right[0] > 40
    assert np.abs(left[1:] - right[1:]).max() < 12, "mirror images"
    signs = {organ.value: organ.sign for organ in place_organs(MANY)}
    assert (signs[3], signs[4]) == (-1, 1)


@pytest.mark.parametrize(
    ("left", "right"), [("Left kidney", "Right kidney"), ("kidney-LEFT", "kidney.right")]
)
def test_sides_are_words_of_any_spelling(left: str, right: str) -> None:
    labels = {left: 1, right: 2, "kidney": 3}
    one, other, third = place_organs(replace(KIDNEYS, labels=labels))
    assert (one.sign, other.sign) == (1, -1)
    assert np.array_equal(one.centre_xyz, other.centre_xyz)
    assert not np.array_equal(one.centre_xyz, third.centre_xyz)


def test_a_label_with_both_sides_in_its_name_is_an_organ_of_its_own() -> None:
    labels = {"left_kidney": 1, "right_kidney": 2, "left_right_kidney": 3}
    left, right, both = place_organs(SceneSpec(4, 0, labels, {}))
    assert np.array_equal(left.centre_xyz, right.centre_xyz)
    assert not np.array_equal(both.centre_xyz, left.centre_xyz)


def test_the_layout_belongs_to_the_data_set_and_the_shape_to_the_case() -> None:
    first, again, other = (make_scene(replace(KIDNEYS, index=index)) for index in (0, 0, 1))
    assert first[0][0][0].tobytes() == again[0][0][0].tobytes()
    assert first[1].tobytes() == again[1].tobytes()
    assert first[0][0][1] != other[0][0][1]
    one, two = (place_organs(replace(KIDNEYS, index=index)) for index in (0, 1))
    assert np.array_equal(one[0].centre_xyz, two[0].centre_xyz)
    assert not np.array_equal(
        one[0].centre_xyz, place_organs(replace(KIDNEYS, seed=5))[0].centre_xyz
    )


def test_ct_is_in_hu_and_mr_has_a_scale_of_its_own() -> None:
    (ct, _), (mr, _) = make_scene(TWO)[0]
    assert -1030 < np.median(ct[:3, :3, :3]) < -970
    assert 0 < np.median(ct[ct > -500]) < 80
    assert mr.min() >= 0
    scales = [
        np.percentile(make_scene(replace(TWO, index=index))[0][1][0], 90) for index in range(4)
    ]
    assert max(scales) > 1.3 * min(scales)


def test_an_organ_differs_from_the_body_in_each_channel_at_one_place() -> None:
    images, labels = make_scene(TWO)
    (ct, grid), (mr, own_grid) = images
    assert own_grid.shape != grid.shape
    for value in (1, 2):
        inside = ndimage.binary_erosion(labels == value)
        around = ndimage.binary_dilation(labels == value, iterations=4) & ~ndimage.binary_dilation(
            labels > 0, iterations=2
        )
        for image, to in ((ct, grid), (mr, own_grid)):
            means = []
            for mask in (inside, around):
                points = grid.index_to_world_xyz_mm(np.argwhere(mask))
                index = np.rint(to.world_to_index_zyx(points)).astype(int)
                means.append(image[tuple(index.T)].mean())
            assert abs(means[0] - means[1]) > (60 if to is grid else 0.15 * means[1])


def test_the_ignore_label_covers_a_part() -> None:
    labels, plain = (make_scene(replace(KIDNEYS, ignore_label=value))[1] for value in (255, None))
    ignored = labels == 255
    assert 0.001 < ignored.mean() < 0.05
    assert np.array_equal(labels[~ignored], plain[~ignored])


def test_a_data_set_has_a_column_for_each_channel(tmp_path: Path) -> None:
    table = write_phantoms(
        tmp_path, 2, 4, splits={"train": 1, "test": 1}, scene=replace(TWO, seed=0, index=77)
    )
    head, first, _ = table.read_text(encoding="utf-8").splitlines()
    assert head == "case,image,image_1,labels,patient,split"
    assert first == (
        "phantom_000,phantom_000/image.nii.gz,phantom_000/image_1.nii.gz,phantom_000/"
        "labels.nii.gz,phantom_000,train"
    )
    images, labels = make_scene(TWO)
    for name, (image, grid) in zip(("image", "image_1"), images, strict=True):
        read = read_image(tmp_path / "phantom_000" / f"{name}.nii.gz")
        assert np.array_equal(read.array, image)
        assert read.grid.is_close(grid)
    assert np.array_equal(read_labels(tmp_path / "phantom_000" / "labels.nii.gz").array, labels)
    file = tmp_path / "phantom_001" / "image_1.nii.gz"
    before = file.stat().st_mtime_ns
    write_phantoms(tmp_path, 2, 4, scene=TWO)
    assert file.stat().st_mtime_ns == before
