"""Intensity: Hounsfield units mapped to the range of the network."""

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from medseg.io.volume import AIR_HU

ImageT = TypeVar("ImageT", np.ndarray, Tensor)

MAX_HU = 3071  # 12 bits above air; higher values are metal
# What counts as HU: scanners pad with -2048 or -3024, which a filter would mix into the skin. Training and prediction clip to it while they
# resample, slab by slab: a clipped scan would be a second one.
HU_LIMITS = (AIR_HU, MAX_HU)
# Air in a normalised image, the lower end of the window; fills what lies outside of a volume.
AIR = -1.0


def normalise_hu(image_hu: ImageT, window_hu: tuple[float, float]) -> ImageT:
    """Clip an image to a window and map the window linearly to [-1, 1].

    The input is left as it is; one new float32 array is made.

    Args:
        image_hu: Image in HU, any shape, integer or float.
        window_hu: Lower and upper HU; the lower becomes -1 (air), the upper 1.

    Returns:
        Image of the same kind (array or tensor) and shape, float32.

    Raises:
        ValueError: If the window is empty.
    """
    low_hu, high_hu = window_hu
    if not low_hu < high_hu:
        raise ValueError(f"window_hu must rise, got {window_hu}")
    image = image_hu.to(torch.float32, copy=True) if isinstance(image_hu, Tensor) else np.array(image_hu, dtype=np.float32)
    # In place; a tensor made of an array shares its memory.
    torch.as_tensor(image).clamp_(low_hu, high_hu).sub_(low_hu).mul_(2.0 / (high_hu - low_hu)).sub_(1.0)
    return image
