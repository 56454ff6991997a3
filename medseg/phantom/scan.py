"""Synthetic chest scans: field of view, slices, noise, padding and exact labels."""

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

# Smaller pieces of a lung are removed: at thin edges of a lung some voxels are separate.
_MIN_PIECE_ML = 1.0
# Number of lattice points that are drawn at a time: few enough for the processor's cache.
_NUM_POINTS = 200_000

Axes = list[NDArray[np.float64]]
"""Coordinates along z, y and x in the canonical frame of the patient, mm."""


class Phantom(NamedTuple):
    """A scan and its exact labels on one grid.

    Attributes:
        image_hu: int16 (D, H, W).
        labels: uint8 (D, H, W): 1 left lung, 2 right lung.
        organs: uint8 (D, H, W): values of `PHANTOM_LABELS`.
        grid: Grid of the voxels, in storage order.
    """

    image_hu: NDArray[np.int16]
    labels: NDArray[np.uint8]
    organs: NDArray[np.uint8]
    grid: VoxelGrid


def make_phantom(spec: PhantomSpec) -> Phantom:
    """Make a phantom.

    Args:
        spec: What the phantom is made from.

    Returns:
        Image, labels and grid; a voxel belongs to a label that covers more than half of its volume.
    """
    patient = draw_patient(spec)
    grid, (z_mm, y_mm, x_mm) = place_scan(patient)
    # A slice is the mean of thin planes across its thickness, in canonical mm.
    thickness_mm = spec.spacing_mm[0] / patient.scale_zyx[0]
    num_planes = max(1, round(thickness_mm / spec.model_spacing_mm[0]))
    offsets_mm = ((np.arange(num_planes) + 0.5) / num_planes - 0.5) * thickness_mm
    # z of each plane: (slices, planes of a slice).
    planes_mm = np.add.outer(z_mm, offsets_mm)
    # Within a plane the anatomy is drawn on a coarser lattice. Its z is replaced by that of the
    # planes, below.
    lattice = Points.covering((0, y_mm[0], x_mm[0]), (0, y_mm[-1], x_mm[-1]), spec.model_spacing_mm)

    image = np.empty(grid.shape, np.int16)
    labels = np.empty(grid.shape, np.uint8)
    organs = np.empty(grid.shape, np.uint8)
    anatomical_noise = draw_noise(spec)
    # For the noise of the scanner.
    rng = spec.rng("noise")
    num_slices_at_once = max(1, _NUM_POINTS // (num_planes * lattice.y.size * lattice.x.size))
    for start in range(0, grid.shape[0], num_slices_at_once):
        slices = slice(start, start + num_slices_at_once)
        points = lattice._replace(z=planes_mm[slices].reshape(-1, 1, 1).astype(np.float32))
        fields = []
        for planes in draw_planes(patient, points, anatomical_noise):
            fields.append(resample(planes, lattice, num_planes, y_mm, x_mm))
        hu, lung_share, organ_share, airway_share = fields
        noisy_hu = [add_noise(plane, spec, rng) for plane in hu]
        image[slices] = np.rint(noisy_hu)
        # The right lung and the spine have negative shares, see `draw_planes`. The values are those
        # of `PHANTOM_LABELS`.
        labels[slices] = np.select([lung_share > 0.5, lung_share < -0.5], [1, 2])
        organs[slices] = np.select(
            [organ_share > 0.5, organ_share < -0.5, airway_share > 0.5], [3, 4, 5]
        )
    if spec.padding_hu is not None:
        is_outside = _is_outside_circle(spec.matrix)
        for array, value in ((image, spec.padding_hu), (labels, 0), (organs, 0)):
            array[:, is_outside] = value
    # After the padding, which may cut a lung into pieces.
    _drop_crumbs(labels, float(np.prod(spec.spacing_mm)))
    # Both maps have the same values for the lungs. A voxel that a lung and another organ claim gets
    # the lung.
    np.copyto(organs, labels, where=labels > 0)
    flipped_axes = tuple(np.flatnonzero(spec.flips).tolist())
    return Phantom(
        np.flip(image, flipped_axes).copy(),
        np.flip(labels, flipped_axes).copy(),
        np.flip(organs, flipped_axes).copy(),
        grid.reoriented(order=(0, 1, 2), flips=spec.flips),
    )


def resample(
    planes: Field,
    lattice: Points,
    num_planes: int,
    y_mm: NDArray[np.float64],
    x_mm: NDArray[np.float64],
) -> Field:
    """Average the thin planes of each slice and interpolate linearly at its pixels.

    Args:
        planes: Values on the lattice, (D * num_planes, h, w).
        lattice: The lattice; only y (h points) and x (w points) are used.
        num_planes: Number of planes of a slice.
        y_mm: Centres of the rows, (H,).
        x_mm: Centres of the columns, (W,).

    Returns:
        Values at the pixels, float32 (D, H, W).
    """
    slices = planes.reshape(-1, num_planes, *planes.shape[1:]).mean(axis=1)
    for axis, coordinates, centres_mm in ((1, lattice.y, y_mm), (2, lattice.x, x_mm)):
        curve = interp1d(coordinates.ravel(), slices, axis=axis, fill_value="extrapolate")
        slices = curve(centres_mm)
    return np.asarray(slices, np.float32)


def place_scan(patient: Patient) -> tuple[VoxelGrid, Axes]:
    """Choose the voxels of the scan in the patient.

    A tilt turns the slices together with the patient: the grid is oblique, and the image shows the
    patient upright.

    Returns:
        The grid before the axes are flipped, and the voxel centres in the canonical frame.
    """
    spec = patient.spec
    rng = spec.rng("view")
    view = VIEWS[spec.view]
    ends_mm = []
    for landmark, lowest_mm, highest_mm in (view.low, view.high):
        ends_mm.append(patient.landmark_z_mm(landmark) + rng.uniform(lowest_mm, highest_mm))
    # The lowest and the highest slice, in the canonical frame.
    low_mm, high_mm = ends_mm
    # World mm per canonical mm; spacing and what follows are in world mm.
    scale = np.array(patient.scale_zyx)
    spacing_mm = np.array(spec.spacing_mm)
    num_slices = spec.num_slices
    if num_slices is None:
        num_slices = max(4, round((high_mm - low_mm) * scale[0] / spacing_mm[0]) + 1)
    shape = (num_slices, *spec.matrix)
    middle_zyx_mm = np.array([(low_mm + high_mm) / 2 * scale[0], *spec.centre_offset_mm])
    first_zyx_mm = middle_zyx_mm - (np.array(shape) - 1) / 2 * spacing_mm
    centres_mm = []
    for axis in range(3):
        along_mm = first_zyx_mm[axis] + np.arange(shape[axis]) * spacing_mm[axis]
        centres_mm.append(along_mm / scale[axis])
    direction = Rotation.from_euler("ZYX", spec.tilt_deg, degrees=True).as_matrix()
    # The patient turns about the carina; a scanner may have its own origin anywhere.
    origin_xyz_mm = direction @ first_zyx_mm[::-1] + rng.uniform(-100, 100, 3)
    return VoxelGrid(shape, spec.spacing_mm, tuple(origin_xyz_mm), direction.tolist()), centres_mm


def add_noise(plane: Field, spec: PhantomSpec, rng: np.random.Generator) -> Field:
    """Blur a slice and add the noise of a scanner, HU (H, W).

    The noise of a row is stronger the more the X-rays along it were absorbed, as at the level of
    the shoulders.
    """
    pixel_mm = spec.spacing_mm[1]
    plane = ndimage.gaussian_filter(plane, spec.blur_mm / pixel_mm)
    if spec.noise_hu > 0:
        # Length of water that absorbs as much as the row: water has 0 HU, air -1000.
        water_mm = np.clip(1 + plane / 1000, 0, 2).sum(axis=1) * pixel_mm
        smooth_water_mm = ndimage.gaussian_filter1d(water_mm, 8 / pixel_mm)
        # `noise_hu` is meant for 290 mm, a row in the middle of the chest.
        strength = np.clip(np.exp((smooth_water_mm - 290) / 260), 0.3, 3)
        # Noise of neighbouring pixels is correlated, as after a reconstruction.
        grain = ndimage.gaussian_filter(rng.standard_normal(plane.shape, np.float32), 0.6)
        plane = plane + spec.noise_hu * strength[:, None] * grain / grain.std()
    # Range of 12-bit CT values.
    return np.clip(plane, -1024, 3071)


def _is_outside_circle(matrix: tuple[int, int]) -> NDArray[np.bool_]:
    """Mask of the pixels outside a round field of view as wide as the slice, (H, W)."""
    y, x = (np.linspace(-1, 1, size) for size in matrix)
    return np.hypot(y[:, None], x) > 1


def _drop_crumbs(labels: NDArray[np.uint8], voxel_mm3: float) -> None:
    """Clear the small pieces of each lung in place; the largest piece always stays."""
    for value, window in enumerate(ndimage.find_objects(labels, max_label=2), start=1):
        # No voxel has this value.
        if window is None:
            continue
        # A view: what is cleared in it is cleared in `labels`.
        labels_in_window = labels[window]
        piece_numbers, _ = ndimage.label(labels_in_window == value)
        # Voxels by number of the piece; number 0 is the background.
        sizes = np.bincount(piece_numbers.ravel())
        is_small = sizes * voxel_mm3 < 1000 * _MIN_PIECE_ML
        largest = int(np.argmax(sizes[1:])) + 1
        is_small[[0, largest]] = False
        labels_in_window[is_small[piece_numbers]] = 0
