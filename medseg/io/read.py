"""Readers: one door for all formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io.inputs import input_format
from medseg.io.payload import DamagedError
from medseg.io.stored import Stored, load_image, load_labels
from medseg.io.volume import Volume

Result = TypeVar("Result")


def _open(path: Path, series: str | None = None) -> Stored:
    """Read the header with the format's own module, which is imported only now."""
    kind = input_format(path)
    if kind == "dicom":
        from medseg.io.dicom.read import open_dicom

        return open_dicom(path, series)
    if series is not None:
        raise UserError(f"{path}: series={series} chooses among DICOM series, but this is a {kind} file; leave series out.")
    if kind == "nifti":
        from medseg.io.nifti import open_nifti

        return open_nifti(path)
    if kind == "nrrd":
        from medseg.io.nrrd import open_nrrd

        return open_nrrd(path)
    from medseg.io.metaimage import open_metaimage

    return open_metaimage(path)


def _explained(path: Path, read: Callable[[Path], Result]) -> Result:
    """Turn what a damaged file makes Python raise into one sentence."""
    try:
        # Numbers of a damaged file may overflow: what is not finite then is refused, or counts as air.
        with np.errstate(over="ignore", invalid="ignore"):
            return read(Path(path))
    except DamagedError as error:
        raise UserError(f"{path}: the file cannot be read: {error}; copy or export it again.") from error
    except OSError as error:
        raise UserError(
            f"{path}: the file cannot be read ({error.strerror or error}); check the file and its permissions."
        ) from error


def _volume(path: Path, load: Callable[[Stored], tuple[np.ndarray, tuple[str, ...]]], series: str | None = None) -> Volume:
    stored = _open(path, series)
    array, remarks = load(stored)
    return Volume(array, stored.grid, stored.header, (*stored.remarks, *remarks))


def read_grid(path: Path, series: str | None = None) -> VoxelGrid:
    """Read where a scan lies, in the storage order of its file; its voxels are not looked at.

    Args:
        path: As for `read_image`.
        series: As for `read_image`.

    Raises:
        UserError: If it cannot be read as one regular 3D volume.
    """
    return _explained(path, lambda known: _open(known, series).grid)


def read_image(path: Path, series: str | None = None) -> Volume:
    """Read a scan in the storage order of its file.

    Args:
        path: Volume file, DICOM folder (searched to its bottom) or DICOMDIR, or one file of a DICOM series.
        series: Which DICOM series, where there are several: Series Instance UID or Series Number, with `/<part>` for a
            part of one; None for the only one.

    Returns:
        HU (D, H, W), slope and intercept applied: int16 where that is exact, else float32.

    Raises:
        UserError: If it cannot be read as one regular 3D volume of numbers.
    """
    return _explained(path, lambda known: _volume(known, load_image, series))


def read_labels(path: Path) -> Volume:
    """Read a label map in the storage order of its file.

    Args:
        path: As for `read_image`.

    Returns:
        Label values (D, H, W), uint8 where they fit.

    Raises:
        UserError: If it cannot be read, or a value is not a whole number.
    """
    return _explained(path, lambda known: _volume(known, load_labels))
