"""Reader of one DICOM series: its stack of slices on a regular grid.

Duplicates are dropped, gaps filled, and a tilted stack is made rectangular. The rules, which
docs/dicom.md repeats:

* Slices within `JITTER_TOLERANCE_MM` of an even grid are taken as they are; thin ones, as of
  micro-CT, within `JITTER_SHARE` of their distance.
* Other slices are interpolated linearly along the normal onto the even grid of their usual
  distance, if no two neighbours are farther apart than `MAX_GAP_MM` and at most `MAX_FILLED_SHARE`
  of the slices is missing (one missing slice is always accepted); slices on that grid stay as they
  are. All other stacks are refused.
* A sheared stack (tilted gantry) is resampled linearly within its slices to a rectangular grid that
  holds all slices. A segmentation lies on that grid too; in SEG and RTSTRUCT, a pixel of a slice
  takes the label at the same position in the patient.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.ndimage import shift

from medseg.errors import UserError
from medseg.findings import Finding, warnings_of
from medseg.geometry.grid import DIRECTION_TOLERANCE, VoxelGrid
from medseg.io.dicom.frames import Frame
from medseg.io.dicom.pixels import READ_FILE, has_whole_hu, read_hu
from medseg.io.dicom.stacks import SAME_POSITION_MM, Stack, choose_stack, natural_key, normal_of
from medseg.io.volume import LazyVolume, grid_from_columns
from medseg.task import AIR_HU
from medseg.wording import first_few

# Largest distance of a slice from its position in an evenly spaced, straight stack that counts as
# rounding of the decimals in headers.
JITTER_TOLERANCE_MM = 0.1

# The same as a share of the distance of slices, the smaller limit below a distance of 0.33 mm. A
# missing slice puts a neighbour at least a third of the distance beside the even grid.
JITTER_SHARE = 0.3

# Wider gaps are not interpolated: a structure may end in between.
MAX_GAP_MM = 10.0

# Largest number of missing slices that are interpolated, as a share of the slices that exist; one
# slice is always interpolated.
MAX_FILLED_SHARE = 0.1

# Largest tilt of a stack that may come from a gantry. Gantries tilt by 30° at most; the rest is
# room for imprecise headers.
MAX_TILT_DEG = 45.0


class Plane(NamedTuple):
    """A plane of the grid: a slice, or interpolated between two slices.

    Attributes:
        lower_index: Index of the slice at the plane or below it.
        upper_weight: Weight of the next slice in [0, 1]; 0 for a plane that is a slice.
    """

    lower_index: int
    upper_weight: float


@dataclass(frozen=True, eq=False)
class SourceSlices:
    """The slices of a series, one at each position, and the regular grid over them.

    Attributes:
        path: Folder or file that the series was read from.
        frames: Slices, sorted along the normal.
        grid: The grid; its planes are parallel to the slices.
        planes: The planes of the grid, sorted along the normal.
        shifts_px: Position of the first pixel of each slice on its plane (slices, 2), (y, x) in
            pixels, each >= 0.
        is_filled: Whether any plane lies between two slices.
        is_shifted: Whether the slices are offset sideways, as by a tilted gantry.
        findings: Messages on files left out, assumptions and repairs.
    """

    path: Path
    frames: tuple[Frame, ...]
    grid: VoxelGrid
    planes: list[Plane]
    shifts_px: np.ndarray
    is_filled: bool
    is_shifted: bool
    findings: tuple[Finding, ...]


def open_slices(
    path: Path, series: str | None = None, modality: str = "ct", files: Sequence[Path] = ()
) -> SourceSlices:
    """Read the headers of a series and lay a regular grid over its slices.

    Args:
        path: Folder, searched to its bottom; a DICOMDIR, which stands for its folder; or a file of
            a series, which stands for the series' files beside it.
        series: As for `choose_stack`.
        modality: Modality of the series, as a task names it: `ct` (in HU), `mr`, or `other` for
            any.
        files: The files to read instead of all files at the path.

    Raises:
        UserError: If the arguments do not select exactly one stack, or its slices do not make a
            regular volume by the rules at the top of this module.
    """
    dicom_modality = "" if modality == "other" else modality.upper()
    stack, left_out = choose_stack(path, series, dicom_modality, files)
    _check_rescale(path, stack)
    frames, heights_mm, duplicate_warnings = _without_duplicates(path, stack)
    planes, step_mm, gap_warnings = _even_planes(path, frames, heights_mm)
    shifts_mm, slant, tilt_warnings = _sideways_shifts(path, frames, heights_mm)
    first = frames[0]
    # The grid begins at the smallest shift (y, x) of all slices.
    low_mm = shifts_mm.min(axis=0)
    shifts_px = (shifts_mm - low_mm) / first.spacing_mm
    # Rows and columns that the grid has beyond a slice. 1e-3: rounding noise must not add a pixel.
    num_more_px = np.ceil(shifts_px.max(axis=0) - 1e-3).astype(int)
    slice_shape = np.array(first.pixels.shape)
    if (num_more_px > slice_shape).any():
        raise UserError(
            f"{path}: expected slices stacked above each other, but they are offset sideways by up "
            f"to {np.ptp(shifts_mm, axis=0).max():.0f} mm; give one stack per folder."
        )
    height, width = slice_shape + num_more_px
    shape = (len(planes), height, width)
    # LPS unit vectors. A step along a row leads to the next column, one along a column to the next
    # row.
    along_row, along_column = first.axes
    row_distance_mm, column_distance_mm = first.spacing_mm
    # Rounded decimals in the headers make a straight stack lean a little. Its slices are not
    # shifted, so the grid leans with them: else its last plane would lie beside the last slice.
    along_stack = normal_of(first) + slant[0] * along_column + slant[1] * along_row
    # LPS vectors from a voxel to the next one along x, y and z.
    steps_mm = [
        along_row * column_distance_mm,
        along_column * row_distance_mm,
        along_stack * step_mm,
    ]
    origin = first.position_xyz_mm + low_mm[0] * along_column + low_mm[1] * along_row
    grid = grid_from_columns(path, shape, np.stack(steps_mm, axis=1), list(origin))
    # Each warning of the slices once, in their order.
    slice_warnings: dict[str, None] = {}
    for frame in frames:
        slice_warnings.update(dict.fromkeys(frame.warnings))
    sentences = (*slice_warnings, *duplicate_warnings, *gap_warnings, *tilt_warnings)
    return SourceSlices(
        path,
        frames,
        grid,
        planes,
        shifts_px,
        is_filled=bool(gap_warnings),
        is_shifted=bool(tilt_warnings),
        findings=(*left_out, *warnings_of("reading", sentences)),
    )


def fault_of(stack: Stack) -> str:
    """Say why a stack makes no regular volume, by its headers alone; "" for one that does.

    Among slices at one position only the first counts. Whether the others are copies of it is not
    checked, since that takes their pixels.
    """
    path = stack.frames[0].path.parent
    is_first = np.diff(stack.heights_mm, prepend=-np.inf) > SAME_POSITION_MM
    frames = tuple(stack.frames[index] for index in np.flatnonzero(is_first))
    heights_mm = stack.heights_mm[is_first]
    try:
        _check_rescale(path, stack)
        _even_planes(path, frames, heights_mm)
        _sideways_shifts(path, frames, heights_mm)
    except UserError as error:
        return str(error).removeprefix(f"{path}: ")
    return ""


def _check_rescale(path: Path, stack: Stack) -> None:
    """Check that all slices of a stack have slope and intercept, or none has.

    Raises:
        UserError: If they differ in what they lack; the message names the first such slice.
    """
    without_rescale = [frame for frame in stack.frames if frame.missing_rescale]
    if len({frame.missing_rescale for frame in stack.frames}) > 1:
        raise UserError(
            f"{path}: expected rescale slope and intercept in every slice or in none, but "
            f"{first_few(without_rescale, 1)} lack them; export the series again."
        )


def open_dicom(
    path: Path, series: str | None = None, modality: str = "ct", files: Sequence[Path] = ()
) -> LazyVolume:
    """Describe the volume of a series, in HU or intensities on its regular grid.

    Arguments and errors are those of `open_slices`.
    """
    slices = open_slices(path, series, modality, files)
    frames = slices.frames
    is_whole = all(map(has_whole_hu, frames))
    dtype = np.dtype(np.int32 if is_whole else np.float32)

    def read_chunks() -> Iterator[np.ndarray]:
        for image_hu in _plane_images(slices):
            # In an int32 volume, interpolated planes are float32 and are rounded. In a float32
            # volume, slices of whole HU are int32, which rounding does not change.
            if image_hu.dtype != dtype:
                image_hu = np.rint(image_hu)
            yield image_hu.astype(dtype).ravel()

    return LazyVolume(
        path,
        slices.grid,
        dtype,
        read_chunks,
        findings=slices.findings,
        identity=frames[0].series.identity,
    )


def _plane_images(slices: SourceSlices) -> Iterator[np.ndarray]:
    """Read the planes of the grid one by one: HU or intensities (H, W)."""
    frames = slices.frames
    air = frames[0].air
    # Interpolation would blur padding far below air into its neighbours, so HU are clipped. Other
    # intensities may be negative, and their padding is 0 already.
    lowest = air if frames[0].is_hu else -np.inf
    # A multi-frame file is read once for all its slices, which follow each other.
    read_slice = partial(read_hu, read_file=lru_cache(maxsize=1)(READ_FILE))

    @lru_cache(maxsize=2)  # two neighbours, for the planes between them
    def placed(index: int) -> np.ndarray:
        """Read one slice and move it to its position on the grid."""
        image_hu = np.maximum(read_slice(frames[index]), lowest).astype(np.float32)
        if not slices.is_shifted:
            return image_hu
        return shifted(image_hu, slices.shifts_px[index], slices.grid.shape[1:], air)

    for lower_index, upper_weight in slices.planes:
        # Each plane is a slice at its place: its values stay as they are.
        if not slices.is_filled and not slices.is_shifted:
            yield read_slice(frames[lower_index])
            continue
        image_hu = placed(lower_index)
        if upper_weight > 0:
            difference_hu = placed(lower_index + 1) - image_hu
            image_hu = image_hu + np.float32(upper_weight) * difference_hu
        yield image_hu


def shifted(
    image_hu: np.ndarray, shift_px: np.ndarray, shape: tuple[int, ...], air: int = AIR_HU
) -> np.ndarray:
    """Place a slice on a larger canvas of air by linear interpolation.

    Args:
        image_hu: Values (H, W) float32.
        shift_px: Position of its first pixel on the canvas (y, x) in pixels, each >= 0.
        shape: Size of the canvas (H, W).
        air: Value of the canvas.

    Example:
        >>> shifted(np.array([[0.0, 100.0]], np.float32), np.array([0.0, 0.25]), (1, 3)).tolist()
        [[-256.0, 75.0, -743.0]]
    """
    canvas = np.full(shape, air, np.float32)
    canvas[: image_hu.shape[0], : image_hu.shape[1]] = image_hu
    return np.asarray(shift(canvas, shift_px, order=1, mode="grid-constant", cval=air))


def _without_duplicates(
    path: Path, stack: Stack
) -> tuple[tuple[Frame, ...], np.ndarray, list[str]]:
    """Keep one slice at each position.

    Among equal slices the first is kept; among slices of two acquisitions, the earlier acquisition.

    Returns:
        The slices, their heights in mm, warnings.

    Raises:
        UserError: If slices of one acquisition share a position and differ.
    """
    frames: list[Frame] = []
    heights_mm: list[float] = []
    copies: list[Frame] = []
    later_slices: list[Frame] = []
    for frame, height_mm in zip(stack.frames, stack.heights_mm.tolist(), strict=True):
        if not heights_mm or height_mm - heights_mm[-1] > SAME_POSITION_MM:
            frames.append(frame)
            heights_mm.append(height_mm)
            continue
        previous = frames[-1]
        if _is_copy(frame, previous):
            copies.append(frame)
            continue
        # The acquisition number is the first of `VOLUME_KEYS`.
        acquisition, previous_acquisition = frame.volume_keys[0], previous.volume_keys[0]
        if acquisition == previous_acquisition:
            raise UserError(
                f"{path}: expected one slice at each position, but {previous} and {frame} share a "
                "position and differ; remove one of them."
            )
        # `natural_key` gives infinity for an acquisition without a number, which counts as later.
        number, _ = natural_key(acquisition)
        previous_number, _ = natural_key(previous_acquisition)
        if number < previous_number:
            frames[-1] = frame
            heights_mm[-1] = height_mm
            later_slices.append(previous)
        else:
            later_slices.append(frame)
    warnings = []
    if copies:
        warnings.append(f"duplicate slices were dropped: {first_few(copies, 1)}")
    if later_slices:
        warnings.append(
            "two acquisitions have a slice at the same position; the earlier one was kept, "
            f"dropped: {first_few(later_slices, 1)}"
        )
    return tuple(frames), np.array(heights_mm), warnings


def _is_copy(frame: Frame, previous: Frame) -> bool:
    """Whether two slices at one height have the same position and values; reads their pixels."""
    offset_mm = np.subtract(frame.position_xyz_mm, previous.position_xyz_mm)
    if np.abs(offset_mm).max() > SAME_POSITION_MM:
        return False
    return np.array_equal(read_hu(frame), read_hu(previous))


def _even_planes(
    path: Path, frames: tuple[Frame, ...], heights_mm: np.ndarray
) -> tuple[list[Plane], float, list[str]]:
    """Lay evenly spaced planes across the normal.

    Args:
        path: The series, for messages.
        frames: Its slices, one at each position.
        heights_mm: Their positions along the normal, ascending.

    Returns:
        The planes, ascending; their distance in mm; a warning if any plane lies between two slices,
        else an empty list.

    Raises:
        UserError: If the slices are too uneven, or too many are missing.
    """
    length_mm = float(heights_mm[-1] - heights_mm[0])
    num_frames = len(frames)
    step_mm = length_mm / (num_frames - 1)
    gaps_mm = np.diff(heights_mm)
    # The lower median: with an even number of gaps, the mean of the two middle ones may not occur.
    usual_mm = float(np.quantile(gaps_mm, 0.5, method="lower"))
    tolerance_mm = min(JITTER_TOLERANCE_MM, JITTER_SHARE * usual_mm)
    even_mm = np.arange(num_frames) * step_mm
    if np.abs(heights_mm - heights_mm[0] - even_mm).max() <= tolerance_mm:
        planes = [Plane(index, upper_weight=0.0) for index in range(num_frames)]
        return planes, step_mm, []
    num_steps = round(length_mm / usual_mm)
    num_missing = num_steps + 1 - num_frames
    is_too_near = gaps_mm.min() < 0.5 * usual_mm
    # Index of the gap that the messages name.
    worst = int(gaps_mm.argmax())
    if is_too_near:
        worst = int(gaps_mm.argmin())
    is_too_far = gaps_mm[worst] > MAX_GAP_MM + JITTER_TOLERANCE_MM
    can_fill = 0 <= num_missing <= max(1, MAX_FILLED_SHARE * num_frames)
    if is_too_near or is_too_far or not can_fill:
        raise UserError(
            f"{path}: expected evenly spaced slices, but {frames[worst]} and {frames[worst + 1]} "
            f"are {gaps_mm[worst]:.3f} mm apart where {usual_mm:.3f} mm are usual "
            f"({max(num_missing, 0)} of {num_steps + 1} slices missing); gaps are filled up to "
            f"{MAX_GAP_MM:g} mm and {MAX_FILLED_SHARE:.0%} of the slices: export the series again."
        )
    step_mm = length_mm / num_steps
    plane_heights_mm = heights_mm[0] + np.arange(num_steps + 1) * step_mm
    # Slice nearest to each plane; distances are (planes, slices).
    nearest = np.abs(heights_mm - plane_heights_mm[:, None]).argmin(axis=1)
    is_slice = np.abs(heights_mm[nearest] - plane_heights_mm) <= tolerance_mm
    # Slice below each plane. The first and the last plane are slices: clipping changes none that is
    # interpolated.
    below = (np.searchsorted(heights_mm, plane_heights_mm) - 1).clip(0, num_frames - 2)
    weights = (plane_heights_mm - heights_mm[below]) / gaps_mm[below]
    weights = np.where(is_slice, 0.0, weights)
    indices = np.where(is_slice, nearest, below)
    planes = list(map(Plane, indices.tolist(), weights.tolist()))
    num_filled = int(np.count_nonzero(weights))
    warning = (
        f"the slices lie {gaps_mm.min():.2f} to {gaps_mm.max():.2f} mm apart: {num_filled} of "
        f"{num_steps + 1} were interpolated linearly onto an even grid of {step_mm:.2f} mm"
    )
    # All slices are planes of the even grid, and only missing ones were interpolated.
    if num_filled == num_missing:
        warning = (
            f"slices missing: {num_missing} of {num_steps + 1}, such as between {frames[worst]} "
            f"and {frames[worst + 1]}; they were interpolated linearly"
        )
    return planes, step_mm, [warning]


def _sideways_shifts(
    path: Path, frames: tuple[Frame, ...], heights_mm: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Measure the sideways offset of each slice from the first.

    Args:
        path: The series, for messages.
        frames: Its slices.
        heights_mm: Their positions along the normal, ascending.

    Returns:
        The shift (y, x) in mm of each slice, 0 in a stack that is straight within rounding; the
        slant (y, x) of such a stack in mm per mm, else 0; a warning if the stack is not straight,
        else an empty list.

    Raises:
        UserError: If the stack leans more than a gantry can.
    """
    positions_xyz_mm = np.array([frame.position_xyz_mm for frame in frames])
    offsets_xyz_mm = positions_xyz_mm - positions_xyz_mm[0]
    # Unit vectors along a column (y) and along a row (x).
    axes_yx = frames[0].axes[::-1]
    shifts_mm = offsets_xyz_mm @ axes_yx.T  # (slices, 2)
    rise_mm = heights_mm - heights_mm[0]
    # Slope (y, x) of the line through the first slice that fits the others best: least squares.
    slant = rise_mm @ shifts_mm / (rise_mm @ rise_mm)
    is_line = np.abs(shifts_mm - rise_mm[:, None] * slant).max() <= JITTER_TOLERANCE_MM
    # Tangent of the angle between stack and normal.
    tangent = np.linalg.norm(slant)
    if tangent <= DIRECTION_TOLERANCE and is_line:
        return np.zeros_like(shifts_mm), slant, []
    tilt_deg = math.degrees(math.atan(tangent))
    if tilt_deg > MAX_TILT_DEG:
        raise UserError(
            f"{path}: expected slices stacked along their normal, but they drift {tilt_deg:.0f}° "
            "away from it; such a stack is no CT of a tilted gantry (30° at most)."
        )
    consequence = "were resampled to a rectangular grid; results are on that grid"
    if is_line:
        warning = f"the gantry was tilted by {tilt_deg:.1f}°: the slices {consequence}"
    else:
        largest_mm = np.abs(shifts_mm).max()
        warning = f"the slices are offset sideways by up to {largest_mm:.1f} mm: they {consequence}"
    return shifts_mm, np.zeros(2), [warning]
