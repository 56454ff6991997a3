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

# Up to this number of labels, each has its own line; more labels are written three to a line.
MAX_LONG = 6

# Three panels and two gaps are as wide as the picture.
_WIDTH_PX = 1280
_PANEL_PX = 424
_GAP_PX = 4
_HEADER_PX = 48
_LINE_PX = 20
_MAX_TITLE = 90
_MAX_WARNINGS = 8
# Letters of 10 points that fit into a line.
_LINE_LETTERS = 170


@dataclass(frozen=True)
class PreviewSlice:
    """One slice of an oriented volume.

    Attributes:
        plane: `axial`, `coronal` or `sagittal`.
        index: Its index along the axis of the plane.
        count: Number of slices along that axis.
        image: Values (rows, columns).
        labels: Label values (rows, columns).
        size_mm: Extent (rows, columns).
    """

    plane: str
    index: int
    count: int
    image: np.ndarray
    labels: np.ndarray
    size_mm: tuple[float, float]


def cut_slices(
    image: np.ndarray, labels: np.ndarray, spacing_mm: tuple[float, float, float]
) -> list[PreviewSlice]:
    """Copy the slice of each plane with the largest labelled area.

    Where nothing is labelled it is the middle one.

    Args:
        image: Oriented volume, (D, H, W).
        labels: Its label values, (D, H, W).
        spacing_mm: Voxel spacing in mm, (z, y, x).
    """
    # Number of labelled voxels of each slice, by axis; plane by plane, since a mask of the volume
    # would be as large as the label map.
    areas = [np.zeros(size, dtype=np.int64) for size in labels.shape]
    for index, plane in enumerate(labels):
        is_label = plane > 0
        areas[1] += np.count_nonzero(is_label, axis=1)
        columns = np.count_nonzero(is_label, axis=0)
        areas[2] += columns
        areas[0][index] = columns.sum()
    slices = []
    for plane, axis in PLANES.items():
        index = labels.shape[axis] // 2
        if areas[axis].any():
            index = int(areas[axis].argmax())
        rows_mm, columns_mm = np.delete(np.multiply(labels.shape, spacing_mm), axis).tolist()
        slices.append(
            PreviewSlice(
                plane,
                index,
                labels.shape[axis],
                np.ascontiguousarray(image.take(index, axis)),
                np.ascontiguousarray(labels.take(index, axis)),
                (rows_mm, columns_mm),
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
    """Draw the slices side by side, with texts below.

    The texts are the labels with their figures, the notes and the warnings.

    Args:
        slices: From `cut_slices`.
        path: PNG file to write.
        title: Line at the top, such as the name of the case.
        structures: Names and colours of the labels.
        figures: Label value to its figures in words.
        warnings: Sentences of the report.
        window: Values that are drawn black and white; None takes percentiles.
        notes: Further sentences, above the warnings.

    Raises:
        UserError: If the file cannot be written.
    """
    warning_lines = _warning_lines(warnings)
    num_columns = 1 if len(structures) <= MAX_LONG else 3
    label_rows = math.ceil(len(structures) / num_columns)
    sizes_px = _sizes_px(slices)
    bottom = _HEADER_PX + max(rows for rows, _ in sizes_px)
    num_lines = label_rows + len(notes) + len(warning_lines)
    canvas = Canvas(_WIDTH_PX, bottom + 24 + _LINE_PX * num_lines + 24)
    canvas.write_title(title, _HEADER_PX, _MAX_TITLE)
    _draw_slices(canvas, slices, sizes_px, structures, window)
    for number, structure in enumerate(structures):
        column, row = divmod(number, label_rows)
        x = 12 + column * _WIDTH_PX / num_columns
        y = bottom + 24 + _LINE_PX * row
        name = shortened(structure.name.replace("_", " "), 28)
        canvas.write(x, y, name, color=structure.colour, fontsize=10, fontweight="bold")
        canvas.write(x + 190, y, figures.get(structure.value, ""), fontsize=10)
    warning_colour = "#fbbf24" if warnings else "#86efac"
    below_labels = [(note, TEXT) for note in notes]
    below_labels += [(line, warning_colour) for line in warning_lines]
    for number, (line, colour) in enumerate(below_labels, start=label_rows):
        canvas.write(12, bottom + 32 + _LINE_PX * number, line, fontsize=10, color=colour)
    write_png(canvas.figure, path)


def _sizes_px(slices: Sequence[PreviewSlice]) -> list[tuple[int, int]]:
    """Size of each slice in the picture in pixels (rows, columns), all in one scale."""
    largest_mm = max(max(cut.size_mm) for cut in slices)
    px_per_mm = min(_PANEL_PX / largest_mm, 4.0)
    sizes_px = []
    for cut in slices:
        rows_mm, columns_mm = cut.size_mm
        rows, columns = round(px_per_mm * rows_mm), round(px_per_mm * columns_mm)
        sizes_px.append((max(1, rows), max(1, columns)))
    return sizes_px


def _draw_slices(
    canvas: Canvas,
    slices: Sequence[PreviewSlice],
    sizes_px: Sequence[tuple[int, int]],
    structures: Sequence[Structure],
    window: tuple[float, float] | None,
) -> None:
    """Draw the slices centred as a group, and each within the height of the highest."""
    width_px = sum(columns for _, columns in sizes_px) + _GAP_PX * (len(slices) - 1)
    height_px = max(rows for rows, _ in sizes_px)
    left = (_WIDTH_PX - width_px) / 2
    # One range for all slices, so that a tissue has one grey.
    all_values = np.concatenate([cut.image.ravel() for cut in slices])
    grey_values = grey_range(all_values, window)
    label_values = [structure.value for structure in structures]
    colours = [structure.colour for structure in structures]
    for cut, (rows, columns) in zip(slices, sizes_px, strict=True):
        upper = (2 * _HEADER_PX + height_px - rows) / 2
        axes = canvas.draw_slice(
            (left, upper, left + columns, upper + rows),
            cut.image,
            label_values,
            grey_values,
            is_up=cut.plane != "axial",
            outlined=cut.labels,
            width_pt=1.3,
            colours=colours,
        )
        draw_marks(axes, cut.plane, f"{cut.plane} {cut.index + 1}/{cut.count}")
        left += columns + _GAP_PX


def _warning_lines(warnings: Sequence[str]) -> list[str]:
    """Wrap the first warnings to lines, and count the rest."""
    lines: list[str] = []
    for warning in warnings[:_MAX_WARNINGS]:
        lines += textwrap.wrap(warning, _LINE_LETTERS, initial_indent="• ", subsequent_indent="   ")
    num_more = len(warnings) - _MAX_WARNINGS
    if num_more > 0:
        lines.append(f"… and {num_more} more, see the report")
    return lines or ["no warnings"]
