"""Pictures of the audit of a data set: two slices of every case with labels, and its findings."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from medseg.report.overlay import TEXT, Canvas, colour_of, grey_range, legend_lines
from medseg.report.plots import shortened, write_png

# Largest number of rows and of columns of a slice; larger slices are thinned.
MAX_SLICE_PX = 256

# Layout of a page: cases in columns, each with a title, its slices, and lines of findings.
_COLUMNS = 3
_CASES_PER_PAGE = 24
_CASE_PX = 480
_SLICES_PX = 210
_TITLE_PX = 38
_LINE_PX = 14
_GAP_PX = 10
_HEADER_PX = 50
_LEGEND_LINE_PX = 20
# Width of a bold character of 13 points of the title, and of one of 10 points of the legend.
_TITLE_LETTER_PX = 12
_LEGEND_LETTER_PX = 8.5
# Severity of a finding to its colour, the most severe first.
_SEVERITY_COLOURS = {"error": "#f87171", "warning": "#facc15", "information": "#8b949e"}
# Number of characters of 8 points that fit into a line below the slices of a case, and largest
# number of these lines.
_LINE_LENGTH = 74
_MAX_LINES = 7


class Slice(NamedTuple):
    """One slice of a case, thinned to the resolution of a small picture.

    Attributes:
        plane: `coronal` or `axial`.
        image_hu: Image in HU, or in the units of another modality, (rows, columns).
        labels: Label values of the same shape; None for a case without labels.
        spacing_mm: Distance of neighbouring rows, and of neighbouring columns, in mm.
    """

    plane: str
    image_hu: np.ndarray
    labels: np.ndarray | None
    spacing_mm: tuple[float, float]


class CaseView(NamedTuple):
    """One case in the picture.

    Attributes:
        title: Name of the case.
        subtitle: Text about its grid and volumes.
        slices: Slices from left to right; empty for a case that could not be read.
        findings: Pairs of severity (`error`, `warning`, `information`) and text.
    """

    title: str
    subtitle: str
    slices: Sequence[Slice]
    findings: Sequence[tuple[str, str]]


def cut_slices(
    image_hu: np.ndarray, labels: np.ndarray | None, spacing_mm: tuple[float, float, float]
) -> tuple[Slice, Slice]:
    """Copy the coronal and the axial slice with the largest labelled area.

    Without labels these are the slices in the middle.

    Args:
        image_hu: Oriented image, (D, H, W); of a memory map only two slices are read.
        labels: Label map of the same shape, or None.
        spacing_mm: Voxel spacing in mm, (z, y, x).
    """
    # The axes are (z, y, x). Coronal slices are perpendicular to y, axial ones to z.
    coronal = _cut_slice("coronal", 1, image_hu, labels, spacing_mm)
    axial = _cut_slice("axial", 0, image_hu, labels, spacing_mm)
    return coronal, axial


def _cut_slice(
    plane: str,
    axis: int,
    image_hu: np.ndarray,
    labels: np.ndarray | None,
    spacing_mm: tuple[float, float, float],
) -> Slice:
    """Copy the slice across an axis with the largest labelled area, thinned to `MAX_SLICE_PX`."""
    index = image_hu.shape[axis] // 2
    if labels is not None:
        other_axes = tuple({0, 1, 2} - {axis})
        num_voxels = np.count_nonzero(labels, axis=other_axes)
        if num_voxels.any():
            index = int(np.argmax(num_voxels))
    # Every n-th voxel along the two axes of the slice, and one index along the third.
    strides = [math.ceil(size / MAX_SLICE_PX) for size in image_hu.shape]
    indices: list[int | slice] = [slice(None, None, stride) for stride in strides]
    indices[axis] = index
    index_tuple = tuple(indices)
    row_mm, column_mm = np.delete(np.multiply(spacing_mm, strides), axis).tolist()
    # Copies: a view would keep the volume in memory.
    label_slice = None if labels is None else np.array(labels[index_tuple])
    return Slice(plane, np.array(image_hu[index_tuple]), label_slice, (row_mm, column_mm))


def audit_pictures(
    cases: Sequence[CaseView],
    path: Path,
    title: str,
    *,
    label_names: Mapping[int, str],
    window_hu: tuple[float, float] | None,
) -> list[Path]:
    """Draw all cases, 24 in a picture; the second picture is called `<name>-2.png`.

    Args:
        cases: The cases, at least one, in the order of drawing.
        path: PNG file of the first picture; surplus pictures of an earlier call are removed.
        title: Line at the top.
        label_names: Label value to name; only these values are drawn, in this order of colours.
        window_hu: Values that are drawn black and white; None takes percentiles of each slice.

    Returns:
        The files.
    """
    num_pages = math.ceil(len(cases) / _CASES_PER_PAGE)
    paths = []
    for number in range(1, 1 + num_pages):
        end = number * _CASES_PER_PAGE
        page = cases[end - _CASES_PER_PAGE : end]
        page_title = title
        if num_pages > 1:
            page_title += f" · {number} of {num_pages}"
        paths.append(_path_of_page(path, number))
        _draw_page(page, paths[-1], page_title, label_names, window_hu)
    # Pages of an earlier audit with more cases are removed: they would seem to belong to this one.
    number = num_pages + 1
    while (old_path := _path_of_page(path, number)).exists():
        old_path.unlink()
        number += 1
    return paths


def _path_of_page(path: Path, number: int) -> Path:
    """Path of a picture by its number, from 1."""
    if number == 1:
        return path
    return path.with_name(f"{path.stem}-{number}{path.suffix}")


def _draw_page(
    cases: Sequence[CaseView],
    path: Path,
    title: str,
    label_names: Mapping[int, str],
    window_hu: tuple[float, float] | None,
) -> None:
    """Draw one picture: a header, and rows of cases.

    The height of a row follows from its case with the most lines of findings.
    """
    lines_by_case = [_finding_lines(case.findings) for case in cases]
    num_columns = min(_COLUMNS, len(cases))
    width_px = num_columns * (_CASE_PX + _GAP_PX) + _GAP_PX
    names = [name.replace("_", " ") for name in label_names.values()]
    widths_px = [_LEGEND_LETTER_PX * len(name) + 2 * _GAP_PX for name in names]
    beside_px = width_px - _GAP_PX - _TITLE_LETTER_PX * len(title)
    legend = legend_lines(widths_px, beside_px, width_px - _GAP_PX)
    # The upper edge of each row of cases, and the lower edge of the last one.
    tops_px = [_HEADER_PX + _LEGEND_LINE_PX * (len(legend) - 1)]
    for first in range(0, len(cases), num_columns):
        lines_in_row = lines_by_case[first : first + num_columns]
        num_lines = max(map(len, lines_in_row))
        row_px = _TITLE_PX + _SLICES_PX + _GAP_PX + num_lines * _LINE_PX + 2 * _GAP_PX
        tops_px.append(tops_px[-1] + row_px)
    canvas = Canvas(width_px, tops_px[-1])
    canvas.write(_GAP_PX, 14, title, fontsize=13, fontweight="bold")
    for number, places in enumerate(legend):
        _write_legend(canvas, 17 + number * _LEGEND_LINE_PX, places, names, widths_px)
    for number, (case, lines) in enumerate(zip(cases, lines_by_case, strict=True)):
        row, column = divmod(number, num_columns)
        left_px = _GAP_PX + column * (_CASE_PX + _GAP_PX)
        top_px = tops_px[row]
        _write_heading(canvas, left_px, top_px, case)
        slices_px = top_px + _TITLE_PX
        _draw_slices(canvas, left_px, slices_px, case.slices, list(label_names), window_hu)
        lines_px = slices_px + _SLICES_PX + _GAP_PX
        for line, (colour, text) in enumerate(lines):
            canvas.write(left_px, lines_px + line * _LINE_PX, text, color=colour, fontsize=8)
    write_png(canvas.figure, path)


def _write_legend(
    canvas: Canvas,
    top_px: float,
    line: Sequence[int],
    names: Sequence[str],
    widths_px: Sequence[float],
) -> None:
    """Write names of labels in their colours, aligned at the right end of the header.

    Args:
        canvas: The picture.
        top_px: Upper edge of the line.
        line: Places of its labels among the names.
        names: Names of all labels.
        widths_px: Width of each name with a gap.
    """
    left_px = canvas.width_px - sum(widths_px[number] for number in line)
    for number in line:
        style = {"color": colour_of(number), "fontsize": 10, "fontweight": "bold"}
        canvas.write(left_px, top_px, names[number], **style)
        left_px += widths_px[number]


def _write_heading(canvas: Canvas, left_px: float, top_px: float, case: CaseView) -> None:
    """Write name and grid of a case, with a mark for its worst finding."""
    severities = [severity for severity, _ in case.findings]
    worst = min(severities, key=list(_SEVERITY_COLOURS).index, default="information")
    # Information needs no action: the case gets the same mark as one without a finding.
    if worst == "information":
        canvas.write(left_px, top_px, "✓", color=TEXT, fontsize=11)
    else:
        canvas.write(left_px, top_px, "●", color=_SEVERITY_COLOURS[worst], fontsize=11)
    title = shortened(case.title, max_letters=46)
    canvas.write(left_px + 16, top_px, title, fontsize=11, fontweight="bold")
    subtitle = shortened(case.subtitle, max_letters=74)
    grey = _SEVERITY_COLOURS["information"]
    canvas.write(left_px + 16, top_px + 18, subtitle, color=grey, fontsize=8)


def _draw_slices(
    canvas: Canvas,
    left_px: float,
    top_px: float,
    slices: Sequence[Slice],
    values: list[int],
    window_hu: tuple[float, float] | None,
) -> None:
    """Draw the slices of a case side by side in one scale, vertically centred.

    The patient's right is marked.
    """
    if not slices:  # the case could not be read
        return
    # Height and width of each slice.
    sizes_mm = [np.multiply(view.image_hu.shape, view.spacing_mm) for view in slices]
    width_mm = sum(size_mm[1] for size_mm in sizes_mm)
    height_mm = max(size_mm[0] for size_mm in sizes_mm)
    px_per_mm = min((_CASE_PX - _GAP_PX) / width_mm, _SLICES_PX / height_mm)
    middle_px = top_px + _SLICES_PX / 2
    for view, size_mm in zip(slices, sizes_mm, strict=True):
        # At least a pixel: a volume of one slice is drawn too.
        height_px, width_px = np.maximum(1.0, size_mm * px_per_mm)
        upper_px = middle_px - height_px / 2
        axes = canvas.draw_slice(
            (left_px, upper_px, left_px + width_px, upper_px + height_px),
            view.image_hu,
            values,
            grey_range(view.image_hu, window_hu),
            is_up=view.plane == "coronal",
            outlined=view.labels,
            width_pt=1.0,
        )
        axes.text(0.01, 0.5, "R", transform=axes.transAxes, color=TEXT, fontsize=8, va="center")
        left_px += width_px + _GAP_PX


def _finding_lines(findings: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Wrap findings into lines, (colour, text); if they do not fit, the last line says so."""
    lines: list[tuple[str, str]] = []
    for severity, text in findings:
        wrapped_texts = textwrap.wrap(text, _LINE_LENGTH, subsequent_indent="   ")
        lines += [(_SEVERITY_COLOURS[severity], line) for line in wrapped_texts]
    if len(lines) <= _MAX_LINES:
        return lines
    last_line = (_SEVERITY_COLOURS["information"], "… more in audit.csv")
    return [*lines[: _MAX_LINES - 1], last_line]
