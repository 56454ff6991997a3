"""Memory-first 3D medical segmentation: a two-stage cascade whose every saving is a switch."""

__version__ = "0.1.0"
