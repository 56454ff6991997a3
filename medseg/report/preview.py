"""Preview of a case: a slice of each plane with outlines and measurements, and the warnings."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medseg.io.label_table import Structure
from medseg.report.overlay import PLANES, TEXT, Canvas, draw_marks, grey_range
from medseg.report.plots import shortened, write_png

# Up to this number, the labels are written below each other; more are written in three columns.
MAX_FULL_LINES = 6

# Layout of the picture, which is as wide as three panels and two gaps. A panel holds a slice.
_WIDTH_PX = 1280
_PANEL_PX = 424
_GAP_PX = 4
_HEADER_PX = 48
_LINE_PX = 20
# Largest number of characters of the title, and largest number of warnings.
_MAX_TITLE = 90
_MAX_WARNINGS = 8
# Number of characters of 10 points that fit into a line.
_LINE_LETTERS = 170


@dataclass(frozen=True)
class PreviewSlice:
    """One slice of an oriented volume.

    Attributes:
        plane: `axial`, `coronal` or `sagittal`.
        index: Index of the slice along the axis perpendicular to the plane.
        num_slices: Number of slices along that axis.
        image: Values (rows, columns).
        labels: Label values (rows, columns).
        size_mm: Extent along rows and along columns: height and width.
    """

    plane: str
    index: int
    num_slices: int
    image: np.ndarray
    labels: np.ndarray
    size_mm: tuple[float, float]


def cut_slices(
    image: np.ndarray, labels: np.ndarray, spacing_mm: tuple[float, float, float]
) -> list[PreviewSlice]:
    """Copy the slice of each plane with the largest labelled area.

    Without any label these are the slices in the middle.

    Args:
        image: Oriented volume, (D, H, W).
        labels: Label values of the volume, (D, H, W).
        spacing_mm: Voxel spacing in mm, (z, y, x).
    """
    # Number of labelled voxels of each slice, by axis. They are counted one axial slice after the
    # other, since a mask of the volume would be as large as the label map.
    num_voxels = [np.zeros(size, dtype=np.int64) for size in labels.shape]
    for index, axial_slice in enumerate(labels):
        is_label = axial_slice > 0
        num_voxels[1] += np.count_nonzero(is_label, axis=1)
        num_in_columns = np.count_nonzero(is_label, axis=0)
        num_voxels[2] += num_in_columns
        num_voxels[0][index] = num_in_columns.sum()
    extent_mm = np.multiply(labels.shape, spacing_mm)
    slices = []
    for plane, axis in PLANES.items():
        index = labels.shape[axis] // 2
        if num_voxels[axis].any():
            index = int(num_voxels[axis].argmax())
        height_mm, width_mm = np.delete(extent_mm, axis).tolist()
        slices.append(
            PreviewSlice(
                plane=plane,
                index=index,
                num_slices=labels.shape[axis],
                # Copies, since views would keep the volumes in memory.
                image=np.ascontiguousarray(image.take(index, axis)),
                labels=np.ascontiguousarray(labels.take(index, axis)),
                size_mm=(height_mm, width_mm),
            )
        )
    return slices


def draw_preview(
    slices: Sequence[PreviewSlice],
    path: Path,
    title: str,
    structures: Sequence[Structure],
    figures: Mapping[int, str],
    warnings: Sequence[str],
    window: tuple[float, float] | None,
    notes: Sequence[str] = (),
) -> None:
    """Draw the slices side by side, with texts below: labels with figures, notes, warnings.

    Args:
        slices: From `cut_slices`.
        path: PNG file to write.
        title: Line at the top, such as the name of the case.
        structures: Names, values and colours of the labels.
        figures: Label value to its measurements, as text.
        warnings: Sentences of the report.
        window: Values that are drawn black and white; None takes percentiles.
        notes: Further sentences, above the warnings.

    Raises:
        UserError: If the file cannot be written.
    """
    note_lines: list[str] = []
    for note in notes:
        note_lines += textwrap.wrap(note, _LINE_LETTERS, subsequent_indent="   ")
    warning_lines = _warning_lines(warnings)
    num_columns = 1 if len(structures) <= MAX_FULL_LINES else 3
    num_label_lines = math.ceil(len(structures) / num_columns)
    sizes_px = _sizes_px(slices)
    slices_bottom_px = _HEADER_PX + max(height_px for height_px, _ in sizes_px)
    num_lines = num_label_lines + len(note_lines) + len(warning_lines)
    canvas = Canvas(_WIDTH_PX, slices_bottom_px + 24 + _LINE_PX * num_lines + 24)
    canvas.write_title(title, _HEADER_PX, _MAX_TITLE)
    _draw_slices(canvas, slices, sizes_px, structures, window)
    for number, structure in enumerate(structures):
        # Columns are filled one after the other.
        column, line = divmod(number, num_label_lines)
        left_px = 12 + column * _WIDTH_PX / num_columns
        top_px = slices_bottom_px + 24 + _LINE_PX * line
        # A name of 28 bold characters fits into the 190 pixels before the figures.
        name = shortened(structure.name.replace("_", " "), max_letters=28)
        canvas.write(left_px, top_px, name, color=structure.colour, fontsize=10, fontweight="bold")
        canvas.write(left_px + 190, top_px, figures.get(structure.value, ""), fontsize=10)
    warning_colour = "#fbbf24" if warnings else "#86efac"
    coloured_lines = [(line, TEXT) for line in note_lines]
    coloured_lines += [(line, warning_colour) for line in warning_lines]
    for number, (text, colour) in enumerate(coloured_lines, start=num_label_lines):
        # Eight pixels below the labels.
        top_px = slices_bottom_px + 32 + _LINE_PX * number
        canvas.write(12, top_px, text, fontsize=10, color=colour)
    write_png(canvas.figure, path)


def _sizes_px(slices: Sequence[PreviewSlice]) -> list[tuple[int, int]]:
    """Choose height and width of each slice in the picture, all in one scale."""
    largest_mm = max(max(view.size_mm) for view in slices)
    # A small volume is not enlarged to the size of a panel: a voxel would be a large square.
    px_per_mm = min(_PANEL_PX / largest_mm, 4.0)
    sizes_px = []
    for view in slices:
        height_mm, width_mm = view.size_mm
        # At least a pixel: a volume of one slice is drawn too.
        height_px = max(1, round(px_per_mm * height_mm))
        width_px = max(1, round(px_per_mm * width_mm))
        sizes_px.append((height_px, width_px))
    return sizes_px


def _draw_slices(
    canvas: Canvas,
    slices: Sequence[PreviewSlice],
    sizes_px: Sequence[tuple[int, int]],
    structures: Sequence[Structure],
    window: tuple[float, float] | None,
) -> None:
    """Draw the slices side by side, centred horizontally as a group and vertically each."""
    group_width_px = sum(width_px for _, width_px in sizes_px) + _GAP_PX * (len(slices) - 1)
    group_height_px = max(height_px for height_px, _ in sizes_px)
    left_px = (_WIDTH_PX - group_width_px) / 2
    # One range for all slices, so that a tissue has the same grey in each of them.
    all_values = np.concatenate([view.image.ravel() for view in slices])
    black_and_white = grey_range(all_values, window)
    label_values = [structure.value for structure in structures]
    colours = [structure.colour for structure in structures]
    for view, (height_px, width_px) in zip(slices, sizes_px, strict=True):
        top_px = _HEADER_PX + (group_height_px - height_px) / 2
        axes = canvas.draw_slice(
            (left_px, top_px, left_px + width_px, top_px + height_px),
            view.image,
            label_values,
            black_and_white,
            is_up=view.plane != "axial",
            outlined=view.labels,
            width_pt=1.3,
            colours=colours,
        )
        caption = f"{view.plane} {view.index + 1}/{view.num_slices}"
        draw_marks(axes, view.plane, caption)
        left_px += width_px + _GAP_PX


def _warning_lines(warnings: Sequence[str]) -> list[str]:
    """Wrap the first warnings to lines, and count the others in a last line."""
    lines: list[str] = []
    for warning in warnings[:_MAX_WARNINGS]:
        lines += textwrap.wrap(warning, _LINE_LETTERS, initial_indent="• ", subsequent_indent="   ")
    num_more = len(warnings) - _MAX_WARNINGS
    if num_more > 0:
        lines.append(f"… and {num_more} more, see the report")
    return lines or ["no warnings"]
