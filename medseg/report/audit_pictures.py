"""Pictures of the audit of a data set: two slices of every case, its labels and findings."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from medseg.report.overlay import TEXT, Canvas, colour_of, grey_range
from medseg.report.plots import shortened, write_png

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
# From the worst to the least severe.
_MARKS = {"error": "#f87171", "warning": "#facc15", "information": "#8b949e"}
# Letters of 8 points that fit into the width of a case, and lines below its slices.
_LINE_LENGTH = 74
_MAX_LINES = 7


class Slice(NamedTuple):
    """One slice of a case, thinned to the resolution of a small picture.

    Attributes:
        plane: `coronal` or `axial`.
        image_hu: Image in HU, (rows, columns).
        labels: Label values of the same shape; None where there are none.
        spacing_mm: Distance of rows and of columns.
    """

    plane: str
    image_hu: np.ndarray
    labels: np.ndarray | None
    spacing_mm: tuple[float, float]


class CaseView(NamedTuple):
    """One case in the picture.

    Attributes:
        title: Name of the case.
        subtitle: Its grid and volumes.
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
    """Take the coronal and the axial slice with most label; without labels those in the middle.

    Args:
        image_hu: Oriented image, (D, H, W); of a memory map only two slices are read.
        labels: Label map of the same shape, or None.
        spacing_mm: Voxel spacing, (z, y, x).
    """
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
    """Take the slice of an axis with most label, or the middle one, every few pixels."""
    index = image_hu.shape[axis] // 2
    if labels is not None:
        areas = np.count_nonzero(labels, axis=tuple({0, 1, 2} - {axis}))
        if areas.any():
            index = int(np.argmax(areas))
    strides = [math.ceil(size / MAX_SLICE_PX) for size in image_hu.shape]
    place: list[int | slice] = [slice(None, None, stride) for stride in strides]
    place[axis] = index
    at = tuple(place)
    rows_mm, columns_mm = np.delete(np.multiply(spacing_mm, strides), axis).tolist()
    # Copies: a view would keep the volume.
    label_slice = None if labels is None else np.array(labels[at])
    return Slice(plane, np.array(image_hu[at]), label_slice, (rows_mm, columns_mm))


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
        path: PNG file to write; further ones of an earlier call are removed.
        title: Line at the top.
        label_names: Label value to name; only these values are drawn, in this order of colours.
        window_hu: Values that are drawn black and white; None takes percentiles of each slice.

    Returns:
        The files.
    """
    num_pages = math.ceil(len(cases) / _CASES_PER_PAGE)
    paths = []
    for number in range(1, 1 + num_pages):
        page = cases[(number - 1) * _CASES_PER_PAGE : number * _CASES_PER_PAGE]
        page_title = title
        if num_pages > 1:
            page_title += f" · {number} of {num_pages}"
        paths.append(_path_of_page(path, number))
        _draw_page(page, paths[-1], page_title, label_names, window_hu)
    # Pages of an earlier audit with more cases are removed: they would seem to belong to this one.
    number = num_pages + 1
    while (old := _path_of_page(path, number)).exists():
        old.unlink()
        number += 1
    return paths


def _path_of_page(path: Path, number: int) -> Path:
    """Path of the n-th picture, from 1."""
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

    A row is as high as its longest findings.
    """
    lines_by_case = [_wrapped(case.findings) for case in cases]
    num_columns = min(_COLUMNS, len(cases))
    # The upper edge of each row of cases, and the lower edge of the last one.
    tops = [_HEADER_PX]
    for first in range(0, len(cases), num_columns):
        lines_in_row = lines_by_case[first : first + num_columns]
        num_lines = max(map(len, lines_in_row))
        row_px = _TITLE_PX + _SLICES_PX + _GAP_PX + num_lines * _LINE_PX + 2 * _GAP_PX
        tops.append(tops[-1] + row_px)
    canvas = Canvas(num_columns * (_CASE_PX + _GAP_PX) + _GAP_PX, tops[-1])
    canvas.write(_GAP_PX, 14, title, fontsize=13, fontweight="bold")
    _write_legend(canvas, list(label_names.values()))
    for number, (case, lines) in enumerate(zip(cases, lines_by_case, strict=True)):
        row, column = divmod(number, num_columns)
        left = _GAP_PX + column * (_CASE_PX + _GAP_PX)
        top = tops[row]
        _write_heading(canvas, left, top, case)
        _draw_slices(canvas, left, top + _TITLE_PX, case.slices, list(label_names), window_hu)
        first_line = top + _TITLE_PX + _SLICES_PX + _GAP_PX
        for line, (colour, text) in enumerate(lines):
            canvas.write(left, first_line + line * _LINE_PX, text, color=colour, fontsize=8)
    write_png(canvas.figure, path)


