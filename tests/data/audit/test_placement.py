"""Audit of the placement of label maps: mirrored, turned and shifted, on phantoms and scans."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage

from medseg.data.audit.placement import audit_placement, audit_shift
from medseg.findings import Severity
from medseg.geometry.grid import VoxelGrid
from medseg.io.read import read_image, read_labels
from medseg.phantom.scan import make_phantom
from medseg.phantom.spec import draw_spec
from medseg.preprocess.orient import orient

FLIPS = [axes for count in (1, 2, 3) for axes in itertools.combinations(range(3), count)]


@pytest.fixture(scope="module")
def chest() -> tuple[np.ndarray, np.ndarray, np.ndarray, VoxelGrid]:
    phantom = make_phantom(draw_spec(3, 2, "small"))
    image, grid, orientation = orient(phantom.image_hu, phantom.grid)
    return image, orientation.to_lps(phantom.labels), orientation.to_lps(phantom.organs), grid


def test_labels_in_place_pass(chest: tuple[np.ndarray, np.ndarray, np.ndarray, VoxelGrid]) -> None:
    image, labels, organs, grid = chest
    assert audit_placement(image, labels, grid) == []
    for value in (1, 2, 3, 4):  # one lung, the heart without a clear edge, the spine
        assert (
            audit_placement(image, np.where(organs == value, np.uint8(1), np.uint8(0)), grid) == []
        )


@pytest.mark.parametrize("axes", FLIPS)
def test_mirrored_labels_are_found(
    chest: tuple[np.ndarray, np.ndarray, np.ndarray, VoxelGrid], axes: tuple[int, ...]
) -> None:
    image, labels, _, grid = chest
    (finding,) = audit_placement(image, np.flip(labels, axes), grid)
    ways = [("head to feet", "back to front", "left to right")[axis] for axis in axes]
    assert f"but would if mirrored {' and '.join(ways)} (fit" in finding.message


def test_transposed_labels_are_found(
    chest: tuple[np.ndarray, np.ndarray, np.ndarray, VoxelGrid],
) -> None:
    image, labels, _, grid = chest
    side = min(labels.shape[1:])
    image, labels = image[:, :side, :side], labels[:, :side, :side]
    square = VoxelGrid(labels.shape, grid.spacing_mm)
    (finding,) = audit_placement(image, labels.swapaxes(1, 2), square)
    assert "but would if transposed within the slices (fit" in finding.message


def test_too_little_says_nothing(
    chest: tuple[np.ndarray, np.ndarray, np.ndarray, VoxelGrid],
) -> None:
    image, labels, _, grid = chest
    assert audit_placement(image, 0 * labels, grid) == []
    noise = np.random.default_rng(0).normal(0, 20, labels.shape).astype(np.int16)
    for axes in FLIPS:
        assert audit_placement(noise, np.flip(labels, axes), grid) == []


@pytest.mark.slow
def test_every_real_scan_in_every_order(shared_ct: Path) -> None:
    """No scan as it is gives an alarm, every mirrored or shifted one does."""
    missed = []
    with (shared_ct / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        volume = read_image(shared_ct / row["image"])
        image, grid, orientation = orient(volume.array, volume.grid)
        labels = orientation.to_lps(read_labels(shared_ct / row["labels"]).array)
        assert audit_placement(image, labels, grid) == [], row["case"]
        assert audit_shift(image, labels, grid) == [], row["case"]
        # Not along z, where a scan that cuts the lungs has few edges.
        missed += [
            (row["case"], axis, shift)
            for axis, shift in itertools.product((1, 2), (5, -5))
            if not audit_shift(image, np.roll(labels, shift, axis), grid)
        ]
        missed += [
            (row["case"], axes)
            for axes in FLIPS
            if not audit_placement(image, np.flip(labels, axes), grid)
        ]
    assert missed == [], missed


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("voxels", [5, -5])
def test_shifted_labels_are_found_and_larger_ones_are_not(
    whole: tuple[np.ndarray, np.ndarray, VoxelGrid], axis: int, voxels: int
) -> None:
    image, labels, grid = whole
    assert audit_shift(image, labels, grid) == []
    assert audit_shift(image, ndimage.grey_dilation(labels, size=5), grid) == []
    assert audit_shift(image, ndimage.grey_erosion(labels, size=5), grid) == []
    (finding,) = audit_shift(image, np.roll(labels, voxels, axis), grid)
    assert (finding.code, finding.severity) == ("misplaced_labels", Severity.error)
    end = (("lower", "upper"), ("front", "back"), ("right", "left"))[axis][voxels < 0]
    assert f"voxels towards the {end} end: the label map was shifted" in finding.message
