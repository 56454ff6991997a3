"""Synthetic scans: field of view, partial volume, table, reconstruction, noise, padding and exact labels of a specification."""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from medseg.geometry.grid import VoxelGrid
from medseg.phantom.shapes import Field, Lattice, interpolate, paint
from medseg.phantom.spec import Anatomy, PhantomSpec, draw_anatomy
from medseg.phantom.tissue import draw_model

Matrix = NDArray[np.float64]

_SLICES_AT_ONCE = 32
# Smaller pieces of a lung, cut off its thin edges by the voxel grid, are removed.
_MIN_PIECE_ML = 1.0


class Phantom(NamedTuple):
    """A scan and its exact labels on one grid.

    Attributes:
        image_hu: int16 (D, H, W).
        labels: uint8 (D, H, W): 1 left lung, 2 right lung.
        organs: uint8 (D, H, W): 1 left lung, 2 right lung, 3 heart, 4 spine.
        grid: Grid of the voxels, in storage order.
    """

    image_hu: NDArray[np.int16]
    labels: NDArray[np.uint8]
    organs: NDArray[np.uint8]
    grid: VoxelGrid


def make_phantom(spec: PhantomSpec) -> Phantom:
    """Make a phantom.

    Args:
        spec: The case.

    Returns:
        Image, labels and grid; a voxel belongs to a label that covers more than half of its volume.
    """
    anatomy, rng = draw_anatomy(spec), spec.rng("noise")
    scan = place_scan(spec, anatomy)
    lattice = place_lattice(spec, anatomy, scan)
    model_hu, *fields = draw_model(spec, anatomy, lattice)
    shape = scan.grid.shape
    image, labels, organs = (np.empty(shape, dtype=kind) for kind in (np.int16, np.uint8, np.uint8))
    y, x = ((np.arange(size) - (size - 1) / 2) / (size / 2) for size in shape[1:])
    # Pixels outside the circle that a scanner reconstructs, (H, W).
    is_padding = ((x * x)[None, :] + (y * y)[:, None] > 1) & (spec.padding_hu is not None)
    support_mm = (122 + 1.1 * spec.fat_mm) if spec.is_prone else (125 + 0.8 * spec.fat_mm)
    for start in range(0, shape[0], _SLICES_AT_ONCE):
        planes = slice(start, min(start + _SLICES_AT_ONCE, shape[0]))
        hu = sample(model_hu, lattice, scan, planes, -1000)
        if spec.has_table:
            paint_table(hu, spec, scan, support_mm, planes)
        reconstruct(hu, spec, scan, rng)
        hu[:, is_padding] = spec.padding_hu or 0
        image[planes] = np.rint(np.clip(hu, -32768, 3071))
        for target, field, (first, second) in zip(
            (labels, organs), fields, ((1, 2), (3, 4)), strict=True
        ):
            share = sample(field, lattice, scan, planes, 0)
            share[:, is_padding] = 0
            target[planes] = np.where(share > 50, first, np.where(share < -50, second, 0))
    _drop_crumbs(labels, float(np.prod(spec.spacing_mm)))
    np.copyto(organs, labels, where=labels > 0)
    flips = (spec.flips[0] != spec.is_feet_first, spec.flips[1], spec.flips[2])
    axes = tuple(axis for axis in range(3) if flips[axis])
    image, labels, organs = (
        np.ascontiguousarray(np.flip(array, axes)) for array in (image, labels, organs)
    )
    return Phantom(image, labels, organs, scan.grid.reoriented((0, 1, 2), flips))


def _drop_crumbs(labels: NDArray[np.uint8], voxel_mm3: float) -> None:
    """Clear the small pieces of each lung in place; the largest piece stays."""
    for value, window in enumerate(ndimage.find_objects(labels, max_label=2), start=1):
        if window is not None:
            part = labels[window]
            pieces, _ = ndimage.label(part == value)
            sizes = np.bincount(pieces.ravel())
            is_crumb = sizes * voxel_mm3 < 1000 * _MIN_PIECE_ML
            is_crumb[[0, int(np.argmax(sizes[1:])) + 1]] = False
            part[is_crumb[pieces]] = 0


