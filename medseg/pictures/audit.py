"""What a data set looks like: two slices of every case with its labels and what the audit found."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from medseg.pictures.overlay import BACKGROUND, COLOURS, TEXT, draw_outlines
from medseg.pictures.png import write_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_SLICE_PX = 256

_COLUMNS = 3
_CARDS_PER_PAGE = 24
_CARD_PX = 480
_SLICES_PX = 210
_TITLE_PX = 38
_LINE_PX = 14
_GAP_PX = 10
_HEADER_PX = 50
_DPI = 100
_MARKS = {"error": "#f87171", "warning": "#facc15", "note": "#8b949e"}
_LINE_LENGTH = 80
_MAX_LINES = 7


@dataclass(frozen=True)
class Slice:
    """One slice of a case, thinned out to what a small picture can show.

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


@dataclass(frozen=True)
class Card:
    """One case in the picture.

    Attributes:
        title: Name of the case.
        subtitle: Its grid and volumes.
        slices: What is shown; may be empty for a case that could not be read.
        findings: Pairs of severity (`error`, `warning`, `note`) and text.
    """

    title: str
    subtitle: str
    slices: Sequence[Slice]
    findings: Sequence[tuple[str, str]]


def cut_slices(image_hu: np.ndarray, labels: np.ndarray | None, spacing_mm: tuple[float, float, float]) -> tuple[Slice, Slice]:
    """Take the coronal and the axial slice that show most label; without labels those in the middle.

    Args:
        image_hu: Oriented image, (D, H, W); of a memory map only two slices are read.
        labels: Label map of the same shape, or None.
        spacing_mm: Voxel spacing, (z, y, x).
    """
    shown = []
    for plane, axis in (("coronal", 1), ("axial", 0)):
        index = image_hu.shape[axis] // 2
        if labels is not None:
            areas = np.count_nonzero(labels, axis=tuple({0, 1, 2} - {axis}))
            index = int(np.argmax(areas)) if areas.any() else index
        at: list[Any] = [slice(None)] * 3
        at[axis] = index
        sizes = [size for other, size in enumerate(image_hu.shape) if other != axis]
        steps_mm = [step for other, step in enumerate(spacing_mm) if other != axis]
        strides = [math.ceil(size / MAX_SLICE_PX) for size in sizes]
        thin = (slice(None, None, strides[0]), slice(None, None, strides[1]))
        shown.append(
            Slice(
                plane,
                np.array(image_hu[tuple(at)][thin]),
                None if labels is None else np.array(labels[tuple(at)][thin]),
                (steps_mm[0] * strides[0], steps_mm[1] * strides[1]),
            )
        )
    return shown[0], shown[1]


