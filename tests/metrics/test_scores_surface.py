"""Closed forms, symmetries and the reference implementation of the surface scores."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import ndimage

from medseg.metrics.scores import (
    area_table_mm2,
    hausdorff_mm,
    nsd,
    score_region,
    surface_distances,
)

SHAPE = (21, 26, 33)
SPACING_MM = (2.5, 0.7, 1.1)


def _box(
    start: tuple[int, int, int], stop: tuple[int, int, int], shape: tuple[int, int, int] = SHAPE
) -> np.ndarray:
    mask = np.zeros(shape, dtype=bool)
    mask[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))] = True
    return mask


def _blob(rng: np.random.Generator, shape: tuple[int, int, int], threshold: float) -> np.ndarray:
    noise = ndimage.gaussian_filter(rng.normal(size=shape), 1.5)
    mask: np.ndarray = noise > threshold * noise.std()
    return mask


def _ball(radius_mm: float, spacing_mm: tuple[float, float, float], half_mm: float) -> np.ndarray:
    axes = [
        np.arange(-math.ceil(half_mm / step), math.ceil(half_mm / step) + 1) * step
        for step in spacing_mm
    ]
    z, y, x = np.meshgrid(*axes, indexing="ij")
    return np.asarray(z**2 + y**2 + x**2 <= radius_mm**2)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_shifted_plates_give_the_shift_along_their_own_axis(axis: int) -> None:
    """A plate across the volume, shifted by three voxels, so nearly all its surface is as well."""
    start, stop = [0, 0, 0], list(SHAPE)
    start[axis], stop[axis] = 4, 14
    target = _box(tuple(start), tuple(stop))
    pred = np.roll(target, 3, axis)
    shift_mm = 3 * SPACING_MM[axis]
    distances = surface_distances(pred, target, SPACING_MM)
    assert hausdorff_mm(distances, 1.0) == pytest.approx(shift_mm)
    assert nsd(distances, shift_mm) == pytest.approx(1.0)
    assert nsd(distances, 0.99 * shift_mm) < 1.0


def test_nsd_of_shifted_boxes_in_closed_form() -> None:
    """A wide thin plate, tolerance below the shift: only rim and bevelled edges can agree."""
    target = _box((5, 2, 2), (10, 62, 72), (20, 64, 74))
    pred = np.roll(target, 2, 0)
    scores = nsd(surface_distances(pred, target, (3.0, 1.0, 1.0)), 2.0)
    faces_mm2 = 2 * 60 * 70
    rim_mm2 = 2 * (60 + 70) * 5 * 3
    # Of the rim three fifths lie on the other rim. The bevelled edges can move the sum a little.
    expected = rim_mm2 * 3 / 5 / (faces_mm2 + rim_mm2)
    assert scores == pytest.approx(expected, abs=0.08)


def test_concentric_balls_are_apart_by_the_difference_of_their_radii() -> None:
    spacing_mm = (1.5, 0.8, 0.6)
    large, small = _ball(15.0, spacing_mm, 18.0), _ball(12.0, spacing_mm, 18.0)
    distances = surface_distances(small, large, spacing_mm)
    assert hausdorff_mm(distances) == pytest.approx(3.0, abs=0.8)
    assert nsd(distances, 1.2) == 0.0
    assert nsd(distances, 4.5) == 1.0
    # Binary marching cubes overestimate a sphere by about nine per cent, whatever the voxels.
    assert distances[1][1].sum() == pytest.approx(4 * math.pi * 15**2 * 1.09, rel=0.04)


def test_area_of_a_box_is_that_of_its_faces_less_the_bevels() -> None:
    distances = surface_distances(
        _box((1, 1, 1), (19, 24, 31)), _box((1, 1, 1), (19, 24, 31)), SPACING_MM
    )
    z_mm, y_mm, x_mm = (n * s for n, s in zip((18, 23, 30), SPACING_MM, strict=True))
    faces_mm2 = 2 * (z_mm * y_mm + z_mm * x_mm + y_mm * x_mm)
    assert 0.9 * faces_mm2 < distances[0][1].sum() < faces_mm2


def test_area_table_obeys_the_symmetries_of_the_cube() -> None:
    table = area_table_mm2(SPACING_MM)
    codes = np.arange(256)
    np.testing.assert_allclose(table, table[255 - codes])
    assert table[0] == 0
    assert np.count_nonzero(table) == 254
    for order in itertools.permutations(range(3)):
        other = area_table_mm2(tuple(SPACING_MM[axis] for axis in order))
        for code in codes:
            corners = np.array([code >> bit & 1 for bit in range(8)]).reshape(2, 2, 2)
            moved = corners.transpose(order)[:, ::-1, :]
            assert other[(moved.reshape(-1) << np.arange(8)).sum()] == pytest.approx(table[code])


def test_scores_follow_the_axes() -> None:
    """Masks and spacing permuted together change nothing; the spacing alone does."""
    rng = np.random.default_rng(0)
    pred, target = _blob(rng, SHAPE, 0.4), _blob(rng, SHAPE, 0.4)
    expected = score_region(pred, target, SPACING_MM)
    for order in itertools.permutations(range(3)):
        spacing_mm = tuple(SPACING_MM[axis] for axis in order)
        scores = score_region(pred.transpose(order), target.transpose(order), spacing_mm)
        assert scores == pytest.approx(expected)
    assert score_region(pred, target, (0.7, 2.5, 1.1))["nsd_1mm"] != pytest.approx(
        expected["nsd_1mm"]
    )


def test_scores_are_symmetric() -> None:
    rng = np.random.default_rng(1)
    pred, target = _blob(rng, SHAPE, 0.2), _blob(rng, SHAPE, 0.8)
    there, back = score_region(pred, target, SPACING_MM), score_region(target, pred, SPACING_MM)
    for name in ("dice", "nsd_1mm", "nsd_2mm", "hd95_mm"):
        assert there[name] == pytest.approx(back[name]), name
    assert there["volume_pred_ml"] == back["volume_ref_ml"] != there["volume_ref_ml"]


def test_scores_do_not_depend_on_the_empty_space_around() -> None:
    rng = np.random.default_rng(2)
    pred, target = _blob(rng, SHAPE, 0.4), _blob(rng, SHAPE, 0.4)
    pads = ((3, 0), (0, 7), (5, 2))
    assert score_region(np.pad(pred, pads), np.pad(target, pads), SPACING_MM) == score_region(
        pred, target, SPACING_MM
    )


def test_equal_masks_are_perfect() -> None:
    mask = _blob(np.random.default_rng(3), SHAPE, 0.5)
    scores = score_region(mask, mask, SPACING_MM)
    assert (scores["dice"], scores["nsd_1mm"], scores["nsd_2mm"], scores["hd95_mm"]) == (
        1.0,
        1.0,
        1.0,
        0.0,
    )


def test_empty_masks() -> None:
    mask, empty = _box((3, 3, 3), (6, 7, 8)), np.zeros(SHAPE, dtype=bool)
    both = score_region(empty, empty, SPACING_MM)
    assert (both["dice"], both["nsd_1mm"], both["nsd_2mm"], both["hd95_mm"]) == (1.0, 1.0, 1.0, 0.0)
    for pred, target in ((mask, empty), (empty, mask)):
        scores = score_region(pred, target, SPACING_MM)
        assert (scores["dice"], scores["nsd_1mm"], scores["nsd_2mm"], scores["hd95_mm"]) == (
            0.0,
            0.0,
            0.0,
            math.inf,
        )


def test_an_element_at_the_tolerance_counts_despite_float32_spacing() -> None:
    target = _box((3, 3, 3), (9, 9, 9))
    spacing_mm = (1.00000012, 1.0, 1.0)
    assert nsd(surface_distances(np.roll(target, 1, 0), target, spacing_mm), 1.0) == 1.0


@pytest.mark.parametrize(
    ("seed", "shape", "spacing_mm", "thresholds"),
    [
        (0, (21, 26, 33), (2.5, 0.7, 0.7), (0.4, 0.4)),
        (1, (30, 19, 24), (0.61, 1.3, 2.9), (0.0, 1.0)),  # touches every face of the volume
        (2, (17, 23, 29), (1.0, 1.0, 1.0), (1.5, 2.0)),  # many small pieces
        (3, (9, 40, 12), (8.0, 0.646484, 0.646484), (0.5, 2.8)),
    ],
)
def test_scores_equal_those_of_surface_distance(
    seed: int,
    shape: tuple[int, int, int],
    spacing_mm: tuple[float, float, float],
    thresholds: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = pytest.importorskip("surface_distance")
    monkeypatch.setattr(np, "Inf", np.inf, raising=False)  # the package was written for numpy 1
    rng = np.random.default_rng(seed)
    pred, target = (_blob(rng, shape, threshold) for threshold in thresholds)
    assert pred.any()
    assert target.any()
    with pytest.warns(DeprecationWarning, match="scipy.ndimage"):
        expected = reference.compute_surface_distances(target, pred, spacing_mm)
    distances = surface_distances(pred, target, spacing_mm)
    for tolerance_mm in (0.3, 1.0, 2.0):
        surface_dice = reference.compute_surface_dice_at_tolerance(expected, tolerance_mm)
        assert nsd(distances, tolerance_mm) == pytest.approx(surface_dice, abs=1e-6)
    for percent in (50, 95, 100):
        robust_mm = reference.compute_robust_hausdorff(expected, percent)
        assert hausdorff_mm(distances, percent / 100) == pytest.approx(robust_mm, abs=1e-6)


def test_a_quantile_that_is_reached_exactly_is_the_distance_there() -> None:
    half = np.array([1.0, 3.0]), np.array([2.0, 2.0])  # half of the surface lies within 1 mm
    assert hausdorff_mm((half, half), quantile=0.5) == 1.0
    assert hausdorff_mm((half, half), quantile=0.51) == 3.0
