"""Harder scans made from whole scans: parts along z, half chests, and painted disease.

Scans and labels are handled in the orientation of the networks: z from feet to head, x from the
patient's right to left.
"""

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

# Share of the organ's height (along z) that `bases` and `apices` show, each, and `middle`.
SHARE_OF_END = 0.25
SHARE_OF_MIDDLE = 0.35
# An organ with less height than this is not cut into `bases`, `middle` and `apices`.
LEAST_HEIGHT_MM = 100.0
# Distance from the organ to a part without organ (`below`, `above`): a reference may end a slice
# before the organ does.
GAP_MM = 5.0
# Least height of a part without organ.
LEAST_MM = 15.0
# With less than this share of an organ's voxels, a half chest shows a sliver of the organ: too
# little to recognise the side of the sliver.
LEAST_SHARE = 0.1
# Trust of the reference of an organ that a half chest shows as a sliver. Scores are summarised by
# trust, so slivers get summaries of their own.
SLIVER = "sliver"
HALVES = ("right_half", "left_half")
# Paths of the image and of the labels of a part.
Files = tuple[Path, Path]


def cut_partial_scans(
    case: Case, organs: Mapping[str, Sequence[int]], folder: Path, modality: str = "ct"
) -> list[Case]:
    """Cut a case along z, and between its two organs along x, and write the parts.

    If the files of all parts are newer than those of the case, nothing is written.

    Args:
        case: Case with labels.
        organs: Name of each organ to its values in the label file.
        folder: Folder for `<case>_<part>.nii.gz` and `<case>_<part>_labels.nii.gz`.
        modality: Modality of the image, as for `read_image`.

    Returns:
        The parts as cases; see `slice_ranges` and `halves` for the parts that a scan has.
    """
    labels, grid = oriented_labels(case)
    values = list(chain(*organs.values()))
    # Whether each slice shows an organ, (D,).
    has_organ = np.array([np.isin(plane, values).any() for plane in labels])
    depth, height, width = labels.shape
    boxes: dict[str, VoxelBox] = {}
    for name, (start, stop) in slice_ranges(has_organ, grid.spacing_mm[0]):
        boxes[name] = VoxelBox((start, 0, 0), (stop, height, width))
    for name, (start, stop) in halves(labels, list(organs.values())):
        boxes[name] = VoxelBox((0, 0, start), (depth, height, stop))
    files = _files(case, boxes, folder)
    if not _are_up_to_date(case, files):
        image, image_grid = oriented_image(case, modality)
        for name, box in boxes.items():
            image_path, labels_path = files[name]
            image_part = np.ascontiguousarray(image[box.slices()])
            labels_part = np.ascontiguousarray(labels[box.slices()])
            write_image(image_path, image_part, image_grid.crop(box))
            write_labels(labels_path, labels_part, grid.crop(box))
    parts = []
    # Boxes, files and parts have the same order.
    for part, (name, box) in zip(_as_cases(case, files), boxes.items(), strict=True):
        trust = dict(part.trust)
        if name in HALVES:
            trust |= dict.fromkeys(_slivers(labels, labels[box.slices()], organs), SLIVER)
        parts.append(replace(part, trust=trust))
    return parts


def paint_scan(case: Case, organs: Sequence[Sequence[int]], folder: Path) -> list[Case]:
    """Paint disease into each organ of a CT, see `paint_disease`, and write the scan in HU.

    If both files are newer than those of the case, nothing is written.

    Args:
        case: Case with labels, a CT.
        organs: Values of each organ in the label file.
        folder: Folder for `<case>_diseased.nii.gz` and `<case>_diseased_labels.nii.gz`. Where the
            case has a scale to HU, the names have its slope and offset too.

    Returns:
        The painted case; none if the scan shows no organ.
    """
    labels, grid = oriented_labels(case)
    present_organs = [values for values in organs if np.isin(labels, values).any()]
    if not present_organs:
        return []
    stem = "diseased"
    # A file that was painted with another scale, or before scales counted, is not up to date.
    if case.hu != AS_STORED:
        stem = f"diseased_{case.hu.slope}_{case.hu.offset}"
    files = {"diseased": _files(case, [stem], folder)[stem]}
    if not _are_up_to_date(case, files):
        scan, scan_grid = oriented_image(case)
        # The seed is a hash of the name, so that a case has the same disease in every study.
        rng = sample_rng(seed=zlib.crc32(case.name.encode()), n=0)
        image = torch.from_numpy(case.hu.apply(scan).astype(np.float32).clip(*HU_LIMITS))
        for values in present_organs:
            organ = torch.from_numpy(np.isin(labels, values).astype(np.uint8))
            # Paints in place; 1 is the value of the organ in `organ`.
            paint_disease(image, organ, 1, list(KINDS), rng, grid.spacing_mm)
        image_path, labels_path = files["diseased"]
        write_image(image_path, image.round().to(torch.int16).numpy(), scan_grid)
        write_labels(labels_path, labels, grid)
    # `hu` of the case converts stored values to HU; the new file already has HU.
    return [replace(painted, hu=AS_STORED) for painted in _as_cases(case, files)]


