"""Harder scans made of whole ones: parts along z, half chests, and painted disease."""

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from medseg.anatomy.disease import KINDS, paint_disease
from medseg.data.case_table import Case
from medseg.data.sampler import sample_rng
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.io.read import read_image, read_labels
from medseg.io.write import write_image, write_labels
from medseg.preprocess.intensity import HU_LIMITS
from medseg.preprocess.orient import orient
from medseg.preprocess.scale import AS_STORED

# Shares of the organ's height in a part with one of its ends, and in the middle part.
SHARE_OF_END = 0.25
SHARE_OF_MIDDLE = 0.35
# A lower organ is not cut.
LEAST_HEIGHT_MM = 100.0
# A part without organ keeps this distance, since references may stop a slice early, and is at least
# this high.
GAP_MM = 5.0
LEAST_MM = 15.0
# A half chest with less than this share of a region's voxels shows a sliver of it, whose side
# nothing in view tells.
LEAST_SHARE = 0.1
# Trust in the reference of such a region, so that its scores stand apart.
SLIVER = "sliver"
HALVES = ("right_half", "left_half")
Files = tuple[Path, Path]


def cut_partial_scans(case: Case, organs: Mapping[str, Sequence[int]], folder: Path) -> list[Case]:
    """Cut a case along z, and between its organs along x, and write the parts.

    Their labels are written too; existing files are kept.

    Args:
        case: Case with labels.
        organs: Name of each organ to its values in the label file.
        folder: Folder of `<case>_<part>.nii.gz` and `<case>_<part>_labels.nii.gz`.

    Returns:
        The parts as cases; see `slice_ranges` and `halves` for the parts that a scan has.
    """
    labels, grid = oriented_labels(case)
    values = list(chain(*organs.values()))
    has_organ = np.array([np.isin(plane, values).any() for plane in labels])
    depth, height, width = labels.shape
    boxes: dict[str, VoxelBox] = {}
    for name, (start, stop) in slice_ranges(has_organ, grid.spacing_mm[0]):
        boxes[name] = VoxelBox((start, 0, 0), (stop, height, width))
    for name, (start, stop) in halves(labels, list(organs.values())):
        boxes[name] = VoxelBox((0, 0, start), (depth, height, stop))
    files = _files(case, boxes, folder)
    if not _exist(files):
        image, image_grid = oriented_image(case)
        for name, box in boxes.items():
            image_path, labels_path = files[name]
            image_part = np.ascontiguousarray(image[box.slices()])
            labels_part = np.ascontiguousarray(labels[box.slices()])
            write_image(image_path, image_part, image_grid.crop(box))
            write_labels(labels_path, labels_part, grid.crop(box))
    parts = []
    for part, (name, box) in zip(_as_cases(case, files), boxes.items(), strict=True):
        trust = dict(part.trust)
        if name in HALVES:
            trust |= dict.fromkeys(_slivers(labels, labels[box.slices()], organs), SLIVER)
        parts.append(replace(part, trust=trust))
    return parts


def paint_scan(case: Case, organs: Sequence[Sequence[int]], folder: Path) -> list[Case]:
    """Paint disease into both sides of a case, see `paint_disease`, and write it in HU.

    Existing files are kept.

    Args:
        case: Case with labels, a CT.
        organs: Values of each organ in its label file.
        folder: Folder of `<case>_diseased.nii.gz` and `<case>_diseased_labels.nii.gz`.

    Returns:
        The painted case; none if the scan shows no organ.
    """
    labels, grid = oriented_labels(case)
    present = [values for values in organs if np.isin(labels, values).any()]
    names = ["diseased"] if present else []
    files = _files(case, names, folder)
    if not _exist(files):
        scan, scan_grid = oriented_image(case)
        # Each case has its own disease, the same in every study.
        rng = sample_rng(zlib.crc32(case.name.encode()), 0)
        image = torch.from_numpy(case.hu.apply(scan).astype(np.float32).clip(*HU_LIMITS))
        for values in present:
            organ = torch.from_numpy(np.isin(labels, values).astype(np.uint8))
            paint_disease(image, organ, 1, list(KINDS), rng, grid.spacing_mm)
        write_image(files["diseased"][0], image.round().to(torch.int16).numpy(), scan_grid)
        write_labels(files["diseased"][1], labels, grid)
    return [replace(painted, hu=AS_STORED) for painted in _as_cases(case, files)]