def _rotation(tilt_deg: tuple[float, float, float]) -> Matrix:
    """Rotation matrix on (x, y, z) from angles about the z, y, x axes."""
    (cz, sz), (cy, sy), (cx, sx) = (
        (math.cos(angle), math.sin(angle)) for angle in map(math.radians, tilt_deg)
    )
    about_z, about_y = (
        np.array([[cz, -sz, 0], [sz, cz, 0], [0, 0, 1]]),
        np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]]),
    )
    return np.asarray(about_z @ about_y @ np.array([[1, 0, 0], [0, cx, -sx], [0, sx, cx]]))


class Scan(NamedTuple):
    """Position of the voxels of an acquisition before it is stored.

    Attributes:
        grid: LPS-like grid (maybe oblique), world mm.
        scale_xyz: World mm per canonical mm.
        matrix: From voxel index (z, y, x) to canonical point (z, y, x) in mm, (3, 3).
        offset: Canonical point (z, y, x) in mm of the first voxel, (3,).
    """

    grid: VoxelGrid
    scale_xyz: tuple[float, float, float]
    matrix: Matrix
    offset: Matrix


def place_scan(spec: PhantomSpec, anatomy: Anatomy) -> Scan:
    """Place the field of view on the patient."""
    apex, dome = max(anatomy.apex_z_mm.values()), max(anatomy.dome_z_mm.values())
    bottom = min(anatomy.dome_z_mm.values()) - anatomy.recess_mm
    a, b = spec.rng("view").uniform(0, 1, 2).tolist()
    # Lowest and highest level in canonical mm.
    low, high = {
        "whole": (bottom - 12 - 30 * a, apex + 10 + 30 * b),
        "apex": (apex - 30 - 35 * a, apex + 25 + 40 * b),
        "mid": (dome + 15 + 20 * a, apex - 45 - 20 * b),
        "bases": (bottom - 20 - 50 * a, dome + 5 + 25 * b),
        "apices_cut": (bottom - 12 - 30 * a, apex - 20 - 35 * b),
        "bases_cut": (dome - 15 + 55 * a, apex + 10 + 30 * b),
        "trunk": (-360 - 40 * a, apex + 10 + 40 * b),
        "abdomen": (-360 - 40 * a, dome - 25 - 20 * b),
        "neck": (apex + 14 + 10 * a, apex + 70 + 25 * b),
    }[spec.view]
    scale, spacing_xyz = np.array(anatomy.scale_xyz), np.array(spec.spacing_mm[::-1])
    num = spec.num_slices or max(4, round((high - low) * scale[2] / spec.spacing_mm[0]) + 1)
    x_mm, y_mm, z_mm = spec.rng("place").uniform(-60, 60, 3) * [0.3, 1, 3]
    middle = np.array([0.0, 2.0, 0.5 * (low + high)]) * scale + [x_mm, y_mm, z_mm]
    middle += [spec.centre_offset_mm[1], spec.centre_offset_mm[0], 0]
    direction = _rotation(spec.tilt_deg)
    origin = middle - direction @ ((np.array([*spec.matrix[::-1], num]) - 1) / 2 * spacing_xyz)
    grid = VoxelGrid((num, *spec.matrix), spec.spacing_mm, tuple(origin), direction.tolist())
    matrix = (np.array(grid.direction) * np.array(grid.spacing_mm)[::-1]) / scale[:, None]
    offset = (np.array(grid.origin_xyz_mm) - [x_mm, y_mm, z_mm]) / scale
    return Scan(
        grid, anatomy.scale_xyz, np.ascontiguousarray(matrix[::-1, ::-1]), offset[::-1].copy()
    )


