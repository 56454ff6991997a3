"""What a reader hands over: the voxels, where they lie, and the header they came with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from medseg.geometry.grid import VoxelGrid

AIR_HU = -1024
"""HU of air outside the patient; what a voxel without a value counts as."""


@dataclass(frozen=True)
class FileHeader:
    """The geometry fields of a file's header, as stored, so that a result can be written with the same bytes.

    Attributes:
        format: `nifti`, `nrrd`, `metaimage` or `dicom`.
        raw: NIfTI: the whole header block. NRRD and MetaImage: the geometry lines. DICOM: empty.
    """

    format: str
    raw: bytes = b""


@dataclass(frozen=True)
class Volume:
    """A whole scan or label map in the storage order of its file.

    Attributes:
        array: Voxels (D, H, W): int16 or float32 HU of an image, integers of a label map.
        grid: Where the voxels lie, LPS.
        header: Header of the file read; None for a volume made in memory.
        remarks: Sentences on what the reader left out, guessed or repaired; whoever reads shows them to the user.
    """

    array: np.ndarray
    grid: VoxelGrid
    header: FileHeader | None = None
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.array.shape != self.grid.shape:
            raise ValueError(f"array {self.array.shape} and grid {self.grid.shape} differ in shape")
