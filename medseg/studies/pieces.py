"""Pieces of whole scans as cases of their own: apices, middle and bases of an organ, and what lies beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from medseg.data.case_table import Case
from medseg.geometry.box import VoxelBox
from medseg.io.read import read_image, read_labels
from medseg.io.write import write_image, write_labels
from medseg.preprocess.orient import orient

# Of the organ's height: what an end piece shows of it, and what the middle one does; a low organ is not cut.
SHARE_OF_END = 0.25
SHARE_OF_MIDDLE = 0.35
LEAST_HEIGHT_MM = 100.0
# A piece without organ keeps away from it, since a reference may stop a slice early, and is at least a thin slab.
GAP_MM = 5.0
LEAST_MM = 15.0


def cut_pieces(case: Case, values: Sequence[int], folder: Path) -> list[Case]:
    """Cut a case along z and write the pieces, each with its labels; pieces that are there already are kept.

    Args:
        case: Case with labels.
        values: Values of the organ in its label file.
        folder: Where `<case>_<piece>.nii.gz` and `<case>_<piece>_labels.nii.gz` lie.

    Returns:
        The pieces as cases; those that the scan cannot give are missing.
    """
    assert case.labels is not None, "only scored cases are cut"
    volume = read_labels(case.labels)
    labels, grid, _ = orient(volume.array, volume.grid)
    has_organ = np.array([np.isin(plane, values).any() for plane in labels])
    ranges = dict(slice_ranges(has_organ, grid.spacing_mm[0]))
    paths = {name: (folder / f"{case.name}_{name}.nii.gz", folder / f"{case.name}_{name}_labels.nii.gz") for name in ranges}
    if not all(path.is_file() for pair in paths.values() for path in pair):
        folder.mkdir(parents=True, exist_ok=True)
        scan = read_image(case.image, case.series)
        image, image_grid, _ = orient(scan.array, scan.grid)
        for name, (start, stop) in ranges.items():
            for path, array, its_grid, write in (
                (paths[name][0], image, image_grid, write_image),
                (paths[name][1], labels, grid, write_labels),
            ):
                box = VoxelBox((start, 0, 0), (stop, *array.shape[1:]))
                write(path, array[box.slices()], its_grid.crop(box))
    return [
        replace(case, name=f"{case.name}_{name}", image=image_path, labels=labels_path, series=None)
        for name, (image_path, labels_path) in paths.items()
    ]


def slice_ranges(has_organ: np.ndarray, step_mm: float) -> Iterator[tuple[str, tuple[int, int]]]:
    """Choose the slices of each piece.

    Args:
        has_organ: Per slice, from the feet up, whether it shows the organ; at least one does not have to.
        step_mm: Distance of slices.

    Yields:
        Name and half-open range of slices. `apices` and `bases` reach to the end of the scan, and are there only where the
        organ ends before it does; `below` and `above` show none of it.

    Example:
        >>> dict(slice_ranges(np.array([False] * 6 + [True] * 20), 5.0))
        {'below': (0, 5), 'bases': (0, 11), 'middle': (12, 20)}
    """
    places = np.flatnonzero(has_organ)
    if len(places) == 0:
        return
    first, last, end = int(places[0]), int(places[-1]), len(has_organ)
    height = last + 1 - first
    gap, least = math.ceil(GAP_MM / step_mm), math.ceil(LEAST_MM / step_mm)
    share, margin = math.ceil(SHARE_OF_END * height), (height - math.ceil(SHARE_OF_MIDDLE * height)) // 2
    if first - gap >= least:
        yield "below", (0, first - gap)
    if height * step_mm >= LEAST_HEIGHT_MM:
        if first > 0:
            yield "bases", (0, first + share)
        yield "middle", (first + margin, last + 1 - margin)
        if last + 1 < end:
            yield "apices", (last + 1 - share, end)
    if end - (last + 1) - gap >= least:
        yield "above", (last + 1 + gap, end)
