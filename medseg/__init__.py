"""3D medical image segmentation in little memory: a two-stage cascade with memory switches."""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"
# Each name of the Python API, and the module that defines it.
_MODULES = {
    "LungSegmenter": "medseg.prediction.segmenter",
    "Segmenter": "medseg.prediction.segmenter",
    "Volume": "medseg.io.volume",
    "cross_validate": "medseg.studies.command_functions",
    "plan": "medseg.studies.command_functions",
    "train": "medseg.studies.command_functions",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    """Import the Python API on first use, so that `import medseg` does not import torch."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
