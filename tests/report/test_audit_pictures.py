"""Pictures of the audit: choice of slices, colours and sides, number of files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medseg.report.audit_pictures import MAX_SLICE_PX, CaseView, audit_pictures, cut_slices

NAMES = {1: "left_lung", 2: "right_lung"}


def test_the_slices_show_most_label_in_true_proportions() -> None:
    image = np.arange(6 * 7 * 8, dtype=np.int16).reshape(6, 7, 8)
    labels = np.zeros(image.shape, np.uint8)
    labels[1:4, 5, 2:7] = 1
    labels[2, 1:5, 3:5] = 2
    coronal, axial = cut_slices(image, labels, (3.0, 2.0, 1.5))
    assert (coronal.plane, coronal.spacing_mm) == ("coronal", (3.0, 1.5))
    assert np.array_equal(coronal.image_hu, image[:, 5])
    assert np.array_equal(coronal.labels, labels[:, 5])
    assert (axial.plane, axial.spacing_mm) == ("axial", (2.0, 1.5))
    assert np.array_equal(axial.image_hu, image[2])
    for none in (None, 0 * labels):
        coronal, axial = cut_slices(image, none, (3.0, 2.0, 1.5))
        assert np.array_equal(coronal.image_hu, image[:, 3])
        assert np.array_equal(axial.image_hu, image[3])


def test_large_slices_are_thinned_out_and_keep_their_extent() -> None:
    image = np.zeros((3, 2, 4 * MAX_SLICE_PX - 1), np.int16)
    coronal, _ = cut_slices(image, None, (5.0, 1.0, 0.25))
    assert coronal.image_hu.shape == (3, MAX_SLICE_PX)
    assert coronal.spacing_mm == (5.0, 1.0)


@pytest.fixture
def case() -> CaseView:
    labels = np.zeros((20, 30, 40), np.uint8)
    labels[5:15, 5:25, 22:36] = 1
    labels[5:15, 5:25, 4:18] = 2
    image = np.where(labels > 0, -850, 60).astype(np.int16)
    return CaseView(
        "p1",
        "20×30×40",
        cut_slices(image, labels, (6.0, 4.0, 4.0)),
        [("error", "a: b"), ("information", "c: " + "d " * 300)],
    )


def has_colour(picture: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """Columns that hold nearly this colour."""
    return np.flatnonzero((np.abs(picture.astype(int) - colour).max(axis=2) < 40).any(axis=0))


def test_outlines_have_their_colours_and_the_right_is_on_the_left(
    case: CaseView, tmp_path: Path
) -> None:
    (path,) = audit_pictures(
        [case], tmp_path / "audit.png", "1 case", label_names=NAMES, window_hu=(-1000.0, 400.0)
    )
    picture = np.asarray(Image.open(path).convert("RGB"))[60:300]
    blue, orange = has_colour(picture, (0x38, 0xBD, 0xF8)), has_colour(picture, (0xFB, 0x92, 0x3C))
    assert blue.size > 20
    assert orange.size > 20
    # Of both slices the left half is the patient's right.
    assert orange[0] < blue[0]
    assert orange[-1] < blue[-1]


def test_many_cases_make_several_pictures_and_old_ones_go(case: CaseView, tmp_path: Path) -> None:
    path = tmp_path / "audit.png"
    bare = CaseView("x" * 200, "", (), [])
    paths = audit_pictures(
        [bare] * 49, path, "49 cases", label_names=NAMES, window_hu=(-1000.0, 400.0)
    )
    assert [one.name for one in paths] == ["audit.png", "audit-2.png", "audit-3.png"]
    assert all(one.is_file() for one in paths)
    assert audit_pictures(
        [case, bare], path, "2 cases", label_names=NAMES, window_hu=(-1000.0, 400.0)
    ) == [path]
    assert [one.name for one in tmp_path.iterdir()] == ["audit.png"]
