"""Mirrored images: the cues of phantoms, which change their sign with the image."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from medseg.anatomy.mirrored.cues import MirrorEvidence, mirror_evidence, tissue_below
from medseg.data.audit.labels import audit_labels
from medseg.findings import Severity
from medseg.geometry.grid import VoxelGrid
from medseg.io.volume import Volume
from medseg.phantom.scan import Phantom, make_phantom
from medseg.phantom.spec import draw_spec
from medseg.prediction.case import mirrored_findings
from medseg.preprocess.orient import orient
from medseg.task import Channel, Region, Task

TASK = Task(
    "lungs",
    {"left_lung": 1, "right_lung": 2},
    (Region("left_lung", ("left_lung",), "left"), Region("right_lung", ("right_lung",), "right")),
    (Channel(),),
)
OTHER_SIDE = np.array([0, 2, 1], dtype=np.uint8)
"""A flipped label map with the names that its places have."""
WHOLE = 12
"""A whole chest of which each cue is clear."""


@cache
def chest() -> tuple[np.ndarray, np.ndarray, VoxelGrid]:
    """Image, labels and grid, oriented."""
    phantom: Phantom = make_phantom(draw_spec(0, WHOLE, "small"))
    image_hu, grid, orientation = orient(phantom.image_hu, phantom.grid)
    return image_hu, orientation.to_lps(phantom.labels), grid


def flipped() -> tuple[np.ndarray, np.ndarray, VoxelGrid]:
    image_hu, labels, grid = chest()
    return image_hu[:, :, ::-1], OTHER_SIDE[labels[:, :, ::-1]], grid


def evidence_of(image_hu: np.ndarray, labels: np.ndarray, grid: VoxelGrid) -> MirrorEvidence:
    return mirror_evidence(image_hu, labels, grid.spacing_mm, TASK)


def codes(image_hu: np.ndarray, labels: np.ndarray, grid: VoxelGrid) -> set[str]:
    return {finding.code for finding in audit_labels(image_hu, labels, grid, TASK, {})}


def test_each_cue_changes_its_sign_with_the_image() -> None:
    usual, mirrored = evidence_of(*chest()).cues, evidence_of(*flipped()).cues
    assert set(usual) == {"liver", "arch", "aorta", "heart"}
    assert min(usual.values()) >= 0.5
    assert mirrored == pytest.approx({name: -size for name, size in usual.items()}, abs=0.2)


def test_a_flipped_image_is_an_error_of_the_audit() -> None:
    assert "mirrored_image" not in codes(*chest())
    image_hu, labels, grid = flipped()
    (finding,) = [
        finding
        for finding in audit_labels(image_hu, labels, grid, TASK, {})
        if finding.code == "mirrored_image"
    ]
    assert finding.severity is Severity.error
    assert "looks like the liver" in finding.message
    assert "the aortic arch seems to lie to the right of the trachea" in finding.message


def test_the_names_of_the_labels_do_not_matter() -> None:
    """A model may follow the organs or the header."""
    image_hu, labels, grid = flipped()
    assert evidence_of(image_hu, OTHER_SIDE[labels], grid) == evidence_of(image_hu, labels, grid)


@pytest.mark.parametrize("axes", [(), (0,), (1, 2)])
def test_a_prediction_warns_in_every_orientation(axes: tuple[int, ...]) -> None:
    for (image_hu, labels, grid), num_warnings in ((chest(), 0), (flipped(), 1)):
        stored = grid.reoriented((0, 1, 2), (0 in axes, 1 in axes, 2 in axes))
        volume = Volume(np.flip(image_hu, axes), stored)
        findings = mirrored_findings(volume, np.flip(labels, axes), TASK)
        assert [finding.severity for finding in findings] == [Severity.warning] * num_warnings


def test_what_the_scan_does_not_show_is_no_cue() -> None:
    image_hu, labels, grid = flipped()
    slices = np.flatnonzero(labels.any(axis=(1, 2)))
    above = slice(int(slices.mean()), None)
    upper = evidence_of(image_hu[above], labels[above], grid)
    assert "liver" not in upper.cues
    assert not upper.is_mirrored, "a collapsed lung would look the same"
    assert evidence_of(image_hu, labels * (labels == 1), grid).cues == {}
    assert evidence_of(image_hu, 0 * labels, grid).cues == {}
    assert evidence_of(image_hu + 800, labels, grid).cues == {}, "organs without air"


def test_labels_of_one_stage_have_sides_by_name() -> None:
    image_hu, labels, grid = flipped()
    evidence = mirror_evidence(image_hu, labels, grid.spacing_mm, TASK.as_one_stage())
    assert evidence == evidence_of(image_hu, labels, grid)


@pytest.mark.parametrize(
    ("cues", "is_mirrored", "is_confirmed"),
    [
        ({}, False, False),
        ({"liver": -2.0}, True, False),
        ({"liver": -2.0, "arch": -0.5}, True, True),
        ({"liver": -2.0, "arch": -1.0, "heart": 0.6}, True, False),
        ({"liver": -0.6}, False, False),
        ({"liver": -0.6, "heart": -0.3}, True, False),
        ({"liver": -0.4, "arch": -2.0, "aorta": -2.0}, False, False),
        ({"arch": -2.0, "aorta": -2.0, "heart": -2.0}, False, False),
        ({"liver": -2.0, "arch": 1.5}, False, False),
    ],
)
def test_the_liver_and_the_sum_decide(
    cues: dict[str, float], is_mirrored: bool, is_confirmed: bool
) -> None:
    evidence = MirrorEvidence(cues)
    assert evidence.is_mirrored == is_mirrored
    assert evidence.is_confirmed == is_confirmed


@pytest.mark.parametrize("z_mm", [0.7, 2.5, 5.0, 70.0])
def test_what_lies_below_a_lung_is_measured_from_its_lowest_voxel(z_mm: float) -> None:
    rng = np.random.default_rng(3)
    lung = rng.random((40, 6, 7)) < 0.05
    columns = rng.random((6, 7)) < 0.7
    expected = np.zeros(lung.shape, dtype=bool)
    for y, x in np.argwhere(columns & lung.any(axis=0)):
        lowest = np.flatnonzero(lung[:, y, x])[0]
        for z in range(lowest):
            expected[z, y, x] = 8.0 < (lowest - z) * z_mm <= 60.0
    np.testing.assert_array_equal(tissue_below(lung, columns, z_mm), expected)
