"""Fingerprint of a data set: sizes, spacings, intensities and labels of its cases."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np
from rich.progress import track
from scipy import ndimage

from medseg.data.case_table import Case
from medseg.data.source_case import SourceCase, read_source
from medseg.io.tables import write_csv
from medseg.knob import Triple
from medseg.task import LabelValues, Task

MM3_PER_ML = 1000.0


@dataclass(frozen=True)
class LabelFacts:
    """Size of a label or region in one case, all components together.

    Attributes:
        volume_ml: Its volume.
        extent_mm: Lengths of its bounding box, (z, y, x).
    """

    volume_ml: float
    extent_mm: Triple

    @property
    def size_mm(self) -> float:
        """Distance across: diameter of a ball of this volume, or the shortest side of the box.

        The smaller of the two counts.
        """
        # A ball of diameter d has the volume V = π/6 · d³, so d = (6 V / π)^(1/3).
        diameter_mm = (6 * self.volume_ml * MM3_PER_ML / math.pi) ** (1 / 3)
        return min(diameter_mm, *self.extent_mm)


@dataclass(frozen=True)
class CaseFacts:
    """Facts of one case from which a configuration is chosen.

    Attributes:
        name: Name of the case.
        shape: Size of the stored array, oriented to (D, H, W), voxels.
        spacing_mm: Spacing of the stored voxels, (z, y, x).
        low: First percentile of the values of the first channel, in HU for a CT.
        high: 99th percentile of the values of the first channel.
        labels: Label name to size; labels that the case lacks are left out.
        regions: Name of a region of the task to the size of all its labels together; regions that
            the case lacks are left out.
    """

    name: str
    shape: tuple[int, int, int]
    spacing_mm: Triple
    low: float
    high: float
    labels: dict[str, LabelFacts]
    regions: dict[str, LabelFacts]

    @property
    def extent_mm(self) -> Triple:
        """Lengths of the scan, (z, y, x)."""
        depth_mm, height_mm, width_mm = np.multiply(self.shape, self.spacing_mm).tolist()
        return depth_mm, height_mm, width_mm

    @property
    def num_voxels(self) -> int:
        """Number of stored voxels."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Fingerprint:
    """Facts of a data set, from its cases with labels."""

    cases: tuple[CaseFacts, ...]

    @cached_property
    def spacing_mm(self) -> Triple:
        """Median spacing of each axis, (z, y, x)."""
        return median_triple([case.spacing_mm for case in self.cases])

    @cached_property
    def extent_mm(self) -> Triple:
        """Median lengths of the scans, (z, y, x)."""
        return median_triple([case.extent_mm for case in self.cases])

    @cached_property
    def largest(self) -> CaseFacts:
        """Case with the largest field of view."""
        return max(self.cases, key=lambda case: math.prod(case.extent_mm))

    @cached_property
    def smallest_label(self) -> tuple[str, float]:
        """Label with the smallest median distance across, and this median in mm."""
        return _smallest(case.labels for case in self.cases)

    @cached_property
    def smallest_region(self) -> tuple[str, float]:
        """Region with the smallest median distance across, and this median in mm."""
        return _smallest(case.regions for case in self.cases)

    def write(self, path: Path) -> None:
        """Write one row per case and label as CSV."""
        rows = []
        for case in self.cases:
            spacing = "x".join(f"{length:.4g}" for length in case.spacing_mm)
            for name, label in case.labels.items():
                extent = "x".join(f"{length:.4g}" for length in label.extent_mm)
                row = {
                    "case": case.name,
                    "shape": "x".join(map(str, case.shape)),
                    "spacing_mm": spacing,
                    "p01": round(case.low, 2),
                    "p99": round(case.high, 2),
                    "label": name,
                    "volume_ml": round(label.volume_ml, 3),
                    "extent_mm": extent,
                    "across_mm": round(label.size_mm, 2),
                }
                rows.append(row)
        write_csv(path, rows)