def slice_ranges(has_organ: np.ndarray, step_mm: float) -> Iterator[tuple[str, tuple[int, int]]]:
    """Choose the slices of each part.

    Args:
        has_organ: Per slice, from the feet up, whether it contains the organ; all may be False.
        step_mm: Distance between slices.

    Yields:
        Name and half-open range of slices. `bases` and `apices` extend to the end of the scan and
        exist only if the organ ends before it; `below` and `above` contain no organ.

    Example:
        >>> dict(slice_ranges(np.array([False] * 6 + [True] * 20), 5.0))
        {'below': (0, 5), 'bases': (0, 11), 'middle': (12, 20)}
    """
    slices = np.flatnonzero(has_organ)
    if len(slices) == 0:
        return
    first, stop, end = int(slices[0]), int(slices[-1]) + 1, len(has_organ)
    height = stop - first
    gap, least = math.ceil(GAP_MM / step_mm), math.ceil(LEAST_MM / step_mm)
    share = math.ceil(SHARE_OF_END * height)
    margin = (height - math.ceil(SHARE_OF_MIDDLE * height)) // 2
    if first - gap >= least:
        yield "below", (0, first - gap)
    if height * step_mm >= LEAST_HEIGHT_MM:
        if first > 0:
            yield "bases", (0, first + share)
        yield "middle", (first + margin, stop - margin)
        if stop < end:
            yield "apices", (stop - share, end)
    if end - stop - gap >= least:
        yield "above", (stop + gap, end)


def halves(
    labels: np.ndarray, organs: Sequence[Sequence[int]]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Choose the columns of half chests.

    A scan that shows two organs is cut in the middle of them.

    Args:
        labels: (D, H, W), x to the patient's left.
        organs: Values of each organ.

    Yields:
        Name, `right_half` or `left_half` of the patient, and half-open range of columns.
    """
    num_present = sum(bool(np.isin(labels, values).any()) for values in organs)
    if num_present != 2:
        return
    is_organ = np.isin(labels, list(chain(*organs)))
    columns = np.flatnonzero(is_organ.any(axis=(0, 1)))
    middle = int(columns[0] + columns[-1] + 1) // 2
    yield HALVES[0], (0, middle)
    yield HALVES[1], (middle, labels.shape[2])


def _slivers(
    labels: np.ndarray, part: np.ndarray, organs: Mapping[str, Sequence[int]]
) -> list[str]:
    """Name the organs of which a part shows some, but less than `LEAST_SHARE`."""
    slivers = []
    for name, values in organs.items():
        num_in_part = np.count_nonzero(np.isin(part, values))
        num_voxels = np.count_nonzero(np.isin(labels, values))
        if 0 < num_in_part < LEAST_SHARE * num_voxels:
            slivers.append(name)
    return slivers


def oriented_image(case: Case) -> tuple[np.ndarray, VoxelGrid]:
    """Read the scan of a case in the orientation of networks, with its grid."""
    scan = read_image(case.image, case.series)
    image, grid, _ = orient(scan.array, scan.grid)
    return image, grid


def oriented_labels(case: Case) -> tuple[np.ndarray, VoxelGrid]:
    """Read the labels of a case in the orientation of networks, with their grid."""
    assert case.labels is not None, "only cases with labels are cut and scored"
    volume = read_labels(case.labels)
    labels, grid, _ = orient(volume.array, volume.grid)
    return labels, grid


def _files(case: Case, names: Iterable[str], folder: Path) -> dict[str, Files]:
    """Name the files of image and labels of each part of a case."""
    files = {}
    for name in names:
        stem = f"{case.name}_{name}"
        files[name] = (folder / f"{stem}.nii.gz", folder / f"{stem}_labels.nii.gz")
    return files


def _exist(files: Mapping[str, Files]) -> bool:
    return all(path.is_file() for path in chain(*files.values()))


def _as_cases(case: Case, files: Mapping[str, Files]) -> list[Case]:
    parts = []
    for name, (image, labels) in files.items():
        # What is written is no DICOM series any more.
        part = replace(case, name=f"{case.name}_{name}", image=image, labels=labels, series=None)
        parts.append(part)
    return parts
