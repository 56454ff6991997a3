"""The scanner: field of view, partial volume, reconstruction kernel, noise, padding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from medseg.geometry.grid import VoxelGrid
from medseg.phantom.anatomy import Anatomy
from medseg.phantom.lattice import Lattice
from medseg.phantom.shapes import Field
from medseg.phantom.spec import PhantomSpec

Matrix = NDArray[np.float64]


def view_range_mm(spec: PhantomSpec, anatomy: Anatomy) -> tuple[float, float]:
    """Lowest and highest level of a view, canonical mm."""
    rng = spec.rng("view")
    apex = max(anatomy.apex_z_mm.values())
    dome = max(anatomy.dome_z_mm.values())
    bottom = min(anatomy.dome_z_mm.values()) - anatomy.recess_mm
    a, b = (float(v) for v in rng.uniform(0, 1, 2))
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
    return low, high


def _rotation(tilt_deg: tuple[float, float, float]) -> Matrix:
    """Rotation matrix on (x, y, z) from angles about the z, y, x axes."""
    az, ay, ax = (math.radians(a) for a in tilt_deg)
    rz = np.array([[math.cos(az), -math.sin(az), 0], [math.sin(az), math.cos(az), 0], [0, 0, 1]])
    ry = np.array([[math.cos(ay), 0, math.sin(ay)], [0, 1, 0], [-math.sin(ay), 0, math.cos(ay)]])
    rx = np.array([[1, 0, 0], [0, math.cos(ax), -math.sin(ax)], [0, math.sin(ax), math.cos(ax)]])
    return np.asarray(rz @ ry @ rx)


@dataclass(frozen=True)
class Scan:
    """Where the voxels of an acquisition lie before it is stored.

    Attributes:
        grid: LPS-like grid (maybe oblique), world mm.
        scale_xyz: World mm per canonical mm.
        offset_xyz_mm: World point of the canonical origin.
    """

    grid: VoxelGrid
    scale_xyz: tuple[float, float, float]
    offset_xyz_mm: tuple[float, float, float]

    def to_canonical(self) -> tuple[Matrix, Matrix]:
        """Affine from voxel index (z, y, x) to canonical point (z, y, x) in mm: matrix (3, 3), offset (3,)."""
        direction = np.array(self.grid.direction)
        spacing_xyz = np.array(self.grid.spacing_mm)[::-1]
        scale = np.array(self.scale_xyz)
        matrix = (direction * spacing_xyz) / scale[:, None]
        offset = (np.array(self.grid.origin_xyz_mm) - np.array(self.offset_xyz_mm)) / scale
        return np.ascontiguousarray(matrix[::-1, ::-1]), offset[::-1].copy()

    def lattice(self, spacing_mm: tuple[float, float, float], body_zyx_mm: tuple[Matrix, Matrix]) -> Lattice:
        """The smallest lattice around what the field of view holds of the body (its lowest and highest corner)."""
        matrix, offset = self.to_canonical()
        size = np.array(self.grid.shape, dtype=np.float64)
        corners = np.array([[(i >> 2) & 1, (i >> 1) & 1, i & 1] for i in range(8)]) * size - 0.5
        points = corners @ matrix.T + offset
        low, high = points.min(axis=0), points.max(axis=0)
        low = np.maximum(low, body_zyx_mm[0])
        high = np.minimum(high, body_zyx_mm[1])
        return Lattice.covering(low, np.maximum(high, low + 8), spacing_mm)


def body_bounds_mm(spec: PhantomSpec, anatomy: Anatomy) -> tuple[Matrix, Matrix]:
    """Corners (z, y, x) of a canonical box around everything that is not air or table."""
    fat = 1.7 * spec.fat_mm
    front = 128 + fat + (50 if spec.sex == "female" else 0)
    side = 180 * anatomy.width_factor + fat + (0 if spec.arms == "none" else 50)
    if spec.arms == "down":
        side = 275 + fat
    return np.array([-440, -front, -side]), np.array([330, 128 + fat, side])


def place_scan(spec: PhantomSpec, anatomy: Anatomy) -> Scan:
    """Place the field of view on the patient."""
    rng = spec.rng("place")
    low, high = view_range_mm(spec, anatomy)
    scale = np.array(anatomy.scale_xyz)
    spacing = spec.spacing_mm
    num = spec.num_slices or max(4, round((high - low) * scale[2] / spacing[0]) + 1)
    offset = rng.uniform(-60, 60, 3) * [0.3, 1, 3]
    middle = np.array([0.0, 2.0, 0.5 * (low + high)]) * scale + offset
    middle += [spec.centre_offset_mm[1], spec.centre_offset_mm[0], 0]
    direction = _rotation(spec.tilt_deg)
    shape = (num, *spec.matrix)
    half = (np.array(shape[::-1]) - 1) / 2 * np.array(spacing[::-1])
    origin = middle - direction @ half
    rows = tuple((float(r[0]), float(r[1]), float(r[2])) for r in direction)
    grid = VoxelGrid(
        (shape[0], shape[1], shape[2]),
        spacing,
        (float(origin[0]), float(origin[1]), float(origin[2])),
        (rows[0], rows[1], rows[2]),
    )
    return Scan(grid, anatomy.scale_xyz, (float(offset[0]), float(offset[1]), float(offset[2])))


def sample(volume: NDArray[np.integer[Any]], lattice: Lattice, scan: Scan, planes: slice, outside: float) -> Field:
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
    matrix, offset = scan.to_canonical()
    spacing = np.array(lattice.spacing_mm)
    to_lattice = matrix / spacing[:, None]
    start = (offset - lattice.origin_zyx_mm) / spacing
    count = max(1, round(scan.grid.spacing_mm[0] / (scan.scale_xyz[2] * lattice.spacing_mm[0])))
    shape = (planes.stop - planes.start, *scan.grid.shape[1:])
    if np.count_nonzero(to_lattice) == 3:
        return _sample_straight(volume, np.diag(to_lattice), start, planes, shape, count, outside)
    total = np.zeros(shape, dtype=np.float32)
    for i in range(count):
        first = np.array([planes.start + (i + 0.5) / count - 0.5, 0, 0])
        total += ndimage.affine_transform(
            volume,
            to_lattice,
            offset=to_lattice @ first + start,
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
    """Sample along the lattice's own axes: one axis after the other, several times faster than the general case."""
    along = np.arange(planes.start * count, planes.stop * count) + 0.5
    places = [
        (along / count - 0.5) * step[0] + start[0],
        np.arange(shape[1]) * step[1] + start[1],
        np.arange(shape[2]) * step[2] + start[2],
    ]
    bases, rests, misses = [], [], []
    for axis, place in enumerate(places):
        last = volume.shape[axis] - 1
        base = np.clip(np.floor(place), 0, last - 1).astype(np.int64)
        bases.append(base)
        rests.append((place - base).astype(np.float32))
        misses.append((place < 0) | (place > last))
    result = np.empty(shape, dtype=np.float32)
    for k in range(shape[0]):
        plane = np.zeros(volume.shape[1:], dtype=np.float32)
        for i in range(k * count, (k + 1) * count):
            if misses[0][i]:
                plane += np.float32(outside)
                continue
            low, w = bases[0][i], rests[0][i]
            plane += volume[low] * (1 - w) + volume[low + 1] * w
        plane /= np.float32(count)
        w = rests[1][:, None]
        rows = plane[bases[1]] * (1 - w) + plane[bases[1] + 1] * w
        w = rests[2][None, :]
        result[k] = rows[:, bases[2]] * (1 - w) + rows[:, bases[2] + 1] * w
    result[:, misses[1], :] = outside
    result[:, :, misses[2]] = outside
    return result