def place_lattice(spec: PhantomSpec, anatomy: Anatomy, scan: Scan) -> Lattice:
    """Make the smallest lattice around everything in the field of view that is not air or table."""
    corners = (
        np.array(list(np.ndindex(2, 2, 2))) * np.array(scan.grid.shape, dtype=np.float64) - 0.5
    )
    points = corners @ scan.matrix.T + scan.offset
    fat, width = 1.7 * spec.fat_mm, 180 * anatomy.width_factor
    front = 128 + fat + (50 if spec.sex == "female" else 0)
    side = {"none": width + fat, "up": width + fat + 50, "down": 275 + fat}[spec.arms]
    low, high = (
        np.maximum(points.min(axis=0), [-440, -front, -side]),
        np.minimum(points.max(axis=0), [330, 128 + fat, side]),
    )
    return Lattice.covering(low, np.maximum(high, low + 8), spec.model_spacing_mm)


def sample(
    volume: NDArray[np.integer[Any]], lattice: Lattice, scan: Scan, planes: slice, outside: float
) -> Field:
    """Average a lattice field over the thickness of some slices.

    Args:
        volume: Field (D, H, W) on the lattice.
        lattice: Its lattice.
        scan: The voxels.
        planes: Slices of the scan.
        outside: Value beyond the lattice.

    Returns:
        Mean over each voxel's thickness, float32 (planes, H, W).
    """
    spacing = np.array(lattice.spacing_mm)
    step, start = scan.matrix / spacing[:, None], (scan.offset - lattice.origin_zyx_mm) / spacing
    count = max(1, round(scan.grid.spacing_mm[0] / (scan.scale_xyz[2] * lattice.spacing_mm[0])))
    shape = (planes.stop - planes.start, *scan.grid.shape[1:])
    if np.count_nonzero(step) == 3:
        return _sample_straight(volume, np.diag(step), start, planes, shape, count, outside)
    total = np.zeros(shape, dtype=np.float32)
    for i in range(count):
        first = step @ np.array([planes.start + (i + 0.5) / count - 0.5, 0, 0]) + start
        total += ndimage.affine_transform(
            volume,
            step,
            offset=first,
            output_shape=shape,
            output=np.float32,
            order=1,
            mode="constant",
            cval=outside,
        )
    return total / np.float32(count)


def _sample_straight(
    volume: NDArray[np.integer[Any]],
    step: Matrix,
    start: Matrix,
    planes: slice,
    shape: tuple[int, int, int],
    count: int,
    outside: float,
) -> Field:
    """Sample along the lattice's own axes, one axis after the other: several times faster than the general case."""
    along = np.arange(planes.start * count, planes.stop * count) + 0.5
    numbers = (along / count - 0.5, np.arange(shape[1]), np.arange(shape[2]))
    places = [number * step[axis] + start[axis] for axis, number in enumerate(numbers)]
    misses = [
        (place < 0) | (place > size - 1) for place, size in zip(places, volume.shape, strict=True)
    ]
    result = np.empty(shape, dtype=np.float32)
    for k in range(shape[0]):  # one slice after the other stays in the processor's cache
        own = slice(k * count, (k + 1) * count)
        thin = interpolate(volume, places[0][own], 0)
        thin[misses[0][own]] = outside
        lines = interpolate(thin.sum(axis=0) / np.float32(count), places[1], 0)
        result[k] = interpolate(lines, places[2], 1)
    result[:, misses[1], :] = outside
    result[:, :, misses[2]] = outside
    return result


