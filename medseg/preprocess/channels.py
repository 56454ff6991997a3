"""Channels of a case: several images, resampled to the grid of the first and stacked.

* `read_channel_images(paths, outside, series=…, scales=…)` reads `image`, `image_1`, … of a case.
  It returns an array (D, H, W) for each in the storage order of the first channel, and the first
  channel as a `Volume` (grid, header, findings of all channels). `read_channels` stacks the arrays.
* `resample_to(image, source, target, outside)` resamples one image to a grid, whose axes may
  differ from the image's.

`medseg.preprocess.intensity` normalises each channel.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.ndimage import affine_transform

from medseg.errors import SeveralSeriesError, UserError
from medseg.findings import Finding, warnings_of
from medseg.geometry.grid import DIRECTION_TOLERANCE, VoxelGrid
from medseg.io.scratch import new_array
from medseg.io.volume import Volume
from medseg.preprocess.orient import orient, orientation_of
from medseg.preprocess.resample import EDGE_TOLERANCE, resample_image
from medseg.preprocess.scale import AS_STORED, HuScale

# If a channel leaves more than this share of the first channel's voxels uncovered, the user is
# warned.
MAX_UNCOVERED_SHARE = 0.01


def resample_to(
    image: np.ndarray, source: VoxelGrid, target: VoxelGrid, outside: float
) -> np.ndarray:
    """Resample an image to any grid.

    If the grids are rotated to each other, the image is first antialiased along its own axes, then
    interpolated linearly.

    Args:
        image: Image (D, H, W) on `source`.
        source: Its grid; axes may be permuted, flipped or oblique to those of the target.
        target: New grid.
        outside: Value for voxels whose centre lies outside the source's field of view.

    Returns:
        Image (D', H', W') on `target`, float32; the image itself, unchanged, if the grids agree.
    """
    if source.is_close(target):
        return image
    image, source, _ = orient(image, source)
    # The image is resampled to the target in LPS order; `from_lps` then restores the target's
    # order.
    target_orientation = orientation_of(target)
    oriented_target = target.reoriented(target_orientation.order, target_orientation.flips)
    if np.allclose(source.direction, oriented_target.direction, rtol=0, atol=DIRECTION_TOLERANCE):
        resampled = resample_image(image, source, oriented_target, outside).numpy()
        return target_orientation.from_lps(resampled)
    # Along an axis where the target is coarser, the linear interpolation would skip voxels, so the
    # image first gets the target's spacing there.
    z, y, x = map(max, source.spacing_mm, oriented_target.spacing_mm)
    filtered_grid = source.resampled((z, y, x))
    filtered = resample_image(image, source, filtered_grid, outside).numpy()
    matrix, offset = _index_map(oriented_target, filtered_grid)
    # `nearest` repeats the outermost voxels; those outside the field of view are filled afterwards.
    resampled = new_array(oriented_target.shape, np.float32)
    affine_transform(filtered, matrix, offset, output=resampled, order=1, mode="nearest")
    _fill_outside(resampled, oriented_target, source, outside)
    return target_orientation.from_lps(resampled)


def _index_map(grid: VoxelGrid, other: VoxelGrid) -> tuple[np.ndarray, np.ndarray]:
    """Find the map from indices of a grid to those of another: `matrix @ index + offset`.

    Returns:
        The matrix (3, 3) and the offset (3,), both in the order (z, y, x).
    """
    # The offset is where voxel (0, 0, 0) lies; column a of the matrix is the step to the next voxel
    # along axis a.
    first_and_next = grid.index_to_world_xyz_mm(np.vstack([np.zeros(3), np.eye(3)]))
    offset, *next_voxels = other.world_to_index_zyx(first_and_next)
    return np.transpose(np.array(next_voxels) - offset), offset


def _fill_outside(image: np.ndarray, grid: VoxelGrid, source: VoxelGrid, outside: float) -> None:
    """Fill the voxels of an image whose centres lie outside a field of view, in place.

    Args:
        image: Image (D, H, W) on `grid`.
        grid: Its grid.
        source: Grid with the field of view.
        outside: Value of the voxels outside.
    """
    matrix, offset = _index_map(grid, source)
    rows, columns = np.ogrid[: grid.shape[1], : grid.shape[2]]
    # Plane by plane, because the source positions of a whole volume would take much memory.
    for z, plane in enumerate(image):
        is_outside = np.zeros(plane.shape, dtype=bool)
        for axis, (step_z, step_y, step_x) in enumerate(matrix):
            position = offset[axis] + step_z * z + step_y * rows + step_x * columns  # (H, W)
            # The field of view ends at the outer faces of the outermost voxels.
            is_outside |= position < -0.5 - EDGE_TOLERANCE
            is_outside |= position > source.shape[axis] - 0.5 + EDGE_TOLERANCE
        plane[is_outside] = outside


def place_channel(
    image: np.ndarray,
    source: VoxelGrid,
    target: VoxelGrid,
    fill: float,
    name: str,
    message_start: str = "",
    first_name: str = "image",
) -> tuple[np.ndarray, list[Finding]]:
    """Resample a channel to the grid of the first channel.

    Args:
        image: Image (D, H, W) on `source`, without NaN.
        source: Its grid.
        target: Grid of the first channel.
        fill: Value of voxels outside the channel.
        name: Name of the channel, for messages.
        message_start: Start of the error message, such as the path of the file and a colon.
        first_name: Name of the first channel in the error message.

    Returns:
        Image (D', H', W') on `target`, and a warning if more than `MAX_UNCOVERED_SHARE` of the
        target lies outside the channel.

    Raises:
        UserError: If the channel covers no voxel of the target.
    """
    # NaN marks the voxels outside; the image itself holds no NaN.
    image = resample_to(image, source, target, outside=math.nan)
    num_outside = 0
    # Plane by plane, since a mask of the whole volume would take much memory.
    for plane in image:
        is_outside = np.isnan(plane)
        # Only a resampled copy has voxels outside: the caller's own array is not overwritten here.
        if is_outside.any():
            plane[is_outside] = fill
            num_outside += int(np.count_nonzero(is_outside))
    if num_outside == image.size:
        raise UserError(
            f"{message_start}expected {name} to show the same patient region as {first_name}, but "
            "the two do not overlap; check both."
        )
    outside_share = num_outside / image.size
    if outside_share <= MAX_UNCOVERED_SHARE:
        return image, []
    warning = f"{outside_share:.0%} of the scan is outside {name} and counts as {fill:g} there"
    return image, warnings_of("reading", [warning])


def read_channels(
    paths: Sequence[Path | None], outside: Sequence[float], **options: Any
) -> tuple[np.ndarray, Volume]:
    """Read the channels of a case as one array.

    Arguments and errors are those of `read_channel_images`.

    Returns:
        Channels (C, D, H, W) in the storage order of the first, and the first channel as
        `read_channel_images` returns it. A single channel keeps its type; several channels are
        float32.
    """
    images, first_volume = read_channel_images(paths, outside, **options)
    if len(images) == 1:
        return images[0][None], first_volume
    return np.stack(images).astype(np.float32, copy=False), first_volume


def read_channel_images(
    paths: Sequence[Path | None],
    outside: Sequence[float],
    *,
    series: str | None = None,
    files: Sequence[Path] = (),
    scales: Sequence[HuScale] = (),
    modalities: Sequence[str] = (),
) -> tuple[list[np.ndarray], Volume]:
    """Read the channels of a case on the grid of the first.

    Arrays above the limit of `medseg.io.scratch.scratch_above` are temporary files.

    Args:
        paths: `image`, `image_1`, `image_2`, …; None for a channel that the case lacks. A path that
            occurs several times is a 4D NIfTI file with one volume for each occurrence.
        outside: Value of each channel beyond its field of view, such as -1024 for CT and 0 for MR.
        series: DICOM series of the first channel, as for `read_image`.
        files: DICOM files of the first channel, as for `read_image`.
        scales: HU scale of each channel. If the list is shorter, the other channels keep their
            stored values.
        modalities: Modality of each channel, `ct`, `mr` or `other`; a DICOM series of another
            modality is refused. If the list is shorter, the other channels are `ct`.

    Returns:
        Image (D, H, W) of each channel in the storage order of the first, and the first channel as
        a volume with the findings about all channels. The first image is the array of this volume
        and keeps its type; the others are float32.

    Raises:
        UserError: If a channel is missing, cannot be read, or does not overlap the first channel.
    """
    from medseg.io.read import read_image

    names = ["image", *(f"image_{number}" for number in range(1, len(paths)))]
    channel_paths = _checked_paths(names, paths)
    num_unscaled = len(paths) - len(scales)
    scales = [*scales, *[AS_STORED] * num_unscaled]
    num_without_modality = len(paths) - len(modalities)
    modalities = [*modalities, *["ct"] * num_without_modality]
    # Number of volumes that the first file must hold: one for each channel that names it.
    num_volumes = channel_paths.count(channel_paths[0])
    first_volume = read_image(
        channel_paths[0],
        series=series,
        modality=modalities[0],
        channel=0,
        num_channels=num_volumes,
        files=files,
    )
    first_volume = replace(first_volume, array=scales[0].apply(first_volume.array))
    if len(paths) == 1:
        return [first_volume.array], first_volume
    images = [first_volume.array]
    findings = [finding.within(names[0]) for finding in first_volume.findings]
    for number in range(1, len(paths)):
        name = names[number]
        path = channel_paths[number]
        # Index of the volume in a 4D file: earlier channels of this path take the earlier volumes.
        volume_index = channel_paths[:number].count(path)
        num_volumes = channel_paths.count(path)
        try:
            volume = read_image(
                path,
                modality=modalities[number],
                channel=volume_index,
                num_channels=num_volumes,
            )
        except SeveralSeriesError as error:
            # The cures of its message, key and column `series`, choose in the first channel alone.
            raise UserError(
                f"{error} Both choose the series of the first channel; for {name}, give one file "
                "of its series as the path."
            ) from error
        image, coverage_warnings = place_channel(
            scales[number].apply(volume.array),
            source=volume.grid,
            target=first_volume.grid,
            fill=outside[number],
            name=name,
            message_start=f"{path}: ",
            first_name=str(paths[0]),
        )
        images.append(_as_float32(image))
        findings += coverage_warnings
        findings += [finding.within(name) for finding in volume.findings]
    first_volume = replace(first_volume, findings=tuple(findings))
    return images, first_volume


def _as_float32(image: np.ndarray) -> np.ndarray:
    """Convert an image to float32; one of this type is returned itself."""
    if image.dtype == np.float32:
        return image
    converted = new_array(image.shape, np.float32)
    np.copyto(converted, image)
    return converted


def _checked_paths(names: Sequence[str], paths: Sequence[Path | None]) -> list[Path]:
    """Return the paths if there is one for each channel.

    Raises:
        UserError: With the names of the missing channels.
    """
    present = [path for path in paths if path is not None]
    if len(present) == len(paths):
        return present
    missing = [name for name, path in zip(names, paths, strict=True) if path is None]
    case = str(present[0]) if present else "the case"
    raise UserError(
        f"{case}: expected the channels {', '.join(names)}, but {', '.join(missing)} is "
        "missing; give a file for each."
    )
