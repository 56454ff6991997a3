"""Laws of VoxelGrid, on an oblique grid with three sizes, three spacings and an origin off zero."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from medseg.geometry.grid import VoxelBox, VoxelGrid, resampled_shape


def rotation(angles: tuple[float, float, float]) -> np.ndarray:
    """Rotation matrix from three Euler angles in radians."""
    matrix = np.eye(3)
    for axis, angle in enumerate(angles):
        turn = np.eye(3)
        i, j = (axis + 1) % 3, (axis + 2) % 3
        turn[i, i] = turn[j, j] = np.cos(angle)
        turn[i, j], turn[j, i] = -np.sin(angle), np.sin(angle)
        matrix = turn @ matrix
    return matrix


def make_grid(flip: bool = False, **changes: Any) -> VoxelGrid:
    """An oblique grid whose numbers all differ."""
    direction = rotation((0.2, -0.35, 0.5))
    if flip:
        direction = direction * [-1, 1, 1]
    values: dict[str, Any] = {
        "shape": (11, 17, 23),
        "spacing_mm": (2.5, 0.8, 0.6),
        "origin_xyz_mm": (-120.25, 33.5, -1434.75),
        "direction": direction.tolist(),
    }
    return VoxelGrid(**{**values, **changes})


@pytest.mark.parametrize("flip", [False, True])
def test_world_and_index_are_inverse(flip: bool) -> None:
    grid = make_grid(flip)
    index = np.random.default_rng(0).uniform(-5, 30, size=(4, 6, 3))
    assert np.allclose(grid.world_to_index_zyx(grid.index_to_world_xyz_mm(index)), index, atol=1e-9)


@pytest.mark.parametrize("flip", [False, True])
def test_agrees_with_simpleitk(flip: bool) -> None:
    sitk = pytest.importorskip("SimpleITK")
    grid = make_grid(flip)
    image = sitk.Image(grid.shape[::-1], sitk.sitkUInt8)
    image.SetSpacing(grid.spacing_mm[::-1])
    image.SetOrigin(grid.origin_xyz_mm)
    image.SetDirection(np.array(grid.direction).ravel().tolist())
    for z, y, x in [(0, 0, 0), (10, 0, 0), (0, 16, 0), (0, 0, 22), (4, 5, 6)]:
        want = image.TransformIndexToPhysicalPoint((x, y, z))
        assert np.allclose(grid.index_to_world_xyz_mm((z, y, x)), want, atol=1e-9)


def test_inputs_are_copied_and_results_are_plain() -> None:
    spacing, origin, direction = np.array([2.5, 0.8, 0.6]), np.array([1.0, 2.0, 3.0]), np.eye(3)
    shape = np.array([3, 4, 5])
    grid = VoxelGrid(shape, spacing, origin, direction)
    before = asdict(grid)
    for array in (shape, spacing, origin, direction):
        array *= 2
    assert asdict(grid) == before
    assert grid == VoxelGrid((3, 4, 5), (2.5, 0.8, 0.6), (1.0, 2.0, 3.0))
    grid.corners_xyz_mm()[:] = 0
    assert asdict(grid) == before
    assert hash(grid) == hash(VoxelGrid(**json.loads(json.dumps(before))))


def test_dict_survives_json_exactly() -> None:
    grid = make_grid()
    assert VoxelGrid(**json.loads(json.dumps(asdict(grid)))) == grid


def test_crop_keeps_world_positions_also_outside() -> None:
    grid = make_grid()
    box = VoxelBox((-2, 3, 5), (4, 20, 9))
    crop = grid.crop(box)
    assert crop.shape == box.shape
    index = np.array([[0, 0, 0], [5, 16, 3], [2, 7, 1]])
    assert np.allclose(
        crop.index_to_world_xyz_mm(index), grid.index_to_world_xyz_mm(index + box.start), atol=1e-9
    )
    with pytest.raises(ValueError, match="shape must be at least 1"):
        grid.crop(VoxelBox((0, 0, 0), (0, 3, 3)))


@pytest.mark.parametrize(
    "target", [(1.0, 1.0, 1.0), (2.0, 2.0, 2.0), (3.1, 0.4, 7.7), (100.0, 0.8, 0.6)]
)
def test_resampled_keeps_centre_axes_and_field_of_view(target: tuple[float, float, float]) -> None:
    grid = make_grid()
    new = grid.resampled(target)
    assert new.spacing_mm == target
    assert new.direction == grid.direction
    centres = [g.index_to_world_xyz_mm((np.array(g.shape) - 1) / 2) for g in (grid, new)]
    assert np.allclose(centres[0], centres[1], atol=1e-9)
    extents = [np.array(g.shape) * g.spacing_mm for g in (grid, new)]
    kept = np.abs(extents[0] - extents[1]) <= np.array(target) / 2 + 1e-9
    assert (kept | (np.array(new.shape) == 1)).all()


def test_resampled_to_its_own_spacing_is_the_same_grid() -> None:
    assert make_grid().resampled(make_grid().spacing_mm).is_close(make_grid(), 1e-9)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("flips", list(itertools.product([False, True], repeat=3)))
def test_reoriented_keeps_every_world_point(
    order: tuple[int, int, int], flips: tuple[bool, bool, bool]
) -> None:
    grid = make_grid(shape=(3, 4, 5))
    points = grid.index_to_world_xyz_mm(np.moveaxis(np.indices(grid.shape), 0, -1))
    moved = points.transpose(*order, 3)
    moved = np.flip(moved, [axis for axis in range(3) if flips[axis]])
    new = grid.reoriented(order, flips)
    assert new.shape == moved.shape[:3]
    assert np.allclose(
        new.index_to_world_xyz_mm(np.moveaxis(np.indices(new.shape), 0, -1)), moved, atol=1e-9
    )


@pytest.mark.parametrize("flip", [False, True])
def test_planes_are_axial_where_the_first_axis_is_nearest_to_z(flip: bool) -> None:
    grid = make_grid(flip)
    assert grid.is_axial
    for order in itertools.permutations(range(3)):
        turned = grid.reoriented(order, (flip, not flip, flip))  # type: ignore[arg-type]
        assert turned.is_axial == (order[0] == 0)


def test_axis_map_and_same_axes() -> None:
    fine = make_grid()
    coarse = fine.resampled((2.0, 2.0, 2.0)).crop(VoxelBox((1, -2, 3), (5, 5, 5)))
    index = np.array([1.5, -2.0, 7.25])
    mapped = [
        scale * i + offset
        for i, (scale, offset) in zip(index, fine.axis_map_to(coarse), strict=True)
    ]
    assert np.allclose(
        coarse.index_to_world_xyz_mm(mapped), fine.index_to_world_xyz_mm(index), atol=1e-9
    )
    other = make_grid(flip=True)
    with pytest.raises(ValueError, match="same axes"):
        fine.axis_map_to(other)


@pytest.mark.parametrize("target", [(1.0, 1.0, 1.0), (2.0, 3.0, 0.25), (5.0, 0.8, 1.2)])
def test_box_from_covers_and_is_smallest(target: tuple[float, float, float]) -> None:
    source, grid = make_grid(), make_grid().resampled(target)
    rng = np.random.default_rng(7)
    for _ in range(20):
        low = rng.integers(-5, 10, 3)
        box = VoxelBox(tuple(low), tuple(low + rng.integers(1, 12, 3)))
        cover = grid.box_from(source, box)
        faces_low = (
            grid.world_to_index_zyx(source.index_to_world_xyz_mm(np.array(box.start) - 0.5)) + 0.5
        )
        faces_high = (
            grid.world_to_index_zyx(source.index_to_world_xyz_mm(np.array(box.stop) - 0.5)) + 0.5
        )
        assert (np.array(cover.start) <= faces_low + 1e-5).all()
        assert (np.array(cover.stop) >= faces_high - 1e-5).all()
        assert (np.array(cover.start) + 1 > faces_low).all()
        assert (np.array(cover.stop) - 1 < faces_high).all()


def test_box_from_ignores_rounding_noise() -> None:
    grid = make_grid()
    box = VoxelBox((1, 2, 3), (4, 6, 9))
    assert grid.box_from(grid, box) == box
    for noise in (1e-8, -1e-8):
        shifted = make_grid(origin_xyz_mm=tuple(np.array(grid.origin_xyz_mm) + noise))
        assert grid.box_from(shifted, box) == box
    half = grid.resampled((1.25, 0.4, 0.3))
    assert grid.box_from(half, half.box_from(grid, box)) == box
    assert grid.box_from(half, VoxelBox((4, 4, 4), (4, 9, 9))).is_empty


def test_is_close_sees_a_shift_of_two_microns() -> None:
    grid = make_grid()
    near = make_grid(origin_xyz_mm=tuple(np.add(grid.origin_xyz_mm, [5e-4, 0, 0])))
    far = make_grid(origin_xyz_mm=tuple(np.add(grid.origin_xyz_mm, [2e-3, 0, 0])))
    assert grid.is_close(near)
    assert not grid.is_close(far)
    assert not grid.is_close(make_grid(shape=(11, 17, 22)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": (0, 4, 5)}, "shape"),
        ({"shape": (4, 5)}, "shape"),
        ({"spacing_mm": (1.0, -1.0, 1.0)}, "positive"),
        ({"spacing_mm": (1.0, float("nan"), 1.0)}, "finite"),
        ({"origin_xyz_mm": (0.0, float("inf"), 0.0)}, "finite"),
        ({"direction": ((1, 0, 0), (0, 1, 0.01), (0, 0, 1))}, "orthonormal"),
        ({"direction": ((1, 0, 0), (0, 1, 0), (0, 1, 0))}, "orthonormal"),
    ],
)
def test_nonsense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_grid(**changes)


def test_rounded_decimals_in_a_direction_are_tolerated() -> None:
    rounded = np.round(rotation((0.2, -0.35, 0.5)), 4)
    grid = make_grid(direction=rounded.tolist())
    index = np.array([10.0, 16.0, 22.0])
    assert np.allclose(grid.world_to_index_zyx(grid.index_to_world_xyz_mm(index)), index, atol=1e-9)


def test_resampled_shape_rounds_halves_up_despite_noise() -> None:
    assert resampled_shape((5, 3, 1), (0.1, 0.1, 0.1), (0.2, 0.2, 3.0)) == (3, 2, 1)
    with pytest.raises(ValueError, match="positive"):
        resampled_shape((5, 3, 1), (0.1, 0.1, 0.1), (0.2, 0.0, 3.0))


@pytest.mark.parametrize("shape", [(11, 17, 23), (5, 40, 23), (64, 1, 7)])
def test_another_shape_keeps_the_field_of_view(shape: tuple[int, int, int]) -> None:
    grid = make_grid()
    resized = grid.resized(shape)
    assert resized.shape == shape
    for corner in itertools.product((0, 1), repeat=3):
        ends = [np.array(corner) * either_grid.shape - 0.5 for either_grid in (grid, resized)]
        points = [
            either_grid.index_to_world_xyz_mm(end)
            for either_grid, end in zip((grid, resized), ends, strict=True)
        ]
        assert np.allclose(*points, atol=1e-9)
    assert grid.resized(grid.shape).is_close(grid, 1e-9)


def test_centres_within_another_grid_are_found_one_by_one() -> None:
    grid = make_grid()
    for other in (
        grid,
        grid.resampled((1.1, 1.3, 0.7)),
        grid.crop(VoxelBox((-3, 4, 20), (4, 9, 40))).resized((9, 2, 31)),
    ):
        box = other.centres_within(grid)
        around = box.expanded((2, 2, 2))
        index = np.stack(np.meshgrid(*map(np.arange, around.start, around.stop), indexing="ij"), -1)
        place = grid.world_to_index_zyx(other.index_to_world_xyz_mm(index))
        is_in = ((place > -0.5 - 1e-6) & (place < np.array(grid.shape) - 0.5 + 1e-6)).all(-1)
        assert VoxelBox.from_mask(is_in).shifted(around.start) == box
    between = make_grid(
        shape=(1, 1, 1),
        spacing_mm=(0.1, 0.1, 0.1),
        origin_xyz_mm=grid.index_to_world_xyz_mm((0.5, 2, 3)),
    )
    assert grid.centres_within(between).is_empty
