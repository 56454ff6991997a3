"""Partial scans: parts of whole scans as cases of their own, with the apices, middle or bases of an organ, or none of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from medseg.data.case_table import Case
from medseg.geometry.grid import VoxelBox
from medseg.io.read import read_image, read_labels
from medseg.io.write import write_image, write_labels
from medseg.preprocess.orient import orient

# Shares of the organ's height in a part with one of its ends, and in the middle part.
SHARE_OF_END = 0.25
SHARE_OF_MIDDLE = 0.35
# A lower organ is not cut.
LEAST_HEIGHT_MM = 100.0
# A part without organ keeps this distance, since references may stop a slice early, and is at least this high.
GAP_MM = 5.0
LEAST_MM = 15.0


def cut_partial_scans(case: Case, values: Sequence[int], folder: Path) -> list[Case]:
    """Cut a case along z and write the parts with their labels; existing files are kept.

    Args:
        case: Case with labels.
        values: Values of the organ in its label file.
        folder: Folder of `<case>_<part>.nii.gz` and `<case>_<part>_labels.nii.gz`.

    Returns:
        The parts as cases; see `slice_ranges` for the parts that a scan has.
    """
    assert case.labels is not None, "only cases with labels are cut"
    volume = read_labels(case.labels)
    labels, grid, _ = orient(volume.array, volume.grid)
    has_organ = np.array([np.isin(plane, values).any() for plane in labels])
    ranges = dict(slice_ranges(has_organ, grid.spacing_mm[0]))
    paths = {name: (folder / f"{case.name}_{name}.nii.gz", folder / f"{case.name}_{name}_labels.nii.gz") for name in ranges}
    if not all(path.is_file() for pair in paths.values() for path in pair):
        scan = read_image(case.image, case.series)
        image, image_grid, _ = orient(scan.array, scan.grid)
        for name, (start, stop) in ranges.items():
            box = VoxelBox((start, 0, 0), (stop, *image.shape[1:]))
            write_image(paths[name][0], image[box.slices()], image_grid.crop(box))
            write_labels(paths[name][1], labels[box.slices()], grid.crop(box))
    return [
        replace(case, name=f"{case.name}_{name}", image=image_path, labels=labels_path, series=None)
        for name, (image_path, labels_path) in paths.items()
    ]


def slice_ranges(has_organ: np.ndarray, step_mm: float) -> Iterator[tuple[str, tuple[int, int]]]:
    """Choose the slices of each part.

    Args:
        has_organ: Per slice, from the feet up, whether it contains the organ; all may be False.
        step_mm: Distance between slices.

    Yields:
        Name and half-open range of slices. `bases` and `apices` extend to the end of the scan and exist only if the organ ends before
        it; `below` and `above` contain no organ.

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
    share, margin = math.ceil(SHARE_OF_END * height), (height - math.ceil(SHARE_OF_MIDDLE * height)) // 2
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
