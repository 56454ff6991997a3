"""Base class of the random changes of a sample."""

from typing import ClassVar

import numpy as np
from torch import Tensor

Spacing = tuple[float, float, float]


class Effect:
    """A random change of a sample after it is read.

    An effect takes random numbers only from the generator of the sample, so that the seed and the
    sample's number determine the sample.

    Attributes:
        is_spatial: True for an effect that moves voxels or cuts the field of view, in all channels
            alike; False for one that changes intensities, as a scanner does.
    """

    is_spatial: ClassVar[bool] = False

    def __call__(
        self, image: Tensor, labels: Tensor, rng: np.random.Generator, spacing_mm: Spacing
    ) -> tuple[Tensor, Tensor]:
        """Change a sample.

        Args:
            image: Channels (C, D, H, W), normalised, float32; may be overwritten.
            labels: Label map (D, H, W), uint8; may be overwritten.
            rng: Generator of this sample.
            spacing_mm: Voxel spacing, (z, y, x), to convert lengths in mm to voxels.

        Returns:
            New image and labels, same shapes.
        """
        raise NotImplementedError
