"""HU scale: slope and offset from the values of a file to Hounsfield units."""

from dataclasses import dataclass

import numpy as np

from medseg.io.scratch import new_array


@dataclass(frozen=True)
class HuScale:
    """Scale from the values of a file to HU: `slope * value + offset`.

    The scale belongs to the files, not to a network: training and prediction apply the scale of
    their own files right after reading.

    Attributes:
        slope: HU per unit of the file's values.
        offset: HU of the file's value 0.
    """

    slope: float = 1.0
    offset: float = 0.0

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Rescale an image (D, H, W).

        Returns:
            Image in HU: int16 if the values are int16, slope and offset are whole numbers and all
            HU fit, else float32. The input itself if nothing changes.
        """
        if self == AS_STORED:
            return values
        is_whole_scale = float(self.slope).is_integer() and float(self.offset).is_integer()
        is_whole = values.dtype == np.int16 and is_whole_scale
        # With a negative slope the smallest value becomes the highest HU.
        hu_of_min = self.slope * float(values.min()) + self.offset
        hu_of_max = self.slope * float(values.max()) + self.offset
        lowest_hu, highest_hu = sorted((hu_of_min, hu_of_max))
        limits = np.iinfo(np.int16)
        fits = limits.min <= lowest_hu and highest_hu <= limits.max
        dtype = np.int16 if is_whole and fits else np.float32
        image_hu = new_array(values.shape, dtype)
        # Plane by plane, because a float32 copy of an int16 scan takes twice the scan's memory.
        # Results that are stored as int16 are exact: float32 holds whole numbers below 2^24
        # exactly.
        slope, offset = np.float32(self.slope), np.float32(self.offset)
        for plane_hu, plane in zip(image_hu, values, strict=True):
            plane_hu[...] = plane.astype(np.float32) * slope + offset
        return image_hu


# Scale of files that store HU, as nearly all scans do.
AS_STORED = HuScale()
