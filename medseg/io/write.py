"""Writers of scans and label maps: one function for all formats, a file whole or not at all.

nibabel writes NIfTI, SimpleITK NRRD and MetaImage.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io.inputs import SEGMENTATION_SUFFIX, WRITTEN_SUFFIXES, volume_suffix
from medseg.io.label_table import Structure, slicer_fields
from medseg.io.volume import Volume

# Integer types that all formats have and other programs read, in the order of preference.
WRITTEN_LABEL_DTYPES = (np.uint8, np.int16, np.uint16, np.int32)


def _write(path: Path, volume: Volume, structures: Sequence[Structure] = ()) -> None:
    """Write voxels of a type that all formats have.

    The library of the format is imported only now.

    Args:
        path: Target; its suffix chooses the format.
        volume: Voxels, grid and the header to copy fields from.
        structures: Names and colours of labels, for formats that hold them.

    Raises:
        UserError: If the suffix is unknown or the file cannot be written.
    """
    path = Path(path)
    suffix = volume_suffix(path)
    if suffix not in WRITTEN_SUFFIXES:
        raise UserError(
            f"{path}: expected an output name that ends in {', '.join(WRITTEN_SUFFIXES)}; "
            "choose one of them."
        )
    if suffix in (".nii", ".nii.gz"):
        from medseg.io.nifti import write_nifti

        write_nifti(path, volume.array, volume.grid, volume.header, structures)
        return
    from medseg.io.simpleitk import write_nrrd_or_metaimage

    fields = None
    if suffix == SEGMENTATION_SUFFIX:
        fields = slicer_fields(structures, volume.array)
    write_nrrd_or_metaimage(path, volume.array, volume.grid, fields)


def write_labels(
    path: Path,
    labels: np.ndarray,
    grid: VoxelGrid,
    like: Any = None,
    structures: Sequence[Structure] = (),
) -> None:
    """Write a label map whole or not at all; missing folders are made.

    The corners of the written grid agree with `grid` within 0.001 mm.

    Args:
        path: Target; the suffix chooses the format: .nii.gz, .nii, .nrrd, .mha, .mhd (with .zraw
            beside it) or .seg.nrrd (a segmentation of 3D Slicer).
        labels: Whole numbers (D, H, W) in the storage order of `grid`; boolean, uint32 and 64-bit
            types are narrowed.
        grid: Position of the voxels.
        like: `Volume.header` of the input; if that is NIfTI, a NIfTI result keeps its version, byte
            order, sform, qform and unit.
        structures: Names and colours of the labels, for .nii.gz, .nii and .seg.nrrd; other formats
            have no place for them.

    Raises:
        UserError: If the suffix is unknown or the folder cannot be written.
        ValueError: If labels are not integers, or the arguments contradict each other.
    """
    if labels.dtype.kind not in "biu":
        raise ValueError(f"labels must be whole numbers, got {labels.dtype}")
    # Types that not every format has, or not every program reads.
    is_boolean = labels.dtype.kind == "b"
    if is_boolean or labels.dtype == np.uint32 or labels.dtype.itemsize > 4:
        labels = _narrowed(labels)
    _write(path, Volume(labels, grid, header=like), structures)


def _narrowed(labels: np.ndarray) -> np.ndarray:
    """Convert labels to the first type of `WRITTEN_LABEL_DTYPES` that holds them.

    Raises:
        ValueError: If none does.
    """
    lowest, highest = 0, 0
    if labels.size:
        lowest, highest = int(labels.min()), int(labels.max())
    for dtype in WRITTEN_LABEL_DTYPES:
        limits = np.iinfo(dtype)
        if limits.min <= lowest and highest <= limits.max:
            return labels.astype(dtype)
    raise ValueError(f"labels must fit into 32 bits, got {lowest} to {highest}")


def write_image(path: Path, image_hu: np.ndarray, grid: VoxelGrid) -> None:
    """Write a scan whole or not at all; missing folders are made.

    Args:
        path: As for `write_labels`.
        image_hu: HU (D, H, W), int16 or float32.
        grid: Position of the voxels.

    Raises:
        UserError: If the suffix is unknown or the folder cannot be written.
        ValueError: If the array has another type, or another shape than the grid.
    """
    # All formats have these types, and `read_image` gives no others.
    if image_hu.dtype not in (np.int16, np.float32):
        raise ValueError(f"an image must be int16 or float32, got {image_hu.dtype}")
    _write(path, Volume(image_hu, grid, header=None))
