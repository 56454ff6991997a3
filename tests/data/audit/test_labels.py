"""Audit of label maps: regions and grids, beyond `tests/integration/test_prepare_audit.py`."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import medseg.data.audit.labels as labels_module
from medseg.data.audit.labels import (
    GRID_TOLERANCE_MM,
    audit_extent,
    audit_grids,
    audit_labels,
    audit_vanished,
    map_values,
    measure_regions,
    measure_volumes,
)
from medseg.findings import Finding, Severity
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.task import Channel, Region, Task

GRID = VoxelGrid((12, 30, 40), (5.0, 2.0, 3.0), (-60.0, 5.0, 7.0))


def lungs() -> tuple[np.ndarray, np.ndarray]:
    labels = np.zeros(GRID.shape, dtype=np.uint8)
    labels[2:10, 8:22, 23:33] = 1
    labels[3:11, 9:25, 6:18] = 2
    return np.where(labels > 0, -850, 40).astype(np.int16), labels


def found(image: np.ndarray | None, labels: np.ndarray, task: Task, **trust: str) -> list[Finding]:
    return audit_labels(image, labels, GRID, task, trust)


def test_regions_are_measured_in_the_world(task: Task) -> None:
    _, labels = lungs()
    regions = measure_regions(labels, GRID, task)
    for name, value in task.labels.items():
        inside = np.argwhere(labels == value)
        assert regions[name].box == VoxelBox.from_mask(labels == value)
        assert regions[name].centre_x_mm == pytest.approx(
            GRID.index_to_world_xyz_mm(inside)[:, 0].mean()
        )
    assert measure_volumes(labels, GRID, task) == pytest.approx(
        {"left_lung": 8 * 14 * 10 * 0.03, "right_lung": 8 * 16 * 12 * 0.03}
    )
    assert measure_regions(0 * labels, GRID, task) == {}
    assert found(*lungs(), task) == []


def test_a_region_of_several_labels_is_one(task: Task) -> None:
    lobes = Task(
        "lobes",
        {"lul": 1, "lll": 2, "right": 3},
        (Region("left_lung", ("lul", "lll"), "left"), Region("right_lung", ("right",), "right")),
        task.channels,
    )
    image, labels = lungs()
    parted = np.array([0, 1, 3], np.uint8)[labels]
    parted[6:][parted[6:] == 1] = 2
    regions = measure_regions(parted, GRID, lobes)
    plain = measure_regions(labels, GRID, task)
    assert [(region.box, region.centre_x_mm) for region in regions.values()] == [
        (region.box, region.centre_x_mm) for region in plain.values()
    ]
    assert found(image, parted, lobes) == []


def test_labels_of_one_organ_are_compared_without_regions(task: Task) -> None:
    image, labels = lungs()
    one_stage = task.as_one_stage()
    swapped = np.array([0, 2, 1], np.uint8)[labels]
    for values in (image, None):
        assert found(values, labels, one_stage) == []
        (finding,) = found(values, swapped, one_stage)
        assert finding.message.startswith("left_lung lies at x = ")
        assert (finding.code, finding.severity) == ("swapped_sides", Severity.error)
    # The left atrium may lie to the right of the right ventricle.
    heart = replace(one_stage, labels={"left_atrium": 1, "right_ventricle": 2, "left_right": 3})
    assert found(image, swapped, heart) == []


def test_labels_without_regions_are_missing_where_all_are(task: Task) -> None:
    """The values of the file mean something else, and all have become background."""
    image, labels = lungs()
    one_stage = task.as_one_stage()
    assert found(image, labels * (labels == 1), one_stage) == []
    codes = [finding.code for finding in found(image, 0 * labels, one_stage, left_lung="absent")]
    assert codes == ["missing_region"]
    many = replace(one_stage, labels={f"organ_{value}": value for value in range(1, 100)})
    (finding,) = found(image, 0 * labels, many)
    assert finding.code == "missing_region"
    assert "none of organ_1, organ_2, organ_3, organ_4, organ_5 and 94 more" in finding.message


def test_labels_with_a_partner_are_searched_in_their_boxes_alone(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of a hundred labels would need a mask of the whole scan for each of them."""
    searched = []
    mask_of = labels_module._mask

    def count(labels: np.ndarray, region: Region, task: Task) -> np.ndarray:
        searched.append(labels.size)
        return mask_of(labels, region, task)

    monkeypatch.setattr(labels_module, "_mask", count)
    image, labels = lungs()
    labels[0, :, :] = 3
    names = {"left_lung": 1, "right_lung": 2, "vessel_left": 3, "left_gland": 4, "right_gland": 5}
    one_stage = replace(task.as_one_stage(), labels=names)
    assert found(image, labels, one_stage) == []
    boxes = [VoxelBox.from_mask(labels == value) for value in (1, 2)]
    assert searched == [math.prod(box.shape) for box in boxes if box]


