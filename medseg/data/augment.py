"""Augmentation effects of one sample: an affine resampling, then effects of the scanner.

The effects of `augment=ct` expect channels in [-1, 1] with -1 as air. `Gamma` clips to this range,
but leaves out channels of z-scores. Each effect is a class that can be an entry of the
configuration key `augment.transforms`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from medseg.preprocess.effect import Effect, Spacing
from medseg.preprocess.intensity import AIR

# Slices, or planes of lines, that are resampled at once: their sampling coordinates fit into the
# cache of the processor.
SLAB_SLICES = 8


class Warp(NamedTuple):
    """An affine map from a patch to the larger crop that it is sampled from, the source.

    The voxel at the offset p from the centre of the patch gets the value of the source at the
    offset `matrix @ p + shift_voxels` from the centre of the source.

    Attributes:
        matrix: (3, 3), for offsets in voxels, (z, y, x).
        shift_voxels: (3,), in voxels, (z, y, x).
    """

    matrix: np.ndarray
    shift_voxels: np.ndarray

    def margin(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """Count the voxels (z, y, x) by which a source must exceed the patch on each side."""
        # `half` is the largest offset of a voxel's centre from the centre of the patch, `reach` the
        # largest offset of a sampled point from the centre of the source.
        half = (np.array(shape) - 1) / 2
        reach = np.abs(self.matrix) @ half + np.abs(self.shift_voxels)
        # `_resample_lines` reads a point at the places where its line crosses the slices above and
        # below. Those lie up to one slice away, so up to this many voxels aside.
        line_axis = _order_axes(self.matrix)[0]
        reach[1:] += np.abs(self.matrix[1:, line_axis] / self.matrix[0, line_axis])
        z, y, x = (max(0, math.ceil(excess)) for excess in reach - half)
        return (z, y, x)

    def apply(
        self, image: Tensor, labels: Tensor, shape: tuple[int, int, int]
    ) -> tuple[Tensor, Tensor]:
        """Resample a patch: the image linearly, the labels without interpolation.

        A point gets the label of the nearest slice, at the voxel nearest to where the line of the
        point crosses this slice, see `_resample_lines`. Outside of the source, the image is air and
        the labels are background.

        Args:
            image: Source, (C, D, H, W) float32.
            labels: Its labels, (D, H, W) uint8.
            shape: Shape of the patch.

        Returns:
            Image (C, *shape) and labels (*shape) of the patch.
        """
        channels = []
        for channel in image:
            # `grid_sample` pads the source with zeros, so air is shifted to zero and back.
            patch = _resample_affine(
                channel - AIR, self.matrix, self.shift_voxels, shape, "bilinear"
            )
            channels.append(patch.add_(AIR))
        patch_labels = _resample_affine(
            labels.float(), self.matrix, self.shift_voxels, shape, "nearest"
        )
        return torch.stack(channels), patch_labels.to(labels.dtype)


@dataclass(frozen=True)
class WindowShift:
    """Shift of the HU window by up to `hu` in either direction, like a scanner's calibration error.

    It is applied while the scan is read.
    """

    hu: float

    def draw(self, rng: np.random.Generator, window_hu: tuple[float, float]) -> tuple[float, float]:
        """Draw the window of a sample."""
        shift_hu = rng.uniform(-self.hu, self.hu)
        return (window_hu[0] + shift_hu, window_hu[1] + shift_hu)


@dataclass(frozen=True)
class Affine:
    """Rotation, scale, shear and shift in one resampling.

    It is applied while the scan is read. The scan is read beyond the crop too, so that no false air
    appears at the corners. A scale above 1 makes the anatomy larger.

    Attributes:
        probability: Probability that a sample is resampled.
        rotation_deg: Largest rotation about the axes z, y and x.
        scale_range: Smallest and largest scale factor, one for all axes.
        shear_max: Largest shear of each pair of axes.
        translation_mm: Largest shift along z, y and x.
    """

    probability: float
    rotation_deg: tuple[float, float, float]
    scale_range: tuple[float, float]
    shear_max: float
    translation_mm: tuple[float, float, float]

    def draw(self, rng: np.random.Generator, spacing_mm: tuple[float, float, float]) -> Warp | None:
        """Draw the warp of a sample; None where it is not warped."""
        if rng.random() >= self.probability:
            return None
        # The matrix is first made for offsets in mm. The map leads from the patch to the source:
        # the anatomy becomes larger when a smaller part of the source fills the patch.
        matrix = np.eye(3) / rng.uniform(*self.scale_range)
        shear_zy, shear_zx, shear_yx = rng.uniform(-self.shear_max, self.shear_max, size=3)
        matrix = np.array([[1, shear_zy, shear_zx], [0, 1, shear_yx], [0, 0, 1]]) @ matrix
        for axis, limit_deg in enumerate(self.rotation_deg):
            angle_deg = rng.uniform(-limit_deg, limit_deg)
            matrix = _rotation(axis, math.radians(angle_deg)) @ matrix
        shift_mm = rng.uniform(-1.0, 1.0, size=3) * self.translation_mm
        spacing = np.array(spacing_mm)
        # From mm to voxels: each column is multiplied by the spacing of its axis, which turns
        # voxels of the patch into mm; each row is divided by it, which turns mm into voxels of the
        # source.
        return Warp(matrix * spacing / spacing[:, None], shift_mm / spacing)


@dataclass(frozen=True)
class Flip(Effect):
    """Flip of each named axis (0 = z, 1 = y, 2 = x) with probability 0.5.

    A flip of x exchanges left and right: `medseg.training.clashes` refuses it for a task with
    sides.
    """

    is_spatial: ClassVar[bool] = True
    axes: Sequence[int]

    def __call__(
        self, image: Tensor, labels: Tensor, rng: np.random.Generator, spacing_mm: Spacing
    ) -> tuple[Tensor, Tensor]:
        """Draw each axis on its own; flip image and labels alike."""
        axes = [axis for axis in self.axes if rng.random() < 0.5]
        if not axes:
            return image, labels
        # The image has its channels before the axes of the labels.
        image_axes = [axis + 1 for axis in axes]
        return image.flip(image_axes), labels.flip(axes)


@dataclass(frozen=True)
class Resolution(Effect):
    """Low resolution and Gaussian blur.

    Both are linear along each axis, so one matrix per axis applies both. Low resolution averages
    over slices of a thickness from `low_resolution_mm` and interpolates back, along z (thick
    slices) or along all axes; an axis whose spacing is already larger stays unchanged. The blur
    acts along all axes, with a standard deviation from `blur_sigma_mm`.
    """

    low_resolution_probability: float
    low_resolution_mm: tuple[float, float]
    low_resolution_all_axes_probability: float
    blur_probability: float
    blur_sigma_mm: tuple[float, float]

    def __call__(
        self, image: Tensor, labels: Tensor, rng: np.random.Generator, spacing_mm: Spacing
    ) -> tuple[Tensor, Tensor]:
        """Multiply the image by the matrix of each axis that has one."""
        # Axis to its matrix; an axis without a matrix does not change.
        matrices: dict[int, np.ndarray] = {}
        sizes = image.shape[1:]
        if rng.random() < self.low_resolution_probability:
            slice_mm = rng.uniform(*self.low_resolution_mm)
            phase = rng.random()
            is_along_all_axes = rng.random() < self.low_resolution_all_axes_probability
            axes = (0, 1, 2) if is_along_all_axes else (0,)
            for axis in axes:
                slice_voxels = slice_mm / spacing_mm[axis]
                if slice_mm > spacing_mm[axis]:
                    matrices[axis] = thick_slice_matrix(sizes[axis], slice_voxels, phase)
        if rng.random() < self.blur_probability:
            sigma_mm = rng.uniform(*self.blur_sigma_mm)
            for axis in range(3):
                matrix = gaussian_matrix(sizes[axis], sigma_mm / spacing_mm[axis])
                if axis in matrices:
                    # The blur acts after the low resolution.
                    matrix = matrix @ matrices[axis]
                matrices[axis] = matrix
        for axis in sorted(matrices):
            image = _apply_along(image, torch.from_numpy(matrices[axis].astype(np.float32)), axis)
        return image, labels


@dataclass(frozen=True)
class Noise(Effect):
    """White Gaussian noise with a standard deviation from the range `sd`, in units of the image."""

    probability: float
    sd: tuple[float, float]

    def __call__(
        self, image: Tensor, labels: Tensor, rng: np.random.Generator, spacing_mm: Spacing
    ) -> tuple[Tensor, Tensor]:
        """Draw one standard deviation for all channels; change them in place."""
        if rng.random() < self.probability:
            noise = rng.standard_normal(image.shape, dtype=np.float32)
            image.add_(torch.from_numpy(noise), alpha=rng.uniform(*self.sd))
        return image, labels


@dataclass(frozen=True)
class Contrast(Effect):
    """Multiplication by a factor from `range`; 0, the middle of the window, stays 0."""

    probability: float
    range: tuple[float, float]

    def __call__(
        self, image: Tensor, labels: Tensor, rng: np.random.Generator, spacing_mm: Spacing
    ) -> tuple[Tensor, Tensor]:
        """Draw one factor for all channels; change them in place."""
        if rng.random() < self.probability:
            image.mul_(rng.uniform(*self.range))
        return image, labels


@dataclass(frozen=True)
class Brightness(Effect):
    """Addition of a constant from -`max` to `max`, in units of the image."""

    probability: float
    max: float

    def __call__(
        self, image: Tensor, labels: Tensor, rng: np.random.Generator, spacing_mm: Spacing
    ) -> tuple[Tensor, Tensor]:
        """Draw one constant for all channels; change them in place."""
        if rng.random() < self.probability:
            image.add_(rng.uniform(-self.max, self.max))
        return image, labels


@dataclass(frozen=True)
class Gamma(Effect):
    """Clip to [-1, 1], then apply a power law with an exponent from `range`.

    Let x be a channel whose range is scaled to [0, 1]. Half of the time it becomes x^exponent, else
    1 - (1 - x)^exponent. The range of `unbounded_channels`, such as z-scores, is that of their own
    values, and they are not clipped.
    """

    probability: float
    range: tuple[float, float]
    unbounded_channels: tuple[int, ...] = ()

    def __call__(
        self, image: Tensor, labels: Tensor, rng: np.random.Generator, spacing_mm: Spacing
    ) -> tuple[Tensor, Tensor]:
        """Draw one exponent for all channels; clip and change them in place."""
        sign_and_exponent: tuple[float, float] | None = None
        if rng.random() < self.probability:
            sign = 1.0 if rng.random() < 0.5 else -1.0
            sign_and_exponent = sign, rng.uniform(*self.range)
        # All channels at once where they have the same range: the last bit of a power may depend on
        # how values are divided.
        channels = list(image) if self.unbounded_channels else [image]
        for number, channel in enumerate(channels):
            low, high = -1.0, 1.0
            if number in self.unbounded_channels:
                low, high = map(float, channel.aminmax())
            else:
                # Noise, contrast and brightness may have left the range.
                channel.clamp_(low, high)
            if sign_and_exponent is not None and low < high:
                _apply_power(channel, low, high, *sign_and_exponent)
        return image, labels


def _apply_power(channel: Tensor, low: float, high: float, sign: float, exponent: float) -> None:
    """Apply the power law of `Gamma` in place to a channel with values from `low` to `high`.

    With the sign 1 to its values above `low`, with the sign -1 to those below `high`.
    """
    middle = (low + high) / 2
    factor = sign / (high - low)
    # To x in [0, 1], with the sign -1 to 1 - x. Rounding may leave [0, 1], where a power is NaN.
    channel.sub_(middle).mul_(factor).add_(0.5).clamp_(0.0, 1.0)
    channel.pow_(exponent)
    channel.sub_(0.5).mul_(sign * (high - low)).add_(middle)


@dataclass(frozen=True)
class Truncate(Effect):
    """Partial scan: slices at the upper or lower end become copies of the last remaining slice.

    At most `max_fraction` of all slices are replaced.
    """

    is_spatial: ClassVar[bool] = True
    probability: float
    max_fraction: float

    def __call__(
        self, image: Tensor, labels: Tensor, rng: np.random.Generator, spacing_mm: Spacing
    ) -> tuple[Tensor, Tensor]:
        """Cut off an end along z."""
        if rng.random() < self.probability:
            depth = labels.shape[0]
            num_slices = int(depth * rng.uniform(0.0, self.max_fraction))
            if rng.random() < 0.5:
                replaced = slice(0, num_slices)
                last = num_slices
            else:
                replaced = slice(depth - num_slices, depth)
                last = depth - num_slices - 1
            # Beyond the end of a scan its last slice is repeated, as in `crop_padded`.
            image[:, replaced] = image[:, last, None].clone()
            labels[replaced] = labels[last, None].clone()
        return image, labels


@dataclass(frozen=True)
class Narrow(Effect):
    """Narrow field of view: rows or columns at the right, left, front or back become air.

    At most `max_fraction` of all rows or columns are replaced.
    """

    is_spatial: ClassVar[bool] = True
    probability: float
    max_fraction: float

    def __call__(
        self, image: Tensor, labels: Tensor, rng: np.random.Generator, spacing_mm: Spacing
    ) -> tuple[Tensor, Tensor]:
        """Cut off a side in plane."""
        if rng.random() < self.probability:
            axis = 1 if rng.random() < 0.5 else 2
            is_low_end = rng.random() < 0.5
            length = int(labels.shape[axis] * rng.uniform(0.0, self.max_fraction))
            start = 0 if is_low_end else labels.shape[axis] - length
            # `narrow` is a view; the image has its channels before the axes of the labels.
            image.narrow(axis + 1, start, length).fill_(AIR)
            labels.narrow(axis, start, length).zero_()
        return image, labels


@dataclass(frozen=True)
class Circle(Effect):
    """Round field of view in the axial plane, with air outside.

    The radius is half the longer in-plane side, times a factor from `radius_range`.
    """

    is_spatial: ClassVar[bool] = True
    probability: float
    radius_range: tuple[float, float]

    def __call__(
        self, image: Tensor, labels: Tensor, rng: np.random.Generator, spacing_mm: Spacing
    ) -> tuple[Tensor, Tensor]:
        """Cut off the outside of a circle."""
        if rng.random() < self.probability:
            height, width = labels.shape[1:]
            _, step_y_mm, step_x_mm = spacing_mm
            height_mm = height * step_y_mm
            width_mm = width * step_x_mm
            radius_mm = rng.uniform(*self.radius_range) * max(height_mm, width_mm) / 2
            # The centre of the circle lies up to a tenth of half a side beside the middle.
            centre_y_mm = 0.1 * rng.uniform(-height_mm, height_mm) / 2
            centre_x_mm = 0.1 * rng.uniform(-width_mm, width_mm) / 2
            # Positions of the rows and columns from that centre.
            y_mm = (torch.arange(height) - (height - 1) / 2) * step_y_mm - centre_y_mm
            x_mm = (torch.arange(width) - (width - 1) / 2) * step_x_mm - centre_x_mm
            is_outside = (y_mm**2)[:, None] + x_mm**2 > radius_mm**2  # (H, W)
            image.masked_fill_(is_outside, AIR)
            labels.masked_fill_(is_outside, 0)
        return image, labels


def gaussian_matrix(size: int, sigma_voxels: float) -> np.ndarray:
    """Make the matrix (size, size) of a Gaussian blur of one axis; its rows add up to one."""
    index = np.arange(size)
    distances = index[:, None] - index
    # At least 1e-6, to avoid a division by 0; the matrix is then the identity.
    weights = np.exp(-0.5 * (distances / max(sigma_voxels, 1e-6)) ** 2)
    return weights / weights.sum(axis=1, keepdims=True)


def thick_slice_matrix(size: int, slice_voxels: float, phase: float) -> np.ndarray:
    """Make the matrix (size, size) of thick slices along one axis, interpolated back linearly.

    Args:
        size: Voxels of the axis.
        slice_voxels: Thickness and distance of the slices in voxels, > 1.
        phase: Share of the first slice that lies before the axis, in [0, 1).

    Returns:
        Matrix whose rows add up to one.
    """
    # All slices that begin within the axis: slice i begins at (i - phase) · slice_voxels.
    num_slices = math.floor(size / slice_voxels + phase) + 1
    # Positions in voxels from the beginning of the axis: slices as a column, voxels as a row.
    slice_starts = ((np.arange(num_slices) - phase) * slice_voxels)[:, None]
    slice_stops = slice_starts + slice_voxels
    voxel_starts = np.arange(size)
    voxel_stops = voxel_starts + 1.0
    # How much of each voxel lies in each slice, (num_slices, size).
    overlaps = np.minimum(slice_stops, voxel_stops) - np.maximum(slice_starts, voxel_starts)
    overlaps = np.maximum(overlaps, 0.0)
    # Slices beyond the axis, which no voxel lies in, are left out.
    overlaps = overlaps[overlaps.sum(axis=1) > 1e-9]
    averaging = overlaps / overlaps.sum(axis=1, keepdims=True)
    # The centre of a slice is that of its part on the axis: the border may cut the slice.
    voxel_centres = voxel_starts + 0.5
    slice_centres = averaging @ voxel_centres
    # Interpolation is linear: column s of its matrix is the interpolation of slices that are all 0
    # except for slice s, which is 1.
    columns = [np.interp(voxel_centres, slice_centres, unit) for unit in np.eye(len(averaging))]
    interpolation = np.stack(columns, axis=1)  # (size, num_slices)
    return interpolation @ averaging


def _apply_along(image: Tensor, matrix: Tensor, axis: int) -> Tensor:
    """Multiply each line of an image (C, D, H, W) along an axis (0 = z) by a matrix."""
    # A matrix product is faster than a convolution.
    if axis == 0:
        # (D, D) times (D, H·W)
        channels = [matrix @ channel.flatten(1) for channel in image]
        return torch.stack(channels).view(image.shape)
    if axis == 1:
        return matrix @ image
    return image @ matrix.T


def _resample_affine(
    source: Tensor, matrix: np.ndarray, shift: np.ndarray, shape: tuple[int, int, int], mode: str
) -> Tensor:
    """Sample a patch of a source, zero outside, see `Warp`.

    `_resample_lines` makes two passes of the two-dimensional `grid_sample`. On a CPU, this kernel
    is vectorised and several times as fast as the three-dimensional one.

    Args:
        source: (D, H, W) float32.
        matrix: From offsets in the patch to offsets in the source, (3, 3).
        shift: Added to the offsets in the source, (3,), voxels.
        shape: Shape of the patch.
        mode: `bilinear` or `nearest`.

    Returns:
        The patch, float32.
    """
    axes = _order_axes(matrix)
    line_shape = (shape[axes[0]], shape[axes[1]], shape[axes[2]])
    # Columns of the matrix belong to axes of the patch and are permuted; rows belong to axes of the
    # source and stay.
    result = _resample_lines(source, matrix[:, axes], shift, line_shape, mode)
    # Back to (z, y, x) of the patch.
    return result.permute(*np.argsort(axes).tolist()).contiguous()


def _order_axes(matrix: np.ndarray) -> list[int]:
    """Order the axes of the patch: first the axis whose lines cross source slices most steeply.

    This is z unless the patch is tilted by more than 45 degrees. A line that runs within a slice
    crosses no other slice, so that there are no crossings to interpolate between.
    """
    with np.errstate(divide="ignore"):
        # For a line along each axis of the patch: the distance in plane, in voxels, between its
        # crossings of two consecutive slices; infinite for a line within a slice.
        steps = np.abs(matrix[1:]).max(axis=0) / np.abs(matrix[0])
    line_axis = int(np.argmin(steps))
    return [line_axis, *(axis for axis in range(3) if axis != line_axis)]


def _resample_lines(
    source: Tensor, matrix: np.ndarray, shift: np.ndarray, shape: tuple[int, int, int], mode: str
) -> Tensor:
    """Sample a patch as `_resample_affine` does, once the axes of the patch are ordered.

    The axes of the source are (z, y, x); those of the patch, in their new order, are (u, v, w). The
    lines along u cross the source slices most steeply.

    First every source slice is resampled in its plane, at the points where these lines cross it.
    Then each line is resampled along u, between its crossings. No axis is interpolated twice.

    With M the matrix and t the shift, the point (u, v, w) of the patch lies in the source at

        z = M_zu u + M_zv v + M_zw w + t_z, and likewise y and x.

    Line (v, w) crosses slice z at the u that solves this equation. Inserted into the equation of y,
    this u gives the row of the crossing (the column likewise, with x in place of y):

        y = (M_yu / M_zu) (z - t_z)
            + (M_yv - M_yu M_zv / M_zu) v + (M_yw - M_yu M_zw / M_zu) w + t_y.
    """
    depth = source.shape[0]
    # The factors of that formula: rows for y and x, columns for z, v and w.
    crossing = np.empty((2, 3))
    crossing[:, 0] = matrix[1:, 0] / matrix[0, 0]
    crossing[:, 1:] = matrix[1:, 1:] - matrix[1:, :1] * (matrix[0] / matrix[0, 0])[1:]
    crossing_shift = shift[1:] - crossing[:, 0] * shift[0]

    size_u, size_v, size_w = shape
    u = _centred(size_u)
    v = _centred(size_v)
    w = _centred(size_w)
    # Coordinates of `grid_sample` are pairs with the last axis first, and run from -1 to 1 between
    # the outer faces of the source.
    to_unit = 2.0 / np.array(source.shape)

    # First pass: every slice of the source in its plane.
    crossed = source.new_empty((depth, size_v, size_w))
    z = _centred(depth)
    for planes in _slabs(depth):
        points = torch.empty((len(z[planes]), size_v, size_w, 2))
        for row, unit in enumerate(to_unit[1:]):
            by_z, by_v, by_w = (float(unit * factor) for factor in crossing[row])
            in_plane = by_v * v[:, None] + (by_w * w + float(unit * crossing_shift[row]))
            # Row 0 is y, the second coordinate of a pair; row 1 is x, the first.
            torch.add(by_z * z[planes, None, None], in_plane, out=points[..., 1 - row])
        sampled = F.grid_sample(source[planes, None], points, mode=mode, align_corners=False)
        crossed[planes] = sampled[:, 0]

    # Second pass: every line along u, several v at a time. The lines of one v form an image (depth
    # of the source, size of w). In it a point has the row z and the column w.
    result = source.new_empty(shape)
    by_u, by_v, by_w = (float(to_unit[0] * factor) for factor in matrix[0])
    for slab in _slabs(size_v):
        points = torch.empty((len(v[slab]), size_u, size_w, 2))
        points[..., 0] = w * (2.0 / size_w)
        within_image = by_u * u[:, None] + (by_w * w + float(to_unit[0] * shift[0]))
        torch.add(by_v * v[slab, None, None], within_image, out=points[..., 1])
        line_images = crossed[:, slab].movedim(1, 0)[:, None]
        sampled = F.grid_sample(line_images, points, mode=mode, align_corners=False)
        result[:, slab] = sampled[:, 0].movedim(0, 1)
    return result


def _centred(size: int) -> Tensor:
    """List the offsets of the voxels of an axis from its centre, float32."""
    return torch.arange(size, dtype=torch.float32) - (size - 1) / 2


def _slabs(size: int) -> list[slice]:
    """Divide an axis into ranges of `SLAB_SLICES`, of which the last may be shorter."""
    return [slice(start, min(start + SLAB_SLICES, size)) for start in range(0, size, SLAB_SLICES)]


def _rotation(axis: int, angle_rad: float) -> np.ndarray:
    """Make the rotation about one of the axes (z, y, x), as a matrix for (z, y, x)."""
    first, second = (other for other in range(3) if other != axis)
    matrix = np.eye(3)
    matrix[first, first] = matrix[second, second] = math.cos(angle_rad)
    matrix[first, second] = -math.sin(angle_rad)
    matrix[second, first] = math.sin(angle_rad)
    return matrix
