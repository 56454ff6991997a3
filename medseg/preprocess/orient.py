"""Orientation of volumes: from storage order to LPS order (z, y, x), and back."""

from dataclasses import dataclass
from itertools import permutations

import numpy as np

from medseg.geometry.grid import VoxelGrid

# Names of the faces of an oriented volume, per axis (z, y, x): low end, high end.
FACES = (("lower", "upper"), ("front", "back"), ("right", "left"))


@dataclass(frozen=True)
class Orientation:
    """Map from storage order to LPS order: transpose, then flip.

    Attributes:
        order: For each new axis (z, y, x), the stored axis that becomes it.
        flips: For each new axis (z, y, x), whether it is reversed.
    """

    order: tuple[int, int, int]
    flips: tuple[bool, bool, bool]

    def to_lps(self, array: np.ndarray) -> np.ndarray:
        """Bring an array of three stored axes to (z, y, x) in LPS; a view, nothing is copied."""
        return array.transpose(self.order)[self._flip_slices()]

    def from_lps(self, array: np.ndarray) -> np.ndarray:
        """Undo `to_lps`; a view, nothing is copied."""
        inverse_order = tuple(int(axis) for axis in np.argsort(self.order))
        return array[self._flip_slices()].transpose(inverse_order)

    def _flip_slices(self) -> tuple[slice, ...]:
        """Make the index that reverses the flipped axes of an LPS array."""
        reversed_axis = slice(None, None, -1)
        whole_axis = slice(None)
        return tuple(reversed_axis if flip else whole_axis for flip in self.flips)


def orientation_of(grid: VoxelGrid) -> Orientation:
    """Find the permutation and the flips that bring a grid nearest to LPS.

    An oblique grid keeps its remaining rotation in its direction. Of several equally near orders (a
    rotation by exactly 45 degrees) the first in stored order is chosen, so that equal grids get
    equal orientations.

    Args:
        grid: Grid in storage order.

    Returns:
        Orientation whose result has array axis z towards Superior, y towards Posterior and x
        towards Left.
    """
    # Rows and columns of a direction are ordered x, y, z; reversed, they are ordered as array axes,
    # z, y, x. Then cosines[a, b] is the cosine between world axis a and stored axis b.
    cosines = np.asarray(grid.direction)[::-1, ::-1]

    def nearness(order: tuple[int, ...]) -> float:
        """Sum the absolute cosines between new axes and the stored axes that become them."""
        total = sum(abs(cosines[axis, stored]) for axis, stored in enumerate(order))
        # Rounded: noise must not decide between orders that are equally near.
        return round(total, 6)

    # Of equal orders `max` takes the first, and `permutations` begins with the stored order.
    z, y, x = max(permutations(range(3)), key=nearness)
    # An axis that runs against the new one is reversed.
    flip_z = bool(cosines[0, z] < 0)
    flip_y = bool(cosines[1, y] < 0)
    flip_x = bool(cosines[2, x] < 0)
    return Orientation((z, y, x), (flip_z, flip_y, flip_x))


def ras_orientation_of(grid: VoxelGrid) -> Orientation:
    """Find the orientation nearest to RAS: as LPS, but y towards Anterior and x towards Right."""
    to_lps = orientation_of(grid)
    flip_z, flip_y, flip_x = to_lps.flips
    return Orientation(to_lps.order, (flip_z, not flip_y, not flip_x))


def oriented_grid(grid: VoxelGrid) -> VoxelGrid:
    """Compute the grid that a scan has once `orient` has turned it."""
    orientation = orientation_of(grid)
    return grid.reoriented(orientation.order, orientation.flips)


def orient(array: np.ndarray, grid: VoxelGrid) -> tuple[np.ndarray, VoxelGrid, Orientation]:
    """Bring a volume into LPS order, in which training and prediction compute.

    Args:
        array: Volume in storage order, (D, H, W).
        grid: Its grid.

    Returns:
        View of the array in LPS order, the grid of the view, and the orientation, whose `from_lps`
        restores the storage order.
    """
    orientation = orientation_of(grid)
    return (
        orientation.to_lps(array),
        grid.reoriented(orientation.order, orientation.flips),
        orientation,
    )