def test_regions_with_a_partner_are_compared_with_it_alone(task: Task) -> None:
    """The left atrium lies at x = 15 mm, the right ventricle at 18 mm."""
    chambers = {
        "left_atrium": slice(24, 27), "right_atrium": slice(6, 10),
        "left_ventricle": slice(30, 34), "right_ventricle": slice(26, 27),
    }  # fmt: skip
    labels = np.zeros(GRID.shape, np.uint8)
    regions = []
    for value, (name, columns) in enumerate(chambers.items(), start=1):
        labels[3:9, 4 + 4 * value : 8 + 4 * value, columns] = value
        regions.append(Region(name, (name,), name.partition("_")[0]))
    values = {name: value for value, name in enumerate(chambers, start=1)}
    heart = replace(task, labels=values, regions=tuple(regions))
    image = np.full(GRID.shape, 40, np.int16)
    assert found(image, labels, heart) == []
    exchanged = np.array([0, 1, 2, 4, 3], np.uint8)[labels]
    (finding,) = found(image, exchanged, heart)
    assert finding.message.startswith("left_ventricle lies at x = 18 mm and right_ventricle at 34")
    # Without its partner, a region is compared with all regions of the other side.
    findings = found(image, labels * (labels != 2), heart, right_atrium="absent")
    assert [finding.code for finding in findings] == ["swapped_sides"]


def test_regions_without_sides_are_not_compared(task: Task) -> None:
    organs = Task(
        "organs",
        {"heart": 1, "spine": 2},
        (Region("heart", ("heart",)), Region("spine", ("spine",))),
        task.channels,
    )
    image, labels = lungs()
    wide = labels.copy()
    wide[2:10, 8:22, 18:23] = 2
    for labels_of_case in (
        labels,
        np.array([0, 2, 1], np.uint8)[labels],
        wide,
        labels * (labels == 1),
    ):
        assert {finding.code for finding in found(image, labels_of_case, organs)} <= {
            "missing_region"
        }


@pytest.mark.parametrize("gap", [0, 1])
def test_the_area_of_contact_is_measured(task: Task, gap: int) -> None:
    image, labels = lungs()
    labels[3:10, 9:22, 18 : 23 - gap] = 2
    findings = found(image, labels, task)
    assert [finding.code for finding in findings] == ["touching_regions"] * (1 - gap)
    if gap == 0:
        assert f"touch over {7 * 13 * 5.0 * 2.0 / 100:.1f} cm²" in findings[0].message


@pytest.mark.parametrize(
    ("axis", "end", "name"),
    [
        (0, 0, "lower"),
        (0, 1, "upper"),
        (1, 0, "front"),
        (1, 1, "back"),
        (2, 0, "right"),
        (2, 1, "left"),
    ],
)
def test_each_end_of_the_scan_has_its_name(task: Task, axis: int, end: int, name: str) -> None:
    image, labels = lungs()
    value = 2 if name == "right" else 1
    box = VoxelBox.from_mask(labels == value)
    assert box is not None
    grown = list(box.slices())
    grown[axis] = slice(grown[axis].start, None) if end else slice(0, grown[axis].stop)
    labels[tuple(grown)] = value
    region = "right_lung" if value == 2 else "left_lung"
    sizes_mm = [
        size * step
        for other, (size, step) in enumerate(zip(box.shape, GRID.spacing_mm, strict=True))
        if other != axis
    ]
    (finding,) = found(image, labels, task)
    assert (
        finding.message
        == f"the scan cuts {region} ({name} end, {math.prod(sizes_mm) / 100:.1f} cm²)"
    )


