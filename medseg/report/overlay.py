"""Overlay of a case: slices with labels, reference and errors, in radiological view."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medseg.geometry.grid import VoxelBox
from medseg.report.plots import shortened, write_png

BACKGROUND = "#0d1117"
TEXT = "#e6edf3"
COLOURS = ("#38bdf8", "#fb923c", "#4ade80", "#f472b6", "#facc15", "#a78bfa", "#2dd4bf", "#f87171")
# Voxels in the reference only, in the prediction only, and with different labels in both. The style
# sheet of the pages has the same colours.
ERROR_COLOURS = {"missed": "#ff2fd0", "extra": "#ffe800", "other label": "#ffffff"}
_FILL_OPACITY = 0.32
_ERROR_OPACITY = 0.75
_DPI = 100

# Plane to the axis of an oriented volume (z, y, x) along which its slices follow each other.
PLANES = {"axial": 0, "coronal": 1, "sagittal": 2}

# Slices of each plane, each given by the share of the labelled voxels that lies before it. These
# slices all show a label, and the sagittal ones show each of two organs side by side. Shares of the
# volume would not ensure that.
_FRACTIONS = {"axial": (0.08, 0.36, 0.64, 0.92), "coronal": (0.3, 0.65), "sagittal": (0.25, 0.75)}
# Planes in each row of the picture.
_ROWS = (("axial",), ("coronal", "sagittal"))
# Margin around the labels in the drawn part of the volume, and the least extent of that part.
_VIEW_MARGIN_MM = 20.0
_MIN_VIEW_MM = 150.0

# Layout of the picture.
_WIDTH_PX = 1280
_MAX_ROW_PX = 400
_HEADER_PX = 56
_LEGEND_LINE_PX = 24
_GAP_PX = 4
# Largest number of characters of the title, and the width of a bold one of 14 points.
_MAX_TITLE = 48
_TITLE_LETTER_PX = 13
# Width of a character of 11 points, and of the patch and the gaps of an entry of the legend.
_LEGEND_LETTER_PX = 8
_PATCH_PX = 58


def grey_range(image: np.ndarray, window: tuple[float, float] | None) -> tuple[float, float]:
    """Find the values that are drawn black and white.

    They are the window, or without one the 1st and 99th percentile of the image.
    """
    if window is not None:
        return window
    low, high = np.percentile(image, (1, 99)).tolist()
    # An image of one value still has a range. Any other image keeps its own, however small: a map
    # of diffusion in m²/s has values of about 1e-9.
    if low == high:
        high = low + 1.0
    return low, high


def colour_of(number: int) -> str:
    """Colour of a label by its place, from 0; after eight labels the colours repeat."""
    return COLOURS[number % len(COLOURS)]


def legend_lines(widths_px: Sequence[float], beside_px: float, below_px: float) -> list[list[int]]:
    """Distribute the entries of a legend over lines: all beside the title, or else below it.

    Args:
        widths_px: Width of each entry.
        beside_px: Width of the place beside the title.
        below_px: Width of a line below the title.

    Returns:
        Indices of the entries in the line of the title, and in each line below.

    Example:
        >>> legend_lines([60, 60], 120, 200), legend_lines([60, 60, 90], 120, 200)
        ([[0, 1]], [[], [0, 1], [2]])
    """
    if sum(widths_px) <= beside_px:
        return [list(range(len(widths_px)))]
    lines: list[list[int]] = [[], []]
    line_px = 0.0
    for index, width_px in enumerate(widths_px):
        if lines[-1] and line_px + width_px > below_px:
            lines.append([])
            line_px = 0.0
        lines[-1].append(index)
        line_px += width_px
    return lines


class Canvas:
    """Figure on which places are given in pixels from its top left corner.

    Args:
        width_px: Width of the figure.
        height_px: Height of the figure.
    """

    def __init__(self, width_px: float, height_px: float) -> None:
        from matplotlib.figure import Figure

        self.width_px = width_px
        self.height_px = height_px
        size_in = (width_px / _DPI, height_px / _DPI)
        self.figure = Figure(figsize=size_in, dpi=_DPI, facecolor=BACKGROUND)

    def write(self, left_px: float, top_px: float, text: str, **style: Any) -> None:
        """Write a text with its upper left corner at a place, unless the style aligns it."""
        # The names of cases may contain `$`, which is no formula.
        defaults = {"color": TEXT, "va": "top", "parse_math": False}
        # Matplotlib takes shares of the figure, from its lower left corner.
        x = left_px / self.width_px
        y = 1 - top_px / self.height_px
        self.figure.text(x, y, text, **{**defaults, **style})

    def write_title(self, title: str, header_px: float, max_letters: int) -> None:
        """Write the title at the left of a header, vertically centred."""
        text = shortened(title, max_letters)
        self.write(12, header_px / 2, text, fontsize=14, fontweight="bold", va="center")

    def draw_slice(
        self,
        box_px: Sequence[float],
        image_hu: np.ndarray,
        values: Sequence[int],
        window_hu: tuple[float, float],
        *,
        is_up: bool,
        filled: np.ndarray | None = None,
        outlined: np.ndarray | None = None,
        width_pt: float = 1.1,
        shows_errors: bool = False,
        colours: Sequence[str] = COLOURS,
    ) -> Any:
        """Draw one slice.

        Args:
            box_px: Left, top, right and bottom of the slice in the figure, in pixels.
            image_hu: Image in HU, or in the units of another modality, (rows, columns).
            values: Label values in the order of colours; other values are not drawn.
            window_hu: Values that are drawn black and white.
            is_up: Whether rows run upwards.
            filled: Label map whose labels are filled, (rows, columns), or None.
            outlined: Label map whose labels get a line around them, (rows, columns), or None.
            width_pt: Width of that line in points.
            shows_errors: Whether voxels that differ between `filled` and `outlined` get
                `ERROR_COLOURS`.
            colours: Colours of the values; they repeat.

        Returns:
            The axes, in which a pixel of the slice has the size 1.
        """
        # The box as shares of the width and the height of the figure.
        figure_px = (self.width_px, self.height_px, self.width_px, self.height_px)
        left, top, right, bottom = np.divide(box_px, figure_px)
        rows, columns = image_hu.shape
        # Lower and upper end of the vertical axis: row 0 is at the bottom or at the top.
        vertical = (0, rows) if is_up else (rows, 0)
        limits: dict[str, Any] = {"xlim": (0, columns), "ylim": vertical, "autoscale_on": False}
        # Matplotlib counts from the lower edge of the figure: left, bottom, width, height.
        axes = self.figure.add_axes((left, 1 - bottom, right - left, bottom - top), **limits)
        place: dict[str, Any] = {
            "extent": (0, columns, *vertical),
            "origin": "lower" if is_up else "upper",
            "aspect": "auto",
        }
        # Clipped before interpolation: otherwise bright metal would lighten the voxels around it.
        grey = np.clip(image_hu.astype(np.float32), *window_hu)
        axes.imshow(
            grey,
            cmap="gray",
            vmin=window_hu[0],
            vmax=window_hu[1],
            interpolation="hanning",
            **place,
        )
        if filled is not None:
            reference = outlined if shows_errors else None
            tint = _tint(filled, reference, values, colours)
            axes.imshow(tint, interpolation="nearest", **place)
        if outlined is not None:
            _draw_outlines(axes, outlined, values, colours, width_pt)
        axes.axis("off")
        return axes


def _tint(
    pred: np.ndarray, reference: np.ndarray | None, values: Sequence[int], colours: Sequence[str]
) -> np.ndarray:
    """Colour the labels of a slice and, with a reference, its errors.

    Args:
        pred: Label values, (rows, columns).
        reference: Label values of the reference, (rows, columns), or None.
        values: Label values in the order of colours.
        colours: Colours of the values; they repeat.

    Returns:
        RGBA in [0, 1], (rows, columns, 4); transparent without a label or error.
    """
    from matplotlib.colors import to_rgba

    tint = np.zeros((*pred.shape, 4))
    for number, value in enumerate(values):
        tint[pred == value] = to_rgba(colours[number % len(colours)], _FILL_OPACITY)
    if reference is not None:
        is_wrong = pred != reference
        # In the order of `ERROR_COLOURS`.
        errors = (
            (pred == 0) & (reference > 0),
            (pred > 0) & (reference == 0),
            (pred > 0) & (reference > 0) & is_wrong,
        )
        for is_error, colour in zip(errors, ERROR_COLOURS.values(), strict=True):
            tint[is_error] = to_rgba(colour, _ERROR_OPACITY)
    return tint


def _draw_outlines(
    axes: Any,
    labels: np.ndarray,
    values: Sequence[int],
    colours: Sequence[str],
    width_pt: float,
) -> None:
    """Draw a line around each label of a slice, (rows, columns)."""
    rows, columns = labels.shape
    # Centres of the pixels, with one more on each side: the padding closes the lines of labels that
    # are cut by the edge of the picture.
    centres_y = np.arange(-1, rows + 1) + 0.5
    centres_x = np.arange(-1, columns + 1) + 0.5
    for number, value in enumerate(values):
        inside = np.pad(labels == value, 1)
        if inside.any():
            colour = colours[number % len(colours)]
            style: dict[str, Any] = {"colors": [colour], "linewidths": width_pt}
            axes.contour(centres_x, centres_y, inside, levels=[0.5], **style)


@dataclass(frozen=True)
class Panel:
    """One slice in the picture.

    Attributes:
        plane: `axial`, `coronal` or `sagittal`.
        index: Index of the slice in the oriented volume.
        box_px: Left, top, right and bottom of the panel in the picture, in pixels.
        has_most_errors: Whether no other slice of the plane has more voxels that differ from the
            reference.
    """

    plane: str
    index: int
    box_px: tuple[int, int, int, int]
    has_most_errors: bool = False


def overlay_montage(
    image_hu: np.ndarray,
    pred: np.ndarray,
    reference: np.ndarray | None,
    spacing_mm: tuple[float, float, float],
    path: Path,
    title: str,
    *,
    label_names: Mapping[int, str],
    window_hu: tuple[float, float] | None = (-1000.0, 400.0),
) -> list[Panel]:
    """Draw axial, coronal and sagittal slices through the labels.

    The prediction is filled, the reference a line; errors are coloured. Each plane includes its
    slice with the most errors. Without any label the slices are evenly distributed over the whole
    volume.

    The volume must be oriented (z to Superior, y to Posterior, x to Left). The patient's right is
    on the viewer's left, superior is up, anterior is up in axial and left in sagittal slices.

    Args:
        image_hu: Image in HU, or in the units of another modality, (D, H, W).
        pred: Predicted label values, (D, H, W); 0 is background.
        reference: Reference label values, (D, H, W), or None.
        spacing_mm: Voxel spacing in mm, (z, y, x).
        path: PNG file to write.
        title: Line at the top, e.g. the name of the case.
        label_names: Label value to name; only these values are drawn, in this order of colours.
        window_hu: Values that are drawn black and white; None takes percentiles of the image.

    Returns:
        The panels in the order of drawing.

    Raises:
        ValueError: If the arrays differ in shape.
    """
    if pred.shape != image_hu.shape:
        raise ValueError("image and labels must have one shape")
    if reference is not None and reference.shape != image_hu.shape:
        raise ValueError("image and labels must have one shape")
    is_label = pred > 0
    is_wrong = np.zeros_like(is_label)
    if reference is not None:
        is_label |= reference > 0
        is_wrong = pred != reference
    view = _view_box(is_label, spacing_mm)
    view_mm = np.multiply(view.shape, spacing_mm)
    legend = _legend(label_names, reference is not None, title)
    # The first line of the legend is that of the title.
    header_px = _HEADER_PX + _LEGEND_LINE_PX * (len(legend) - 1)
    panels, height_px = _layout(is_label, is_wrong, view_mm, header_px)
    canvas = Canvas(_WIDTH_PX, height_px)
    window_hu = grey_range(image_hu, window_hu)
    _draw_header(canvas, title, legend)
    for panel in panels:
        axis = PLANES[panel.plane]
        # Index of the slice along its axis, the view along the others.
        indices: list[int | slice] = list(view.slices())
        indices[axis] = panel.index
        index_tuple = tuple(indices)
        outlined = None if reference is None else reference[index_tuple]
        axes = canvas.draw_slice(
            panel.box_px,
            image_hu[index_tuple],
            list(label_names),
            window_hu,
            is_up=panel.plane != "axial",
            filled=pred[index_tuple],
            outlined=outlined,
            shows_errors=True,
        )
        caption = f"{panel.plane} {panel.index + 1}/{image_hu.shape[axis]}"
        if panel.has_most_errors:
            caption += ", most errors"
        draw_marks(axes, panel.plane, caption)
    write_png(canvas.figure, path)
    return panels


def _view_box(is_label: np.ndarray, spacing_mm: tuple[float, float, float]) -> VoxelBox:
    """Find the part of a volume to draw: the box of the labels with a margin.

    The box is at least `_MIN_VIEW_MM` long along each axis, or as long as a shorter volume; it is
    the whole volume without a label.
    """
    box = VoxelBox.from_mask(is_label)
    if box is None:
        box = VoxelBox.full(is_label.shape)
    margin = [round(_VIEW_MARGIN_MM / step_mm) for step_mm in spacing_mm]
    least_shape = [round(_MIN_VIEW_MM / step_mm) for step_mm in spacing_mm]
    return box.expanded(margin).at_least(least_shape).clipped(is_label.shape)


def _layout(
    is_label: np.ndarray, is_wrong: np.ndarray, view_mm: np.ndarray, header_px: int
) -> tuple[list[Panel], int]:
    """Lay out rows of panels, each as large as the width of the picture allows.

    Args:
        is_label: Labelled voxels, (D, H, W).
        is_wrong: Voxels that differ from the reference, (D, H, W).
        view_mm: Extent of the drawn box in mm, (z, y, x).
        header_px: Height of title and legend.

    Returns:
        The panels, and the height of the picture in pixels.
    """
    panels: list[Panel] = []
    top_px = header_px
    # Plane to the index of its slice with the most errors; None without errors.
    worst: dict[str, int | None] = dict.fromkeys(PLANES)
    if is_wrong.any():
        for plane in PLANES:
            worst[plane] = int(np.argmax(_num_voxels_by_slice(is_wrong, plane)))
    for row_planes in _ROWS:
        slices = []
        for plane in row_planes:
            rows_mm, columns_mm = np.delete(view_mm, PLANES[plane])
            for index in _slice_indices(is_label, plane, worst[plane]):
                slices.append((plane, index, rows_mm, columns_mm))
        # One scale for the row, which is as wide as the picture or as high as a row may be.
        width_mm = sum(columns_mm for _, _, _, columns_mm in slices)
        height_mm = max(rows_mm for _, _, rows_mm, _ in slices)
        free_px = _WIDTH_PX - _GAP_PX * (len(slices) - 1)
        px_per_mm = min(free_px / width_mm, _MAX_ROW_PX / height_mm)
        # A row that is not as wide as the picture is centred.
        left_px = (free_px - width_mm * px_per_mm) / 2
        for plane, index, rows_mm, columns_mm in slices:
            right_px = left_px + columns_mm * px_per_mm
            # A panel is at least a pixel high and wide, even that of a volume of one slice.
            bottom_px = top_px + max(1.0, rows_mm * px_per_mm)
            drawn_right_px = max(round(left_px) + 1, round(right_px))
            box_px = (round(left_px), top_px, drawn_right_px, round(bottom_px))
            panels.append(Panel(plane, index, box_px, index == worst[plane]))
            left_px = right_px + _GAP_PX
        # `box_px[3]` is the bottom of a panel.
        top_px = max(panel.box_px[3] for panel in panels) + _GAP_PX
    return panels, top_px - _GAP_PX


def _num_voxels_by_slice(mask: np.ndarray, plane: str) -> np.ndarray:
    """Count the set voxels in each slice of a plane."""
    other_axes = tuple({0, 1, 2} - {PLANES[plane]})
    return np.count_nonzero(mask, axis=other_axes)


def _slice_indices(is_label: np.ndarray, plane: str, worst: int | None) -> list[int]:
    """Choose the slices of a plane, at fixed shares of the labelled voxels.

    Without a label the shares are of all voxels.

    Args:
        is_label: Labelled voxels, (D, H, W).
        plane: A key of `PLANES`.
        worst: Slice that replaces the nearest of the chosen ones; None replaces none.
    """
    num_voxels = _num_voxels_by_slice(is_label, plane)
    if not num_voxels.any():
        num_voxels = np.ones_like(num_voxels)
    shares = np.cumsum(num_voxels) / num_voxels.sum()
    indices = np.searchsorted(shares, _FRACTIONS[plane])
    if worst is not None:
        nearest = np.argmin(np.abs(indices - worst))
        indices[nearest] = worst
    return [int(index) for index in indices]


def draw_marks(axes: Any, plane: str, caption: str) -> None:
    """Write the letters of the patient's sides (A and P, or R and L) and a caption on a slice."""
    from matplotlib.patheffects import withStroke

    style = {
        "transform": axes.transAxes,
        "color": TEXT,
        "path_effects": [withStroke(linewidth=2.5, foreground="black")],
    }
    # Anterior and posterior, or the patient's right and left.
    left_side, right_side = ("A", "P") if plane == "sagittal" else ("R", "L")
    bold = {"va": "center", "fontsize": 11, "fontweight": "bold", **style}
    axes.text(0.015, 0.5, left_side, ha="left", **bold)
    axes.text(0.985, 0.5, right_side, ha="right", **bold)
    axes.text(0.015, 0.015, caption, ha="left", va="bottom", fontsize=8, **style)


