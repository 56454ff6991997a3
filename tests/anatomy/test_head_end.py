"""Patients upside down: the cues of a phantom, which change their sign with the image."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from medseg.anatomy.mirrored.head_end import HeadEvidence, head_evidence
from medseg.anatomy.plausibility import position_warnings
from medseg.data.audit.labels import audit_labels
from medseg.geometry.grid import VoxelGrid
from medseg.phantom.scan import make_phantom
from medseg.phantom.spec import draw_spec
from medseg.preprocess.orient import orient
from medseg.task import Channel, Region, Task

TASK = Task(
    "lungs",
    {"left_lung": 1, "right_lung": 2},
    (Region("left_lung", ("left_lung",), "left"), Region("right_lung", ("right_lung",), "right")),
    (Channel(),),
)
OTHER_SIDE = np.array([0, 2, 1], dtype=np.uint8)
"""A turned label map with the names that its places have."""
WHOLE = 12
"""A whole chest of which each cue is clear."""


@cache
def chest() -> tuple[np.ndarray, np.ndarray, VoxelGrid]:
    """Image, labels and grid, oriented."""
    phantom = make_phantom(draw_spec(0, WHOLE, "small"))
    image_hu, grid, orientation = orient(phantom.image_hu, phantom.grid)
    return image_hu, orientation.to_lps(phantom.labels), grid


def upside_down() -> tuple[np.ndarray, np.ndarray, VoxelGrid]:
    """Turn the patient about the axis from front to back."""
    image_hu, labels, grid = chest()
    return image_hu[::-1, :, ::-1], OTHER_SIDE[labels[::-1, :, ::-1]], grid


def evidence_of(image_hu: np.ndarray, labels: np.ndarray, grid: VoxelGrid) -> HeadEvidence:
    return head_evidence(image_hu, labels, grid.spacing_mm, TASK)


def codes(image_hu: np.ndarray, labels: np.ndarray, grid: VoxelGrid) -> set[str]:
    return {finding.code for finding in audit_labels(image_hu, labels, grid, TASK, {})}


def test_each_cue_changes_its_sign_with_the_image() -> None:
    usual, turned = evidence_of(*chest()), evidence_of(*upside_down())
    assert set(usual.cues) == {"trachea", "liver"}
    assert min(usual.cues.values()) >= 0.5
    assert turned.cues == pytest.approx({name: -size for name, size in usual.cues.items()}, abs=0.2)
    assert not usual.is_upside_down
    assert turned.is_upside_down


def test_labels_beyond_the_lungs_change_nothing() -> None:
    """Upside down, a network labels bowel and liver; some label the trachea."""
    image_hu, labels, grid = upside_down()
    wide = np.maximum(labels, np.where(image_hu > -300, 1, 0)).astype(np.uint8)
    assert evidence_of(image_hu, wide, grid) == evidence_of(image_hu, labels, grid)
    half = image_hu.shape[2] // 2
    left_air = (image_hu < -600) & (labels == 0)
    left_air[:, :, :half] = False
    box = np.argwhere(labels)
    inside = np.zeros(labels.shape, dtype=bool)
    inside[tuple(slice(*ends) for ends in zip(box.min(0), box.max(0) + 1, strict=True))] = True
    with_trachea = np.where(left_air & inside & (labels == 0), 1, labels).astype(np.uint8)
    assert evidence_of(image_hu, with_trachea, grid).is_upside_down


def test_the_audit_calls_the_body_upside_down() -> None:
    assert "body_position" not in codes(*chest())
    assert "body_position" in codes(*upside_down())


def test_trachea_and_liver_suffice_where_the_ends_of_the_lungs_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on scans that cut both ends; the sign is named to the user."""
    monkeypatch.setattr("medseg.data.audit.labels.apex_excess", lambda *_: 1.0)
    monkeypatch.setattr("medseg.anatomy.plausibility.apex_excess", lambda *_: 1.0)
    sign = (
        "the trachea seems to lie between the lower halves of the lungs and the tissue above the "
        "lungs looks like the liver"
    )
    image_hu, labels, grid = upside_down()
    assert evidence_of(image_hu, labels, grid).sentence == sign
    (finding,) = (
        finding
        for finding in audit_labels(image_hu, labels, grid, TASK, {})
        if finding.code == "body_position"
    )
    assert "upside down" in finding.message
    assert sign in finding.message
    assert "body_position" not in codes(*chest())
    (warning,) = position_warnings(image_hu, labels, {}, grid, TASK)
    assert warning.startswith(f"{sign}: if the position of the patient")
    assert position_warnings(*chest()[:2], {}, grid, TASK) == []


def test_a_part_without_the_liver_or_with_one_lung_is_not_judged() -> None:
    for image_hu, labels, grid in (chest(), upside_down()):
        slices = np.flatnonzero(labels.any(axis=(1, 2)))
        for part in (slice(int(slices.mean()), None), slice(0, int(slices.mean()))):
            half = evidence_of(image_hu[part], labels[part], grid)
            assert not half.is_upside_down
        assert evidence_of(image_hu, labels * (labels == 1), grid).cues == {}
        assert evidence_of(image_hu, 0 * labels, grid).cues == {}
        assert evidence_of(image_hu + 800, labels, grid).cues == {}, "organs without air"


@pytest.mark.parametrize(
    ("cues", "is_upside_down"),
    [
        ({}, False),
        ({"trachea": -0.5, "liver": -0.5}, True),
        ({"trachea": -2.0, "liver": -0.4}, False),
        ({"trachea": -0.4, "liver": -2.0}, False),
        ({"trachea": -2.0}, False),
        ({"trachea": 2.0, "liver": -2.0}, False),
    ],
)
def test_trachea_and_liver_must_agree(cues: dict[str, float], is_upside_down: bool) -> None:
    assert HeadEvidence(cues).is_upside_down == is_upside_down
