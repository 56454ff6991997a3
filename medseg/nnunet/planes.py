"""Resampling that a plan asks for: by splines, by torch or none; plane by plane."""

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

# An axis is resampled apart where the largest spacing exceeds the smallest this many times.
ANISOTROPY = 3.0
SpacingMm = tuple[float, float, float]


class Planes(Protocol):
    """Planes of a resampled volume.

    Attributes:
        num_planes: Number of output planes.
    """

    num_planes: int

    def sources(self, plane: int) -> list[int]:
        """Source planes of an output plane, in the order in which `resample` takes them."""

    def resample(self, plane: int, planes: Sequence[Tensor]) -> Tensor:
        """Compute the output plane (H, W) from its source planes (h, w)."""


def separate_axis(separate_z: bool | None, current_mm: SpacingMm, new_mm: SpacingMm) -> int | None:
    """Find the axis that nnU-Net resamples apart from the other two; None where there is none.

    Args:
        separate_z: `force_separate_z` of the plan.
        current_mm: Spacing of the source.
        new_mm: Spacing of the target.
    """
    if separate_z is False:
        return None
    if separate_z or max(current_mm) / min(current_mm) > ANISOTROPY:
        spacing_mm = current_mm
    elif max(new_mm) / min(new_mm) > ANISOTROPY:
        spacing_mm = new_mm
    else:
        return None
    coarsest = [axis for axis in range(3) if spacing_mm[axis] == max(spacing_mm)]
    # Two coarse axes, such as 0.24, 1.25 and 1.25 mm, are resampled together with the third.
    return coarsest[0] if len(coarsest) == 1 else None


class SamePlanes:
    """A volume that is not resampled."""

    def __init__(self, num_planes: int) -> None:
        self.num_planes = num_planes

    def sources(self, plane: int) -> list[int]:
        """The plane itself."""
        return [plane]

    def resample(self, plane: int, planes: Sequence[Tensor]) -> Tensor:
        """The plane as it is."""
        return planes[0]


class TorchPlanes:
    """Linear interpolation of torch in float32, with the bits of one call on the whole volume.

    Torch interpolates rows inside planes inside the volume. Two planes that keep their distance
    along z go through the same kernel; what is left is the step between them, a fused
    multiply-add. Slices that are resampled apart are two-dimensional images to torch, which takes
    another kernel for results with H + W <= 128: there the last bit of a value may differ.

    Args:
        source: Shape of the volume.
        target: Shape of the result.
        apart: Axis along which the nearest voxel is taken once the other two are interpolated; None
            interpolates along all.
    """

    def __init__(self, source: Shape, target: Shape, apart: int | None = None) -> None:
        self.num_planes = target[0]
        self._apart = apart
        self._nearest = np.empty(0, dtype=np.int64)
        # An axis apart keeps its size while the other two are interpolated.
        in_plane = list(target)
        if apart is not None:
            in_plane[apart] = source[apart]
            self._nearest = nearest_exact(target[apart], source[apart])
        self._in_plane = in_plane[1:]
        scale = np.float32(source[0]) / np.float32(target[0])
        # Fused as well: the product is exact in float64, and the result is rounded once.
        position = (np.float64(scale) * (np.arange(target[0]) + 0.5) - 0.5).astype(np.float32)
        position = np.maximum(position, np.float32(0.0))
        self._first = np.minimum(position.astype(np.int64), source[0] - 1)
        self._second = np.minimum(self._first + 1, source[0] - 1)
        distance = position - self._first.astype(np.float32)
        self._weight = np.clip(distance, np.float32(0.0), np.float32(1.0))

    def sources(self, plane: int) -> list[int]:
        """The nearest plane, or those before and after the position."""
        if self._apart == 0:
            return [int(self._nearest[plane])]
        return [int(self._first[plane]), int(self._second[plane])]

    def resample(self, plane: int, planes: Sequence[Tensor]) -> Tensor:
        """Interpolate in plane, then between the planes; float32."""
        values = torch.stack([source.float() for source in planes])[None, None]
        size = (len(planes), *self._in_plane)
        interpolated = functional.interpolate(values, size, mode="trilinear")[0, 0]
        if self._apart == 0:
            return interpolated[0]
        first, second = interpolated
        weight = self._weight[plane]
        after = (second * float(weight)).double()
        between = after.add_(first.double().mul_(float(np.float32(1.0) - weight))).float()
        if self._apart is None:
            return between
        return between.index_select(self._apart - 1, torch.from_numpy(self._nearest))


def nearest_exact(num_outputs: int, num_inputs: int) -> np.ndarray:
    """Source voxels of torch's `nearest-exact`; it rounds the scale and the product to float32."""
    scale = np.float64(np.float32(num_inputs) / np.float32(num_outputs))
    position = ((np.arange(num_outputs) + 0.5) * scale).astype(np.float32)
    return np.minimum(np.floor(position).astype(np.int64), num_inputs - 1)


def orders_of(plan: ResamplingPlan, current_mm: SpacingMm, new_mm: SpacingMm) -> Shape:
    """Order of the spline along each axis."""
    apart = separate_axis(plan.separate_z, current_mm, new_mm)
    orders = [0 if axis == apart else plan.order for axis in range(3)]
    return orders[0], orders[1], orders[2]


def filtered_axes(orders: Shape) -> list[int]:
    """Axes along which the source must be filtered first, see `medseg.nnunet.spline.filtered`."""
    return [axis for axis in range(3) if orders[axis] == CUBIC]


def make_planes(
    plan: ResamplingPlan,
    source: Shape,
    target: Shape,
    current_mm: SpacingMm,
    new_mm: SpacingMm,
) -> Planes:
    """Make the planes of a plan.

    Args:
        plan: One of the resampling functions of a plan.
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
        apart = separate_axis(plan.separate_z, current_mm, new_mm)
        return TorchPlanes(source, target, apart)
    orders = orders_of(plan, current_mm, new_mm)
    margins = [FILTER_MARGIN if order == CUBIC else 0 for order in orders]
    return SplinePlanes(source, target, orders, (margins[0], margins[1], margins[2]))
