"""From slices at their places to a regular grid: doubles dropped, gaps filled, a tilted stack set upright.

The rule, which docs/DICOM.md repeats:

* Slices within `JITTER_TOLERANCE_MM` of an even grid are taken as they are.
* Else they are interpolated linearly along the normal onto the even grid of their usual distance, if no two neighbours are
  farther apart than `MAX_GAP_MM` and at most `MAX_FILLED_SHARE` of the slices (one at least) is missing; slices that lie
  on the grid stay as they are. All else is refused.
* A stack that is sheared (tilted gantry) is resampled linearly within its slices to a rectangular grid that holds all of them.
  The result lies on that grid; a pixel of a tilted slice finds its label at its own world point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medseg.errors import UserError
from medseg.geometry.grid import DIRECTION_TOLERANCE, VoxelGrid
from medseg.io.checks import grid_from_columns
from medseg.io.dicom.frames import NO_RESCALE, Frame
from medseg.io.dicom.series import SAME_PLACE_MM, Stack, normal_of

JITTER_TOLERANCE_MM = 0.1
"""How far a slice may lie beside its place on an even, straight stack: positions are rounded decimals."""

MAX_GAP_MM = 10.0
"""Across more nothing is interpolated: a lobe may end in between."""

MAX_FILLED_SHARE = 0.1
"""Largest share of missing slices that are interpolated."""

MAX_TILT_DEG = 45.0
"""Gantries tilt by 30° at most."""

ACQUISITION = 0
"""Place of the acquisition among a frame's phases."""


@dataclass(frozen=True)
class Plan:
    """How each slice of a regular volume is made from the slices of a stack.

    Attributes:
        grid: The volume's.
        frames: Slices of the stack, ascending along the grid's z axis, one at a place.
        sources: For each slice of the volume (index of the frame below, weight of the next frame).
        shifts_px: Place of each frame's first pixel on the grid (y, x) in pixels, (len(frames), 2); None where all fill it.
        remarks: What was repaired.
    """

    grid: VoxelGrid
    frames: tuple[Frame, ...]
    sources: tuple[tuple[int, float], ...]
    shifts_px: np.ndarray | None
    remarks: tuple[str, ...]

    @property
    def is_interpolated(self) -> bool:
        """Whether any voxel is made of several pixels."""
        return self.shifts_px is not None or any(weight for _, weight in self.sources)


def make_plan(path: Path, stack: Stack, read_hu: Callable[[Frame], np.ndarray]) -> Plan:
    """Find the regular grid of a stack.

    Args:
        path: What the user gave, for messages.
        stack: Slices sorted along their normal.
        read_hu: Reads the pixels of a slice; called only for slices at one place.

    Raises:
        UserError: If the slices do not make a regular volume, by the rule above.
    """
    without = [frame for frame in stack.frames if NO_RESCALE in frame.remarks]
    if 0 < len(without) < len(stack.frames):
        raise UserError(
            f"{path}: expected rescale slope and intercept in every slice or in none, but {_some(without)} lack them; export the "
            "series again."
        )
    frames, heights_mm, remarks = _without_doubles(path, stack, read_hu)
    sources, step_mm, says = _even(path, frames, heights_mm)
    shifts_mm, slant, tilt_says = _straight(path, frames, heights_mm)
    first = frames[0]
    row, column, normal = np.array(first.axes[:3]), np.array(first.axes[3:]), normal_of(first)
    spacing_yx_mm = np.array(first.spacing_mm)
    height, width = first.shape
    origin = np.array(first.position_xyz_mm)
    shifts_px = None
    if shifts_mm is not None:
        low_mm = shifts_mm.min(axis=0)
        shifts_px = (shifts_mm - low_mm) / spacing_yx_mm
        origin = origin + low_mm[0] * column + low_mm[1] * row
        more = np.ceil(shifts_px.max(axis=0) - 1e-3).astype(int)
        if (more > (height, width)).any():
            raise UserError(
                f"{path}: expected slices above each other, but they lie up to {np.ptp(shifts_mm, axis=0).max():.0f} mm beside each "
                "other; give one stack per folder."
            )
        height, width = height + int(more[0]), width + int(more[1])
    # Rounded decimals let a stack slant by less than the tolerance: that is kept, so that no corner moves.
    along = normal + slant[0] * column + slant[1] * row
    columns = np.stack([row * spacing_yx_mm[1], column * spacing_yx_mm[0], along * step_mm], axis=1)
    grid = grid_from_columns(path, (len(sources), height, width), columns, list(origin))
    return Plan(grid, frames, sources, shifts_px, (*remarks, *says, *tilt_says))


def _without_doubles(
    path: Path, stack: Stack, read_hu: Callable[[Frame], np.ndarray]
) -> tuple[tuple[Frame, ...], np.ndarray, list[str]]:
    """Keep one slice at each place: of equal ones the first, where two acquisitions meet that of the earlier."""
    kept: list[int] = []
    dropped: list[Frame] = []
    met: list[Frame] = []
    for index, frame in enumerate(stack.frames):
        if not kept or stack.heights_mm[index] - stack.heights_mm[kept[-1]] > SAME_PLACE_MM:
            kept.append(index)
            continue
        other = stack.frames[kept[-1]]
        is_beside = np.abs(np.subtract(frame.position_xyz_mm, other.position_xyz_mm)).max() > SAME_PLACE_MM
        if not is_beside and np.array_equal(read_hu(frame), read_hu(other)):
            dropped.append(frame)
        elif frame.phases[ACQUISITION] != other.phases[ACQUISITION]:
            earlier, later = sorted((other, frame), key=lambda one: _number(one.phases[ACQUISITION]))
            if earlier is frame:
                kept[-1] = index
            met.append(later)
        else:
            raise UserError(
                f"{path}: expected one slice at each place, but {other} and {frame} lie at the same one and differ; remove one of "
                "them."
            )
    remarks = []
    if dropped:
        remarks.append(f"doubles of equal slices were dropped: {_some(dropped)}")
    if met:
        remarks.append(f"acquisitions meet at one place, where the slice of the earlier one was kept: without {_some(met)}")
    return tuple(stack.frames[index] for index in kept), stack.heights_mm[kept], remarks


