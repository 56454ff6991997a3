"""Memory-first 3D medical segmentation: a two-stage cascade whose every saving is a switch."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["LungSegmenter", "__version__"]


def __getattr__(name: str) -> Any:
    """Import what Python programs use when they ask for it: `import medseg` must not wait for torch."""
    if name == "LungSegmenter":
        return import_module("medseg.prediction.segmenter").LungSegmenter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
