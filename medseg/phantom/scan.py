"""Synthetic scans: field of view, slices, noise, padding and exact labels of a specification."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.interpolate import interp1d
from scipy.spatial.transform import Rotation

from medseg.geometry.grid import VoxelGrid
from medseg.phantom.anatomy import Patient, draw_patient
from medseg.phantom.shapes import Field, Points
from medseg.phantom.spec import VIEWS, PhantomSpec
from medseg.phantom.tissue import draw_noise, draw_planes

# Smaller pieces of a lung, cut off its thin edges by the voxel grid, are removed.
_MIN_PIECE_ML = 1.0
# Points that are drawn at a time; they stay in the processor's cache.
_NUM_POINTS = 200_000

Axes = list[NDArray[np.float64]]
"""Coordinates along z, y and x in the canonical frame of the patient, mm."""


class Phantom(NamedTuple):
    """A scan and its exact labels on one grid.

    Attributes:
        image_hu: int16 (D, H, W).
        labels: uint8 (D, H, W): 1 left lung, 2 right lung.
        organs: uint8 (D, H, W): 1 left lung, 2 right lung, 3 heart, 4 spine,
            5 airway.
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
    patient = draw_patient(spec)
    grid, (z_mm, y_mm, x_mm) = place_scan(patient)
    # A slice is the mean of thin planes, which are drawn on a lattice of their own.
    thickness_mm = spec.spacing_mm[0] / patient.scale_zyx[0]
    num_planes = max(1, round(thickness_mm / spec.model_spacing_mm[0]))
    offsets_mm = ((np.arange(num_planes) + 0.5) / num_planes - 0.5) * thickness_mm
    planes_mm = np.add.outer(z_mm, offsets_mm)
    lattice = Points.covering((0, y_mm[0], x_mm[0]), (0, y_mm[-1], x_mm[-1]), spec.model_spacing_mm)

    image = np.empty(grid.shape, np.int16)
    labels = np.empty(grid.shape, np.uint8)
    organs = np.empty(grid.shape, np.uint8)
    noise = draw_noise(spec)
    rng = spec.rng("noise")
    num_slices = max(1, _NUM_POINTS // (num_planes * lattice.y.size * lattice.x.size))
    for start in range(0, grid.shape[0], num_slices):
        slices = slice(start, start + num_slices)
        points = lattice._replace(z=planes_mm[slices].reshape(-1, 1, 1).astype(np.float32))
        fields = []
        for planes in draw_planes(patient, points, noise):
            fields.append(resample(planes, lattice, num_planes, y_mm, x_mm))
        hu, lung_share, organ_share, airway_share = fields
        noisy_hu = [add_noise(plane, spec, rng) for plane in hu]
        image[slices] = np.rint(noisy_hu)
        # Left lungs and the heart are drawn as positive shares, right ones and the spine as
        # negative ones.
        labels[slices] = np.select([lung_share > 0.5, lung_share < -0.5], [1, 2])
        organs[slices] = np.select(
            [organ_share > 0.5, organ_share < -0.5, airway_share > 0.5], [3, 4, 5]
        )
    if spec.padding_hu is not None:
        # Outside of the round field of view, whose diameter is the width of the slice.
        y, x = (np.linspace(-1, 1, size) for size in spec.matrix)
        is_outside = np.hypot(y[:, None], x) > 1
        for array, value in ((image, spec.padding_hu), (labels, 0), (organs, 0)):
            array[:, is_outside] = value
    _drop_crumbs(labels, float(np.prod(spec.spacing_mm)))
    # The lungs lie over the other organs.
    np.copyto(organs, labels, where=labels > 0)
    axes = tuple(np.flatnonzero(spec.flips).tolist())
    stored = grid.reoriented((0, 1, 2), spec.flips)
    return Phantom(
        np.flip(image, axes).copy(),
        np.flip(labels, axes).copy(),
        np.flip(organs, axes).copy(),
        stored,
    )


def resample(
    planes: Field,
    lattice: Points,
    num_planes: int,
    y_mm: NDArray[np.float64],
    x_mm: NDArray[np.float64],
) -> Field:
    """Average the thin planes of each slice and interpolate them at its pixels, (D, H, W)."""
    slices = planes.reshape(-1, num_planes, *planes.shape[1:]).mean(axis=1)
    for axis, coordinates, centres_mm in ((1, lattice.y, y_mm), (2, lattice.x, x_mm)):
        curve = interp1d(coordinates.ravel(), slices, axis=axis, fill_value="extrapolate")
        slices = curve(centres_mm)
    return np.asarray(slices, np.float32)


def place_scan(patient: Patient) -> tuple[VoxelGrid, Axes]:
    """Place the field of view on the patient.

    A tilt turns the slices together with the patient: the grid is oblique, and the image shows the
    patient upright.

    Returns:
        The grid before it is stored, and the voxel centres in the canonical frame.
    """
    spec = patient.spec
    rng = spec.rng("view")
    view = VIEWS[spec.view]
    ends_mm = []
    for landmark, lowest_mm, highest_mm in (view.low, view.high):
        ends_mm.append(patient.landmark_z_mm(landmark) + rng.uniform(lowest_mm, highest_mm))
    low_mm, high_mm = ends_mm
    scale = np.array(patient.scale_zyx)
    spacing = np.array(spec.spacing_mm)
    num_slices = spec.num_slices
    if num_slices is None:
        num_slices = max(4, round((high_mm - low_mm) * scale[0] / spacing[0]) + 1)
    shape = (num_slices, *spec.matrix)
    middle = np.array([(low_mm + high_mm) / 2 * scale[0], *spec.centre_offset_mm])
    first = middle - (np.array(shape) - 1) / 2 * spacing
    centres_mm = []
    for axis in range(3):
        along_mm = first[axis] + np.arange(shape[axis]) * spacing[axis]
        # In the canonical patient, in which the anatomy is drawn.
        centres_mm.append(along_mm / scale[axis])
    direction = Rotation.from_euler("ZYX", spec.tilt_deg, degrees=True).as_matrix()
    # The origin of the world is anywhere.
    origin = direction @ first[::-1] + rng.uniform(-100, 100, 3)
    return VoxelGrid(shape, spec.spacing_mm, tuple(origin), direction.tolist()), centres_mm


def add_noise(plane: Field, spec: PhantomSpec, rng: np.random.Generator) -> Field:
    """Blur a slice and add noise, HU (H, W).

    The noise grows along the rows with the water that the rays cross.
    """
    pixel_mm = spec.spacing_mm[1]
    plane = ndimage.gaussian_filter(plane, spec.blur_mm / pixel_mm)
    if spec.noise_hu > 0:
        # The noise of a row grows with the water that the rays along it pass.
        water_mm = np.clip(1 + plane / 1000, 0, 2).sum(axis=1) * pixel_mm
        smooth_water_mm = ndimage.gaussian_filter1d(water_mm, 8 / pixel_mm)
        strength = np.clip(np.exp((smooth_water_mm - 290) / 260), 0.3, 3)
        grain = ndimage.gaussian_filter(rng.standard_normal(plane.shape, np.float32), 0.6)
        plane = plane + spec.noise_hu * strength[:, None] * grain / grain.std()
    return np.clip(plane, -1024, 3071)


def _drop_crumbs(labels: NDArray[np.uint8], voxel_mm3: float) -> None:
    """Clear the small pieces of each lung in place; the largest piece stays."""
    for value, window in enumerate(ndimage.find_objects(labels, max_label=2), start=1):
        if window is None:
            continue
        part = labels[window]
        pieces, _ = ndimage.label(part == value)
        sizes = np.bincount(pieces.ravel())
        is_crumb = sizes * voxel_mm3 < 1000 * _MIN_PIECE_ML
        # Number 0 is what lies around the pieces.
        largest = int(np.argmax(sizes[1:])) + 1
        is_crumb[[0, largest]] = False
        part[is_crumb[pieces]] = 0
