"""Plane-by-plane resampling as a plan specifies it: by splines, by torch, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from medseg.geometry.sizes import Shape
from medseg.nnunet.plan import NONE, TORCH, PlanError, ResamplingPlan
from medseg.nnunet.spline import CUBIC, FILTER_MARGIN, SplinePlanes

# A spacing is anisotropic where its largest value is more than this many times its smallest, as in
# nnU-Net. The coarsest axis is then separate, see `separate_axis`.
ANISOTROPY = 3.0
SpacingMm = tuple[float, float, float]


class Planes(Protocol):
    """Planes of a resampled volume, each computed from the few source planes that it needs.

    Attributes:
        num_planes: Number of output planes.
    """

    num_planes: int

    def sources(self, number: int) -> list[int]:
        """List the source planes of output plane `number`, in the order that `resample` expects."""

    def resample(self, number: int, planes: Sequence[Tensor]) -> Tensor:
        """Compute output plane (H, W) `number` from its source planes (h, w)."""


def separate_axis(separate_z: bool | None, current_mm: SpacingMm, new_mm: SpacingMm) -> int | None:
    """Find the axis that nnU-Net resamples separately from the other two, by the nearest voxel.

    Args:
        separate_z: `force_separate_z` of the plan. True = the coarsest axis of the source, False =
            no axis, None = the coarsest axis of an anisotropic source, else of an anisotropic
            target.
        current_mm: Spacing of the source.
        new_mm: Spacing of the target.

    Returns:
        The axis; None if there is none, or if several axes are the coarsest.
    """
    if separate_z is False:
        return None
    if separate_z or _is_anisotropic(current_mm):
        spacing_mm = current_mm
    elif _is_anisotropic(new_mm):
        spacing_mm = new_mm
    else:
        return None
    coarsest = [axis for axis in range(3) if spacing_mm[axis] == max(spacing_mm)]
    # Two coarse axes, such as 0.24, 1.25 and 1.25 mm, are resampled together with the third.
    return coarsest[0] if len(coarsest) == 1 else None


def _is_anisotropic(spacing_mm: SpacingMm) -> bool:
    """Whether the largest spacing is more than `ANISOTROPY` times the smallest."""
    return max(spacing_mm) / min(spacing_mm) > ANISOTROPY


class SamePlanes:
    """Planes of a volume that is not resampled; see `Planes`."""

    def __init__(self, num_planes: int) -> None:
        self.num_planes = num_planes

    def sources(self, number: int) -> list[int]:
        """List the plane itself."""
        return [number]

    def resample(self, number: int, planes: Sequence[Tensor]) -> Tensor:
        """Return the plane as it is."""
        return planes[0]


class TorchPlanes:
    """Planes of torch's linear interpolation in float32; see `Planes`.

    Their bits are those of a call of torch on the whole volume. Torch interpolates along x, then y,
    then z. For x and y, a call on the two source planes goes through the same kernel; for z this
    class computes what torch's fused multiply-add does. Slices across a separate axis are passed to
    torch as two-dimensional images by nnU-Net. If H + W <= 128, torch has another kernel for these,
    and the last bit of a value may differ.

    Args:
        source: Shape of the volume.
        target: Shape of the result.
        separate: Axis along which the nearest voxel is taken after the other two are interpolated;
            None interpolates along all axes.
    """

    def __init__(self, source: Shape, target: Shape, separate: int | None = None) -> None:
        self.num_planes = target[0]
        self._separate = separate
        # Source voxel of each output voxel along the separate axis; empty without such an axis.
        self._nearest = np.empty(0, dtype=np.int64)
        # A separate axis keeps its size while the other two are interpolated.
        interpolated_shape = list(target)
        if separate is not None:
            interpolated_shape[separate] = source[separate]
            self._nearest = nearest_exact(target[separate], source[separate])
        self._plane_shape = interpolated_shape[1:]
        # Source positions of the output planes, as torch computes them: the scale in float32, then
        # a fused multiply-add. The product of two float32 is exact in float64, so that the sum is
        # rounded once.
        scale = np.float32(source[0]) / np.float32(target[0])
        position = (np.float64(scale) * (np.arange(target[0]) + 0.5) - 0.5).astype(np.float32)
        position = np.maximum(position, np.float32(0.0))
        self._first = np.minimum(position.astype(np.int64), source[0] - 1)
        self._second = np.minimum(self._first + 1, source[0] - 1)
        distance = position - self._first.astype(np.float32)
        self._weight = np.clip(distance, np.float32(0.0), np.float32(1.0))

    def sources(self, number: int) -> list[int]:
        """List the nearest plane of a separate axis, else those before and after the position."""
        if self._separate == 0:
            return [int(self._nearest[number])]
        return [int(self._first[number]), int(self._second[number])]

    def resample(self, number: int, planes: Sequence[Tensor]) -> Tensor:
        """Interpolate in plane, then between the planes; float32."""
        volume = torch.stack([source.float() for source in planes])[None, None]
        # Torch interpolates nothing along z, because the number of planes stays.
        size = (len(planes), *self._plane_shape)
        interpolated = functional.interpolate(volume, size, mode="trilinear")[0, 0]
        if self._separate == 0:
            return interpolated[0]
        first, second = interpolated
        weight = self._weight[number]
        # first * (1 - weight) + second * weight, as a fused multiply-add: the second product is
        # rounded to float32, the first is exact in float64, and their sum is rounded to float32.
        # The sum in float64 is rounded too, which matters only in rare ties.
        second_term = (second * float(weight)).double()
        first_term = first.double().mul_(float(np.float32(1.0) - weight))
        between = second_term.add_(first_term).float()
        if self._separate is None:
            return between
        # Axis 1 or 2 of the volume is axis 0 or 1 of a plane.
        return between.index_select(self._separate - 1, torch.from_numpy(self._nearest))


def nearest_exact(num_outputs: int, num_inputs: int) -> np.ndarray:
    """Find the source voxels of torch's mode `nearest-exact`.

    As in torch, the scale and the position are rounded to float32.
    """
    scale = np.float64(np.float32(num_inputs) / np.float32(num_outputs))
    position = ((np.arange(num_outputs) + 0.5) * scale).astype(np.float32)
    return np.minimum(np.floor(position).astype(np.int64), num_inputs - 1)


def orders_of(plan: ResamplingPlan, current_mm: SpacingMm, new_mm: SpacingMm) -> Shape:
    """Choose the order of the spline along each axis: 0 along a separate axis."""
    separate = separate_axis(plan.separate_z, current_mm, new_mm)
    orders = [0 if axis == separate else plan.order for axis in range(3)]
    return orders[0], orders[1], orders[2]


def filtered_axes(orders: Shape) -> list[int]:
    """List the axes along which the source is filtered first, see `spline.filtered`."""
    return [axis for axis in range(3) if orders[axis] == CUBIC]


def make_planes(
    plan: ResamplingPlan,
    source: Shape,
    target: Shape,
    current_mm: SpacingMm,
    new_mm: SpacingMm,
) -> Planes:
    """Make the planes of a resampled volume as a plan specifies.

    Along the axes of `filtered_axes` the source planes must be coefficients of `spline.filtered`.

    Args:
        plan: Resampling function, and its arguments.
        source: Shape of the source.
        target: Shape of the target.
        current_mm: Spacing of the source.
        new_mm: Spacing of the target.

    Raises:
        PlanError: If the plan does not resample, but the shapes differ.
    """
    if source == target:
        return SamePlanes(target[0])
    if plan.function == NONE:
        raise PlanError(
            f"asks for {NONE} of the logits, but they have {source} voxels and the scan {target}"
        )
    if plan.function == TORCH:
        separate = separate_axis(plan.separate_z, current_mm, new_mm)
        return TorchPlanes(source, target, separate)
    orders = orders_of(plan, current_mm, new_mm)
    margins = [FILTER_MARGIN if order == CUBIC else 0 for order in orders]
    return SplinePlanes(source, target, orders, (margins[0], margins[1], margins[2]))