def slice_ranges(has_organ: np.ndarray, step_mm: float) -> Iterator[tuple[str, tuple[int, int]]]:
    """Choose the slices of each part.

    Args:
        has_organ: Per slice, from the feet up, whether it contains the organ; all may be False.
        step_mm: Distance between slices.

    Yields:
        Name and half-open range of slices. `bases` extends to the lower end of the scan, `apices`
        to the upper end; each exists only if the organ does not reach that end. `below` and `above`
        contain no organ.

    Example:
        >>> dict(slice_ranges(np.array([False] * 6 + [True] * 20), 5.0))
        {'below': (0, 5), 'bases': (0, 11), 'middle': (12, 20)}
    """
    slices = np.flatnonzero(has_organ)
    if len(slices) == 0:
        return
    # All lengths below are in slices; the organ reaches from `first` to `stop`, half-open.
    first = int(slices[0])
    stop = int(slices[-1]) + 1
    num_slices = len(has_organ)
    height = stop - first
    gap = math.ceil(GAP_MM / step_mm)
    least_height = math.ceil(LEAST_MM / step_mm)
    end_height = math.ceil(SHARE_OF_END * height)
    # Slices that the middle part leaves out at each end of the organ.
    margin = (height - math.ceil(SHARE_OF_MIDDLE * height)) // 2
    if first - gap >= least_height:
        yield "below", (0, first - gap)
    if height * step_mm >= LEAST_HEIGHT_MM:
        if first > 0:
            yield "bases", (0, first + end_height)
        yield "middle", (first + margin, stop - margin)
        if stop < num_slices:
            yield "apices", (stop - end_height, num_slices)
    if num_slices - stop - gap >= least_height:
        yield "above", (stop + gap, num_slices)


def halves(
    labels: np.ndarray, organs: Sequence[Sequence[int]]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Choose the columns of half chests.

    A scan that shows exactly two organs is cut in the middle of their joint extent along x; any
    other scan is not cut.

    Args:
        labels: Label map (D, H, W), x from the patient's right to left.
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
    right_half, left_half = HALVES
    yield right_half, (0, middle)
    yield left_half, (middle, labels.shape[2])


def _slivers(
    labels: np.ndarray, labels_of_part: np.ndarray, organs: Mapping[str, Sequence[int]]
) -> list[str]:
    """List the organs of which a part shows voxels, but fewer than the share `LEAST_SHARE`.

    Args:
        labels: Label map of the whole scan.
        labels_of_part: Label map of the part.
        organs: Name of each organ to its values.
    """
    slivers = []
    for name, values in organs.items():
        num_in_part = np.count_nonzero(np.isin(labels_of_part, values))
        num_in_scan = np.count_nonzero(np.isin(labels, values))
        if 0 < num_in_part < LEAST_SHARE * num_in_scan:
            slivers.append(name)
    return slivers


def oriented_image(case: Case, modality: str = "ct") -> tuple[np.ndarray, VoxelGrid]:
    """Read the scan of a case in the orientation of networks, with its grid."""
    scan = read_image(case.image, case.series, modality)
    image, grid, _ = orient(scan.array, scan.grid)
    return image, grid


def oriented_labels(case: Case) -> tuple[np.ndarray, VoxelGrid]:
    """Read the labels of a case in the orientation of networks, with their grid."""
    assert case.labels is not None, "only cases with labels are cut and scored"
    volume = read_labels(case.labels)
    labels, grid, _ = orient(volume.array, volume.grid)
    return labels, grid


def _files(case: Case, names: Iterable[str], folder: Path) -> dict[str, Files]:
    """Map the name of each part of a case to the paths of its image and labels."""
    files = {}
    for name in names:
        stem = f"{case.name}_{name}"
        files[name] = (folder / f"{stem}.nii.gz", folder / f"{stem}_labels.nii.gz")
    return files


def _are_up_to_date(case: Case, files: Mapping[str, Files]) -> bool:
    """Whether all files exist and are newer than image and labels of the case."""
    paths = list(chain(*files.values()))
    if not all(path.is_file() for path in paths):
        return False
    oldest_s = min((path.stat().st_mtime for path in paths), default=math.inf)
    # Labels may have been corrected since.
    sources = [source for source in (case.image, case.labels) if source and source.exists()]
    return all(source.stat().st_mtime <= oldest_s for source in sources)


def _as_cases(case: Case, files: Mapping[str, Files]) -> list[Case]:
    """Describe the parts of a case as cases of their own, in the order of `files`."""
    parts = []
    for name, (image, labels) in files.items():
        # The files of parts are NIfTI and have no series, even if the case is a DICOM series.
        part = replace(case, name=f"{case.name}_{name}", image=image, labels=labels, series=None)
        parts.append(part)
    return parts