def read_fingerprint(cases: Sequence[tuple[Case, LabelValues]], task: Task) -> Fingerprint:
    """Read, audit and measure every case.

    Args:
        cases: Pairs of a case with labels and the label values in its file.
        task: Labels and channels.

    Raises:
        UserError: If a case cannot be read, or its audit finds an error.
    """
    facts = []
    for case, label_values in track(cases, "read the cases", transient=True):
        facts.append(facts_of(case.name, read_source(case, task, label_values), task))
    return Fingerprint(tuple(facts))


def facts_of(name: str, source: SourceCase, task: Task) -> CaseFacts:
    """Measure a case that was read.

    Args:
        name: Name of the case.
        source: The case, oriented.
        task: Task with the labels to measure.
    """
    grid = source.grid
    labels: dict[str, LabelFacts] = {}
    regions: dict[str, LabelFacts] = {}
    if source.labels is not None:
        counts, boxes = _count_and_bound(source.labels, task)
        for label in counts:
            labels[label] = _size_of([label], counts, boxes, grid.spacing_mm)
        for region in task.regions:
            present_labels = [label for label in region.labels if label in counts]
            if present_labels:
                regions[region.name] = _size_of(present_labels, counts, boxes, grid.spacing_mm)
    # In spite of its name, `hu` holds percentiles in the unit of the first channel.
    percentiles = source.audit.hu
    return CaseFacts(
        name=name,
        shape=grid.shape,
        spacing_mm=grid.spacing_mm,
        low=percentiles["p01"],
        high=percentiles["p99"],
        labels=labels,
        regions=regions,
    )


def _count_and_bound(
    label_map: np.ndarray, task: Task
) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """Count the voxels of each label in a label map, and find its bounding box.

    Returns:
        Label name to number of voxels, and label name to the first and the last corner of its box,
        (2, 3), voxels; labels that the map lacks are left out.
    """
    counts = {}
    boxes = {}
    # Item v - 1 has the slices of the bounding box of the value v, or None if the map lacks v. The
    # list ends at the largest value in the map.
    found = ndimage.find_objects(label_map)
    for label, value in task.labels.items():
        box = found[value - 1] if value <= len(found) else None
        if box is None:
            continue
        counts[label] = int(np.count_nonzero(label_map[box] == value))
        starts = [axis_slice.start for axis_slice in box]
        stops = [axis_slice.stop for axis_slice in box]
        boxes[label] = np.array([starts, stops])
    return counts, boxes


def _size_of(
    labels: Sequence[str],
    counts: Mapping[str, int],
    boxes: Mapping[str, np.ndarray],
    spacing_mm: Triple,
) -> LabelFacts:
    """Compute the size of labels together.

    Args:
        labels: Names of the labels, at least one.
        counts: Label name to number of voxels.
        boxes: Label name to the first and the last corner of its bounding box, (2, 3), voxels.
        spacing_mm: Spacing of the voxels, (z, y, x).
    """
    corners = np.stack([boxes[label] for label in labels])
    lengths = corners[:, 1].max(axis=0) - corners[:, 0].min(axis=0)
    depth_mm, height_mm, width_mm = np.multiply(lengths, spacing_mm).tolist()
    num_voxels = sum(counts[label] for label in labels)
    volume_ml = num_voxels * math.prod(spacing_mm) / MM3_PER_ML
    return LabelFacts(volume_ml, (depth_mm, height_mm, width_mm))


def _smallest(cases: Iterable[Mapping[str, LabelFacts]]) -> tuple[str, float]:
    """Find the name with the smallest median distance across, and this median in mm.

    Args:
        cases: Name to size, for each case.
    """
    sizes_mm: dict[str, list[float]] = {}
    for sizes in cases:
        for name, size in sizes.items():
            sizes_mm.setdefault(name, []).append(size.size_mm)
    medians_mm = {name: median(all_sizes_mm) for name, all_sizes_mm in sizes_mm.items()}
    smallest = min(medians_mm, key=medians_mm.__getitem__)
    return smallest, medians_mm[smallest]


def median_triple(triples: Sequence[Triple]) -> Triple:
    """Compute the median along each axis, (z, y, x)."""
    z, y, x = (median(along_axis) for along_axis in zip(*triples, strict=True))
    return z, y, x
