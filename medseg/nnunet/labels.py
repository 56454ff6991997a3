"""Labels from finished planes of logits: folds averaged, logits resampled, the largest head taken.

No array of heads × scan is in memory: with one fold a plane is reduced as soon as the planes beside
it are there; with several the logits at the network's spacing lie in a temporary file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from medseg.io.scratch import new_tensor, scratch_at_most
from medseg.nnunet.planes import Planes
from medseg.nnunet.spline import ESTIMATE_ERROR, SplinePlanes

# Sums of folds of more bytes are a temporary file.
MAX_FOLDS_BYTES = 2**26
# Logits of doubtful voxels that are computed at a time.
DOUBTFUL_LOGITS = 2**16
# Bytes per voxel of a plane of the scan while it is labelled: its best logits and their labels, and
# a head with the terms of its sum in float64.
PLANE_BYTES = 45
# Step between two stored values by the larger one, with room for the difference of the two.
STORED_STEP = 1.01


def mean_planes(
    folds: Iterable[Iterator[Tensor]], num_folds: int, shape: tuple[int, int, int, int]
) -> Iterator[Tensor]:
    """Average the planes of several folds, in the precision and the order of nnU-Net.

    Args:
        folds: Planes (K, H, W) of each fold; the next fold begins when the last one has ended.
        num_folds: How many there are.
        shape: Shape of all planes of a fold, (D, K, H, W).

    Yields:
        The mean of each plane.
    """
    sums: Tensor | None = None
    for number, planes in enumerate(folds):
        for index, plane in enumerate(planes):
            if num_folds == 1:
                yield plane
                continue
            # The first plane tells the precision.
            if sums is None:
                with scratch_at_most(MAX_FOLDS_BYTES):
                    sums = new_tensor(shape, plane.dtype)
            if number == 0:
                sums[index] = plane
                continue
            # In the precision of the planes, and in the order of the folds, as nnU-Net adds them.
            sums[index] += plane
            if number == num_folds - 1:
                yield sums[index].div_(num_folds)


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
    # Source planes by their number: those that the present plane, or a later one, needs.
    window: dict[int, Tensor] = {}
    num_received = 0
    for number in range(planes.num_planes):
        sources = planes.sources(number)
        first, last = min(sources), max(sources)
        while num_received <= last:
            values = next(logits)
            if num_received >= first:
                # A copy: the iterator may write the next plane in its place.
                window[num_received] = values.clone()
            num_received += 1
        # Later planes need no earlier sources.
        window = {index: values for index, values in window.items() if index >= first}
        inputs = [window[index] for index in sources]
        if region_values is None:
            labels[number] = _largest(planes, number, inputs)
        else:
            labels[number] = _painted(planes, number, inputs, region_values)


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
            probabilities = _probabilities(logits, planes, number, region_values is None)
            # In float32 and in the order of the models, as nnU-Net adds them.
            total = probabilities if total is None else total.add_(probabilities)
        assert total is not None, "an ensemble has members"
        mean = total.div_(len(members)).numpy()
        if region_values is None:
            labels[number] = mean.argmax(axis=0)
            continue
        labels[number] = 0
        for head, value in enumerate(region_values):
            labels[number][mean[head] > 0.5] = value


def _probabilities(logits: Tensor, planes: Planes, number: int, are_classes: bool) -> Tensor:
    """Probabilities (K, H, W) of a plane of the scan."""
    inputs = [logits[index] for index in planes.sources(number)]
    heads = range(logits.shape[1])
    resampled = torch.stack([_resampled(planes, number, inputs, head) for head in heads])
    return torch.softmax(resampled, 0) if are_classes else torch.sigmoid(resampled)


def _largest(planes: Planes, number: int, inputs: Sequence[Tensor]) -> np.ndarray:
    """Head of the largest logit of each voxel, the first of equals."""
    if isinstance(planes, SplinePlanes) and planes.keeps_range:
        return _largest_by_estimates(planes, number, inputs)
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


def _largest_by_estimates(
    planes: SplinePlanes, number: int, inputs: Sequence[Tensor]
) -> np.ndarray:
    """Like `_largest`, but heads are interpolated exactly where an estimate leaves a doubt alone.

    It does where the two largest estimates may be stored as one value, or in the other order.
    """
    shape = planes.plane_shape
    best = torch.full(shape, -torch.inf)
    second = torch.full(shape, -torch.inf)
    label = torch.zeros(shape, dtype=torch.uint8)
    # One memory for all heads: new pages take more time than the comparison.
    smaller = torch.empty(shape)
    is_larger = torch.empty(shape, dtype=torch.bool)
    for head in range(inputs[0].shape[0]):
        logit = planes.estimate(number, [values[head].float() for values in inputs])
        torch.minimum(best, logit, out=smaller)
        torch.maximum(second, smaller, out=second)
        torch.gt(logit, best, out=is_larger)
        # A later head has a larger number, so that a fill of masked voxels, slower, is not needed.
        torch.maximum(label, is_larger.view(torch.uint8) * head, out=label)
        torch.maximum(best, logit, out=best)
    for voxels in _doubtful_voxels(best, second, inputs).split(
        max(1, DOUBTFUL_LOGITS // inputs[0].shape[0])
    ):
        exact = _rounded(planes.resample_at(number, inputs, voxels), inputs[0].dtype)
        # Of equal values NumPy takes the first.
        heads = exact.numpy().argmax(axis=0).astype(np.uint8)
        label.view(-1)[voxels] = torch.from_numpy(heads)
    return label.numpy()


def _doubtful_voxels(best: Tensor, second: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """Places of the voxels where another head than that of the largest estimate may win.

    Args:
        best: Largest estimate of each voxel.
        second: The next one.
        inputs: Source planes of the estimates.
    """
    stored = torch.finfo(inputs[0].dtype)
    largest = max(float(values.abs().max()) for values in inputs)
    # Two errors of estimates, and the step between the smallest stored values.
    least = 2 * ESTIMATE_ERROR * largest + stored.eps * stored.tiny
    margin = best.abs().mul_(STORED_STEP * stored.eps).add_(least)
    return (second >= best - margin).flatten().nonzero()[:, 0]


def _painted(
    planes: Planes, number: int, inputs: Sequence[Tensor], values: Sequence[int]
) -> np.ndarray:
    """Paint the regions in their order where their probability exceeds one half."""
    label: Tensor | None = None
    for head, value in enumerate(values):
        logit = _resampled(planes, number, inputs, head)
        if label is None:
            label = torch.zeros(logit.shape, dtype=torch.uint8)
        # Not `logit > 0`: the sigmoid of a tiny logit rounds to one half.
        label.masked_fill_(torch.sigmoid(logit) > 0.5, value)
    assert label is not None, "a network has a head"
    return label.numpy()


def _resampled(planes: Planes, number: int, inputs: Sequence[Tensor], head: int) -> Tensor:
    """Logits (H, W) of one head on a plane of the scan, float32, rounded as nnU-Net stores them."""
    plane = planes.resample(number, [values[head].double() for values in inputs])
    return _rounded(plane, inputs[0].dtype)


def _rounded(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits in float32, rounded to the precision of the sums where they were interpolated."""
    # What torch interpolates stays in float32.
    if dtype is torch.half and logits.dtype is torch.float64:
        # NumPy rounds float64 to half once; torch would round to float32 on the way.
        return torch.from_numpy(logits.numpy().astype(np.float16)).float()
    return logits.float()
