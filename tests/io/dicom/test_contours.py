"""Outlines and filled polygons: inverse to each other, and filled alike by two programs."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.path import Path as Polygon
from PIL import Image, ImageDraw

from medseg.io.dicom.contours import fill, outlines


def masks() -> dict[str, np.ndarray]:
    y, x = np.indices((41, 53))
    far = np.hypot(y - 19, x - 24)
    holes = (far < 18) & (np.hypot(y - 14, x - 20) > 4) & (np.hypot(y - 24, x - 30) > 3)
    rng = np.random.default_rng(0)
    one_pixel = np.zeros((5, 7), bool)
    one_pixel[2, 3] = True
    return {
        "two parts and holes": holes | (x > 47),
        "an island in a hole": (far < 18) ^ (far < 12) ^ (far < 6),
        "noise": rng.random((31, 17)) < 0.5,
        "sparse noise": rng.random((31, 17)) < 0.1,
        "the whole slice": np.ones((5, 7), bool),
        "one pixel": one_pixel,
        "pixels that touch at corners": (y + x) % 2 == 0,
    }


@pytest.mark.parametrize("name", masks())
def test_filled_outlines_restore_the_mask(name: str) -> None:
    mask = masks()[name]
    polygons = outlines(mask)
    assert np.array_equal(fill(polygons, mask.shape), mask)
    centres = np.indices(mask.shape).reshape(2, -1).T
    inside = [
        Polygon(polygon, closed=False).contains_points(centres).reshape(mask.shape)
        for polygon in polygons
    ]
    assert np.array_equal(np.logical_xor.reduce(inside), mask)


@pytest.mark.parametrize("name", ["two parts and holes", "an island in a hole"])
def test_pillow_fills_the_outlines_to_the_same_mask(name: str) -> None:
    mask, scale = masks()[name], 16
    filled = np.zeros(mask.shape, bool)
    for polygon in outlines(mask):
        canvas = Image.new("1", (mask.shape[1] * scale, mask.shape[0] * scale))
        ImageDraw.Draw(canvas).polygon(
            [((x + 0.5) * scale, (y + 0.5) * scale) for y, x in polygon], fill=1
        )
        filled ^= np.array(canvas)[scale // 2 :: scale, scale // 2 :: scale]
    assert np.array_equal(filled, mask)


def test_parts_of_a_mask_are_polygons_and_straight_lines_have_two_points() -> None:
    mask = np.zeros((20, 30), bool)
    mask[2:18, 3:11] = mask[5:9, 15:25] = True
    assert sorted(len(polygon) for polygon in outlines(mask)) == [8, 8]  # corners are cut
    mask[8:10, 5:7] = False
    # Twice the two ends of the keyhole.
    assert sorted(len(polygon) for polygon in outlines(mask)) == [8, 8 + 1 + 8 + 2]


def test_polygons_within_each_other_are_holes_however_they_turn() -> None:
    square = np.array([[0.5, 0.5], [0.5, 8.5], [8.5, 8.5], [8.5, 0.5]])
    for hole in (square / 2 + 2, (square / 2 + 2)[::-1]):
        mask = fill([square, hole], (10, 10))
        assert mask.sum() == 64 - 16
        assert not mask[3:7, 3:7].any()


def test_pixels_under_an_outline_are_inside() -> None:
    """Some programs draw through the centres of the outermost pixels."""
    square = np.array([[2.0, 3.0], [2.0, 7.0], [5.0, 7.0], [5.0, 3.0]])
    mask = fill([square], (10, 10))
    assert np.array_equal(np.argwhere(mask)[[0, -1]], [[2, 3], [5, 7]])
    assert mask.sum() == 4 * 5


def test_polygons_beyond_the_slice_are_cut() -> None:
    assert (
        fill([np.array([[-9.0, -9.0], [-9.0, 3.4], [30.0, 3.4], [30.0, -9.0]])], (5, 6)).sum()
        == 5 * 4
    )
    assert not fill([np.array([[9.0, 9.0], [9.0, 12.0], [12.0, 9.0]])], (5, 6)).any()
