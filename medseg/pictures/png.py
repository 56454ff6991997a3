"""Write a drawn figure as a small PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from medseg.io.replacing import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    width, height = canvas.get_width_height()
    image = Image.frombuffer("RGBA", (width, height), canvas.buffer_rgba(), "raw", "RGBA", 0, 1).convert("RGB")
    with replacing(path) as file:
        image.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(file, "PNG")