def paint_table(image: Field, spec: PhantomSpec, scan: Scan, model_back_mm: float, planes: slice) -> None:
    """Put the patient table under the body (over it in prone scans) into sampled slices, in place.

    Tables differ: a thin shell or a box of foam as thick and as dark as a lung, flat or hollowed, with or without a mattress.
    """
    rng = spec.rng("table")
    thickness_mm = float(rng.uniform(18, 90))
    foam_hu, skin_hu, mattress_hu = rng.uniform(-985, -820), rng.uniform(-600, 100), rng.uniform(-950, -700)
    hollow, half_width_mm = float(rng.uniform(0, 0.0011)), float(rng.uniform(170, 260))
    gap_mm = float(rng.uniform(5, 45)) if rng.random() < 0.5 else 0.0
    matrix, offset = scan.to_canonical()
    _, height, width = scan.grid.shape
    k = np.arange(planes.start, planes.stop)[:, None, None]
    j = np.arange(height)[None, :, None]
    i = np.arange(width)[None, None, :]
    y, x = ((matrix[r, 0] * k + matrix[r, 1] * j + matrix[r, 2] * i + offset[r]).astype(np.float32) for r in (1, 2))
    sign = -1.0 if spec.is_prone else 1.0
    depth = (sign * y - model_back_mm + hollow * x * x) * scan.scale_xyz[1]
    sides = np.abs(x) - half_width_mm
    edge = max(scan.grid.spacing_mm[1], 1.0)
    half_mm = thickness_mm / 2
    shell = np.maximum(np.abs(depth - gap_mm - half_mm) - half_mm, sides)
    is_air = image < -850
    mattress = np.clip(0.5 - np.maximum(np.abs(depth - gap_mm / 2) - gap_mm / 2, sides) / edge, 0, 1) * is_air
    foam = np.clip(0.5 - (shell + 2) / edge, 0, 1) * is_air
    skin = np.clip(0.5 - (np.abs(shell + 1.2) - 1.2) / edge, 0, 1) * is_air
    if gap_mm > 0:
        image += (np.float32(mattress_hu) - image) * mattress
    image += (np.float32(foam_hu) - image) * foam
    image += (np.float32(skin_hu) - image) * skin


