"""Trees that fill a lung: airways with their arteries, and veins.

A tree grows towards the centre of the points that it must still supply and splits them by a plane, as in Tawhai, Pullan and
Hunter, Annals of Biomedical Engineering 28 (2000) 793. Radii follow a power law of the number of supplied ends; Murray's
exponent is 3, pulmonary arteries measure about 2.7 to 3 (Huang et al., J Appl Physiol 81 (1996) 2123).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Tree:
    """Pieces of a tree.

    Attributes:
        starts_xyz_mm: Ends towards the root, (n, 3).
        ends_xyz_mm: Ends away from the root, (n, 3).
        num_ends: Supplied end points behind each piece, (n,).
    """

    starts_xyz_mm: Array
    ends_xyz_mm: Array
    num_ends: NDArray[np.int64]

    def radii_mm(self, end_radius_mm: float, exponent: float = 2.8) -> Array:
        """Radius of each piece from the number of ends behind it."""
        radii: Array = end_radius_mm * self.num_ends.astype(np.float64) ** (1 / exponent)
        return radii


def grow_tree(root_xyz_mm: Array, ends_xyz_mm: Array, rng: np.random.Generator) -> Tree:
    """Grow a tree from a root to all end points.

    Args:
        root_xyz_mm: Where the tree enters, (3,).
        ends_xyz_mm: Points to supply, (n, 3); none gives an empty tree.
        rng: Draws splits and bends.

    Returns:
        The tree; each branch is bent, made of two pieces.
    """
    starts: list[Array] = []
    stops: list[Array] = []
    numbers: list[int] = []
    stack: list[tuple[Array, Array, int]] = (
        [(np.asarray(root_xyz_mm, dtype=np.float64), ends_xyz_mm, 0)] if len(ends_xyz_mm) else []
    )
    while stack:
        place, points, depth = stack.pop()
        count = len(points)
        centre = points.mean(axis=0)
        reach = centre - place
        step = 1.0 if count == 1 else (0.22 if depth == 0 else 0.3 if depth == 1 else 0.42)
        goal = place + step * reach
        length = float(np.linalg.norm(goal - place)) + 1e-9
        bend = place + 0.5 * (goal - place) + rng.normal(0, 0.07 * length, 3)
        starts += [place, bend]
        stops += [bend, goal]
        numbers += [count, count]
        if count == 1:
            continue
        spread = points - centre
        direction = reach / (np.linalg.norm(reach) + 1e-9)
        normal = spread[np.argmax(np.einsum("ij,ij->i", spread, spread))]
        normal = normal - 0.8 * direction * (normal @ direction) + rng.normal(0, 0.5, 3)
        order = np.argsort((points - goal) @ normal, kind="stable")
        cut = int(np.clip(round(count * rng.uniform(0.35, 0.65)), 1, count - 1))
        stack += [(goal, points[order[:cut]], depth + 1), (goal, points[order[cut:]], depth + 1)]
    if not starts:
        return Tree(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(0, dtype=np.int64))
    return Tree(np.array(starts), np.array(stops), np.array(numbers, dtype=np.int64))
