"""Slices of a case in a dark figure whose places are pixels: image, filled labels, outlined labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from medseg.pictures.png import write_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BACKGROUND = "#0d1117"
TEXT = "#e6edf3"
COLOURS = ("#38bdf8", "#fb923c", "#4ade80", "#f472b6", "#facc15", "#a78bfa", "#2dd4bf", "#f87171")
_FILL_OPACITY = 0.32
_DPI = 100


def colour_of(number: int) -> str:
    """Colour of the n-th label; after eight labels the colours repeat."""
    return COLOURS[number % len(COLOURS)]


class Canvas:
    """Figure with places in pixels from its top left corner."""

    def __init__(self, width_px: float, height_px: float) -> None:
        from matplotlib.figure import Figure

        self.width_px, self.height_px = width_px, height_px
        self.figure = Figure(figsize=(width_px / _DPI, height_px / _DPI), dpi=_DPI, facecolor=BACKGROUND)

    def write(self, left: float, top: float, text: str, **style: Any) -> None:
        """Write a text with its upper left corner at a place, unless the style aligns it otherwise."""
        place = left / self.width_px, 1 - top / self.height_px
        self.figure.text(*place, text, **{"color": TEXT, "va": "top", "parse_math": False, **style})

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
    ) -> Axes:
        """Draw one slice.

        Args:
            box_px: Left, top, right and bottom of its place.
            image_hu: Image in HU, (rows, columns).
            values: Label values in the order of colours; other values are not drawn.
            window_hu: HU that are drawn black and white.
            is_up: Whether rows run upwards.
            filled: Label values that are filled, (rows, columns), or None.
            outlined: Label values that get a line around them, (rows, columns), or None.
            width_pt: Width of that line in points.

        Returns:
            The axes, in which a pixel of the slice has the size 1.
        """
        from matplotlib.colors import to_rgba

        left, top, right, bottom = box_px
        size = (right - left) / self.width_px, (bottom - top) / self.height_px
        axes = self.figure.add_axes((left / self.width_px, 1 - bottom / self.height_px, *size))
        rows, columns = image_hu.shape
        vertical = (0, rows) if is_up else (rows, 0)
        place: dict[str, Any] = {"extent": (0, columns, *vertical), "origin": "lower" if is_up else "upper", "aspect": "auto"}
        low_hu, high_hu = window_hu
        grey = np.clip(image_hu.astype(np.float32), low_hu, high_hu)
        axes.imshow(grey, cmap="gray", vmin=low_hu, vmax=high_hu, interpolation="hanning", **place)
        if filled is not None:
            tint = np.zeros((rows, columns, 4))
            for number, value in enumerate(values):
                tint[filled == value] = to_rgba(colour_of(number), _FILL_OPACITY)
            axes.imshow(tint, interpolation="nearest", **place)
        if outlined is not None:
            # The padding closes the lines of labels that are cut by the edge of the picture.
            centres_y, centres_x = np.arange(-1, rows + 1) + 0.5, np.arange(-1, columns + 1) + 0.5
            for number, value in enumerate(values):
                inside = np.pad(outlined == value, 1)
                if inside.any():
                    axes.contour(centres_x, centres_y, inside, levels=[0.5], colors=[colour_of(number)], linewidths=width_pt)
        axes.set(xlim=(0, columns), ylim=vertical)
        axes.axis("off")
        return axes

    def save(self, path: Path) -> None:
        """Write the figure as PNG.

        Raises:
            UserError: If the file cannot be written.
        """
        write_png(self.figure, path)
