"""Checks of the shape and the grid that a header gives, and parts of their messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from medseg.errors import UserError, require
from medseg.geometry.grid import VoxelGrid

MAX_EXTENT_MM, MAX_FIELD_MM3 = 4e3, 8e9
"""No scanner's table is longer: beyond it the spacing is in another unit, or damaged."""


def shown(text: str) -> str:
    """Quote a value for a message: on one line, short, without characters that a terminal would act on."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def describe(sizes: Sequence[int]) -> str:
    """Write sizes for a message, as in `512 x 512 x 300`."""
    return " x ".join(map(str, sizes))


def grid_from_columns(path: Path, shape: Sequence[int], columns: np.ndarray, origin: Sequence[float]) -> VoxelGrid:
    """Make the grid of a file from its world steps.

    Small deviations from right angles (rounded decimals) are kept, so that no corner moves.

    Args:
        path: The file, for messages.
        shape: Voxels (D, H, W).
        columns: 3×3; column j is the LPS step in mm along index axis (x, y, z)[j].
        origin: LPS point of the first voxel's centre, in mm.

    Raises:
        UserError: If the axes are sheared, an axis has no length, or no scanner is so large.
    """
    spacing = np.linalg.norm(columns, axis=0)
    require(
        bool(np.isfinite([*columns.flat, *spacing, *origin]).all()) and spacing.min() > 0,
        f"{path}: expected three axes of positive length and a finite origin, but the header gives steps of "
        f"{columns.T.tolist()} mm from {list(origin)}; repair the header or export the scan again.",
    )
    extents = [float(step) * size for step, size in zip(spacing, shape[::-1], strict=True)]
    require(
        max(extents) <= MAX_EXTENT_MM and math.prod(extents) <= MAX_FIELD_MM3,
        f"{path}: expected a scan of at most {MAX_EXTENT_MM / 1e3:g} m along each axis and {MAX_FIELD_MM3 / 1e9:g} m³ in all, but the "
        f"header makes it {' x '.join(f'{extent / 1e3:.4g}' for extent in extents)} m; check its sizes, and whether its spacing is in "
        "mm.",
    )
    try:
        return VoxelGrid(tuple(shape), tuple(spacing[::-1]), tuple(origin), (columns / spacing).tolist())  # type: ignore[arg-type]
    except ValueError as error:
        raise UserError(
            f"{path}: expected axes at right angles, but {error}; resample the scan to a regular grid first."
        ) from None


def check_shape(path: Path, sizes: Sequence[int]) -> tuple[int, int, int]:
    """Turn stored sizes (x, y, z, then frames) into (D, H, W).

    Raises:
        UserError: If it is not one 3D volume.
    """
    require(
        len(sizes) >= 3 and set(sizes[3:]) <= {1} and min(sizes) >= 1,
        f"{path}: expected one 3D volume, but the file holds {describe(sizes)} values; give one volume per file.",
    )
    return int(sizes[2]), int(sizes[1]), int(sizes[0])
