"""Overlay of a case: sides and colours of the labels, proportions, choice of slices, the file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medseg.report.overlay import ERROR_COLOURS, Panel, grey_range, overlay_montage

SHAPE = (20, 50, 60)
SPACING_MM = (6.0, 3.0, 4.0)
NAMES = {1: "left_lung", 2: "right_lung"}
BLUE, ORANGE = (56, 189, 248), (251, 146, 60)


def _labels(value: int, x: slice, y: slice = slice(10, 40), z: slice = slice(5, 15)) -> np.ndarray:
    labels = np.zeros(SHAPE, dtype=np.uint8)
    labels[z, y, x] = value
    return labels


def _body() -> np.ndarray:
    image_hu = np.full(SHAPE, -1000, dtype=np.int16)
    image_hu[:, 5:45, 5:55] = 40
    return image_hu


def _coloured(picture: np.ndarray, panel: Panel, colour: tuple[int, int, int]) -> np.ndarray:
    """Pixels of a panel, (rows, columns), that lean towards a colour."""
    left, top, right, bottom = panel.box_px
    part = picture[top:bottom, left:right].astype(float)
    lean = part - part.mean(axis=-1, keepdims=True)
    wanted = np.array(colour) - np.mean(colour)
    wanted /= np.linalg.norm(wanted)
    return np.asarray((lean @ wanted > 20) & (lean @ wanted > 0.8 * np.linalg.norm(lean, axis=-1)))


def _draw(
    path: Path, pred: np.ndarray, reference: np.ndarray | None
) -> tuple[np.ndarray, list[Panel]]:
    panels = overlay_montage(
        _body(), pred, reference, SPACING_MM, path, "Doe, John $x_1$ (ü)", label_names=NAMES
    )
    return np.asarray(Image.open(path).convert("RGB")), panels


def test_small_values_keep_their_range() -> None:
    """Diffusion in m²/s is about 1e-9; an image of one value has a range too."""
    diffusion = np.linspace(0.0, 3e-9, 1000, dtype=np.float32)
    assert grey_range(diffusion, None) == pytest.approx((3e-11, 2.97e-9), rel=1e-3)
    low, high = grey_range(np.full(9, 1e9), None)
    assert low < high


@pytest.mark.parametrize("source", ["pred", "reference"])
def test_left_is_on_the_viewers_right(tmp_path: Path, source: str) -> None:
    """Larger x is the patient's left; its label colours the right of axial and coronal views."""
    labels, empty = _labels(1, slice(40, 52)), np.zeros(SHAPE, dtype=np.uint8)
    # A second label in the middle keeps the view from centring on the first.
    frame = _labels(2, slice(8, 12))
    pred, reference = (labels + frame, None) if source == "pred" else (empty, labels + frame)
    picture, panels = _draw(tmp_path / "a.png", pred, reference)
    seen = set()
    for panel in panels:
        if panel.plane == "sagittal":
            continue
        seen.add(panel.plane)
        for colour, is_right_half in ((BLUE, True), (ORANGE, False)):
            columns = np.nonzero(_coloured(picture, panel, colour))[1]
            middle = (panel.box_px[2] - panel.box_px[0]) / 2
            assert len(columns) > 0
            assert ((columns > middle) == is_right_half).all()
    assert seen == {"axial", "coronal"}