@pytest.mark.parametrize(("distance_mm", "is_near"), [(3.0, True), (9.0, False)])
def test_the_edge_of_the_field_of_view_cuts(task: Task, distance_mm: float, is_near: bool) -> None:
    image, labels = lungs()
    image[:, :, 33 + round(distance_mm / 3.0) :] = -2000
    findings = found(image, labels, task)
    assert [finding.message for finding in findings] == [
        "the scan cuts left_lung (edge of the field of view)"
    ] * is_near
    assert found(None, labels, task) == []


@pytest.mark.parametrize("value", [1, 2])
def test_a_lone_region_is_compared_with_the_body(task: Task, value: int) -> None:
    image, labels = lungs()
    image[:, :, :3] = image[:, :, -2:] = -1000
    alone = labels * (labels == value)
    absent = {"right_lung" if value == 1 else "left_lung": "absent"}
    assert found(image, alone, task, **absent) == []
    (finding,) = found(
        image, (3 - alone) * (alone > 0), task, **{next(iter({*task.labels} - {*absent})): "absent"}
    )
    assert finding.code == "doubtful_side"


def test_what_is_rightly_absent_is_not_missing(task: Task) -> None:
    image, labels = lungs()
    (finding,) = found(image, labels * (labels == 1), task, right_lung="approximate")
    assert finding.code == "missing_region"
    assert found(image, labels * (labels == 1), task, right_lung="absent") == []


def test_a_region_that_a_spacing_loses_is_told(task: Task) -> None:
    (finding,) = audit_vanished({"left_lung": 0.012, "right_lung": 0.0}, {}, task, "4x4x4")
    assert finding.message == "left_lung has 0.012 ml, and none of it is left at 4x4x4 mm"
    assert (
        audit_vanished(
            {"left_lung": 5.0, "right_lung": 0.0},
            {"left_lung": VoxelBox.full((2, 2, 2))},
            task,
            "4",
        )
        == []
    )


def test_without_regions_a_label_that_a_spacing_loses_is_told(task: Task) -> None:
    volumes_ml = {"left_lung": 0.012, "right_lung": 3.0}
    boxes = {"right_lung": VoxelBox.full((2, 2, 2))}
    (finding,) = audit_vanished(volumes_ml, boxes, task.as_one_stage(), "4x4x4")
    assert finding.message == "left_lung has 0.012 ml, and none of it is left at 4x4x4 mm"


@pytest.mark.parametrize("away", [0.9, 1.1])
def test_one_tolerance_decides_about_grids(away: float) -> None:
    origin = (-60.0 + away * GRID_TOLERANCE_MM, 5.0, 7.0)
    moved = VoxelGrid(GRID.shape, GRID.spacing_mm, origin, GRID.direction)
    assert bool(audit_grids(GRID, moved, (GRID.shape, GRID.shape))) == (away > 1)
    stretched = VoxelGrid(
        GRID.shape,
        (5.0 + away * GRID_TOLERANCE_MM / 11, 2.0, 3.0),
        GRID.origin_xyz_mm,
        GRID.direction,
    )
    assert bool(audit_grids(GRID, stretched, (GRID.shape, GRID.shape))) == (away > 1)


def test_a_label_map_in_another_order_of_axes_is_told_by_where_it_lies() -> None:
    """Its voxels cannot be laid on the image one by one, so that this cannot be ignored."""
    away = VoxelGrid(GRID.shape, GRID.spacing_mm, (-59.0, 5.0, 7.0), GRID.direction)
    (finding,) = audit_grids(GRID, away, (GRID.shape, GRID.shape[::-1]))
    assert (finding.code, finding.message) == (
        "label_shape",
        (
            "the label map is stored in another order of axes than its image and is not on its "
            "grid: its corners lie up to 1.00 mm off"
        ),
    )


