"""A montage of slices with the prediction filled and the reference outlined, in radiological view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from medseg.geometry.box import VoxelBox
from medseg.pictures.png import write_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Share of the labelled voxels that lie below each slice: every slice shows label, each lung gets a sagittal one.
_FRACTIONS = {"axial": (0.08, 0.36, 0.64, 0.92), "coronal": (0.3, 0.65), "sagittal": (0.25, 0.75)}
_ROWS = (("axial",), ("coronal", "sagittal"))
_AXIS = {"axial": 0, "coronal": 1, "sagittal": 2}
_VIEW_MARGIN_MM = 20.0
_MIN_VIEW_MM = 150.0

_WIDTH_PX = 1280
_MAX_ROW_PX = 400
_HEADER_PX = 56
_GAP_PX = 4
_DPI = 100
_MAX_TITLE = 48
# Shared with the other pictures of cases.
BACKGROUND = "#0d1117"
TEXT = "#e6edf3"
COLOURS = ("#38bdf8", "#fb923c", "#4ade80", "#f472b6", "#facc15", "#a78bfa", "#2dd4bf", "#f87171")
_FILL_OPACITY = 0.32


@dataclass(frozen=True)
class Panel:
    """One slice in the picture.

    Attributes:
        plane: `axial`, `coronal` or `sagittal`.
        index: Index of the slice in the oriented volume.
        box_px: Left, top, right and bottom of the panel in the picture, in pixels.
    """

    plane: str
    index: int
    box_px: tuple[int, int, int, int]


def overlay_montage(
    image_hu: np.ndarray,
    pred: np.ndarray,
    reference: np.ndarray | None,
    spacing_mm: tuple[float, float, float],
    path: Path,
    title: str,
    *,
    label_names: Mapping[int, str],
    window_hu: tuple[float, float] = (-1000.0, 400.0),
) -> list[Panel]:
    """Draw axial, coronal and sagittal slices through the labels: prediction filled, reference as a line.

    The volume must be oriented (z to Superior, y to Posterior, x to Left). The patient's right is on the viewer's left,
    superior is up, anterior is up or left. Without any label the slices are spread over the whole volume.

    Args:
        image_hu: Image in HU, (D, H, W).
        pred: Predicted label values, (D, H, W); 0 is background.
        reference: Reference label values, (D, H, W), or None.
        spacing_mm: Voxel spacing in mm, (z, y, x).
        path: PNG file to write.
        title: Line at the top, e.g. the name of the case.
        label_names: Label value to name; only these values are drawn, in this order of colours.
        window_hu: HU that are drawn black and white.

    Returns:
        The panels in the order of drawing.

    Raises:
        ValueError: If the arrays differ in shape.
    """
    if pred.shape != image_hu.shape or (reference is not None and reference.shape != image_hu.shape):
        raise ValueError("image and labels must have one shape")
    from matplotlib.figure import Figure

    is_label = pred > 0 if reference is None else (pred > 0) | (reference > 0)
    view = _view(is_label, spacing_mm)
    sizes_mm = {
        plane: tuple(
            length * step for axis, (length, step) in enumerate(zip(view.shape, spacing_mm, strict=True)) if axis != _AXIS[plane]
        )
        for plane in _AXIS
    }
    panels, height_px = _layout(is_label, sizes_mm)
    figure = Figure(figsize=(_WIDTH_PX / _DPI, height_px / _DPI), dpi=_DPI, facecolor=BACKGROUND)
    _draw_header(figure, height_px, title, label_names, reference is not None)
    for panel in panels:
        left, top, right, bottom = panel.box_px
        axes = figure.add_axes((left / _WIDTH_PX, 1 - bottom / height_px, (right - left) / _WIDTH_PX, (bottom - top) / height_px))
        selection = list(view.slices())
        axis = _AXIS[panel.plane]
        selection[axis] = slice(panel.index, panel.index + 1)
        at = tuple(selection)
        _draw_slice(
            axes,
            image_hu[at].squeeze(axis),
            pred[at].squeeze(axis),
            None if reference is None else reference[at].squeeze(axis),
            list(label_names),
            window_hu,
            is_up=panel.plane != "axial",
        )
        _draw_marks(axes, panel, image_hu.shape[axis])
    write_png(figure, path)
    return panels


def _view(is_label: np.ndarray, spacing_mm: tuple[float, float, float]) -> VoxelBox:
    """Box that is shown: the labels with a margin, of a least size; the whole volume where there is no label."""
    box = VoxelBox.from_mask(is_label)
    if box is None:
        return VoxelBox.full(is_label.shape)
    margin = [round(_VIEW_MARGIN_MM / step) for step in spacing_mm]
    least = [round(_MIN_VIEW_MM / step) for step in spacing_mm]
    return box.expanded(margin).at_least(least).clipped(is_label.shape)


def _layout(is_label: np.ndarray, sizes_mm: Mapping[str, tuple[float, ...]]) -> tuple[list[Panel], int]:
    """Rows of panels, each as large as the width of the picture allows; and the height of the picture in pixels."""
    panels: list[Panel] = []
    top = _HEADER_PX
    for row in _ROWS:
        slices = [(plane, index) for plane in row for index in _slice_indices(is_label, plane)]
        width_mm = sum(sizes_mm[plane][1] for plane, _ in slices)
        height_mm = max(sizes_mm[plane][0] for plane, _ in slices)
        free_px = _WIDTH_PX - _GAP_PX * (len(slices) - 1)
        px_per_mm = min(free_px / width_mm, _MAX_ROW_PX / height_mm)
        left = (free_px - width_mm * px_per_mm) / 2
        for plane, index in slices:
            rows_mm, columns_mm = sizes_mm[plane]
            right, bottom = left + columns_mm * px_per_mm, top + max(1.0, rows_mm * px_per_mm)
            panels.append(Panel(plane, index, (round(left), top, max(round(left) + 1, round(right)), round(bottom))))
            left = right + _GAP_PX
        top = max(panel.box_px[3] for panel in panels) + _GAP_PX
    return panels, top - _GAP_PX


def _slice_indices(is_label: np.ndarray, plane: str) -> list[int]:
    axis = _AXIS[plane]
    others = tuple(other for other in range(3) if other != axis)
    areas = np.count_nonzero(is_label, axis=others)
    if not areas.any():
        areas = np.ones_like(areas)
    share = np.cumsum(areas) / areas.sum()
    return [int(np.searchsorted(share, fraction)) for fraction in _FRACTIONS[plane]]


def _draw_slice(
    axes: Axes,
    image_hu: np.ndarray,
    pred: np.ndarray,
    reference: np.ndarray | None,
    values: list[int],
    window_hu: tuple[float, float],
    *,
    is_up: bool,
) -> None:
    """Draw one slice (rows, columns); `is_up` says that rows run upwards."""
    from matplotlib.colors import to_rgba

    rows, columns = image_hu.shape
    extent = (0, columns, 0, rows) if is_up else (0, columns, rows, 0)
    place: dict[str, Any] = {"extent": extent, "origin": "lower" if is_up else "upper", "aspect": "auto"}
    low_hu, high_hu = window_hu
    grey = np.clip(image_hu.astype(np.float32), low_hu, high_hu)
    axes.imshow(grey, cmap="gray", vmin=low_hu, vmax=high_hu, interpolation="hanning", **place)
    colour = np.zeros((rows, columns, 4))
    for number, value in enumerate(values):
        colour[pred == value] = to_rgba(COLOURS[number % len(COLOURS)], _FILL_OPACITY)
    axes.imshow(colour, interpolation="nearest", **place)
    if reference is not None:
        draw_outlines(axes, reference, values, width_pt=1.1)
    axes.set_xlim(0, columns)
    axes.set_ylim(extent[2], extent[3])
    axes.axis("off")


def draw_outlines(axes: Axes, labels: np.ndarray, values: Sequence[int], *, width_pt: float) -> None:
    """Draw a line around each label of a slice (rows, columns) whose pixels have the size 1; `values` in the order of colours."""
    rows, columns = labels.shape
    # The padding closes the lines of labels that are cut by the edge of the picture.
    centres_y, centres_x = np.arange(-1, rows + 1) + 0.5, np.arange(-1, columns + 1) + 0.5
    for number, value in enumerate(values):
        inside = np.pad(labels == value, 1)
        if inside.any():
            line = COLOURS[number % len(COLOURS)]
            axes.contour(centres_x, centres_y, inside, levels=[0.5], colors=[line], linewidths=width_pt)


def _draw_marks(axes: Axes, panel: Panel, num_slices: int) -> None:
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=2.5, foreground="black")]
    sides = ("A", "P") if panel.plane == "sagittal" else ("R", "L")
    style: dict[str, Any] = {"transform": axes.transAxes, "color": TEXT, "path_effects": halo}
    axes.text(0.015, 0.5, sides[0], ha="left", va="center", fontsize=11, fontweight="bold", **style)
    axes.text(0.985, 0.5, sides[1], ha="right", va="center", fontsize=11, fontweight="bold", **style)
    axes.text(0.015, 0.015, f"{panel.plane} {panel.index + 1}/{num_slices}", ha="left", va="bottom", fontsize=8, **style)


def _draw_header(figure: Figure, height_px: int, title: str, label_names: Mapping[int, str], has_reference: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    middle = 1 - _HEADER_PX / 2 / height_px
    if len(title) > _MAX_TITLE:
        title = f"{title[: _MAX_TITLE - 1]}…"
    figure.text(12 / _WIDTH_PX, middle, title, color=TEXT, fontsize=14, fontweight="bold", va="center", parse_math=False)
    keys: list[Patch | Line2D] = [
        Patch(facecolor=COLOURS[number % len(COLOURS)], label=name.replace("_", " "))
        for number, name in enumerate(label_names.values())
    ]
    keys.append(Patch(facecolor="#8b949e", alpha=0.6, label="prediction"))
    if has_reference:
        keys.append(Line2D([], [], color="#c9d1d9", linewidth=1.5, label="reference"))
    figure.legend(
        handles=keys,
        loc="center right",
        bbox_to_anchor=(1 - 4 / _WIDTH_PX, middle),
        ncols=len(keys),
        frameon=False,
        labelcolor=TEXT,
        fontsize=11,
        handlelength=1.4,
        columnspacing=1.4,
        borderpad=0,
    )