def audit_pictures(
    cards: Sequence[Card], path: Path, title: str, *, label_names: Mapping[int, str], window_hu: tuple[float, float]
) -> list[Path]:
    """Draw all cases, 24 on a picture; the second picture is called `<name>-2.png`.

    Args:
        cards: The cases, at least one, in the order of drawing.
        path: PNG file to write; further ones of an earlier call are removed.
        title: Line at the top.
        label_names: Label value to name; only these values are drawn, in this order of colours.
        window_hu: HU that are drawn black and white.

    Returns:
        The files.
    """
    pages = [cards[first : first + _CARDS_PER_PAGE] for first in range(0, len(cards), _CARDS_PER_PAGE)]
    paths = [path, *(path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(2, len(pages) + 1))]
    for number, (page, file) in enumerate(zip(pages, paths, strict=True), start=1):
        place = f" · {number} of {len(pages)}" if len(pages) > 1 else ""
        _draw_page(page, file, title + place, label_names, window_hu)
    number = len(pages) + 1
    while (old := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        old.unlink()
        number += 1
    return paths


def _draw_page(
    cards: Sequence[Card], path: Path, title: str, label_names: Mapping[int, str], window_hu: tuple[float, float]
) -> None:
    from matplotlib.figure import Figure

    texts = [_wrapped(card.findings) for card in cards]
    columns = min(_COLUMNS, len(cards))
    tops, top = [], _HEADER_PX
    for first in range(0, len(cards), columns):
        tops.append(top)
        num_lines = max(len(text) for text in texts[first : first + columns])
        top += _TITLE_PX + _SLICES_PX + _GAP_PX + num_lines * _LINE_PX + 2 * _GAP_PX
    width_px, height_px = columns * (_CARD_PX + _GAP_PX) + _GAP_PX, top
    figure = Figure(figsize=(width_px / _DPI, height_px / _DPI), dpi=_DPI, facecolor=BACKGROUND)

    def write(x_px: float, y_px: float, text: str, **style: Any) -> None:
        figure.text(x_px / width_px, 1 - y_px / height_px, text, **{"color": TEXT, "va": "top", "parse_math": False, **style})

    write(_GAP_PX, 14, title, fontsize=13, fontweight="bold")
    x_px = float(width_px)
    for number, name in reversed(list(enumerate(label_names.values()))):
        x_px -= 7.5 * len(name) + 2 * _GAP_PX
        write(x_px, 17, name.replace("_", " "), color=COLOURS[number % len(COLOURS)], fontsize=10, fontweight="bold")
    for number, (card, text) in enumerate(zip(cards, texts, strict=True)):
        left, top = _GAP_PX + number % columns * (_CARD_PX + _GAP_PX), tops[number // columns]
        worst = min((severity for severity, _ in card.findings), key=list(_MARKS).index, default="note")
        write(left, top, "✓" if worst == "note" else "●", color=TEXT if worst == "note" else _MARKS[worst], fontsize=11)
        write(left + 16, top, _shortened(card.title, 48), fontsize=11, fontweight="bold")
        write(left + 16, top + 18, _shortened(card.subtitle, 74), color=_MARKS["note"], fontsize=8)
        shown_mm = [(one.image_hu.shape[0] * one.spacing_mm[0], one.image_hu.shape[1] * one.spacing_mm[1]) for one in card.slices]
        if shown_mm:
            px_per_mm = min(
                (_CARD_PX - _GAP_PX) / sum(columns_mm for _, columns_mm in shown_mm),
                _SLICES_PX / max(rows_mm for rows_mm, _ in shown_mm),
            )
            x_px = left
            for one, (rows_mm, columns_mm) in zip(card.slices, shown_mm, strict=True):
                size = max(1.0, columns_mm * px_per_mm), max(1.0, rows_mm * px_per_mm)
                bottom = height_px - top - _TITLE_PX - (_SLICES_PX + size[1]) / 2
                place = (x_px / width_px, bottom / height_px, size[0] / width_px, size[1] / height_px)
                _draw_slice(figure.add_axes(place), one, list(label_names), window_hu)
                x_px += size[0] + _GAP_PX
        for line, (colour, words) in enumerate(text):
            write(left, top + _TITLE_PX + _SLICES_PX + _GAP_PX + line * _LINE_PX, words, color=colour, fontsize=8)
    write_png(figure, path)


def _draw_slice(axes: Axes, shown: Slice, values: list[int], window_hu: tuple[float, float]) -> None:
    rows, columns = shown.image_hu.shape
    is_up = shown.plane == "coronal"
    axes.imshow(
        shown.image_hu,
        cmap="gray",
        vmin=window_hu[0],
        vmax=window_hu[1],
        extent=(0, columns, 0, rows) if is_up else (0, columns, rows, 0),
        origin="lower" if is_up else "upper",
        aspect="auto",
        interpolation="hanning",
    )
    if shown.labels is not None:
        draw_outlines(axes, shown.labels, values, width_pt=1.0)
    axes.set_xlim(0, columns)
    axes.set_ylim(*((0, rows) if is_up else (rows, 0)))
    axes.axis("off")
    axes.text(0.01, 0.5, "R", transform=axes.transAxes, color=TEXT, fontsize=8, va="center")


def _wrapped(findings: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Lines of text with their colours; what does not fit is counted."""
    lines = [
        (_MARKS[severity], line)
        for severity, text in findings
        for line in textwrap.wrap(text, _LINE_LENGTH, subsequent_indent="   ")
    ]
    if len(lines) <= _MAX_LINES:
        return lines
    return [*lines[: _MAX_LINES - 1], (_MARKS["note"], "… more in audit.csv")]


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
