"""Base class of the random changes of a sample."""

from typing import ClassVar

import numpy as np
from torch import Tensor

Spacing = tuple[float, float, float]


class Effect:
    """A random change of a sample that has been read.

    An effect draws from the generator that it is given and from nothing else, so that a sample is a
    function of its number.

    Attributes:
        is_spatial: Whether it moves voxels or cuts the field of view, so that every channel follows
            it; else it is one of the scanner.
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
            spacing_mm: Voxel spacing, (z, y, x); lengths apply to world coordinates, not to voxels.

        Returns:
            New image and labels, same shapes.
        """
        raise NotImplementedError
