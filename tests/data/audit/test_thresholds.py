"""Each threshold of the audit from both sides: just a finding, and just none."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from medseg.anatomy.position import apex_excess, turned_pairs
from medseg.data.audit import tissue_profile as profile
from medseg.data.audit.finding import KINDS, CaseAudit, Finding, Severity
from medseg.data.audit.image import ImageFacts, audit_image
from medseg.data.audit.labels import audit_extent, audit_labels
from medseg.data.audit.table import AuditedCase, compare_cases, copy_distance
from medseg.data.audit.tissue_profile import areas_of, make_profile, profile_distance
from medseg.data.case_table import Case
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.task import Task

LOW, HIGH = -1024, 3071


def facts(
    *parts: tuple[int, int, int],
    spikes: dict[int, int] | None = None,
    ends: tuple[int, int] | None = None,
) -> ImageFacts:
    """Histogram of flat parts (first value, value after the last, voxels) and single values."""
    counts = np.zeros(65536, np.int64)
    for first, stop, voxels in parts:
        whole, rest = divmod(voxels, stop - first)
        counts[first + 32768 : stop + 32768] += whole
        counts[first + 32768 : first + rest + 32768] += 1
    for value, voxels in (spikes or {}).items():
        counts[value + 32768] += voxels
    held = np.flatnonzero(counts) - 32768
    low, high = ends or (int(held[0]), int(held[-1]))
    return ImageFacts(float(low), float(high), counts)


def chest(
    air: int = 30_000,
    soft: int = 40_000,
    bone: int = 10_000,
    spikes: dict[int, int] | None = None,
    offset: int = 0,
) -> ImageFacts:
    """A CT of about 100,000 voxels: air -1024 to -700, soft tissue -120 to 120, bone up to 3071."""
    parts = (
        (LOW + offset, -700 + offset, air),
        (-120 + offset, 121 + offset, soft),
        (121 + offset, HIGH + 1 + offset, bone),
    )
    return facts(*parts, spikes={HIGH + offset: 1, LOW + offset: 1, **(spikes or {})})


def kinds(histogram: ImageFacts) -> list[tuple[str, Severity]]:
    return [(finding.code, finding.severity) for finding in audit_image(histogram)]


def test_the_chest_of_these_tests_passes() -> None:
    assert kinds(chest()) == []


def test_severities_of_the_findings_that_refuse_a_case() -> None:
    errors = {kind for kind, (severity, *_) in KINDS.items() if severity is Severity.error}
    assert {
        "hu_offset",
        "hu_range:constant",
        "label_grid",
        "label_shape",
        "swapped_sides",
        "near_copy",
    } <= errors
    assert (
        not {
            "missing_region",
            "cut_region",
            "spacing_outlier",
            "no_air",
            "body_position",
            "reading",
        }
        & errors
    )


@pytest.mark.parametrize(("voxels", "is_spike"), [(99, False), (100, True)])
def test_a_spike_has_ten_times_the_voxels_of_the_values_nearby(voxels: int, is_spike: bool) -> None:
    even = facts((0, 1000, 10_000), spikes={500: voxels - 10})
    assert (500 in even.spikes) == is_spike


@pytest.mark.parametrize(("others", "is_spike"), [(99_899, True), (99_901, False)])
def test_a_spike_has_a_thousandth_of_all_voxels(others: int, is_spike: bool) -> None:
    thin = facts((1000, 21_000, others), spikes={0: 100})
    assert (0 in thin.spikes) == is_spike
    assert thin.spikes.get(0, 0.0) == (100 / (others + 100) if is_spike else 0.0)


def test_values_nearby_are_those_within_25() -> None:
    """Eleven neighbours of a tenth and more hide a spike; those that are farther away do not."""
    for distance, is_spike in ((25, False), (26, True)):
        histogram = facts(spikes={0: 1000, distance: 101, -5000: 10_000})
        assert (0 in histogram.spikes) == is_spike


def test_the_four_largest_spikes_count() -> None:
    histogram = facts(spikes={100 * n: 1000 + n for n in range(6)})
    assert list(histogram.spikes) == [500, 400, 300, 200]
    assert histogram.tissue.sum() == 1000 + 1001


def test_measured_values_begin_at_the_end_of_padding() -> None:
    assert facts((-1100, 50, 9000), spikes={-1101: 5}).measured_hu == (-1100, 49)
    assert facts(spikes={-2000: 5, -1500: 4}, ends=(-2001, -1499)).measured_hu == (-2001, -1499)


@pytest.mark.parametrize(("high", "is_small"), [(256, True), (257, False)])
def test_a_range_of_256_values_is_no_hu(high: int, is_small: bool) -> None:
    (finding,) = audit_image(facts((0, high + 1, 50_000)))
    assert finding.code == "hu_range"
    assert ("data.hu_slope=" in str(finding)) == is_small


@pytest.mark.parametrize(("dark", "code"), [(1000, None), (900, "hu_range")])
def test_a_hundredth_of_a_ct_is_fat_or_air(dark: int, code: str | None) -> None:
    histogram = facts((-200, -50, dark), (-50, 800, 100_000 - dark))
    found = [finding for finding in audit_image(histogram) if finding.code != "no_air"]
    assert [finding.code for finding in found] == ([code] if code else [])
    if code:
        assert "fat or air" in found[0].message


@pytest.mark.parametrize(("soft", "is_refused"), [(100, False), (90, True)])
def test_a_thousandth_of_a_ct_is_soft_tissue_or_denser(soft: int, is_refused: bool) -> None:
    found = audit_image(facts((-1020, -160, 100_000 - soft), (-150, 100, soft)))
    assert any(finding.code == "hu_range" for finding in found) == is_refused
    assert all(
        "lacks soft tissue" in finding.message or "soft tissue" in finding.message
        for finding in found[:1]
        if is_refused
    )


@pytest.mark.parametrize(("soft", "code"), [(5100, "hu_offset"), (4900, "hu_range")])
def test_an_offset_needs_a_twentieth_of_soft_tissue_where_it_would_lie(
    soft: int, code: str
) -> None:
    """Stored 1024 too high: nothing is dark, and soft tissue lies around 1024."""
    (finding,) = audit_image(facts((874, 1174, soft), (1174, 4000, 100_000 - soft)))
    assert finding.code == code


@pytest.mark.parametrize(("gap", "code"), [(29_000, "hu_offset"), (31_000, "hu_range")])
def test_soft_tissue_outweighs_the_gap_below_it(gap: int, code: str) -> None:
    (finding,) = audit_image(facts((524, 824, gap), (874, 1174, 30_000), (1174, 4000, 50_000)))
    assert finding.code == code


@pytest.mark.parametrize("offset", [1024, -1024])
def test_an_offset_names_its_place_and_its_cure(offset: int) -> None:
    peak = 30 + offset
    (finding,) = audit_image(chest(air=30_000, soft=40_000, spikes={peak: 150}, offset=offset))
    assert f"soft tissue lies at about {peak}" in finding.message
    assert f"about 1024 too {'high' if offset > 0 else 'low'} for HU" in finding.message
    assert f"data.hu_offset={-offset}" in str(finding)


@pytest.mark.parametrize(("far", "code"), [(4900, "hu_offset"), (5200, "hu_range")])
def test_values_far_below_moved_air_were_multiplied(far: int, code: str) -> None:
    (finding,) = audit_image(
        facts(
            (-4000, -2124, far),
            (-2048, -1750, 40_000),
            (-1174, -874, 95_000 - 40_000),
            (-874, 3000, 100),
        )
    )
    assert finding.code == code


@pytest.mark.parametrize(("padding", "is_told"), [(100, True), (90, False)])
def test_a_thousandth_of_padding_is_noted(padding: int, is_told: bool) -> None:
    histogram = facts((LOW, -700, 30_000), (-120, 120, 69_899), spikes={-2000: padding, HIGH: 1})
    assert [finding.code for finding in audit_image(histogram)] == ["padding"] * is_told


@pytest.mark.parametrize(("others", "words"), [(9, "hold -2000"), (12, "lie below -1100")])
def test_padding_is_a_constant_where_nine_tenths_are(others: int, words: str) -> None:
    histogram = facts(
        (LOW, -700, 30_000),
        (-120, 120, 69_900),
        (-1700, -1600, others * 10),
        spikes={-2000: 1000 - others * 10},
    )
    (finding,) = audit_image(histogram)
    assert words in finding.message


@pytest.mark.parametrize(
    ("value", "share", "is_told"),
    [
        (0, 1100, True),
        (0, 900, False),
        (-499, 1100, True),
        (-500, 1100, False),
        (3045, 1100, True),
        (3046, 1100, False),
    ],
)
def test_a_filled_value_has_a_hundredth_and_lies_inside(
    value: int, share: int, is_told: bool
) -> None:
    histogram = facts((LOW, HIGH + 1, 100_000), spikes={value: share})
    found = [
        finding
        for finding in audit_image(histogram)
        if "filled" in finding.message or finding.severity is Severity.warning
    ]
    assert [finding.code for finding in found] == ["padding"] * is_told


@pytest.mark.parametrize(
    ("low", "voxels", "expected"),
    [
        (-1010, 2000, []),
        (-1009, 2000, [("clipped", Severity.information)]),
        (-1000, 2000, [("clipped", Severity.information)]),
        (-999, 2000, [("clipped", Severity.warning)]),
        (-999, 900, []),
    ],
)
def test_air_that_is_clipped(low: int, voxels: int, expected: list[tuple[str, Severity]]) -> None:
    histogram = facts(
        (low, -700, 30_000), (-120, 120, 60_000), (120, HIGH + 1, 8000), spikes={low: voxels}
    )
    assert kinds(histogram) == expected


@pytest.mark.parametrize(("high", "is_told"), [(1499, True), (1500, False)])
def test_bone_that_is_clipped_below_1500(high: int, is_told: bool) -> None:
    histogram = facts(
        (LOW, -700, 30_000), (-120, 120, 60_000), (120, high, 8000), spikes={high: 2000}
    )
    assert kinds(histogram) == [("clipped", Severity.warning)] * is_told


@pytest.mark.parametrize(("air", "is_told"), [(101, False), (99, True)])
def test_a_thousandth_of_a_ct_is_air(air: int, is_told: bool) -> None:
    histogram = facts((-1000, -600, air), (-450, -60, 20_000), (-60, 500, 80_000 - air))
    assert kinds(histogram) == [("no_air", Severity.warning)] * is_told


@pytest.mark.parametrize(
    ("low", "high", "near_zero", "near_one", "kind"),
    [
        (-1, 3, 10, 5, "divided"),
        (-1, 4, 10, 5, "divided"),
        (-1, 5, 10, 5, "window"),
        (-2, 3, 10, 5, "window"),
        (-1, 3, 5, 10, "window"),
        (-1, 1, 10, 5, "clipped"),
    ],
)
def test_hu_that_were_divided_by_a_thousand(
    low: int, high: int, near_zero: int, near_one: int, kind: str
) -> None:
    words = {
        "divided": "they are HU divided by 1000",
        "clipped": "they may be HU divided by 1000",
        "window": "not HU",
    }
    histogram = facts(spikes={low: 3, 0: near_zero, 1: near_one, high: 2})
    (finding,) = audit_image(histogram)
    assert [name for name, sentence in words.items() if sentence in finding.message] == [kind]


@pytest.mark.parametrize(
    ("low", "high", "slope", "offset"),
    [
        (0, 1, 1500, -1250),
        (-1, 1, 750, -500),
        (0, 255, 1500 / 255, -1250),
        (0, 128, 1500 / 255, -1250),
        (0, 127, 1500 / 127, -1250),
        (-128, 127, 1500 / 255, -1250 + 128 * 1500 / 255),
        (-64, 64, 1500 / 255, -1250 + 128 * 1500 / 255),
    ],
)
def test_the_usual_ends_of_a_window(low: int, high: int, slope: float, offset: float) -> None:
    (finding,) = audit_image(facts((low, high + 1, 1000 * (high + 1 - low))))
    assert f"data.hu_slope={slope:.6g} data.hu_offset={offset:.6g}" in str(finding)


GRID = VoxelGrid((12, 30, 40), (5.0, 2.0, 3.0), (-60.0, 5.0, 7.0))


@pytest.mark.parametrize(
    ("shape", "is_told"),
    [((20, 5, 5), False), ((19, 5, 5), True), ((5, 5, 2800), False), ((5, 2801, 5), True)],
)
def test_a_scan_is_between_2_cm_and_280_cm_long(shape: tuple[int, int, int], is_told: bool) -> None:
    assert bool(audit_extent(VoxelGrid(shape, (1.0, 1.0, 1.0)))) == is_told


@pytest.mark.parametrize(("slices", "is_told"), [(60, False), (61, True)])
@pytest.mark.parametrize("has_side", [True, False])
def test_a_region_of_one_side_is_at_most_60_cm_long(
    task: Task, slices: int, is_told: bool, has_side: bool
) -> None:
    labels = np.zeros((64, 6, 8), np.uint8)
    labels[1 : slices + 1, 2:4, 5:7] = 1
    regions = (
        task.regions if has_side else tuple(replace(region, side=None) for region in task.regions)
    )
    findings = audit_labels(
        None, labels, VoxelGrid(labels.shape, (10.0, 2.0, 3.0)), replace(task, regions=regions), {}
    )
    assert ("implausible_size" in {finding.code for finding in findings}) == (is_told and has_side)


@pytest.mark.parametrize(("faces", "is_told"), [(30, True), (29, False)])
def test_regions_touch_from_3_cm2_on(task: Task, faces: int, is_told: bool) -> None:
    """A face across x is 2 x 5 = 10 mm²."""
    labels = np.zeros(GRID.shape, np.uint8)
    labels[2:10, 8:22, 23:33] = 1
    labels[2:10, 8:22, 6:22] = 2
    for place in range(faces):
        z, y = divmod(place, 14)
        labels[2 + z, 8 + y, 22] = 2
    findings = audit_labels(None, labels, GRID, task, {})
    assert [finding.code for finding in findings] == ["touching_regions"] * is_told


@pytest.mark.parametrize(("shift", "is_told"), [(3, False), (4, True)])
@pytest.mark.parametrize("side", [1, 2])
def test_a_lone_region_may_lie_8_percent_of_the_body_beyond_its_midline(
    task: Task, shift: int, is_told: bool, side: int
) -> None:
    """A body of 40 columns (117 mm): its midline is at 19.5, and 8 % of it are 3.12 columns."""
    labels = np.zeros(GRID.shape, np.uint8)
    centre = 19.5 + (shift if side == 2 else -shift)
    labels[2:10, 8:22, int(centre - 3.5) : int(centre + 4.5)] = side
    image = np.full(GRID.shape, 40, np.int16)
    trust = {"right_lung" if side == 1 else "left_lung": "absent"}
    findings = audit_labels(image, labels, GRID, task, trust)
    assert [finding.code for finding in findings] == ["doubtful_side"] * is_told
    if findings:
        assert f"it lies {shift * 3} mm across" in findings[0].message


@pytest.mark.parametrize(
    ("low", "high", "severity"),
    [
        (33.6, 100.0, None),
        (33.7, 100.0, Severity.warning),
        (33.6 * 12 - 0.1, 5000.0, Severity.warning),
        (33.6 * 12 + 0.1, 5000.0, Severity.error),
        (10.0, 33.6, None),
        (10.0, 33.5, Severity.warning),
        (10.0, 16.8, Severity.warning),
        (10.0, 16.7, Severity.error),
    ],
)
def test_volumes_beyond_the_range_and_far_beyond_it(
    task: Task, low: float, high: float, severity: Severity | None
) -> None:
    """A lung of 33.6 ml."""
    labels = np.zeros(GRID.shape, np.uint8)
    labels[2:10, 8:22, 23:33] = 1
    labels[2:10, 8:22, 6:16] = 2
    findings = audit_labels(
        None, labels, GRID, replace(task, volume_ml={"left_lung": (low, high)}), {}
    )
    assert [finding.severity for finding in findings] == ([severity] if severity else [])


@pytest.mark.parametrize(("rows", "is_told"), [(10, True), (9, False)])
def test_a_cut_by_the_field_of_view_has_1_cm2(task: Task, rows: int, is_told: bool) -> None:
    """A face across x is 2 x 5 = 10 mm²; the padding begins at the region."""
    labels = np.zeros(GRID.shape, np.uint8)
    labels[5:6, 8:22, 23:33] = 1
    labels[2:10, 8:22, 6:16] = 2
    image = np.full(GRID.shape, 40, np.int16)
    image[5, 8 : 8 + rows, 33:] = -1501
    assert [finding.code for finding in audit_labels(image, labels, GRID, task, {})] == [
        "cut_region"
    ] * is_told
    image[image == -1501] = -1500
    assert audit_labels(image, labels, GRID, task, {}) == []


def audited(
    name: str, thumbnail: tuple[int, ...] = (), areas: profile.Profile = (), patient: str = ""
) -> AuditedCase:
    grid = VoxelGrid((9, 8, 7), (1.0, 0.7, 0.7))
    # A few values stand for all blocks.
    blocks = tuple(np.resize(thumbnail, 8**3).tolist()) if thumbnail else ()
    audit = CaseAudit(grid, {}, name, {}, (), blocks, areas)
    return AuditedCase(Case(name, Path(name), None, patient or name), audit)


@pytest.mark.parametrize(("difference", "is_told"), [(11, True), (12, False)])
def test_thumbnails_that_differ_by_less_than_12_hu_are_copies(
    difference: int, is_told: bool
) -> None:
    # The difference is no change of scale: that would be a copy too.
    changed = (100 + difference, 100 - difference, -100 + difference, -100 - difference)
    cases = [audited("a", (100, 100, -100, -100)), audited("b", changed)]
    first, second = compare_cases(cases)
    assert first.comparison == ()
    assert [finding.code for finding in second.comparison] == ["near_copy"] * is_told
    assert (
        compare_cases([audited("a", (1,), patient="p"), audited("b", (2,), patient="p")])[
            1
        ].comparison
        == ()
    )


@pytest.mark.parametrize(("difference", "is_told"), [(80, True), (130, False)])
def test_thumbnails_that_a_line_maps_within_10_percent_are_copies(
    difference: int, is_told: bool
) -> None:
    values = np.array([1000, 1000, -1000, -1000])
    noise = difference * np.array([1, -1, 1, -1])
    scaled = tuple((0.8 * (values + noise) + 200).astype(int).tolist())
    cases = [audited("a", tuple(values.tolist())), audited("b", scaled)]
    assert [finding.code for finding in compare_cases(cases)[1].comparison] == [
        "near_copy"
    ] * is_told
    same_patient = [
        replace(audited_case, case=replace(audited_case.case, patient="p"))
        for audited_case in cases
    ]
    assert compare_cases(same_patient)[1].comparison == ()
    negative = [cases[0], audited("c", tuple((-values).tolist())), audited("d", (7, 7, 7, 7))]
    assert [compared.comparison for compared in compare_cases(negative)] == [(), (), ()]


def test_the_nearest_copy_is_named() -> None:
    cases = [
        audited("far", (10, 10)),
        audited("near", (3, 3)),
        audited("other", ()),
        audited("copy", (0, 0)),
    ]
    (finding,) = compare_cases(cases)[-1].comparison
    assert "'near' (3.0 HU apart)" in finding.message
    audits = [case.audit for case in cases]
    assert all(audit is not None for audit in audits)
    assert copy_distance(audits[0], audits[2]) == math.inf
    assert copy_distance(audits[0], audits[0]) == 0.0


def test_a_profile_has_the_areas_of_each_band_in_steps_of_5_mm() -> None:
    values = [-201, -200, -21, -20, 149, 150, 3071, 3072]
    image = np.tile(np.array(values, np.int16), (40, 3, 1))
    areas = make_profile(image, (2.5, 2.0, 3.0))
    assert len(areas) == 20
    assert set(areas) == {(2 * 3 * 6, 2 * 3 * 6, 2 * 3 * 6)}
    assert make_profile(image[:39], (2.5, 2.0, 3.0)) == ()
    growing = np.full((40, 6, 10), 40, np.int16)
    for index, plane in enumerate(growing):
        plane.ravel()[index:] = -1000
    soft_mm2 = [step_areas[1] for step_areas in make_profile(growing, (2.5, 2.0, 2.0))]
    # The middle of a step of 5 mm lies between two slices of 2.5 mm.
    assert soft_mm2 == [4 * (2 * step + 0.5) for step in range(20)]


def row(scale: float, slope: int = 0) -> profile.Profile:
    return tuple((round(scale * (1000 + slope * step)), 500, 300) for step in range(40))


@pytest.mark.parametrize(("scale", "is_told"), [(1.061, True), (1.063, False)])
def test_profiles_within_6_percent_are_copies(scale: float, is_told: bool) -> None:
    """Of the mean of both areas: 1.061 differs by 5.9 %, and 1.063 by 6.1 %."""
    second = compare_cases([audited("a", areas=row(1.0)), audited("b", areas=row(scale))])[1]
    assert [finding.code for finding in second.comparison] == ["near_copy"] * is_told
    same_patient = [
        audited("a", areas=row(1.0), patient="p"),
        audited("b", areas=row(scale), patient="p"),
    ]
    assert compare_cases(same_patient)[1].comparison == ()


@pytest.mark.parametrize(("steps", "is_near"), [(32, True), (31, False)])
def test_a_copy_has_four_fifths_of_the_slices(steps: int, is_near: bool) -> None:
    whole, part = areas_of(row(1.0, 10)), areas_of(row(1.0, 10)[40 - steps :])
    assert whole is not None
    assert part is not None
    assert math.isfinite(profile_distance(whole, part)) == is_near
    assert (profile_distance(whole, part) == 0.0) == is_near
    assert profile_distance(part, whole) == profile_distance(whole, part)


def body(task: Task, spine_at: str) -> tuple[np.ndarray, dict[str, VoxelBox], VoxelGrid]:
    """Two lungs of 9 slices, and bone between them at the back in a number of slices."""
    grid = VoxelGrid((11, 20, 30), (5.0, 4.0, 4.0))
    image = np.full(grid.shape, -800, np.int16)
    boxes = {
        "left_lung": VoxelBox((1, 2, 18), (10, 18, 26)),
        "right_lung": VoxelBox((1, 2, 4), (10, 18, 12)),
    }
    for index, end in enumerate(spine_at):
        rows = slice(13, 16) if end == "b" else slice(4, 7)
        image[1 + index, rows, 14:16] = 201
    return image, boxes, grid


@pytest.mark.parametrize(
    ("spine_at", "is_turned"), [("bbbffffff", False), ("bbfffffff", True), ("", False)]
)
def test_a_third_of_the_slices_shows_the_spine_at_the_back(
    task: Task, spine_at: str, is_turned: bool
) -> None:
    image, boxes, grid = body(task, spine_at)
    pairs = turned_pairs(image, boxes, grid, task)
    assert [(left.name, right.name) for left, right in pairs] == [
        ("left_lung", "right_lung")
    ] * is_turned
    image[image == 201] = 200
    assert turned_pairs(image, boxes, grid, task) == []
    assert turned_pairs(image, {"left_lung": boxes["left_lung"]}, grid, task) == []


def test_bone_farther_than_35_mm_from_the_middle_is_no_spine(task: Task) -> None:
    image, boxes, grid = body(task, "")
    image[1:10, 4:7, 25:] = 300  # the middle is at 15, and the reach 8.75 columns
    assert turned_pairs(image, boxes, grid, task) == []
    image[1:10, 4:7, 23] = 300
    assert len(turned_pairs(image, boxes, grid, task)) == 1


def test_an_apex_fills_its_rectangle_and_a_base_does_not(task: Task) -> None:
    grid = VoxelGrid((24, 12, 20), (5.0, 2.0, 2.0))
    labels = np.zeros(grid.shape, np.uint8)
    labels[2:22, 2:10, 2:10] = 1
    labels[2:12, 3:9, 3:9] = 0  # a rim at the lower end: 28 of 64 pixels
    image = np.where(labels == 1, -800, 40).astype(np.int16)
    boxes = {"left_lung": VoxelBox((2, 2, 2), (22, 10, 10))}
    assert apex_excess(image, labels, boxes, grid, task) == pytest.approx(1 - 28 / 64)
    flipped = apex_excess(image[::-1], labels[::-1], boxes, grid, task)
    assert flipped == pytest.approx(28 / 64 - 1)
    assert apex_excess(image * 0 - 499, labels, boxes, grid, task) == 1.0, "no lung"
    assert apex_excess(image * 0 - 500, labels, boxes, grid, task) == pytest.approx(1 - 28 / 64)
    for start, stop in ((0, 20), (4, 24)):
        cut = {"left_lung": VoxelBox((start, 2, 2), (stop, 10, 10))}
        assert apex_excess(image, labels, cut, grid, task) == 1.0, "the scan cuts it"


def test_findings_are_sorted_by_severity_and_ignored_by_code() -> None:
    plain = audited("a")
    assert plain.audit is not None
    findings = [
        Finding(code, severity, code, "")
        for code, severity in (("x", "information"), ("y", "error"), ("z", "warning"))
    ]
    findings = [replace(finding, severity=Severity(finding.severity)) for finding in findings]
    changed = replace(plain, audit=replace(plain.audit, findings=tuple(findings)))
    assert [finding.code for finding in changed.findings()] == ["y", "z", "x"]
    assert changed.status == "refused"
    ignoring = replace(changed, case=replace(plain.case, ignore_findings=frozenset({"y"})))
    assert ignoring.status == "ready"