@pytest.mark.parametrize(
    ("pred_value", "reference_value", "kind"),
    [(0, 1, "missed"), (1, 0, "extra"), (2, 1, "other label"), (1, 1, None)],
)
def test_errors_have_their_own_colours(
    tmp_path: Path, pred_value: int, reference_value: int, kind: str | None
) -> None:
    """A block on the patient's left differs; the label on the right agrees everywhere."""
    right, at = _labels(2, slice(8, 28)), slice(34, 52)
    picture, panels = _draw(
        tmp_path / "a.png", right + _labels(pred_value, at), right + _labels(reference_value, at)
    )
    for panel in panels:
        left, top, right_px, bottom = panel.box_px
        part = picture[top:bottom, left:right_px].astype(int)
        for name, colour in ERROR_COLOURS.items():
            tint = 0.75 * np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)])
            # Blended with any grey, a colour keeps the differences of its channels.
            blends = (
                np.abs((part - part.min(axis=-1, keepdims=True)) - (tint - tint.min())).max(axis=-1)
                < 25
            )
            near_white = part.min(axis=-1) > 220
            is_drawn = (
                near_white & (np.ptp(part, axis=-1) < 12) if name == "other label" else blends
            ).mean() > 0.05
            assert (
                is_drawn == (name == kind and panel.plane != "sagittal")
                or panel.plane == "sagittal"
            ), (panel, name)


def draw_axial(
    image_hu: np.ndarray, pred: np.ndarray, reference: np.ndarray, path: Path
) -> list[Panel]:
    panels = overlay_montage(
        image_hu, pred, reference, (2.0, 2.0, 2.0), path, "a", label_names={1: "lung"}
    )
    return [panel for panel in panels if panel.plane == "axial"]


def test_the_slice_with_most_errors_is_shown_and_named(tmp_path: Path) -> None:
    reference = _labels(1, slice(10, 50))
    pred = reference.copy()
    pred[6, 12:38, 12:20] = 0
    pred[9, 12:14, 12:14] = 0
    _, panels = _draw(tmp_path / "a.png", pred, reference)
    assert [
        panel.index for panel in panels if panel.plane == "axial" and panel.has_most_errors
    ] == [6]
    assert {panel.plane for panel in panels if panel.has_most_errors} == {
        "axial",
        "coronal",
        "sagittal",
    }
    _, panels = _draw(tmp_path / "a.png", reference, reference)
    assert not any(panel.has_most_errors for panel in panels)


def test_the_nearest_slice_moves_to_the_most_errors(tmp_path: Path) -> None:
    labels = np.zeros((100, 8, 8), np.uint8)
    labels[:, 2:6, 2:6] = 1
    pred = labels.copy()
    pred[40, 3, 3] = 0
    image_hu = np.zeros(labels.shape, np.int16)
    shown = [
        [panel.index for panel in draw_axial(image_hu, one, labels, tmp_path / "p.png")]
        for one in (labels, pred)
    ]
    assert shown[0][1] != 40
    assert shown[1] == [shown[0][0], 40, *shown[0][2:]]


def test_superior_and_anterior_are_up_and_anterior_is_left(tmp_path: Path) -> None:
    top_front = _labels(1, slice(20, 40), y=slice(8, 14), z=slice(15, 18))
    bottom_back = _labels(2, slice(20, 40), y=slice(36, 42), z=slice(2, 5))
    picture, panels = _draw(tmp_path / "a.png", top_front + bottom_back, None)
    for panel in panels:
        front = np.argwhere(_coloured(picture, panel, BLUE))
        back = np.argwhere(_coloured(picture, panel, ORANGE))
        height, width = panel.box_px[3] - panel.box_px[1], panel.box_px[2] - panel.box_px[0]
        if panel.plane == "sagittal":
            assert len(front) > 0
            assert (front[:, 0] < height / 2).all()
            assert (front[:, 1] < width / 2).all()
            assert (back[:, 0] > height / 2).all()
            assert (back[:, 1] > width / 2).all()
        elif len(front):
            assert (front[:, 0] < height / 2).all()
        else:
            assert (back[:, 0] > height / 2).all()


def test_a_cube_in_mm_is_drawn_square_in_every_plane(tmp_path: Path) -> None:
    cube = _labels(1, slice(20, 35), y=slice(15, 35), z=slice(5, 15))  # 60 mm along each axis
    picture, panels = _draw(tmp_path / "a.png", cube, None)
    assert {panel.plane for panel in panels} == {"axial", "coronal", "sagittal"}
    for panel in panels:
        rows, columns = np.nonzero(_coloured(picture, panel, BLUE))
        assert np.ptp(rows) == pytest.approx(np.ptp(columns), rel=0.08), panel.plane


