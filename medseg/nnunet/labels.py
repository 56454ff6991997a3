"""Labels from planes of logits: average over folds, resampling to the scan, largest logit.

A head is a channel of the logits: a class or a region. The logits of all heads and voxels of the
scan are never in memory. With one fold, a plane becomes labels as soon as the logits of the planes
next to it are final; with several, the logits at the network's spacing lie in a temporary file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from medseg.io.scratch import new_tensor, scratch_at_most
from medseg.nnunet.planes import Planes
from medseg.nnunet.spline import ESTIMATE_ERROR, SplinePlanes

# Sums over folds that are larger than this, in bytes, are kept in a temporary file.
MAX_FOLDS_BYTES = 2**26
# Number of logits of doubtful voxels that are computed exactly at a time.
DOUBTFUL_LOGITS = 2**16
# Bytes per voxel of a plane of the scan while it is labelled: 4 + 1 for the largest logit (float32)
# and its label (uint8), and 40 for a head: five planes of float64, the terms of its sum.
PLANE_BYTES = 45
# Neighbouring floating-point numbers differ by at most epsilon times the larger magnitude.
# `_doubtful_voxels` multiplies epsilon by the magnitude of the best logit instead, which is the
# smaller one if both logits are negative; this factor makes up for that.
STEP_FACTOR = 1.01


def mean_planes(
    folds: Iterable[Iterator[Tensor]], num_folds: int, shape: tuple[int, int, int, int]
) -> Iterator[Tensor]:
    """Average the planes of several folds, in the precision and the order of nnU-Net.

    Args:
        folds: Planes (K, H, W) of each fold. The next fold is requested only after the last plane
            of the one before, because all folds use one network.
        num_folds: Number of the folds.
        shape: Shape of all planes of a fold, (D, K, H, W).

    Yields:
        The mean of each plane, (K, H, W).
    """
    sums: Tensor | None = None
    for fold, planes in enumerate(folds):
        for number, plane in enumerate(planes):
            if num_folds == 1:
                yield plane
                continue
            if sums is None:
                # The first plane shows the precision.
                with scratch_at_most(MAX_FOLDS_BYTES):
                    sums = new_tensor(shape, plane.dtype)
            if fold == 0:
                sums[number] = plane
                continue
            # Summed in the precision of the planes and in the order of the folds, as in nnU-Net.
            sums[number] += plane
            if fold == num_folds - 1:
                yield sums[number].div_(num_folds)


def reduce_planes(
    logits: Iterator[Tensor],
    planes: Planes,
    region_values: Sequence[int] | None,
    labels: np.ndarray,
) -> None:
    """Reduce planes of logits to labels at the resolution of the scan.

    Args:
        logits: Planes (K, h, w) at the spacing of the network, half or float32.
        planes: Their resampling to the crop of the scan.
        region_values: Value of each head for regions; None for classes.
        labels: Receives the labels of the crop, (D, H, W); may be a view.
    """
    # Source planes by their number: those that this output plane or a later one needs.
    window: dict[int, Tensor] = {}
    num_received = 0
    for number in range(planes.num_planes):
        sources = planes.sources(number)
        first, last = min(sources), max(sources)
        while num_received <= last:
            source_plane = next(logits)
            if num_received >= first:
                # A copy, because the iterator may write the next plane in its place.
                window[num_received] = source_plane.clone()
            num_received += 1
        # Sources rise from plane to plane, so earlier ones are not needed any more.
        window = {index: plane for index, plane in window.items() if index >= first}
        inputs = [window[index] for index in sources]
        if region_values is None:
            labels[number] = _largest_head(planes, number, inputs)
        else:
            labels[number] = _painted_regions(planes, number, inputs, region_values)


def average_planes(
    members: Sequence[tuple[Tensor, Planes]],
    region_values: Sequence[int] | None,
    labels: np.ndarray,
) -> None:
    """Label each voxel by the mean of the probabilities of several models.

    Args:
        members: Logits (D, K, h, w) of each model at its spacing, and their resampling to the crop
            of the scan, which is the same for all.
        region_values: Value of each head for regions; None for classes.
        labels: Receives the labels of the crop, (D, H, W); may be a view.
    """
    for number in range(len(labels)):
        total: Tensor | None = None
        for logits, planes in members:
            probabilities = _probabilities(
                logits, planes, number, are_classes=region_values is None
            )
            # Summed in float32 and in the order of the models, as in nnU-Net.
            total = probabilities if total is None else total.add_(probabilities)
        assert total is not None, "an ensemble has members"
        mean = total.div_(len(members)).numpy()
        if region_values is None:
            labels[number] = mean.argmax(axis=0)
            continue
        # Regions may overlap: a later one covers those before.
        labels[number] = 0
        for head, value in enumerate(region_values):
            labels[number][mean[head] > 0.5] = value


def _probabilities(logits: Tensor, planes: Planes, number: int, *, are_classes: bool) -> Tensor:
    """Compute the probabilities (K, H, W) of plane `number` of the scan."""
    inputs = [logits[index] for index in planes.sources(number)]
    heads = range(logits.shape[1])
    resampled = torch.stack([_resampled(planes, number, inputs, head) for head in heads])
    return torch.softmax(resampled, 0) if are_classes else torch.sigmoid(resampled)


def _largest_head(planes: Planes, number: int, inputs: Sequence[Tensor]) -> np.ndarray:
    """Find the head with the largest logit for each voxel of a plane; of equal ones the first.

    Args:
        planes: Resampling of the logits to the scan.
        number: Number of the plane in the scan.
        inputs: Its source planes of logits (K, h, w).

    Returns:
        Labels (H, W), uint8.
    """
    if isinstance(planes, SplinePlanes) and planes.keeps_range:
        return _largest_head_by_estimates(planes, number, inputs)
    best: Tensor | None = None
    label: Tensor | None = None
    for head in range(inputs[0].shape[0]):
        logit = _resampled(planes, number, inputs, head)
        if best is None or label is None:
            best = logit
            label = torch.zeros(logit.shape, dtype=torch.uint8)
            continue
        label.masked_fill_(logit > best, head)
        torch.maximum(best, logit, out=best)
    assert label is not None, "a network has a head"
    return label.numpy()


def _largest_head_by_estimates(
    planes: SplinePlanes, number: int, inputs: Sequence[Tensor]
) -> np.ndarray:
    """Return the result of `_largest_head` in less time, from estimates of the logits.

    Exact logits are computed only where the two largest estimates are so close that the exact ones
    may be equal or in the other order.
    """
    shape = planes.plane_shape
    num_heads = inputs[0].shape[0]
    best = torch.full(shape, -torch.inf)
    second = torch.full(shape, -torch.inf)
    label = torch.zeros(shape, dtype=torch.uint8)
    # Allocated once for all heads, because new pages take more time than the comparison.
    smaller = torch.empty(shape)
    is_larger = torch.empty(shape, dtype=torch.bool)
    for head in range(num_heads):
        logit = planes.estimate(number, [source[head].float() for source in inputs])
        # The second largest so far: the smaller of `best` and `logit`, if it exceeds `second`.
        torch.minimum(best, logit, out=smaller)
        torch.maximum(second, smaller, out=second)
        torch.gt(logit, best, out=is_larger)
        # Where the logit of this head is larger, its number replaces the number of an earlier head,
        # which is smaller; elsewhere the product is 0. The maximum thus gives the result of
        # `masked_fill_`, in less time.
        torch.maximum(label, is_larger.view(torch.uint8) * head, out=label)
        torch.maximum(best, logit, out=best)
    voxels_at_a_time = max(1, DOUBTFUL_LOGITS // num_heads)
    for voxels in _doubtful_voxels(best, second, inputs).split(voxels_at_a_time):
        exact = _rounded(planes.resample_at(number, inputs, voxels), inputs[0].dtype)
        # Of equal values `argmax` of NumPy takes the first.
        heads = exact.numpy().argmax(axis=0).astype(np.uint8)
        label.view(-1)[voxels] = torch.from_numpy(heads)
    return label.numpy()


def _doubtful_voxels(best: Tensor, second: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """Find the voxels in which the head of the largest estimate may not have the largest logit.

    Args:
        best: Largest estimate of each voxel, (H, W).
        second: Second largest estimate.
        inputs: Source planes (K, h, w) of the estimates.

    Returns:
        Indices of the voxels in the flattened plane.
    """
    precision = torch.finfo(inputs[0].dtype)
    largest_input = max(float(source.abs().max()) for source in inputs)
    # Each exact logit may differ from its estimate by the error. Once rounded, two logits may be
    # equal if they are one step of the precision apart; its smallest step is eps * tiny.
    min_margin = 2 * ESTIMATE_ERROR * largest_input + precision.eps * precision.tiny
    margin = best.abs().mul_(STEP_FACTOR * precision.eps).add_(min_margin)
    return (second >= best - margin).flatten().nonzero()[:, 0]


def _painted_regions(
    planes: Planes, number: int, inputs: Sequence[Tensor], values: Sequence[int]
) -> np.ndarray:
    """Write the value of each region, in their order, where its probability exceeds one half.

    Args:
        planes: Resampling of the logits to the scan.
        number: Number of the plane in the scan.
        inputs: Its source planes of logits (K, h, w).
        values: Value of each head.

    Returns:
        Labels (H, W), uint8.
    """
    label: Tensor | None = None
    for head, value in enumerate(values):
        logit = _resampled(planes, number, inputs, head)
        if label is None:
            label = torch.zeros(logit.shape, dtype=torch.uint8)
        # Not `logit > 0`: as in nnU-Net, a tiny logit whose sigmoid rounds to one half is outside.
        label.masked_fill_(torch.sigmoid(logit) > 0.5, value)
    assert label is not None, "a network has a head"
    return label.numpy()


def _resampled(planes: Planes, number: int, inputs: Sequence[Tensor], head: int) -> Tensor:
    """Compute the logits (H, W) of a head on a plane of the scan, rounded as nnU-Net stores them.

    Args:
        planes: Resampling of the logits to the scan.
        number: Number of the plane in the scan.
        inputs: Its source planes of logits (K, h, w).
        head: Number of the head.

    Returns:
        Logits, float32.
    """
    plane = planes.resample(number, [source[head].double() for source in inputs])
    return _rounded(plane, inputs[0].dtype)


def _rounded(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Round logits of a spline, float64, to the precision of the sums; return them in float32."""
    # Logits that torch interpolates are float32, and nnU-Net does not round them.
    if dtype is torch.half and logits.dtype is torch.float64:
        # NumPy rounds float64 to half once; torch would round to float32 on the way.
        return torch.from_numpy(logits.numpy().astype(np.float16)).float()
    return logits.float()
