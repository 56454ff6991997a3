"""Volume: the voxels of a scan or label map, its grid, and the remarks of the reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from medseg.geometry.grid import VoxelGrid

AIR_HU = -1024
"""HU of air outside the patient; a voxel without a value gets it too."""


@dataclass(frozen=True)
class Volume:
    """A whole scan or label map in the storage order of its file.

    Attributes:
        array: Voxels (D, H, W): int16 or float32 HU of an image, integers of a label map.
        grid: Position of the voxels, LPS.
        header: nibabel header of a NIfTI file, so that a result in NIfTI keeps its sform, qform and unit; None for other formats.
        remarks: Sentences on what the reader left out, assumed or repaired; the caller shows them to the user.
    """

    array: np.ndarray
    grid: VoxelGrid
    header: Any = None
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.array.shape != self.grid.shape:
            raise ValueError(f"array {self.array.shape} and grid {self.grid.shape} differ in shape")