def _write_legend(canvas: Canvas, names: Sequence[str]) -> None:
    """Write the names of the labels in their colours, from right to left."""
    right = canvas.width_px
    for number in reversed(range(len(names))):
        # About the width of a letter in bold type of 10 points.
        right -= 7.5 * len(names[number]) + 2 * _GAP_PX
        text = names[number].replace("_", " ")
        canvas.write(right, 17, text, color=colour_of(number), fontsize=10, fontweight="bold")


def _write_heading(canvas: Canvas, left: float, top: float, case: CaseView) -> None:
    """Write name and grid of a case, with a mark for its worst finding."""
    severities = [severity for severity, _ in case.findings]
    worst = min(severities, key=list(_MARKS).index, default="information")
    if worst == "information":
        canvas.write(left, top, "✓", color=TEXT, fontsize=11)
    else:
        canvas.write(left, top, "●", color=_MARKS[worst], fontsize=11)
    canvas.write(left + 16, top, shortened(case.title, 46), fontsize=11, fontweight="bold")
    subtitle = shortened(case.subtitle, 74)
    canvas.write(left + 16, top + 18, subtitle, color=_MARKS["information"], fontsize=8)


def _draw_slices(
    canvas: Canvas,
    left: float,
    top: float,
    slices: Sequence[Slice],
    values: list[int],
    window_hu: tuple[float, float] | None,
) -> None:
    """Draw the slices of a case side by side in one scale, vertically centred.

    The patient's right is marked.
    """
    if not slices:  # the case could not be read
        return
    sizes_mm = [np.multiply(cut.image_hu.shape, cut.spacing_mm) for cut in slices]
    width_mm = sum(size_mm[1] for size_mm in sizes_mm)
    height_mm = max(size_mm[0] for size_mm in sizes_mm)
    px_per_mm = min((_CASE_PX - _GAP_PX) / width_mm, _SLICES_PX / height_mm)
    for cut, size_mm in zip(slices, sizes_mm, strict=True):
        height, width = np.maximum(1.0, size_mm * px_per_mm)
        middle = top + _SLICES_PX / 2
        axes = canvas.draw_slice(
            (left, middle - height / 2, left + width, middle + height / 2),
            cut.image_hu,
            values,
            grey_range(cut.image_hu, window_hu),
            is_up=cut.plane == "coronal",
            outlined=cut.labels,
            width_pt=1.0,
        )
        axes.text(0.01, 0.5, "R", transform=axes.transAxes, color=TEXT, fontsize=8, va="center")
        left += width + _GAP_PX


def _wrapped(findings: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Wrap findings into lines, (colour, text); a last line stands for those that do not fit."""
    lines: list[tuple[str, str]] = []
    for severity, text in findings:
        wrapped = textwrap.wrap(text, _LINE_LENGTH, subsequent_indent="   ")
        lines += [(_MARKS[severity], line) for line in wrapped]
    if len(lines) <= _MAX_LINES:
        return lines
    return [*lines[: _MAX_LINES - 1], (_MARKS["information"], "… more in audit.csv")]