def paint_table(
    image: Field, spec: PhantomSpec, scan: Scan, model_back_mm: float, planes: slice
) -> None:
    """Put the patient table under the body (over it in prone scans) into sampled slices, in place.

    Tables differ: a thin shell or a box of foam as thick and as dark as a lung, flat or hollowed,
    with or without a mattress.
    """
    rng = spec.rng("table")
    half_mm = float(rng.uniform(18, 90)) / 2
    foam_hu, skin_hu, mattress_hu = (
        rng.uniform(-985, -820),
        rng.uniform(-600, 100),
        rng.uniform(-950, -700),
    )
    hollow, half_width_mm = float(rng.uniform(0, 0.0011)), float(rng.uniform(170, 260))
    gap_mm = float(rng.uniform(5, 45)) if rng.random() < 0.5 else 0.0
    matrix, offset = scan.matrix, scan.offset
    k, j, i = np.ogrid[planes, : image.shape[1], : image.shape[2]]
    y, x = (
        (matrix[r, 0] * k + matrix[r, 1] * j + matrix[r, 2] * i + offset[r]).astype(np.float32)
        for r in (1, 2)
    )
    depth = (
        (-1.0 if spec.is_prone else 1.0) * y - model_back_mm + hollow * x * x
    ) * scan.scale_xyz[1]
    sides, edge = np.abs(x) - half_width_mm, max(scan.grid.spacing_mm[1], 1.0)
    shell = np.maximum(np.abs(depth - gap_mm - half_mm) - half_mm, sides)
    mattress = np.maximum(np.abs(depth - gap_mm / 2) - gap_mm / 2, sides)
    layers = ((mattress_hu, mattress), (foam_hu, shell + 2), (skin_hu, np.abs(shell + 1.2) - 1.2))
    is_air = image < -850
    paint(
        image,
        *(
            (value_hu, np.clip(0.5 - one / edge, 0, 1) * is_air)
            for value_hu, one in layers[0 if gap_mm > 0 else 1 :]
        ),
    )


def reconstruct(image: Field, spec: PhantomSpec, scan: Scan, rng: np.random.Generator) -> None:
    """Apply the kernel, noise and rounding errors of a reconstruction to sampled slices, in place.

    Smooth kernels blur; sharp kernels raise high frequencies, which leaves overshoot at edges and
    grainy noise. Noise grows with the water that the rays cross and runs along x where the
    shoulders are wide.
    """
    pixel, (_, height, width) = scan.grid.spacing_mm[1], image.shape
    blur_mm = float(np.interp(spec.kernel, (0, 0.5, 1), (0.85, 0.45, 0.0)))
    frequency = (
        np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :]) / pixel
    )  # cycles per mm
    cut = float(np.interp(spec.kernel, (0, 1), (0.28, 0.85)))
    spectrum = np.sqrt(frequency + 0.01) * np.exp(-((frequency / cut) ** 2))
    spectrum = spectrum / math.sqrt(float((spectrum**2).mean()))
    for k, plane in enumerate(image):
        if blur_mm > 0:
            plane = ndimage.gaussian_filter(plane, blur_mm / pixel)
        if spec.kernel > 0.6:
            plane = plane + np.float32(1.6 * (spec.kernel - 0.6)) * (
                plane - ndimage.gaussian_filter(plane, 1.1 / pixel)
            )
        if spec.noise_hu > 0:
            water = np.clip((plane + 1000) / 1000, 0, 2)
            # Millimetres of water along each row and each column.
            lateral, sagittal = (
                ndimage.gaussian_filter1d(water.sum(axis=axis) * pixel, 8 / pixel)
                for axis in (1, 0)
            )
            inside = ndimage.gaussian_filter(np.minimum(water, 1), 25 / pixel)
            sigma = (
                np.exp((lateral[:, None] - 290) / 260) * 0.6
                + np.exp((sagittal[None, :] - 190) / 200) * 0.4
            )
            sigma = spec.noise_hu * np.clip(sigma, 0.3, 3) * (0.45 + 0.55 * inside)
            white = rng.standard_normal((height, width), dtype=np.float32)
            grain = np.fft.irfft2(np.fft.rfft2(white) * spectrum, s=(height, width))
            streak = ndimage.gaussian_filter1d(
                rng.standard_normal((height, width), dtype=np.float32), 18 / pixel, axis=1
            )
            streak *= math.sqrt(3.5 * 18 / pixel) * 0.8
            strength = np.clip(np.exp((lateral[:, None] - 400) / 90) - 0.3, 0, 2.5) * inside
            plane = plane + sigma * grain + spec.noise_hu * strength * streak
        image[k] = plane
    np.maximum(image, -1024, out=image)
