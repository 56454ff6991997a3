"""Pictures inside the page: made smaller, as data URIs."""

from __future__ import annotations

import base64
import io
from pathlib import Path

_MAX_WIDTH_PX = 960
_QUALITY = 82


def data_uri(path: Path) -> tuple[str, int, int]:
    """A picture as a JPEG data URI, at most 960 pixels wide.

    Args:
        path: Picture in any format that Pillow reads.

    Returns:
        The URI, and width and height in pixels.

    Raises:
        OSError: If the file is no picture, or half of one.
    """
    from PIL import Image

    with Image.open(path) as stored:
        image = stored.convert("RGB")
    image.thumbnail((_MAX_WIDTH_PX, 10 * _MAX_WIDTH_PX))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=_QUALITY, subsampling=0, optimize=True)  # full colour: the outlines are one pixel wide
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}", image.width, image.height
