"""Memory-first 3D medical image segmentation: a cascade whose memory savings are switches."""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"
__all__ = ["LungSegmenter", "Segmenter", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the Python API on first use, so that `import medseg` does not import torch."""
    if name in ("LungSegmenter", "Segmenter"):
        return getattr(import_module("medseg.prediction.segmenter"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
