"""Reader of one series of CT or another modality: its stack of slices on a regular grid, duplicates dropped, gaps filled, a tilted stack made rectangular.

The rules, which docs/dicom.md repeats:

* Slices within `JITTER_TOLERANCE_MM` of an even grid are taken as they are.
* Other slices are interpolated linearly along the normal onto the even grid of their usual distance, if no two neighbours are
  farther apart than `MAX_GAP_MM` and at most `MAX_FILLED_SHARE` of the slices (one at least) is missing; slices on that grid stay
  as they are. All other stacks are refused.
* A sheared stack (tilted gantry) is resampled linearly within its slices to a rectangular grid that holds all of them. The result
  lies on that grid; a pixel of a tilted slice finds its label at its own world point.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from scipy.ndimage import shift

from medseg.errors import UserError, require
from medseg.geometry.grid import DIRECTION_TOLERANCE
from medseg.io.dicom.frames import PHASES, Frame, NoSlice, Series, group_by, plain, read_frames, some
from medseg.io.dicom.pixels import READ_FILE, is_whole, read_hu
from medseg.io.inputs import DICOM_SUFFIXES, dicom_files, is_dicomdir
from medseg.io.volume import AIR_HU, LazyVolume, grid_from_columns, shown

SAME_POSITION_MM = 0.01
"""Slices nearer than this have one position: the thinnest CT slices are ten times as far apart."""

SAME_SPACING = 1e-3
"""Pixel spacings with a smaller relative difference are equal: headers store rounded decimals."""

JITTER_TOLERANCE_MM = 0.1
"""Largest distance of a slice from its position on an even, straight stack: positions are rounded decimals."""

MAX_GAP_MM = 10.0
"""Wider gaps are not interpolated: a lobe may end in between."""

MAX_FILLED_SHARE = 0.1
"""Largest share of missing slices that are interpolated."""

MAX_LISTED = 10
"""More series are counted in a message."""

MAX_TILT_DEG = 45.0
"""Gantries tilt by 30° at most."""


@dataclass(frozen=True, eq=False)
class Stack:
    """Parallel slices of one size, at two positions at least, that may be one volume.

    Attributes:
        part: Number of the stack within its series, from 1; 0 where it is the only one.
        phase: What distinguishes it from the other parts, or "".
        frames: Its slices, sorted along the normal.
        heights_mm: Their positions along the normal, ascending.
    """

    part: int
    phase: str
    frames: tuple[Frame, ...]
    heights_mm: np.ndarray


def normal_of(frame: Frame) -> np.ndarray:
    """Compute the LPS unit vector across a slice, right-handed with its row and column."""
    normal = np.cross(*frame.axes)
    return np.asarray(normal / np.linalg.norm(normal))


def natural(value: str) -> tuple[float, str]:
    """Sort key that puts 2 before 10, and both before text."""
    try:
        return float(value), value
    except ValueError:
        return float("inf"), value


def _is_parallel(frame: Frame, other: Frame) -> bool:
    """Whether size, pixel spacing and orientation of two slices agree."""
    return (
        frame.pixels.shape == other.pixels.shape
        and np.abs(frame.axes - other.axes).max() <= DIRECTION_TOLERANCE
        and np.abs(np.divide(frame.spacing_mm, other.spacing_mm) - 1).max() <= SAME_SPACING
    )


def heights_of(frames: Sequence[Frame], normal: np.ndarray) -> np.ndarray:
    """Compute the positions of slices along a normal, in mm."""
    return np.array([frame.position_xyz_mm for frame in frames]) @ normal


def num_positions(heights_mm: np.ndarray) -> int:
    """Count the positions of sorted slices."""
    return 1 + int((np.diff(heights_mm) > SAME_POSITION_MM).sum())


def _by_phase(frames: Sequence[Frame], first_key: int = 0) -> list[tuple[str, Sequence[Frame]]]:
    """Divide parallel slices that fill the same space more than once: acquisitions, time points, kernels.

    Values that follow each other along the normal (the rotations of one scan) are one stack, also where they share a slice.

    Returns:
        Pairs (what distinguishes the stack, its slices).
    """
    for key in range(first_key, len(PHASES)):
        groups = group_by(frames, lambda frame, key=key: frame.phases[key])  # type: ignore[misc]
        # A value of its own for nearly every slice, such as a time, distinguishes slices, not volumes.
        if 1 < len(groups) <= len(frames) // 2 and _overlap(list(groups.values())):
            return [
                (", ".join(filter(None, (f"{PHASES[key][0]} {plain(value) or 'unknown'}", rest))), part)
                for value in sorted(groups, key=natural)
                for rest, part in _by_phase(groups[value], key + 1)
            ]
    return [("", frames)]


def _overlap(groups: list[list[Frame]]) -> bool:
    """Whether two groups of parallel slices share more than one position along the normal."""
    heights_mm = [heights_of(group, normal_of(groups[0][0])) for group in groups]
    steps_mm = np.diff(np.sort(np.concatenate(heights_mm)))
    steps_mm = steps_mm[steps_mm > SAME_POSITION_MM]
    step_mm = np.median(steps_mm) if steps_mm.size else 0.0
    starts_mm, stops_mm = np.array(sorted((heights.min(), heights.max()) for heights in heights_mm)).T
    return bool((np.maximum.accumulate(stops_mm)[:-1] - starts_mm[1:] > 0.5 * step_mm).any())


def find_stacks(frames: Sequence[Frame]) -> tuple[list[Stack], list[NoSlice]]:
    """Divide the slices of one series into stacks, and list the slices without a second one in their plane or at another position."""
    found: list[tuple[str, tuple[Frame, ...], np.ndarray]] = []
    alone: list[NoSlice] = []
    planes = group_by(frames, lambda frame: next(first for first in frames if _is_parallel(frame, first)))
    for phase, part in [stack for plane in planes.values() for stack in _by_phase(plane)]:
        heights_mm = heights_of(part, normal_of(part[0]))
        keys = [
            (round(height_mm / SAME_POSITION_MM), frame.path, frame.index)
            for height_mm, frame in zip(heights_mm, part, strict=True)
        ]
        order = sorted(range(len(part)), key=keys.__getitem__)
        if num_positions(heights_mm[order]) > 1:
            found.append((phase, tuple(part[index] for index in order), heights_mm[order]))
        else:
            alone += [NoSlice(frame.path, frame.series, "single slice without neighbours") for frame in part]
    return [Stack(number * (len(found) > 1), *stack) for number, stack in enumerate(found, start=1)], alone


def _name_pattern(path: Path) -> str:
    """Reduce a name to what names of slices share: a suffix of DICOM, else all but their numbers, which may have letters for digits.

    Example:
        >>> _name_pattern(Path("IM.0012")), _name_pattern(Path("IM.00001Z")), _name_pattern(Path("1.dcm"))
        ('im.#', 'im.#', '.dcm')
    """
    name = path.name.lower()
    return next(filter(name.endswith, DICOM_SUFFIXES), "") or re.sub(r"[0-9a-f]*[0-9][0-9a-z]*", "#", name)


def _broken_copies(files: set[Path], images: Sequence[Frame | NoSlice]) -> Iterator[NoSlice]:
    """Find files that are named like the slices beside them and are no DICOM, such as copies that never got a byte."""
    slices = {image.path for image in images if isinstance(image, Frame)}
    for folder, neighbours in group_by(slices, lambda path: path.parent).items():
        patterns = set(map(_name_pattern, neighbours))
        for entry in sorted(folder.iterdir()):
            if _name_pattern(entry) in patterns and entry not in files and entry.name[0] != "." and not entry.is_dir():
                num_bytes = entry.stat().st_size if entry.is_file() else 0
                reason = (
                    f"expected a slice, as its name is like those of the slices beside it, but its {num_bytes} bytes are no DICOM; "
                    "copy it again or remove it."
                )
                yield NoSlice(entry, Series(), reason, is_unreadable=True)


def choose_stack(path: Path, wanted: str | None, modality: str) -> tuple[Stack, list[str]]:
    """Read the headers of all files and find the one stack that is meant.

    Unreadable files are refused with their series: other series stay readable beside them. A series of unreadable files alone is
    left out, like an object that is no CT, where there is one other to read.

    Args:
        path: Folder, DICOMDIR or one file of a series, as for `open_dicom`.
        wanted: Series Instance UID or Series Number, with `/<part>` for a part of a series; None for the only one.
        modality: Modality of the series, as DICOM names it; "" takes any.

    Returns:
        The stack, and remarks on what was left out.

    Raises:
        UserError: If there is none, or more than one, or a file of it cannot be read.
    """
    is_folder = path.is_dir() or is_dicomdir(path)
    files = list(dicom_files(path.parent if path.is_file() else path, is_deep=is_folder))
    images = [image for file in files for image in read_frames(file, modality)]
    images += _broken_copies(set(files), images)
    only_file = None if is_folder else path
    kind = f"{modality or 'scan'} series"
    stacks: list[Stack] = []
    left_out = [image for image in images if isinstance(image, NoSlice) and not image.is_unreadable]
    unreadable = [image for image in images if isinstance(image, NoSlice) and image.is_unreadable]
    frames = [image for image in images if isinstance(image, Frame)]
    for same_series in group_by(frames, lambda frame: frame.series.uid).values():
        its_stacks, alone = find_stacks(same_series)
        stacks += its_stacks
        left_out += alone
    stacks.sort(key=lambda stack: (natural(stack.frames[0].series.number), stack.frames[0].series.uid, stack.part))
    in_file = [stack for stack in stacks if only_file is None or any(frame.path == only_file for frame in stack.frames)]
    chosen = [stack for stack in in_file if wanted is None or _is_meant(wanted, stack.frames[0].series, stack.part or 1)]
    require(
        len(chosen) <= 1,
        f"{path}: expected one {kind}, but it holds {len(chosen)}: {_list(chosen, stacks)}; choose one with series=, or in the "
        "column series of a case table.",
    )
    uids = {stack.frames[0].series.uid for stack in chosen} or {
        image.series.uid
        for image in images
        if only_file in (None, image.path) and (wanted is None or not in_file or _is_meant(wanted, image.series))
    }
    in_folder = group_by(images, lambda image: image.path.parent)
    broken = [image for image in unreadable if _may_belong(image, uids, in_folder[image.path.parent])]
    if broken:
        raise UserError(f"{some([image.path for image in broken])}: {broken[0].reason}")
    is_any = wanted is None and only_file is None
    listed = Counter((str(image.series), image.reason) for image in left_out if is_any or image.series.uid in uids)
    summary = _first([f"{count} x {reason} ({series})" for (series, reason), count in listed.items()], ", ")
    require(
        bool(in_file),
        f"{path}: expected a {kind} of at least two slices, but found only {summary or 'no image'}; give the folder of a {kind}.",
    )
    require(bool(chosen), f"{path}: there is no series={plain(str(wanted))} among {_list(in_file, stacks)}; give one of them.")
    num_patients = len({frame.patient for frame in chosen[0].frames} - {""})
    require(
        num_patients <= 1,
        f"{path}: expected a series of one patient, but its slices carry {num_patients} different Patient IDs; put the files of each patient "
        "into a folder of their own.",
    )
    remarks = [f"left out, because they are not slices of the scan: {summary}"] if summary else []
    for series, lost in group_by(unreadable if is_any else [], lambda image: image.series).items():
        names = some([f"'{image.path.name}'" for image in lost])
        remarks.append(f"{series} was left out, since it cannot be read: {names}: {lost[0].reason.rstrip('.')}")
    return chosen[0], remarks


def _is_meant(wanted: str, series: Series, part: int = 0) -> bool:
    """Whether `series=` names a series, and this part where it names one; `part` 0 stands for any part."""
    uid_or_number, _, wanted_part = wanted.partition("/")
    return uid_or_number in (series.uid, series.number) and (not part or wanted_part in ("", str(part)))


def _may_belong(image: NoSlice, uids: set[str], neighbours: Iterable[Frame | NoSlice]) -> bool:
    """Whether a file may belong to one of these series.

    Where its own cannot be read, it may be any of the series in its folder; where the folder holds nothing else, any at all.
    """
    if image.series.uid:
        return image.series.uid in uids
    near = {neighbour.series.uid for neighbour in neighbours} - {""}
    return not near or not near.isdisjoint(uids) or "" in uids


def _first(texts: list[str], separator: str) -> str:
    """Join the first texts, and count the others."""
    return separator.join(texts[:MAX_LISTED]) + (f"{separator}and {len(texts) - MAX_LISTED} more" if texts[MAX_LISTED:] else "")


def _list(stacks: Sequence[Stack], all_stacks: Sequence[Stack]) -> str:
    """List stacks by the value that `series=` takes, their description, number of slices and spacing (z, y, x)."""
    uids = group_by(
        {(stack.frames[0].series.number, stack.frames[0].series.uid) for stack in all_stacks}, lambda series: series[0]
    )
    names = []
    for stack in stacks:
        first, series = stack.frames[0], stack.frames[0].series
        is_unique = series.number and len(uids[series.number]) == 1
        key = plain(series.number if is_unique else series.uid) + (f"/{stack.part}" if stack.part else "")
        about = ", ".join(filter(None, (shown(series.description) if series.description else "", stack.phase)))
        step_mm = np.ptp(stack.heights_mm) / (num_positions(stack.heights_mm) - 1)
        spacing = " x ".join(f"{mm:.3g}" for mm in (step_mm, *first.spacing_mm))
        names.append(f"series={key} {about + ' ' if about else ''}({len(stack.frames)} slices, {spacing} mm)")
    return _first(names, "; ")


def open_dicom(path: Path, series: str | None = None, modality: str = "ct") -> LazyVolume:
    """Read the headers of a series and lay a regular grid over its slices.

    Args:
        path: Folder, searched to its bottom; a DICOMDIR, which stands for its folder; or a file of a series, which stands for
            the series' files beside it.
        series: Series Instance UID or Series Number, with `/<part>` for a part of a series; None for the only one.
        modality: Modality of the series, as a task names it: `ct` (in HU), `mr`, or `other` for any.

    Raises:
        UserError: If it is not exactly one stack of slices, or the slices do not make a regular volume by the rules above.
    """
    stack, remarks = choose_stack(path, series, "" if modality == "other" else modality.upper())
    without = [frame for frame in stack.frames if not frame.has_rescale]
    if 0 < len(without) < len(stack.frames):
        raise UserError(
            f"{path}: expected rescale slope and intercept in every slice or in none, but {some(without)} lack them; export the "
            "series again."
        )
    frames, heights_mm, repairs = _without_duplicates(path, stack)
    planes, step_mm, filled = _even(path, frames, heights_mm)
    shifts_mm, slant, tilt = _straight(path, frames, heights_mm)
    first = frames[0]
    low_mm = shifts_mm.min(axis=0)
    shifts_px = (shifts_mm - low_mm) / first.spacing_mm
    # Rounding noise must not add a pixel.
    more = np.ceil(shifts_px.max(axis=0) - 1e-3).astype(int)
    require(
        (more <= first.pixels.shape).all(),
        f"{path}: expected slices stacked above each other, but they are offset sideways by up to "
        f"{np.ptp(shifts_mm, axis=0).max():.0f} mm; give one stack per folder.",
    )
    shape = (len(planes), *(first.pixels.shape + more))
    row, column = first.axes
    # A slant within the rounding of decimals is kept, so that no corner moves.
    along = normal_of(first) + slant[0] * column + slant[1] * row
    columns = np.stack([row * first.spacing_mm[1], column * first.spacing_mm[0], along * step_mm], axis=1)
    grid = grid_from_columns(path, shape, columns, list(first.position_xyz_mm + low_mm[0] * column + low_mm[1] * row))
    dtype = np.dtype(np.int32 if all(map(is_whole, frames)) else np.float32)

    def runs() -> Iterator[np.ndarray]:
        hu = partial(read_hu, read_file=lru_cache(maxsize=1)(READ_FILE))

        @lru_cache(maxsize=2)  # two neighbours, for the planes between them
        def placed(index: int) -> np.ndarray:
            """Read one slice and move it to its position on the grid."""
            # Padding far below air would blur into its neighbours.
            image_hu = np.maximum(hu(frames[index]), first.air).astype(np.float32)
            return shifted(image_hu, shifts_px[index], shape[1:], first.air) if tilt else image_hu

        for below, weight in planes:
            image_hu = placed(below) if filled or tilt else hu(frames[below])
            if weight:
                image_hu = image_hu + np.float32(weight) * (placed(below + 1) - image_hu)
            # HU stay whole numbers where the slices have them.
            yield (image_hu if image_hu.dtype == dtype else np.rint(image_hu)).astype(dtype).ravel()

    losses = dict.fromkeys(remark for frame in frames for remark in frame.remarks)
    return LazyVolume(path, grid, dtype, runs, remarks=(*remarks, *losses, *repairs, *filled, *tilt))


def shifted(image_hu: np.ndarray, shift_px: np.ndarray, shape: tuple[int, ...], air: int = AIR_HU) -> np.ndarray:
    """Move a slice on a larger canvas of air by linear interpolation.

    Args:
        image_hu: Values (H, W) float32.
        shift_px: Position of its first pixel on the canvas (y, x), each >= 0.
        shape: Size of the canvas.
        air: Value of the canvas.

    Example:
        >>> shifted(np.array([[0.0, 100.0]], np.float32), np.array([0.0, 0.25]), (1, 3)).tolist()
        [[-256.0, 75.0, -743.0]]
    """
    canvas = np.full(shape, air, np.float32)
    canvas[: image_hu.shape[0], : image_hu.shape[1]] = image_hu
    return np.asarray(shift(canvas, shift_px, order=1, mode="grid-constant", cval=air))


def _without_duplicates(path: Path, stack: Stack) -> tuple[tuple[Frame, ...], np.ndarray, list[str]]:
    """Keep one slice at each position: of equal ones the first, of two acquisitions that of the earlier.

    Returns:
        The slices, their heights in mm, remarks.
    """
    kept: list[tuple[Frame, float]] = []
    dropped: dict[str, list[Frame]] = {}
    for frame, height_mm in zip(stack.frames, stack.heights_mm.tolist(), strict=True):
        if not kept or height_mm - kept[-1][1] > SAME_POSITION_MM:
            kept.append((frame, height_mm))
            continue
        other = kept[-1][0]
        is_beside = np.abs(np.subtract(frame.position_xyz_mm, other.position_xyz_mm)).max() > SAME_POSITION_MM
        why = "duplicate slices were dropped: "
        if is_beside or not np.array_equal(read_hu(frame), read_hu(other)):
            why = "two acquisitions have a slice at the same position; the earlier one was kept, dropped: "
            number, other_number = frame.phases[0], other.phases[0]  # acquisitions, the first of PHASES
            require(
                number != other_number,
                f"{path}: expected one slice at each position, but {other} and {frame} share a position and differ; remove one of "
                "them.",
            )
            if natural(number)[0] < natural(other_number)[0]:
                kept[-1], frame = (frame, height_mm), other
        dropped.setdefault(why, []).append(frame)
    frames, heights_mm = zip(*kept, strict=True)
    return frames, np.array(heights_mm), [why + some(dropped[why]) for why in sorted(dropped)]


def _even(path: Path, frames: tuple[Frame, ...], heights_mm: np.ndarray) -> tuple[list[tuple[int, float]], float, list[str]]:
    """Lay evenly spaced planes across the normal.

    Returns:
        For each plane the frame below and the weight of the next frame; the distance of the planes in mm; remarks.
    """
    length_mm, num_frames = float(heights_mm[-1] - heights_mm[0]), len(frames)
    step_mm = length_mm / (num_frames - 1)
    if np.abs(heights_mm - heights_mm[0] - np.arange(num_frames) * step_mm).max() <= JITTER_TOLERANCE_MM:
        return [(index, 0.0) for index in range(num_frames)], step_mm, []
    gaps_mm = np.diff(heights_mm)
    usual_mm = float(np.quantile(gaps_mm, 0.5, method="lower"))
    num_steps = round(length_mm / usual_mm)
    num_missing = num_steps + 1 - num_frames
    is_too_near = gaps_mm.min() < 0.5 * usual_mm
    worst = int(gaps_mm.argmin() if is_too_near else gaps_mm.argmax())
    require(
        not is_too_near
        and gaps_mm[worst] <= MAX_GAP_MM + JITTER_TOLERANCE_MM
        and 0 <= num_missing <= max(1, MAX_FILLED_SHARE * num_frames),
        f"{path}: expected evenly spaced slices, but {frames[worst]} and {frames[worst + 1]} are {gaps_mm[worst]:.3f} mm apart "
        f"where {usual_mm:.3f} mm are usual ({max(num_missing, 0)} of {num_steps + 1} slices missing); gaps are filled up to "
        f"{MAX_GAP_MM:g} mm and {MAX_FILLED_SHARE:.0%} of the slices: export the series again.",
    )
    step_mm = length_mm / num_steps
    planes_mm = heights_mm[0] + np.arange(num_steps + 1) * step_mm
    nearest = np.abs(heights_mm - planes_mm[:, None]).argmin(axis=1)
    is_slice = np.abs(heights_mm[nearest] - planes_mm) <= JITTER_TOLERANCE_MM
    # The first and the last plane are slices: clipping changes none that is interpolated.
    below = (np.searchsorted(heights_mm, planes_mm) - 1).clip(0, num_frames - 2)
    weights = np.where(is_slice, 0.0, (planes_mm - heights_mm[below]) / gaps_mm[below])
    num_filled = int(np.count_nonzero(weights))
    remark = (
        f"the slices lie {gaps_mm.min():.2f} to {gaps_mm.max():.2f} mm apart: {num_filled} of {num_steps + 1} were interpolated "
        f"linearly onto an even grid of {step_mm:.2f} mm"
    )
    if num_filled == num_missing:
        remark = (
            f"slices missing: {num_missing} of {num_steps + 1}, such as between {frames[worst]} and {frames[worst + 1]}; they were "
            "interpolated linearly"
        )
    return list(zip(np.where(is_slice, nearest, below).tolist(), weights.tolist(), strict=True)), step_mm, [remark]


def _straight(path: Path, frames: tuple[Frame, ...], heights_mm: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Measure the sideways offset of each slice from the first.

    Returns:
        The shift (y, x) in mm of each slice, 0 in a stack that is straight within rounding; the slant (y, x) of such a stack in mm
        per mm, else 0; remarks.
    """
    shifts_mm = np.subtract([frame.position_xyz_mm for frame in frames], frames[0].position_xyz_mm) @ frames[0].axes[::-1].T
    rise_mm = heights_mm - heights_mm[0]
    slant = rise_mm @ shifts_mm / (rise_mm @ rise_mm)
    is_line = np.abs(shifts_mm - rise_mm[:, None] * slant).max() <= JITTER_TOLERANCE_MM
    if np.linalg.norm(slant) <= DIRECTION_TOLERANCE and is_line:
        return np.zeros_like(shifts_mm), slant, []
    tilt_deg = math.degrees(math.atan(np.linalg.norm(slant)))
    require(
        tilt_deg <= MAX_TILT_DEG,
        f"{path}: expected slices stacked along their normal, but they drift {tilt_deg:.0f}° away from it; such a stack is no CT of a "
        "tilted gantry (30° at most).",
    )
    beside = f"the slices are offset sideways by up to {np.abs(shifts_mm).max():.1f} mm: they"
    found = f"the gantry was tilted by {tilt_deg:.1f}°: the slices" if is_line else beside
    return shifts_mm, np.zeros(2), [f"{found} were resampled to a rectangular grid; results are on that grid"]
