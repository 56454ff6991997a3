"""Labels of the previous stage of a cascade at the spacing of the second network.

The indicator of each label is interpolated, and the largest wins; where several are the largest,
the label of the nearest voxel, or the lowest of them. So `batchgenerators` 0.25 and newer resample
label maps for nnU-Net; older versions took the last label of at least one half.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from medseg.geometry.sizes import Shape
from medseg.nnunet.plan import NONE, PlanError, ResamplingPlan
from medseg.nnunet.planes import SpacingMm, orders_of
from medseg.nnunet.spline import SplinePlanes

# Background beyond the non-zero voxels of the scan, a label of its own while it is resampled.
BEYOND = -1


def resample_previous(
    labels: np.ndarray,
    target: Tensor,
    resampling: ResamplingPlan,
    current_mm: SpacingMm,
    new_mm: SpacingMm,
) -> None:
    """Resample a label map plane by plane.

    Args:
        labels: Labels (D, H, W), int16, with `BEYOND`.
        target: Receives the labels (D', H', W').
        resampling: `resampling_fn_seg` of the plan.
        current_mm: Spacing of the source.
        new_mm: Spacing of the target.

    Raises:
        PlanError: If the plan does not resample, but the shapes differ.
    """
    shape = _shape_of(labels.shape)
    new_shape = _shape_of(target.shape)
    if shape == new_shape:
        for number, plane in enumerate(labels):
            target[number] = torch.from_numpy(plane)
        return
    if resampling.function == NONE:
        raise PlanError(f"asks for {NONE} of labels of {shape} voxels for {new_shape} voxels")
    scores = SplinePlanes(shape, new_shape, orders_of(resampling, current_mm, new_mm))
    nearest = SplinePlanes(shape, new_shape, (0, 0, 0))
    values = [int(value) for value in np.unique(labels)]
    planes = [torch.from_numpy(plane) for plane in labels]
    for number in range(scores.num_planes):
        sources = [planes[index] for index in scores.sources(number)]
        (source,) = nearest.sources(number)
        of_nearest = nearest.resample(number, [planes[source]])
        target[number] = _winners(scores, number, sources, values, of_nearest)


def _winners(
    planes: SplinePlanes,
    number: int,
    sources: Sequence[Tensor],
    values: Sequence[int],
    of_nearest: Tensor,
) -> Tensor:
    """Label (H', W') of the largest score of each voxel of a plane."""
    best: Tensor | None = None
    winner = torch.full_like(of_nearest, values[0])
    # Whether the nearest label has the largest score so far.
    is_nearest = of_nearest == values[0]
    for value in values:
        score = planes.resample(number, [(source == value).double() for source in sources])
        # Sums of weights may exceed 1 by their rounding, and scores are compared exactly.
        score.clamp_(0.0, 1.0)
        if best is None:
            best = score
            continue
        is_better = score > best
        is_of_nearest = of_nearest == value
        winner.masked_fill_(is_better, value)
        is_equal_of_nearest = is_of_nearest & (score == best)
        is_nearest = torch.where(is_better, is_of_nearest, is_nearest | is_equal_of_nearest)
        torch.maximum(best, score, out=best)
    return torch.where(is_nearest, of_nearest, winner)


def _shape_of(sizes: Sequence[int]) -> Shape:
    depth, height, width = sizes
    return depth, height, width