def reconstruct(image: Field, spec: PhantomSpec, scan: Scan, rng: np.random.Generator) -> None:
    """Apply the kernel, noise and rounding errors of a reconstruction to sampled slices, in place.

    Smooth kernels blur; sharp kernels raise high frequencies, which leaves overshoot at edges and grainy noise. Noise grows
    with the water that the rays cross and runs along x where the shoulders are wide.
    """
    pixel = scan.grid.spacing_mm[1]
    blur_mm = float(np.interp(spec.kernel, (0, 0.5, 1), (0.85, 0.45, 0.0)))
    _, height, width = image.shape
    fy = np.fft.fftfreq(height)[:, None]
    fx = np.fft.rfftfreq(width)[None, :]
    frequency = np.hypot(fy, fx) / pixel  # cycles per mm
    cut = float(np.interp(spec.kernel, (0, 1), (0.28, 0.85)))
    spectrum = np.sqrt(frequency + 0.01) * np.exp(-((frequency / cut) ** 2))
    power = math.sqrt(float((spectrum**2).mean()))
    for k in range(len(image)):
        plane = image[k]
        if blur_mm > 0:
            plane = ndimage.gaussian_filter(plane, blur_mm / pixel)
        if spec.kernel > 0.6:
            plane = plane + np.float32(1.6 * (spec.kernel - 0.6)) * (plane - ndimage.gaussian_filter(plane, 1.1 / pixel))
        if spec.noise_hu > 0:
            water = np.clip((plane + 1000) / 1000, 0, 2)
            lateral = water.sum(axis=1) * pixel
            lateral = ndimage.gaussian_filter1d(lateral, 8 / pixel)
            sagittal = ndimage.gaussian_filter1d(water.sum(axis=0) * pixel, 8 / pixel)
            inside = ndimage.gaussian_filter(np.minimum(water, 1), 25 / pixel)
            sigma = np.exp((lateral[:, None] - 290) / 260) * 0.6 + np.exp((sagittal[None, :] - 190) / 200) * 0.4
            sigma = spec.noise_hu * np.clip(sigma, 0.3, 3) * (0.45 + 0.55 * inside)
            white = rng.standard_normal((height, width), dtype=np.float32)
            grain = np.fft.irfft2(np.fft.rfft2(white) * (spectrum / power), s=(height, width))
            streak = ndimage.gaussian_filter1d(rng.standard_normal((height, width), dtype=np.float32), 18 / pixel, axis=1)
            streak *= math.sqrt(3.5 * 18 / pixel) * 0.8
            strength = np.clip(np.exp((lateral[:, None] - 400) / 90) - 0.3, 0, 2.5) * inside
            plane = plane + sigma * grain + spec.noise_hu * strength * streak
        image[k] = plane
    np.maximum(image, -1024, out=image)


def padding_mask(grid: VoxelGrid) -> NDArray[np.bool_]:
    """Pixels outside the circle that a scanner reconstructs, (H, W)."""
    _, height, width = grid.shape
    y = (np.arange(height) - (height - 1) / 2)[:, None] / (height / 2)
    x = (np.arange(width) - (width - 1) / 2)[None, :] / (width / 2)
    return np.asarray(x * x + y * y > 1)
