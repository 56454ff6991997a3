"""Scans of extreme spacings come back on their own grid, right, or are refused with a reason."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import RULES, TASK, CoarseOracle, MiddleOracle, dice, stage

from medseg.cascade.cascade import Cascade
from medseg.cascade.load import load_stages
from medseg.geometry.grid import VoxelGrid
from medseg.inference.segmentation import Segmentation
from medseg.io.volume import Volume
from medseg.weights.files import shipped_weights


def segmented(
    shape: tuple[int, int, int], spacing_mm: tuple[float, float, float], rule: str | None = None
) -> tuple[Segmentation, np.ndarray]:
    """A chest of two blocks, with a margin, sampled at any spacing; sides of different size."""
    labels = np.zeros(shape, dtype=np.uint8)
    depth, height, width = shape
    rows = slice(height // 4, height * 3 // 4)
    labels[depth // 6 : depth - depth // 6, rows, width * 5 // 8 : width * 7 // 8] = 1
    labels[depth // 6 : depth - depth // 6, rows, width // 8 : width * 3 // 8] = 2
    image_hu = np.where(labels > 0, 0, -1000).astype(np.int16)
    ends = np.zeros(shape, dtype=bool)
    ends[:, :, : width // 16 + 1] = ends[:, :, -(width // 16) - 1 :] = True
    image_hu[ends & (labels == 0)] = -500
    volume = Volume(image_hu, VoxelGrid(shape, spacing_mm))
    how = {"spacing_mm": RULES[rule][0], "rule": RULES[rule][1]} if rule else {}
    return Cascade(
        stage(CoarseOracle(), "coarse", **how), stage(MiddleOracle(), "fine", **how)
    ).segment(volume), labels


EXTREMES = [
    ((12, 200, 224), (10.0, 0.5, 0.5)),
    ((160, 24, 32), (0.6, 5.0, 5.0)),
    ((1, 128, 160), (5.0, 0.8, 0.8)),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("shape", "spacing_mm"), EXTREMES)
def test_every_rule_brings_an_extreme_scan_back_to_its_own_grid(
    shape: tuple[int, int, int], spacing_mm: tuple[float, float, float], rule: str
) -> None:
    result, labels = segmented(shape, spacing_mm, rule)
    assert result.labels.shape == shape
    for value in TASK.labels.values():
        assert dice(result.labels == value, labels == value) > 0.95
    for step, bent in result.distortions.items():
        name = step.removeprefix("refine_").replace("localise", "whole scan")
        assert any(
            warning.startswith(f"{name}: ") and "a distortion of" in warning
            for warning in result.warnings
        ) is (bent > 2)


@pytest.mark.parametrize(("shape", "spacing_mm"), EXTREMES)
def test_an_extreme_scan_is_segmented_on_its_own_grid(
    shape: tuple[int, int, int], spacing_mm: tuple[float, float, float]
) -> None:
    result, labels = segmented(shape, spacing_mm)
    assert result.labels.shape == shape
    for value in TASK.labels.values():
        assert dice(result.labels == value, labels == value) > 0.95
    assert set(result.boxes) == {region.name for region in TASK.regions}


def test_a_slice_too_thin_to_hold_a_region_is_said() -> None:
    result, _ = segmented((1, 128, 160), (0.5, 0.8, 0.8))
    assert not result.labels.any()
    for region in TASK.regions:
        assert any(
            warning.startswith(f"no {region.name} found: the coarse stage marks")
            for warning in result.warnings
        )


@pytest.mark.parametrize(
    ("shape", "spacing_mm"),
    [
        ((16, 16, 16), (2.0, 2.0, 2.0)),
        ((5, 7, 9), (1.0, 1.0, 1.0)),
        ((1, 1, 1), (0.5, 0.5, 0.5)),
        ((40, 41, 42), (0.001, 0.001, 0.001)),  # metres that are taken for mm
    ],
)
def test_a_scan_of_a_few_centimetres_is_segmented(
    shape: tuple[int, int, int], spacing_mm: tuple[float, float, float]
) -> None:
    """It fills one voxel of the deepest level of the included networks, which has no variance."""
    cpu = torch.device("cpu")
    coarse, fine = (
        load_stages([shipped_weights("lungs", name)], name, cpu) for name in ("coarse", "fine")
    )
    image_hu = np.random.default_rng(0).integers(-900, -700, shape).astype(np.int16)
    result = Cascade(coarse, fine).segment(Volume(image_hu, VoxelGrid(shape, spacing_mm)))
    assert result.labels.shape == shape
    assert any(
        "no region found at all" in warning or "touches" in warning for warning in result.warnings
    )
