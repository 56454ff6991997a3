"""Laws of Dice and volume."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medseg.metrics.scores import dice, dice_per_label, volume_ml


def _box(start: tuple[int, int, int], stop: tuple[int, int, int]) -> np.ndarray:
    mask = np.zeros((9, 12, 15), dtype=bool)
    mask[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))] = True
    return mask


def test_dice_of_boxes_that_overlap_by_half() -> None:
    a = _box((1, 2, 2), (5, 6, 6))
    b = _box((3, 2, 2), (7, 6, 6))
    assert dice(a, b) == 0.5
    assert dice(b, a) == 0.5
    assert dice(a, a) == 1.0


def test_dice_of_empty_masks() -> None:
    a, empty = _box((1, 2, 2), (5, 6, 6)), np.zeros((9, 12, 15), dtype=bool)
    assert dice(empty, empty) == 1.0
    assert dice(a, empty) == 0.0
    assert dice(empty, a) == 0.0


def test_dice_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match="one shape"):
        dice(np.zeros((2, 3, 4), bool), np.zeros((2, 3, 1), bool))
    with pytest.raises(ValueError, match="one shape"):
        dice_per_label(np.zeros((2, 3, 4), int), np.zeros((2, 3, 1), int), [1])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_dice_per_label_is_the_dice_of_each_mask(kind: str) -> None:
    rng = np.random.default_rng(3)
    pred = rng.integers(0, 4, (7, 8, 9)).astype(np.uint8)
    target = rng.integers(0, 3, (7, 8, 9)).astype(np.uint8)
    values = [2, 1, 3, 5]
    expected = {value: dice(pred == value, target == value) for value in values}
    if kind == "torch":
        scores = dice_per_label(torch.from_numpy(pred), torch.from_numpy(target).long(), values)
    else:
        scores = dice_per_label(pred, target, values)
    assert scores == expected
    assert list(scores) == values
    assert scores[3] == 0.0
    assert scores[5] == 1.0


@pytest.mark.gpu
def test_dice_per_label_on_the_gpu_equals_the_cpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    rng = np.random.default_rng(4)
    pred, target = (torch.from_numpy(rng.integers(0, 3, (7, 8, 9))) for _ in range(2))
    assert dice_per_label(pred.cuda(), target.cuda(), [1, 2, 7]) == dice_per_label(
        pred, target, [1, 2, 7]
    )


def test_volume_counts_voxels_in_ml() -> None:
    assert volume_ml(_box((0, 0, 0), (5, 10, 10)), (2.0, 0.5, 0.25)) == pytest.approx(
        500 * 0.25 / 1000
    )
