"""Labels from planes of logits: those of the largest interpolated logit of each voxel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from scipy.ndimage import zoom
from torch import Tensor

from medseg.memory.tracker import MemoryTracker
from medseg.nnunet.labels import PLANE_BYTES, reduce_planes
from medseg.nnunet.spline import ESTIMATE_ERROR, SplinePlanes

Shape = tuple[int, int, int]
SOURCE = (9, 14, 12)
TARGETS = [(17, 41, 30), (5, 9, 20), (9, 20, 12)]


def smooth_logits(num_heads: int, dtype: torch.dtype) -> Tensor:
    """Logits (D, K, H, W) whose largest head changes from region to region, with equal heads."""
    numbers = torch.Generator().manual_seed(3)
    coarse = torch.randn((1, num_heads, 3, 4, 3), generator=numbers)
    logits = functional.interpolate(coarse, size=SOURCE, mode="trilinear")[0].mul_(20)
    if num_heads > 2:
        logits[2] = logits[1]
    return logits.transpose(0, 1).to(dtype).contiguous()


def close_logits(num_heads: int, dtype: torch.dtype) -> Tensor:
    """Logits (D, K, H, W) whose heads differ in their last bits: most voxels are doubtful."""
    numbers = torch.Generator().manual_seed(4)
    logits = smooth_logits(1, dtype).repeat(1, num_heads, 1, 1)
    steps = torch.randint(-2, 3, logits.shape, generator=numbers)
    return (logits * (1 + steps * torch.finfo(dtype).eps)).to(dtype)


@pytest.mark.parametrize("make_logits", [smooth_logits, close_logits])
@pytest.mark.parametrize("dtype", [torch.half, torch.float32])
@pytest.mark.parametrize("orders", [(1, 1, 1), (0, 1, 1), (1, 1, 0)])
@pytest.mark.parametrize("target", TARGETS)
def test_labels_are_those_of_all_heads_at_all_voxels(
    target: Shape,
    orders: Shape,
    dtype: torch.dtype,
    make_logits: Callable[[int, torch.dtype], Tensor],
) -> None:
    logits = make_logits(7, dtype)
    planes = SplinePlanes(SOURCE, target, orders)
    labels = np.empty(target, dtype=np.uint8)
    reduce_planes(iter(logits), planes, None, labels)
    stored = np.float16 if dtype is torch.half else np.float32
    resampled = []
    for head in logits.double().numpy().transpose(1, 0, 2, 3):
        whole = head
        for order in (0, 1):
            factors = [
                1 / (SOURCE[axis] / target[axis]) if orders[axis] == order else 1
                for axis in range(3)
            ]
            if order in orders:
                whole = zoom(whole, factors, order=order, mode="nearest", grid_mode=True)
        resampled.append(whole.astype(stored))
    assert np.array_equal(labels, np.argmax(resampled, axis=0))
    assert len(np.unique(labels)) > 3


@pytest.mark.parametrize("orders", [(1, 1, 1), (0, 1, 1), (1, 0, 1), (0, 0, 0)])
def test_some_voxels_have_the_bits_of_the_plane_and_estimates_are_close(orders: Shape) -> None:
    planes = SplinePlanes(SOURCE, (17, 41, 30), orders)
    logits = smooth_logits(3, torch.half)[4:]
    inputs = list(logits[: len(planes.sources(8))])
    voxels = torch.arange(0, 41 * 30, 7)
    some = planes.resample_at(8, inputs, voxels)
    largest = float(logits.abs().max())
    for head in range(3):
        whole = planes.resample(8, [values[head].double() for values in inputs])
        assert torch.equal(some[head], whole.flatten()[voxels])
        estimate = planes.estimate(8, [values[head].float() for values in inputs])
        assert float((estimate - whole).abs().max()) < ESTIMATE_ERROR * largest


def test_few_voxels_are_interpolated_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    num_exact = 0
    resample_at = SplinePlanes.resample_at

    def counted(self: SplinePlanes, plane: int, inputs: Any, voxels: Tensor) -> Tensor:
        nonlocal num_exact
        num_exact += len(voxels)
        return resample_at(self, plane, inputs, voxels)

    monkeypatch.setattr(SplinePlanes, "resample_at", counted)
    logits = smooth_logits(7, torch.half)
    # No two heads are equal everywhere.
    logits[:, 2] += 1
    labels = np.empty(TARGETS[0], dtype=np.uint8)
    reduce_planes(iter(logits), SplinePlanes(SOURCE, TARGETS[0], (1, 1, 1)), None, labels)
    assert 0 < num_exact < 0.01 * labels.size


@pytest.mark.parametrize("scale", [1, 20])
def test_a_plane_takes_the_known_bytes_for_each_of_its_voxels(scale: int) -> None:
    """Noise, where all heads may win anywhere, and smooth logits; by the live tensors."""
    shape = (2, 6, 30 // scale + 1, 30 // scale + 1)
    coarse = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    logits = functional.interpolate(coarse, size=(30, 30), mode="bilinear").half()
    labels = np.empty((3, 120, 120), dtype=np.uint8)
    with MemoryTracker() as tracker:
        tracker.assign(logits, "given")
        reduce_planes(
            iter(logits), SplinePlanes((2, 30, 30), labels.shape, (1, 1, 1)), None, labels
        )
    # Copies of the source planes are counted apart.
    num_bytes = tracker.peak_bytes - 2 * tracker.live_bytes("given")
    assert 0.6 * PLANE_BYTES < num_bytes / (120 * 120) < 1.1 * PLANE_BYTES
