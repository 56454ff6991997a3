"""Base class of the random changes of a sample."""

from typing import ClassVar

import numpy as np
from torch import Tensor

Spacing = tuple[float, float, float]


class Effect:
    """A random change of a sample after it is read.

    An effect takes random numbers only from the generator that it is given, so that a sample is
    determined by its number.

    Attributes:
        is_spatial: Whether it moves voxels or cuts the field of view, which concerns all channels
            alike. Otherwise it changes intensities, as a scanner does.
    """

    is_spatial: ClassVar[bool] = False

    def __call__(
        self, image: Tensor, labels: Tensor, rng: np.random.Generator, spacing_mm: Spacing
    ) -> tuple[Tensor, Tensor]:
        """Change a sample.

        Args:
            image: (C, D, H, W) float32; may be overwritten.
            labels: (D, H, W) uint8; may be overwritten.
            rng: Generator of this sample.
            spacing_mm: Voxel spacing, (z, y, x), by which an effect turns its lengths in mm into
                voxels.

        Returns:
            New image and labels, same shapes.
        """
        raise NotImplementedError