def test_values_are_translated_and_nothing_is_copied_in_vain(task: Task) -> None:
    _, labels = lungs()
    same, nothing = map_values(labels, task, {1: "left_lung", 2: "right_lung"})
    assert same is labels
    assert nothing == []
    wide = np.array([0, 700, -3], np.int16)[labels]
    mapped, nothing = map_values(wide, task, {700: "left_lung", -3: "right_lung"})
    assert np.array_equal(mapped, labels)
    assert nothing == []
    (finding,) = map_values(np.arange(13, dtype=np.int16)[:, None, None], task, {1: "left_lung"})[1]
    assert finding.message.startswith(
        "the label map holds the values 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, …, which"
    )
    ten = np.arange(12, dtype=np.int16)[:, None, None]
    (finding,) = map_values(ten, task, {1: "left_lung"})[1]
    assert finding.message.startswith(
        "the label map holds the values 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, which"
    )
    # Hydra adds a key with "+", but refuses this for a key that exists, whose values must stay.
    assert "or +data.label_values.background=[2,3,4,5,6,7,8,9,10,11] if" in finding.cure
    (finding,) = map_values(ten[:9], task, {1: "left_lung", 7: "background", 6: "background"})[1]
    assert "or data.label_values.background=[7,6,2,3,4,5,8] if" in finding.cure
    (finding,) = map_values(ten[:2], task, {})[1]
    assert "(it names no value)" in finding.message
    many = np.arange(labels.size, dtype=np.int32).reshape(labels.shape)
    (finding,) = map_values(many, task, {1: "left_lung", 2: "right_lung"})[1]
    assert finding.message.startswith(
        "the label map holds the values 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, …, which"
    )
    assert finding.cure == "is it an image instead of a label map?"


def test_a_label_map_of_ignored_voxels_alone_is_as_good_as_empty(task: Task) -> None:
    values = {1: "left_lung", 2: "right_lung", 9: "ignore"}
    ignoring = replace(task, ignore_label=255)
    labels = np.zeros((4, 5, 6), dtype=np.uint8)

    def codes() -> list[str]:
        return [finding.code for finding in map_values(labels, ignoring, values)[1]]

    assert codes() == ["empty_labels"]
    labels[1] = 9
    assert codes() == ["empty_labels"]
    labels[2, 2, 2] = 2
    assert codes() == []
    mapped, _ = map_values(labels, ignoring, values)
    assert np.bincount(mapped.ravel()).nonzero()[0].tolist() == [0, 2, 255]
    assert np.array_equal(mapped == 2, labels == 2)
    assert np.array_equal(mapped == 255, labels == 9)


POSITIONS = {
    "upside down": ((0,), (0, 2)),
    "turned by 180 degrees about its long axis": ((1,), (1, 2)),
}


@pytest.mark.parametrize("position", POSITIONS)
def test_a_body_that_lies_against_its_header_is_told_and_its_labels_are_not_to_be_exchanged(
    whole: tuple[np.ndarray, np.ndarray, VoxelGrid], task: Task, position: str
) -> None:
    image, labels, grid = whole
    assert not {"body_position", "swapped_sides"} & {
        finding.code for finding in audit_labels(image, labels, grid, task, {})
    }
    mirrored, turned = POSITIONS[position]
    findings = audit_labels(np.flip(image, mirrored), np.flip(labels, mirrored), grid, task, {})
    (finding,) = [finding for finding in findings if "body" in finding.code]
    assert (finding.severity, position in finding.message) == (Severity.warning, True)
    findings = audit_labels(np.flip(image, turned), np.flip(labels, turned), grid, task, {})
    (finding,) = [finding for finding in findings if finding.code == "swapped_sides"]
    assert position in finding.message
    assert "leave data.label_values as they are" in finding.cure