def _legend(label_names: Mapping[int, str], has_reference: bool, title: str) -> list[list[Any]]:
    """Make the entries of the legend, in lines: that of the title, and lines below."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Any] = []
    for number, name in enumerate(label_names.values()):
        entries.append(Patch(facecolor=colour_of(number), label=name.replace("_", " ")))
    # With a reference, errors have colours of their own: a voxel in the colour of a label agrees.
    fill_name = "agreement" if has_reference else "prediction"
    entries.append(Patch(facecolor="#8b949e", alpha=0.6, label=fill_name))
    if has_reference:
        entries.append(Line2D([], [], color="#c9d1d9", linewidth=1.5, label="reference"))
        for name, colour in ERROR_COLOURS.items():
            entries.append(Patch(facecolor=colour, label=name))
    widths_px = [_PATCH_PX + _LEGEND_LETTER_PX * len(entry.get_label()) for entry in entries]
    title_px = _TITLE_LETTER_PX * min(len(title), _MAX_TITLE)
    lines = legend_lines(widths_px, _WIDTH_PX - title_px, _WIDTH_PX)
    return [[entries[index] for index in line] for line in lines]


def _draw_header(canvas: Canvas, title: str, legend: Sequence[Sequence[Any]]) -> None:
    """Write the title and the lines of the legend."""
    canvas.write_title(title, _HEADER_PX, _MAX_TITLE)
    for number, entries in enumerate(legend):
        # Beside the title the legend is vertically centred in the header.
        middle_px = _HEADER_PX / 2
        if number:
            middle_px = _HEADER_PX + (number - 0.5) * _LEGEND_LINE_PX
        canvas.figure.legend(
            handles=entries,
            loc="center right",
            bbox_to_anchor=(1 - _GAP_PX / _WIDTH_PX, 1 - middle_px / canvas.height_px),
            ncols=max(1, len(entries)),
            frameon=False,
            labelcolor=TEXT,
            fontsize=11,
            handlelength=1.4,
            columnspacing=1.4,
            borderpad=0,
        )
