"""Splines plane by plane: the bits of scipy's `zoom` on the whole volume."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from scipy.ndimage import zoom
from torch import Tensor

from medseg.nnunet.plan import SPLINE, TORCH, ResamplingPlan
from medseg.nnunet.planes import filtered_axes, make_planes, nearest_exact, separate_axis
from medseg.nnunet.spline import FILTER_MARGIN, SplinePlanes, filtered

Shape = tuple[int, int, int]
SHAPES = [
    ((7, 11, 13), (12, 17, 9)),
    ((10, 20, 30), (15, 30, 60)),
    ((40, 30, 20), (13, 17, 41)),
    ((1, 9, 9), (3, 5, 11)),
]


def by_planes(values: np.ndarray, target: Shape, orders: Shape) -> np.ndarray:
    axes = filtered_axes(orders)
    source = filtered(list(values), axes) if axes else values
    margins = [FILTER_MARGIN if axis in axes else 0 for axis in range(3)]
    planes = SplinePlanes(values.shape, target, orders, (margins[0], margins[1], margins[2]))
    resampled = []
    for number in range(planes.num_planes):
        parts = [torch.from_numpy(source[index]) for index in planes.sources(number)]
        resampled.append(planes.resample(number, parts).numpy())
    return np.stack(resampled)


@pytest.mark.parametrize("order", [0, 1, 3])
@pytest.mark.parametrize(("source", "target"), SHAPES)
def test_planes_have_the_bits_of_scipy(source: Shape, target: Shape, order: int) -> None:
    # Half-precision values: sums of their products show the order of the additions.
    values = np.random.default_rng(0).normal(size=source).astype(np.float16).astype(np.float64)
    factors = [1 / (inputs / outputs) for inputs, outputs in zip(source, target, strict=True)]
    expected = zoom(values, factors, order=order, mode="nearest", grid_mode=True)
    assert np.array_equal(by_planes(values, target, (order, order, order)), expected)


@pytest.mark.parametrize("apart", [0, 1, 2])
@pytest.mark.parametrize("order", [1, 3])
def test_slices_are_resampled_apart_from_their_axis(apart: int, order: int) -> None:
    source, target = (6, 9, 12), (11, 14, 10)
    values = np.random.default_rng(1).normal(size=source)
    in_plane = [axis for axis in range(3) if axis != apart]
    factors = [1 / (source[axis] / target[axis]) for axis in in_plane]
    slices = [
        zoom(part, factors, order=order, mode="nearest", grid_mode=True)
        for part in np.moveaxis(values, apart, 0)
    ]
    nearest = np.floor((np.arange(target[apart]) + 0.5) * source[apart] / target[apart])
    expected = np.moveaxis(np.stack(slices)[nearest.astype(int)], 0, apart)
    orders = [0 if axis == apart else order for axis in range(3)]
    assert np.array_equal(by_planes(values, target, (orders[0], orders[1], orders[2])), expected)


@pytest.mark.parametrize(
    ("separate_z", "current_mm", "new_mm", "axis"),
    [
        (None, (2.2, 0.7, 0.7), (1.5, 1.5, 1.5), 0),
        (None, (2.09, 0.7, 0.7), (1.5, 1.5, 1.5), None),
        (None, (1.5, 1.5, 1.5), (0.7, 2.2, 0.7), 1),
        (None, (0.24, 1.25, 1.25), (1.0, 1.0, 1.0), None),
        (True, (1.0, 1.0, 1.2), (1.0, 1.0, 1.0), 2),
        (True, (1.0, 1.0, 1.0), (1.0, 1.0, 5.0), None),
        (False, (9.0, 1.0, 1.0), (1.0, 1.0, 1.0), None),
    ],
)
def test_the_axis_apart(
    separate_z: bool | None,
    current_mm: tuple[float, float, float],
    new_mm: tuple[float, float, float],
    axis: int | None,
) -> None:
    assert separate_axis(separate_z, current_mm, new_mm) == axis


@pytest.mark.parametrize(("source", "target"), SHAPES)
def test_planes_have_the_bits_of_torch(source: Shape, target: Shape) -> None:
    values = torch.randn(source, generator=torch.Generator().manual_seed(0))
    whole = functional.interpolate(values[None, None], target, mode="trilinear")[0, 0]
    plan = ResamplingPlan(TORCH, 1, None)
    planes = make_planes(plan, source, target, (1.0, 1.0, 1.0), (1.1, 1.0, 1.0))
    for number in range(planes.num_planes):
        parts = [values[index] for index in planes.sources(number)]
        assert torch.equal(planes.resample(number, parts), whole[number])


def torch_apart(values: Tensor, target: Shape, apart: int) -> Tensor:
    """Resample heads (K, d, h, w) as nnU-Net does: slices as channels, then the nearest slice."""
    in_plane = [axis for axis in range(3) if axis != apart]
    slices = values.movedim(1 + apart, 1)
    channels = slices.reshape(-1, *slices.shape[2:])[None]
    size = [target[axis] for axis in in_plane]
    images = functional.interpolate(channels.float(), size, mode="bilinear")[0]
    images = images.reshape(len(values), -1, *size).movedim(1, 1 + apart)
    return functional.interpolate(images[None], target, mode="nearest-exact")[0]


@pytest.mark.parametrize("apart", [0, 1, 2])
@pytest.mark.parametrize("source", [(9, 11, 13), (30, 7, 2)])
def test_slices_apart_have_the_bits_of_torch(source: Shape, apart: int) -> None:
    target = (66, 70, 75)
    values = torch.randn((2, *source), generator=torch.Generator().manual_seed(0)).half()
    whole = torch_apart(values, target, apart)
    current_mm = [5.0 if axis == apart else 1.0 for axis in range(3)]
    spacing_mm = current_mm[0], current_mm[1], current_mm[2]
    planes = make_planes(ResamplingPlan(TORCH, 1, None), source, target, spacing_mm, (1, 1, 1))
    for number in range(planes.num_planes):
        parts = [values[1, index] for index in planes.sources(number)]
        assert torch.equal(planes.resample(number, parts), whole[1, number])


def test_the_nearest_slice_is_that_of_torch() -> None:
    for num_inputs, num_outputs in itertools.product((1, 2, 7, 65, 311), range(1, 200, 11)):
        values = torch.arange(num_inputs).float()[None, None, :, None, None]
        size = (num_outputs, 1, 1)
        expected = functional.interpolate(values, size, mode="nearest-exact").flatten()
        assert nearest_exact(num_outputs, num_inputs).tolist() == expected.tolist()


def test_an_equal_shape_is_not_touched() -> None:
    plan = ResamplingPlan(SPLINE, 3, None)
    planes = make_planes(plan, (4, 5, 6), (4, 5, 6), (1.0, 1.0, 1.0), (1.1, 1.0, 1.0))
    plane = torch.randn(5, 6, dtype=torch.float64)
    assert planes.sources(2) == [2]
    assert planes.resample(2, [plane]) is plane
