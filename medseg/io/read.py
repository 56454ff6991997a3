"""Readers of scans and label maps: one function for all formats."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from isal.igzip_lib import IsalError

from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io.inputs import input_format
from medseg.io.volume import LazyVolume, Volume, load_image, load_labels
from medseg.task import AIR_HU

Result = TypeVar("Result")


def _open(
    path: Path,
    series: str | None = None,
    modality: str = "ct",
    channel: int = 0,
    num_channels: int = 1,
    files: Sequence[Path] = (),
) -> LazyVolume:
    """Read the header of a scan; the library of its format is imported only now.

    Arguments and errors are those of `read_image`.
    """
    kind = input_format(path)
    if num_channels > 1 and kind != "nifti":
        # Otherwise every channel would be the same image.
        raise UserError(
            f"{path}: named as {num_channels} channels of one case, but only a NIfTI file can hold "
            "several; give a file or folder for each channel."
        )
    if kind == "dicom":
        from medseg.io.dicom.read import open_dicom

        return open_dicom(path, series, modality, files)
    if series is not None:
        raise UserError(
            f"{path}: series={series} chooses among DICOM series, but this is a {kind} file; "
            "leave series out."
        )
    if kind == "nifti":
        from medseg.io.nifti import open_nifti

        return open_nifti(path, channel, num_channels)
    from medseg.io.simpleitk import open_nrrd_or_metaimage

    return open_nrrd_or_metaimage(path)


def _explained(path: Path, read: Callable[[Path], Result]) -> Result:
    """Call a reader, and turn the exceptions that a damaged file causes into a `UserError`.

    Args:
        path: Path of the scan, for messages and for the reader.
        read: Reads the scan at a path.
    """
    try:
        # Numbers of a damaged file may overflow: a result that is not finite is refused, or counts
        # as air, so NumPy need not warn.
        with np.errstate(over="ignore", invalid="ignore"):
            return read(Path(path))
    # `type: ignore`, since the type stub of isal declares `IsalError` as a value, not as a class.
    except (OSError, EOFError, IsalError, OverflowError) as error:  # type: ignore[misc]
        # Errors of the system have a number; the OSErrors of decompressors have none.
        if isinstance(error, OSError) and error.errno is not None:
            raise UserError(
                f"{path}: the file cannot be read ({error.strerror}); "
                "check the file and its permissions."
            ) from error
        reason = f"are damaged: {error}"
        if isinstance(error, EOFError):
            reason = "end too early"
        raise UserError(
            f"{path}: the file cannot be read: its compressed voxels {reason}; "
            "copy or export it again."
        ) from error


def read_grid(
    path: Path,
    series: str | None = None,
    modality: str = "ct",
    num_channels: int = 1,
    files: Sequence[Path] = (),
) -> VoxelGrid:
    """Read the grid of a scan, in the storage order of its file, without its voxels.

    The arguments are those of `read_image`.

    Raises:
        UserError: If it cannot be read as one regular 3D volume.
    """

    def read(file: Path) -> VoxelGrid:
        volume = _open(file, series, modality, num_channels=num_channels, files=files)
        return volume.grid

    return _explained(path, read)


def read_image(
    path: Path,
    series: str | None = None,
    modality: str = "ct",
    channel: int = 0,
    num_channels: int = 1,
    files: Sequence[Path] = (),
) -> Volume:
    """Read a scan in the storage order of its file.

    Args:
        path: Volume file, DICOM folder (searched to its bottom) or DICOMDIR, or one file of a DICOM
            series.
        series: Which DICOM series, where there are several: Series Instance UID or Series Number,
            with `/<part>` behind it for one of several volumes in the series; None for the only
            one.
        modality: Modality of a DICOM series, as a task names it (`ct`, `mr`, or `other` for any);
            other files do not name theirs.
        channel: Which volume of a 4D NIfTI file, from 0.
        num_channels: Volumes of a NIfTI file, one per channel; 1 for a 3D file. Files of other
            formats hold one channel.
        files: DICOM files to read instead of searching the path for them; empty: search it.

    Returns:
        Volume of HU or, of another modality, of intensities (D, H, W), slope and intercept applied:
        int16 where that is exact, else float32.

    Raises:
        UserError: If it cannot be read as one regular 3D volume of numbers.
    """
    air = AIR_HU if modality == "ct" else 0

    def read(file: Path) -> Volume:
        volume = _open(
            file,
            series,
            modality,
            channel=channel,
            num_channels=num_channels,
            files=files,
        )
        return load_image(volume, air)

    return _explained(path, read)


def read_labels(path: Path) -> Volume:
    """Read a label map in the storage order of its file.

    Args:
        path: As for `read_image`; a DICOM series of any modality.

    Returns:
        Volume of label values (D, H, W), in the first fitting type of `LABEL_DTYPES`.

    Raises:
        UserError: If it cannot be read, or a value is not a whole number.
    """
    # Labels are no HU, and a label map may have the modality of its image, such as MR.
    return _explained(path, lambda file: load_labels(_open(file, modality="other")))


def read_layer(path: Path, layer: int) -> Volume:
    """Read one layer of a segmentation of 3D Slicer as `read_labels` reads a label map.

    Args:
        path: NRRD file.
        layer: Which layer, from 0; segments that overlap are in different layers.

    Raises:
        UserError: If it cannot be read, or a value is not a whole number.
    """
    from medseg.io.simpleitk import open_layer

    return _explained(path, lambda file: load_labels(open_layer(file, layer)))
