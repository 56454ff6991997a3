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
        # Whole numbers below 2^24 are exact in float32, and what lies above does not fit into int16 anyway.
        image_hu = values.astype(np.float32)
        image_hu *= self.slope
        image_hu += self.offset
        is_whole = values.dtype == np.int16 and float(self.slope).is_integer() and float(self.offset).is_integer()
        limits = np.iinfo(np.int16)
        if is_whole and image_hu.min() >= limits.min and image_hu.max() <= limits.max:
            return image_hu.astype(np.int16)
        return image_hu


AS_STORED = HuScale()
"""The values are HU already, as in nearly every file."""
