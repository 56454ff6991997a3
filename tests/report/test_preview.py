"""Preview: the slices that are chosen, the sides, the outlines, the words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from medseg.io.label_table import Structure
from medseg.report.preview import cut_slices, draw_preview

SPACING_MM = (5.0, 2.0, 2.5)
BLUE = np.array([56, 189, 248])


def volume() -> tuple[np.ndarray, np.ndarray]:
    """A patient with one label on the left, largest in slice 7 from below."""
    image, labels = np.full((20, 60, 70), -1000, np.int16), np.zeros((20, 60, 70), np.uint8)
    image[:, 5:55, 5:65] = 40
    labels[5:12, 20:30, 45:60] = 1
    labels[7, 10:40, 45:60] = 1
    return image, labels


def test_slices_with_the_largest_area_are_cut() -> None:
    image, labels = volume()
    cuts = cut_slices(image, labels, SPACING_MM)
    assert [one.plane for one in cuts] == ["axial", "coronal", "sagittal"]
    for axis, one in enumerate(cuts):
        areas = np.count_nonzero(labels, axis=tuple({0, 1, 2} - {axis}))
        assert areas[one.index] == areas.max()
        assert (one.labels == labels.take(one.index, axis)).all()
        assert (one.image == image.take(one.index, axis)).all()
        assert one.num_slices == labels.shape[axis]
    assert [one.size_mm for one in cuts] == [(120.0, 175.0), (100.0, 175.0), (100.0, 120.0)]
    assert [one.index for one in cut_slices(image, np.zeros_like(labels), SPACING_MM)] == [
        10,
        30,
        35,
    ]


def test_the_picture_shows_outlines_on_the_patients_side_and_grows_with_its_words(
    tmp_path: Path,
) -> None:
    cuts = cut_slices(*volume(), SPACING_MM)
    heights = []
    for number in (0, 3, 20):
        path = tmp_path / f"{number}.png"
        draw_preview(
            cuts,
            path,
            "Doe, $x_1$",
            [Structure("left_lung", 1, "#38bdf8")],
            {1: "120 ml"},
            ["a warning " * 5] * number,
            (-1000.0, 400.0),
        )
        heights.append(Image.open(path).height)
    assert heights == sorted(heights)
    assert heights[0] < heights[1] < heights[2] < 1.6 * heights[0]
    picture = np.asarray(Image.open(tmp_path / "0.png").convert("RGB")).astype(int)
    axial = picture[48 : 48 + 290, :424]
    is_blue = np.abs(axial - BLUE).sum(axis=-1) < 90
    assert is_blue.sum() > 100
    assert np.nonzero(is_blue)[1].min() > 424 / 2, (
        "the patient's left is on the right of the picture"
    )
    assert is_blue.sum() < 3000, "a line, not a filled area"


def test_a_long_note_takes_several_lines(tmp_path: Path) -> None:
    heights = []
    for number, notes in enumerate((["a", "b", "c"], ["0.98 (liver), " * 30])):
        path = tmp_path / f"{number}.png"
        structures = [Structure("left_lung", 1, "#38bdf8")]
        cuts = cut_slices(*volume(), SPACING_MM)
        draw_preview(cuts, path, "case", structures, {}, [], (-1000.0, 400.0), notes)
        heights.append(Image.open(path).height)
    assert heights[0] == heights[1]
