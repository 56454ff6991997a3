"""Intensity of a channel: stored values mapped to the range of the network.

An `Intensity` is a clipped linear map, four plain numbers that belong to one case and channel. It
is computed once per case, on the oriented scan before resampling, and applied to each crop by
`normalise`:

* `window(window_hu)`: a fixed range of HU to [-1, 1]; the same for all cases.
* `zscore(image, modality)`: mean 0 and standard deviation 1 over the foreground, like MONAI's
  `NormalizeIntensity(nonzero=True)` and nnU-Net's `ZScoreNormalization` with `use_mask_for_norm`.
* `percentile(image, modality)`: the range from the 0.5th to the 99.5th percentile of the foreground
  (nnU-Net uses these percentiles for CT) is mapped to [-1, 1].

The foreground (`foreground(image, modality)`) is the body for `ct`: all voxels above `BODY_HU`. For
other modalities it is all voxels that are not 0, as in MONAI and nnU-Net, where 0 is the
background. If no voxel is foreground, the whole image counts.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from medseg.io.scratch import new_tensor
from medseg.task import AIR_HU

ImageT = TypeVar("ImageT", np.ndarray, Tensor)

MAX_HU = 3071  # largest 12-bit value, counted from -1024 HU; higher values are metal
# Range in HU to which a CT is clipped before a filter: scanners pad with -2048 or -3024, which a
# filter would mix into the skin. Training and prediction clip while they resample, slab by slab,
# because a clipped copy would take the memory of a second scan.
HU_LIMITS = (AIR_HU, MAX_HU)
# Value of air in an image that is normalised by `window`. Voxels outside a normalised image get it
# too, whatever the map.
AIR = -1.0

# Voxels above this are body: halfway between air and soft tissue. Not a whole number, so that an
# image and its rounded copy have the same body.
BODY_HU = -500.5

PERCENTILES = (0.5, 99.5)  # in percent, of the foreground
# Largest number of values of which percentiles are computed, to save time: of more values, only
# every second, third, … is used.
MAX_VALUES = 2**24


class Intensity(NamedTuple):
    """A clipped linear map: `(min(max(value, low), high) - low) * factor + offset`.

    Attributes:
        low: Lower end of the clipped range, as stored (HU for a CT).
        high: Upper end of the clipped range.
        factor: Slope of the map.
        offset: Result for values up to `low`.
    """

    low: float
    high: float
    factor: float
    offset: float


def window(window_hu: tuple[float, float]) -> Intensity:
    """Map a range of HU linearly to [-1, 1].

    Raises:
        ValueError: If the window is empty.
    """
    low_hu, high_hu = window_hu
    if not low_hu < high_hu:
        raise ValueError(f"window_hu must rise, got {window_hu}")
    return Intensity(low_hu, high_hu, 2.0 / (high_hu - low_hu), AIR)


def foreground(image: np.ndarray, modality: str) -> Iterator[np.ndarray]:
    """Select the values of the body for `ct`, else the nonzero values; all if there are none.

    Plane by plane, since a copy of all values would take as much memory as the image.

    Args:
        image: Image (D, …).
        modality: Modality of the channel; `ct` in HU.

    Yields:
        Flat array of the values of each plane in their order; may be empty.
    """

    def is_foreground(plane: np.ndarray) -> np.ndarray:
        return np.asarray(plane > BODY_HU if modality == "ct" else plane != 0)

    if any(is_foreground(plane).any() for plane in image):
        for plane in image:
            yield plane[is_foreground(plane)]
    else:
        yield from map(np.ravel, image)


def zscore(image: np.ndarray, modality: str) -> Intensity:
    """Map the mean of the foreground to 0 and its standard deviation to 1.

    If all values of the foreground are equal, the whole image becomes 0.

    Args:
        image: Whole image (D, H, W) of the case.
        modality: As for `foreground`.
    """
    num_values = 0
    total = 0.0
    for values in foreground(image, modality):
        num_values += values.size
        total += float(np.sum(values, dtype=np.float64))
    mean = total / num_values
    squares = 0.0  # sum of the squared differences from the mean
    for values in foreground(image, modality):
        squares += float(np.square(np.subtract(values, mean, dtype=np.float64)).sum())
    std = math.sqrt(squares / num_values)
    # The range of the whole image, so nothing is clipped.
    low, high = float(image.min()), float(image.max())
    factor = 1.0 / std if std > 0 else 0.0
    return Intensity(low, high, factor, (low - mean) * factor)


def percentile(image: np.ndarray, modality: str) -> Intensity:
    """Map the `PERCENTILES` of the foreground to -1 and 1, and clip to them.

    If the two percentiles are equal, the whole image becomes -1.

    Args:
        image: As for `zscore`.
        modality: As for `foreground`.
    """
    num_values = sum(values.size for values in foreground(image, modality))
    step = math.ceil(num_values / MAX_VALUES)
    chosen = np.empty(math.ceil(num_values / step), image.dtype)
    num_chosen = 0
    num_before = 0  # values of the planes before
    for values in foreground(image, modality):
        # Of all values together, those whose index is a multiple of `step`.
        chosen_here = values[-num_before % step :: step]
        chosen[num_chosen : num_chosen + chosen_here.size] = chosen_here
        num_chosen += chosen_here.size
        num_before += values.size
    low, high = map(float, np.percentile(chosen, PERCENTILES, overwrite_input=True))
    factor = 2.0 / (high - low) if high > low else 0.0
    return Intensity(low, high, factor, AIR)


def intensity_of(
    image: np.ndarray, modality: str, kind: str, window_hu: tuple[float, float] | None
) -> Intensity:
    """Choose the map of a channel.

    Args:
        image: Whole image (D, H, W) of the case.
        modality: As for `foreground`.
        kind: `window`, `zscore` or `percentile`.
        window_hu: Range of HU for the kind `window`; None for the other kinds.
    """
    if window_hu is not None:
        return window(window_hu)
    function_by_kind = {"zscore": zscore, "percentile": percentile}
    return function_by_kind[kind](image, modality)


def normalise(image: ImageT, intensity: Intensity) -> ImageT:
    """Apply a map to an image of one channel.

    The input is left as it is; one new float32 array is made.

    Args:
        image: Image of any shape, integer or float.
        intensity: The map of its channel.

    Returns:
        Image of the same kind (array or tensor) and shape, float32.
    """
    if isinstance(image, Tensor):
        result = new_tensor(tuple(image.shape), torch.float32, image.device).copy_(image)
    else:
        result = np.array(image, dtype=np.float32)
    low, high, factor, offset = intensity
    # A tensor shares the memory of its array, so this changes `result`.
    torch.as_tensor(result).clamp_(low, high).sub_(low).mul_(factor).add_(offset)
    return result


def normalise_hu(image_hu: ImageT, window_hu: tuple[float, float]) -> ImageT:
    """Clip an image to a window and map the window linearly to [-1, 1].

    Args:
        image_hu: Image in HU, any shape, integer or float.
        window_hu: Lower and upper HU; the lower becomes -1 (air), the upper 1.

    Returns:
        Image of the same kind (array or tensor) and shape, float32.

    Raises:
        ValueError: If the window is empty.
    """
    return normalise(image_hu, window(window_hu))