def _some(frames: Sequence[Frame]) -> str:
    """Name the first slice of a list, and how many more there are."""
    return str(frames[0]) + (f" and {len(frames) - 1} more" if len(frames) > 1 else "")


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return math.inf


def _even(
    path: Path, frames: tuple[Frame, ...], heights_mm: np.ndarray
) -> tuple[tuple[tuple[int, float], ...], float, list[str]]:
    """Lay an even grid along the normal: (frame below, weight of the next) per slice, their distance, remarks."""
    gaps_mm = np.diff(heights_mm)
    length_mm = float(heights_mm[-1] - heights_mm[0])
    num_frames = len(frames)
    step_mm = length_mm / (num_frames - 1)
    if np.abs(heights_mm - heights_mm[0] - np.arange(num_frames) * step_mm).max() <= JITTER_TOLERANCE_MM:
        return tuple((index, 0.0) for index in range(num_frames)), step_mm, []
    usual_mm = float(np.quantile(gaps_mm, 0.5, method="lower"))
    num_steps = round(length_mm / usual_mm)
    num_missing = num_steps + 1 - num_frames
    widest, narrowest = int(np.argmax(gaps_mm)), int(np.argmin(gaps_mm))
    worst = widest
    if gaps_mm[narrowest] < 0.5 * usual_mm:
        worst = narrowest
    elif gaps_mm[widest] <= MAX_GAP_MM + JITTER_TOLERANCE_MM and 0 <= num_missing <= max(1, MAX_FILLED_SHARE * num_frames):
        worst = -1
    if worst >= 0:
        raise UserError(
            f"{path}: expected evenly spaced slices, but {frames[worst]} and {frames[worst + 1]} are {gaps_mm[worst]:.3f} mm apart "
            f"where {usual_mm:.3f} mm are usual ({max(num_missing, 0)} of {num_steps + 1} slices missing); gaps are filled up to "
            f"{MAX_GAP_MM:g} mm and {MAX_FILLED_SHARE:.0%} of the slices: export the series again."
        )
    step_mm = length_mm / num_steps
    sources = []
    for place_mm in heights_mm[0] + np.arange(num_steps + 1) * step_mm:
        nearest = int(np.argmin(np.abs(heights_mm - place_mm)))
        if abs(heights_mm[nearest] - place_mm) <= JITTER_TOLERANCE_MM:
            sources.append((nearest, 0.0))
        else:
            below = int(np.searchsorted(heights_mm, place_mm)) - 1
            sources.append((below, float((place_mm - heights_mm[below]) / gaps_mm[below])))
    num_filled = sum(weight > 0 for _, weight in sources)
    if num_filled == num_missing:
        where = f"{frames[widest]} and {frames[widest + 1]}"
        says = f"slices missing: {num_missing} of {num_steps + 1}, such as between {where}; they were interpolated linearly"
    else:
        says = (
            f"the slices lie {gaps_mm.min():.2f} to {gaps_mm.max():.2f} mm apart: {num_filled} of {num_steps + 1} were interpolated "
            f"linearly onto an even grid of {step_mm:.2f} mm"
        )
    return tuple(sources), step_mm, [says]


def _straight(path: Path, frames: tuple[Frame, ...], heights_mm: np.ndarray) -> tuple[np.ndarray | None, np.ndarray, list[str]]:
    """Find how far slices lie beside the first: (their shifts (y, x) in mm or None, slant (y, x) of a stack left so, remarks)."""
    axes = np.array([frames[0].axes[3:], frames[0].axes[:3]])
    shifts_mm = (np.array([frame.position_xyz_mm for frame in frames]) - np.array(frames[0].position_xyz_mm)) @ axes.T
    rise_mm = heights_mm - heights_mm[0]
    slant = rise_mm @ shifts_mm / (rise_mm @ rise_mm)
    off_line_mm = float(np.abs(shifts_mm - rise_mm[:, None] * slant).max())
    tilt_deg = math.degrees(math.atan(np.linalg.norm(slant)))
    if np.linalg.norm(slant) <= DIRECTION_TOLERANCE and off_line_mm <= JITTER_TOLERANCE_MM:
        return None, slant, []
    if tilt_deg > MAX_TILT_DEG:
        raise UserError(
            f"{path}: expected slices stacked along their normal, but they drift {tilt_deg:.0f}° away from it; such a stack is no CT "
            "of a tilted gantry (30° at most)."
        )
    if off_line_mm <= JITTER_TOLERANCE_MM:
        says = f"the gantry was tilted by {tilt_deg:.1f}°: the slices were resampled to a rectangular grid, on which results lie"
    else:
        says = (
            f"the slices lie up to {np.abs(shifts_mm).max():.1f} mm beside a straight stack: they were resampled to a rectangular "
            "grid, on which results lie"
        )
    return shifts_mm, np.zeros(2), [says]
