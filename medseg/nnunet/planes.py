"""Choice of the resampling of a plan: by splines, or none; plane by plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from medseg.geometry.sizes import Shape
from medseg.nnunet.plan import NONE, PlanError, ResamplingPlan
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
            f"asks for no resampling, but the scan has {source} voxels and the network needs {target}"
        )
    orders = orders_of(plan, current_mm, new_mm)
    margins = [FILTER_MARGIN if order == CUBIC else 0 for order in orders]
    return SplinePlanes(source, target, orders, (margins[0], margins[1], margins[2]))