def test_every_slice_goes_through_the_label(tmp_path: Path) -> None:
    labels = _labels(1, slice(50, 52), y=slice(40, 43), z=slice(18, 20))
    picture, panels = _draw(tmp_path / "a.png", labels, None)
    assert all(_coloured(picture, panel, BLUE).any() for panel in panels)


def test_without_labels_the_whole_volume_is_shown(tmp_path: Path) -> None:
    empty = np.zeros(SHAPE, dtype=np.uint8)
    picture, panels = _draw(tmp_path / "a.png", empty, empty)
    assert len({(panel.plane, panel.index) for panel in panels}) == 8
    for panel in panels:
        left, top, right, bottom = panel.box_px
        part = picture[top:bottom, left:right]
        assert np.ptp(part) > 100
        assert not _coloured(picture, panel, BLUE).any()


def test_the_file_replaces_an_older_one_and_leaves_nothing_beside(tmp_path: Path) -> None:
    folder = tmp_path / "a=b (1)"
    labels = _labels(1, slice(20, 30))
    for _ in range(2):
        _draw(folder / "ü.png", labels, None)
    assert os.listdir(folder) == ["ü.png"]


def test_a_volume_of_one_slice_is_drawn(tmp_path: Path) -> None:
    image_hu = np.zeros((1, 30, 40), dtype=np.int16)
    panels = overlay_montage(
        image_hu,
        np.ones_like(image_hu),
        None,
        (1.0, 1.0, 1.0),
        tmp_path / "a.png",
        "x" * 200,
        label_names=NAMES,
    )
    assert len(panels) == 8


def test_shapes_must_agree(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one shape"):
        overlay_montage(
            _body(),
            np.zeros((2, 3, 4), np.uint8),
            None,
            SPACING_MM,
            tmp_path / "a.png",
            "a",
            label_names=NAMES,
        )


def test_an_image_without_a_window_is_drawn_by_its_own_values(tmp_path: Path) -> None:
    image = np.linspace(5000, 9000, int(np.prod(SHAPE))).reshape(SHAPE)
    panels = overlay_montage(
        image,
        np.zeros(SHAPE, np.uint8),
        None,
        SPACING_MM,
        tmp_path / "a.png",
        "a",
        label_names=NAMES,
        window_hu=None,
    )
    picture = np.asarray(Image.open(tmp_path / "a.png").convert("L"))
    means = [
        picture[top:bottom, left:right].mean()
        for left, top, right, bottom in (panel.box_px for panel in panels[:4])
    ]
    assert means == sorted(means)
    assert means[-1] - means[0] > 100


def test_many_labels_are_listed_below_the_title(tmp_path: Path) -> None:
    """Fifteen names in one line would cover the title, and begin beyond the picture."""
    image = np.zeros((8, 40, 40), np.float32)
    labels = np.zeros(image.shape, np.uint8)
    tops = {}
    for num_labels in (2, 15):
        names = {value: f"label_{value}_of_an_organ" for value in range(1, num_labels + 1)}
        path = tmp_path / f"{num_labels}.png"
        panels = overlay_montage(
            image, labels, None, (5.0, 2.0, 2.0), path, "case", label_names=names
        )
        tops[num_labels] = panels[0].box_px[1]
    assert tops[15] > tops[2]
    header = np.asarray(Image.open(tmp_path / "15.png").convert("L"))[: tops[15]]
    background = header[0, 0]
    assert (header[: tops[2] - 8, 200:] == background).all(), "the title stands alone"
    is_written = (header != background).any(axis=0)
    assert not is_written[0]
    assert is_written[:400].any()
