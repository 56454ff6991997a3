"""Figures of plots in one style, and their file: a small PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from medseg.io.atomic import replace_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(width_in: float, height_in: float) -> Figure:
    """Make a figure without a window for plots, of a size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), dpi=110, layout="constrained")


def new_axes(
    figure: Figure, title: str, place: tuple[int, int, int] = (1, 1, 1), loc: Literal["left", "center"] = "center"
) -> Axes:
    """Add axes without a frame at the top and at the right; `place` is (rows, columns, number)."""
    axes = figure.add_subplot(*place)
    axes.set_title(title, fontsize=10, loc=loc, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def write_png(figure: Figure, path: Path) -> None:
    """Draw a figure and write it with a palette of 256 colours, half the size of true colour.

    The file appears under its name only when it is complete; missing folders are made.

    Args:
        figure: Matplotlib figure without a window.
        path: PNG file.

    Raises:
        UserError: If the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    with replace_path(path) as part:
        image.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(part, "PNG")


def shortened(text: str, length: int) -> str:
    """Cut a text to a number of characters, the last of them an ellipsis."""
    return text if len(text) <= length else f"{text[: length - 1]}…"