@pytest.mark.parametrize(
    ("factor", "severity"),
    [(1.0, None), (5.0, "warning"), (10.0, "error"), (0.2, "warning"), (0.1, "warning")],
)
def test_a_wrong_spacing_gives_implausible_volumes(
    task: Task, factor: float, severity: str | None
) -> None:
    _, labels = lungs()
    volumes_ml = measure_volumes(labels, GRID, task)
    ranges = {name: (0.25 * volume_ml, 3.0 * volume_ml) for name, volume_ml in volumes_ml.items()}
    z, y, x = GRID.spacing_mm
    grid = VoxelGrid(GRID.shape, (factor * z, y, x))
    findings = audit_labels(None, labels, grid, replace(task, volume_ml=ranges), {})
    assert [
        finding.severity.value for finding in findings if finding.code == "implausible_volume"
    ] == [severity] * 2 * (severity is not None)


@pytest.mark.parametrize(("factor", "is_error"), [(1.0, False), (0.001, True), (30.0, True)])
def test_a_scan_has_the_size_of_a_patient(factor: float, is_error: bool) -> None:
    """A header in metres makes it a thousand times smaller."""
    z, y, x = GRID.spacing_mm
    findings = audit_extent(replace(GRID, spacing_mm=(factor * z, factor * y, factor * x)))
    expected = [("implausible_size", Severity.error)] * is_error
    assert [(finding.code, finding.severity) for finding in findings] == expected


@pytest.mark.parametrize(("step_z_mm", "is_error"), [(30.0, False), (80.0, True)])
def test_no_organ_of_one_side_is_longer_than_the_femur(
    task: Task, step_z_mm: float, is_error: bool
) -> None:
    """Slices are several times too thick, while the volume may still be that of a large lung."""
    image, labels = lungs()
    grid = replace(GRID, spacing_mm=(step_z_mm, 2.0, 3.0))
    codes = {
        finding.code
        for finding in audit_labels(image, labels, grid, replace(task, volume_ml={}), {})
    }
    assert ("implausible_size" in codes) == is_error


@pytest.mark.parametrize(
    ("low_ml", "severity"), [(40.0, Severity.warning), (500.0, Severity.error)]
)
def test_a_whole_region_that_is_far_too_small_is_an_error(
    task: Task, low_ml: float, severity: Severity
) -> None:
    """A lung of 34 ml."""
    limited = replace(task, volume_ml={"left_lung": (low_ml, 5500.0)})
    (finding,) = found(*lungs(), limited)
    assert (finding.code, finding.severity) == ("implausible_volume", severity)


def test_a_region_that_the_scan_cuts_may_be_small(task: Task) -> None:
    _, labels = lungs()
    grid = VoxelGrid((5, *GRID.shape[1:]), GRID.spacing_mm)
    findings = audit_labels(
        None, labels[:5], grid, replace(task, volume_ml={"left_lung": (900.0, 5000.0)}), {}
    )
    assert [finding.code for finding in findings] == ["cut_region"]


@pytest.mark.parametrize(("start", "severity"), [(0, None), (1, Severity.error)])
def test_a_label_without_a_region_that_the_scan_cuts_may_be_small(
    start: int, severity: Severity | None
) -> None:
    """The dome of a liver in the lowest slice of a chest CT, and a piece of it inside the scan."""
    labels = np.zeros(GRID.shape, dtype=np.uint8)
    labels[start : start + 1, 8:22, 23:33] = 1
    abdomen = Task(
        "abdomen",
        labels={"liver": 1, "spleen": 2},
        regions=(),
        channels=(Channel("ct", (-160.0, 240.0)),),
        volume_ml={"liver": (500.0, 4000.0)},
    )
    findings = audit_labels(None, labels, GRID, abdomen, {})
    expected = [] if severity is None else [("implausible_volume", severity)]
    assert [(finding.code, finding.severity) for finding in findings] == expected


def test_a_helper_label_that_the_scan_cuts_may_be_small(task: Task) -> None:
    """A label beside the regions, such as the airway, is judged as a region is."""
    _, labels = lungs()
    labels[-1:, 1:3, 19:22] = 3
    airway = replace(task, labels={**task.labels, "airway": 3}, volume_ml={"airway": (30.0, 100.0)})
    assert found(None, labels, airway) == []
    labels[-1] = 0
    labels[-2:-1, 1:3, 19:22] = 3
    assert [finding.code for finding in found(None, labels, airway)] == ["implausible_volume"]
