"""Labels of the previous stage of a cascade, resampled to the spacing of the second network.

The score of a label is its indicator (1 where a voxel has the label, else 0), interpolated. A voxel
gets the label with the largest score. If several labels share the largest score, the label of the
nearest source voxel wins if it is one of them, else the lowest label. This is how nnU-Net resamples
label maps with `batchgenerators` 0.25 and later; older versions of that package took the last label
with a score of at least one half.
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

# Value of background outside the non-zero mask of the scan; used during resampling only.
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
    score_planes = SplinePlanes(shape, new_shape, orders_of(resampling, current_mm, new_mm))
    nearest_planes = SplinePlanes(shape, new_shape, orders=(0, 0, 0))
    values = [int(value) for value in np.unique(labels)]
    planes = [torch.from_numpy(plane) for plane in labels]
    for number in range(score_planes.num_planes):
        sources = [planes[index] for index in score_planes.sources(number)]
        (nearest_source,) = nearest_planes.sources(number)
        nearest_label = nearest_planes.resample(number, [planes[nearest_source]])
        target[number] = _winners(score_planes, number, sources, values, nearest_label)


def _winners(
    planes: SplinePlanes,
    number: int,
    sources: Sequence[Tensor],
    values: Sequence[int],
    nearest_label: Tensor,
) -> Tensor:
    """Find the winning label of each voxel of an output plane.

    Args:
        planes: Interpolation of the scores.
        number: Number of the output plane.
        sources: Its source planes (H, W) of labels.
        values: Labels that occur in the volume, in rising order.
        nearest_label: Label of the nearest source voxel, (H', W').

    Returns:
        Labels (H', W').
    """
    best_score: Tensor | None = None
    winner = torch.full_like(nearest_label, values[0])
    # Whether the nearest label has the largest score so far, alone or with others.
    is_nearest_best = nearest_label == values[0]
    for value in values:
        score = planes.resample(number, [(source == value).double() for source in sources])
        # Sums of weights may exceed 1 by their rounding, and scores are compared exactly.
        score.clamp_(0.0, 1.0)
        if best_score is None:
            best_score = score
            continue
        is_better = score > best_score
        winner.masked_fill_(is_better, value)
        is_nearest = nearest_label == value
        is_nearest_equal = is_nearest & (score == best_score)
        is_nearest_best = torch.where(is_better, is_nearest, is_nearest_best | is_nearest_equal)
        torch.maximum(best_score, score, out=best_score)
    return torch.where(is_nearest_best, nearest_label, winner)


def _shape_of(sizes: Sequence[int]) -> Shape:
    """Return three sizes as a shape."""
    depth, height, width = sizes
    return depth, height, width
