"""Which slices belong to one stack, and which stack is meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medseg.errors import UserError
from medseg.geometry.grid import DIRECTION_TOLERANCE
from medseg.io.checks import shown
from medseg.io.dicom.fields import plain
from medseg.io.dicom.frames import PHASES, Frame, Image, LeftOut, Series, Unreadable

SAME_PLACE_MM = 0.01
"""Slices nearer than this lie at one place: the thinnest CT slices are ten times as far apart."""

SAME_SPACING = 1e-3
"""Pixel spacings that differ by a smaller part are one: headers store rounded decimals."""


@dataclass(frozen=True, eq=False)
class Stack:
    """Parallel slices of one size, at two places at least, that may be one volume.

    Attributes:
        series: What they belong to.
        part: Number of the stack within its series, from 1; 0 where it is the only one.
        phase: What tells it from the other parts, or "".
        frames: Its slices, sorted along the normal.
        heights_mm: Where they lie along the normal, ascending.
    """

    series: Series
    part: int
    phase: str
    frames: tuple[Frame, ...]
    heights_mm: np.ndarray


def normal_of(frame: Frame) -> np.ndarray:
    """Unit vector across a slice, LPS, right-handed with its row and column."""
    normal = np.cross(frame.axes[:3], frame.axes[3:])
    return np.asarray(normal / np.linalg.norm(normal))


def _by_plane(frames: Sequence[Frame]) -> list[list[Frame]]:
    """Part slices by size, pixel spacing and orientation."""
    planes: list[list[Frame]] = []
    for frame in frames:
        for plane in planes:
            first = plane[0]
            if (
                frame.shape == first.shape
                and max(abs(a - b) for a, b in zip(frame.axes, first.axes, strict=True)) <= DIRECTION_TOLERANCE
                and max(abs(a / b - 1) for a, b in zip(frame.spacing_mm, first.spacing_mm, strict=True)) <= SAME_SPACING
            ):
                plane.append(frame)
                break
        else:
            planes.append([frame])
    return planes


def _sorted(frames: Sequence[Frame]) -> tuple[list[Frame], np.ndarray]:
    """Sort slices along the normal of the first; those at one place by file and number."""
    normal = normal_of(frames[0])
    heights_mm = np.array([frame.position_xyz_mm for frame in frames]) @ normal
    order = sorted(range(len(frames)), key=lambda i: (round(heights_mm[i] / SAME_PLACE_MM), frames[i].path, frames[i].index))
    return [frames[i] for i in order], heights_mm[order]


def num_places(heights_mm: np.ndarray) -> int:
    """Count the places at which sorted slices lie."""
    return 1 + int((np.diff(heights_mm) > SAME_PLACE_MM).sum())


def _natural(value: str) -> tuple[float, str]:
    """Sort key that puts 2 before 10."""
    try:
        return float(value), value
    except ValueError:
        return float("inf"), value


def _by_phase(frames: Sequence[Frame], first_key: int = 0) -> list[tuple[str, list[Frame]]]:
    """Part parallel slices that fill the same place more than once: acquisitions, time points, kernels.

    Values that follow each other along the normal (the rotations of one scan) are one stack, also where they share a slice.

    Returns:
        Pairs (what tells the stack from the others, its slices).
    """
    for key in range(first_key, len(PHASES)):
        groups: dict[str, list[Frame]] = {}
        for frame in frames:
            groups.setdefault(frame.phases[key], []).append(frame)
        # A value of its own for nearly every slice, as their times are, tells slices apart and not volumes.
        if 1 < len(groups) <= len(frames) // 2 and _overlap(list(groups.values()), normal_of(frames[0])):
            return [
                (", ".join(filter(None, (f"{PHASES[key][0]} {plain(value) or 'unknown'}", rest))), part)
                for value in sorted(groups, key=_natural)
                for rest, part in _by_phase(groups[value], key + 1)
            ]
    return [("", list(frames))]


def _overlap(groups: list[list[Frame]], normal: np.ndarray) -> bool:
    """Whether two groups of slices share more than one place along the normal."""
    heights_mm = [np.sort([np.dot(frame.position_xyz_mm, normal) for frame in group]) for group in groups]
    places = np.sort(np.concatenate(heights_mm))
    steps = np.diff(places)
    step_mm = float(np.median(steps[steps > SAME_PLACE_MM])) if (steps > SAME_PLACE_MM).any() else 0.0
    ends = sorted((float(group[0]), float(group[-1])) for group in heights_mm)
    reach = -np.inf
    for low, high in ends:
        if reach - low > 0.5 * step_mm:
            return True
        reach = max(reach, high)
    return False


def find_stacks(frames: Sequence[Frame]) -> tuple[list[Stack], list[LeftOut]]:
    """Part the slices of one series into stacks; slices that are alone in their plane or place are left out."""
    found: list[tuple[str, list[Frame], np.ndarray]] = []
    left_out: list[LeftOut] = []
    for plane in _by_plane(frames):
        for phase, part in _by_phase(plane):
            ordered, heights_mm = _sorted(part)
            if num_places(heights_mm) > 1:
                found.append((phase, ordered, heights_mm))
            else:
                left_out += [LeftOut(frame.path, frame.series, "slice alone at its place") for frame in ordered]
    stacks = [
        Stack(frames[0].series, number if len(found) > 1 else 0, phase, tuple(ordered), heights_mm)
        for number, (phase, ordered, heights_mm) in enumerate(found, start=1)
    ]
    return stacks, left_out


def choose_stack(path: Path, images: Sequence[Image], wanted: str | None, only_file: Path | None) -> tuple[Stack, list[str]]:
    """Find the one stack that is meant.

    Files that cannot be read are refused with their series: other series stay readable beside them. A series of nothing
    else is left out, as what is no CT is, where there is one other to read.

    Args:
        path: What the user gave, for messages.
        images: All that was found there.
        wanted: Series Instance UID or Series Number, with `/<part>` for a part of a series; None for the only one.
        only_file: Only stacks that hold a slice of this file.

    Returns:
        The stack, and remarks on what was left out.

    Raises:
        UserError: If there is none, or more than one, or a file of it cannot be read.
    """
    by_series: dict[str, list[Frame]] = {}
    left_out: list[LeftOut] = []
    unreadable: list[Unreadable] = []
    for image in images:
        if isinstance(image, LeftOut):
            left_out.append(image)
        elif isinstance(image, Unreadable):
            unreadable.append(image)
        else:
            by_series.setdefault(image.series.uid, []).append(image)
    stacks: list[Stack] = []
    for frames in by_series.values():
        its_stacks, alone = find_stacks(frames)
        stacks += its_stacks
        left_out += alone
    stacks.sort(key=lambda stack: (_natural(stack.series.number), stack.series.uid, stack.part))

    in_file = [stack for stack in stacks if only_file is None or any(frame.path == only_file for frame in stack.frames)]
    chosen = [stack for stack in in_file if wanted is None or _is_meant(wanted, stack.series, stack.part)]
    names = _names(stacks)
    if len(chosen) > 1:
        raise UserError(
            f"{path}: expected one CT series, but it holds {len(chosen)}: {'; '.join(names[id(stack)] for stack in chosen)}; "
            "choose one with series=, or in the column series of a case table."
        )
    uids = {stack.series.uid for stack in chosen} or {
        image.series.uid
        for image in images
        if only_file in (None, image.path) and (wanted is None or not in_file or _is_meant(wanted, image.series))
    }
    in_folder: dict[Path, set[str]] = {}
    for image in images:
        in_folder.setdefault(image.path.parent, set()).add(image.series.uid)
    broken = [image for image in unreadable if _may_belong(image, uids, in_folder[image.path.parent])]
    if broken:
        raise UserError(f"{broken[0].path}{_and_more(broken)}: {broken[0].says}")
    if not (wanted is None and only_file is None):
        left_out = [image for image in left_out if image.series.uid in uids]
    if not in_file:
        raise UserError(
            f"{path}: expected a CT series of at least two slices, but found only {_summary(left_out) or 'no image'}; give the "
            "folder of a CT series."
        )
    if not chosen:
        raise UserError(
            f"{path}: there is no series={wanted} among {'; '.join(names[id(stack)] for stack in in_file)}; give one of them."
        )
    remarks = [f"left out, being no slices of the scan: {_summary(left_out)}"] if left_out else []
    if wanted is None and only_file is None:
        remarks += _unreadable_series(unreadable)
    return chosen[0], remarks


def _is_meant(wanted: str, series: Series, part: int = 0) -> bool:
    """Whether `series=` names a series, and where it names a part, this one; `part` 0 stands for all of them."""
    uid_or_number, _, wanted_part = wanted.partition("/")
    return uid_or_number in (series.uid, series.number) and (not part or wanted_part in ("", str(part)))


def _may_belong(image: Unreadable, uids: set[str], in_folder: set[str]) -> bool:
    """Whether a file may belong to one of these series.

    Where its own cannot be read, it may be any of the series in its folder; where the folder holds nothing else, any at all.
    """
    if image.series.uid:
        return image.series.uid in uids
    neighbours = in_folder - {""}
    return not neighbours or not neighbours.isdisjoint(uids) or "" in uids


def _and_more(images: Sequence[Unreadable]) -> str:
    return f" and {len(images) - 1} more" if len(images) > 1 else ""


def _unreadable_series(unreadable: Sequence[Unreadable]) -> list[str]:
    """Say which series were left out because nothing of them can be read, and why."""
    by_series: dict[Series, list[Unreadable]] = {}
    for image in unreadable:
        by_series.setdefault(image.series, []).append(image)
    return [
        f"{series} was left out, since it cannot be read: '{images[0].path.name}'{_and_more(images)}: {images[0].says.rstrip('.')}"
        for series, images in by_series.items()
    ]


def _names(stacks: Sequence[Stack]) -> dict[int, str]:
    """Describe each stack by what `series=` takes, its description, its slices and its spacing (z, y, x)."""
    uids_of_number: dict[str, set[str]] = {}
    for stack in stacks:
        uids_of_number.setdefault(stack.series.number, set()).add(stack.series.uid)
    names = {}
    for stack in stacks:
        series = stack.series
        is_unique = bool(series.number) and len(uids_of_number[series.number]) == 1
        key = plain(series.number if is_unique else series.uid) + (f"/{stack.part}" if stack.part else "")
        says = ", ".join(filter(None, (shown(series.description) if series.description else "", stack.phase)))
        places = num_places(stack.heights_mm)
        step_mm = (stack.heights_mm[-1] - stack.heights_mm[0]) / (places - 1)
        spacing = " x ".join(f"{mm:.3g}" for mm in (step_mm, *stack.frames[0].spacing_mm))
        names[id(stack)] = f"series={key} {says + ' ' if says else ''}({len(stack.frames)} slices, {spacing} mm)"
    return names


def _summary(left_out: Sequence[LeftOut]) -> str:
    """Count what was left out, by series and reason."""
    counts = Counter((str(image.series), image.reason) for image in left_out)
    return ", ".join(f"{count} x {reason} ({series})" for (series, reason), count in counts.items())
