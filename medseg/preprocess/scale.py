"""From the values of a file to Hounsfield units, where the file itself does not say how."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class HuScale:
    """What makes HU of the values that a file gives, where the file does not say so itself: `slope * value + offset`.

    It belongs to the files, not to a network: training and prediction apply it right after reading, each to its own.

    Attributes:
        slope: Factor.
        offset: Added after it.
    """

    slope: float = 1.0
    offset: float = 0.0

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Rescale an image: int16 where that is exact and fits, else float32; the input itself where nothing changes."""
        if self == AS_STORED:
            return values
        is_whole = values.dtype == np.int16 and float(self.slope).is_integer() and float(self.offset).is_integer()
        ends = [self.slope * float(end) + self.offset for end in (values.min(), values.max())]
        limits = np.iinfo(np.int16)
        fits = limits.min <= min(ends) and max(ends) <= limits.max
        image_hu = np.empty(values.shape, np.int16 if is_whole and fits else np.float32)
        # Plane by plane: a float32 of the whole would be two scans more. Whole numbers below 2^24 are exact in it.
        for scaled, plane in zip(image_hu, values, strict=True):
            scaled[...] = plane.astype(np.float32) * np.float32(self.slope) + np.float32(self.offset)
        return image_hu


AS_STORED = HuScale()
"""The values are HU already, as in nearly every file."""
