"""Fingerprint of a data set: sizes, spacings, intensities and labels of its cases."""

import math
from collections.abc import Sequence
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

ML = 1000.0  # mm³


@dataclass(frozen=True)
class LabelFacts:
    """Size of a label in one case.

    Attributes:
        volume_ml: Its volume.
        extent_mm: Lengths of its bounding box, (z, y, x).
    """

    volume_ml: float
    extent_mm: Triple

    @property
    def size_mm(self) -> float:
        """Distance across: the diameter of a ball of this volume, or the box where it is thinner.

        The volume is that of all parts together.
        """
        diameter_mm = (6 * self.volume_ml * ML / math.pi) ** (1 / 3)
        return min(diameter_mm, *self.extent_mm)


@dataclass(frozen=True)
class CaseFacts:
    """What decides about a configuration in one case.

    Attributes:
        name: Name of the case.
        shape: Voxels as they were stored, oriented, (D, H, W).
        spacing_mm: Their spacing, (z, y, x).
        low: First percentile of the first channel; HU of a CT.
        high: 99th percentile.
        labels: Label name to its size; labels that the case lacks are left out.
    """

    name: str
    shape: tuple[int, int, int]
    spacing_mm: Triple
    low: float
    high: float
    labels: dict[str, LabelFacts]

    @property
    def extent_mm(self) -> Triple:
        """Lengths of the scan, (z, y, x)."""
        depth_mm, height_mm, width_mm = np.multiply(self.shape, self.spacing_mm).tolist()
        return depth_mm, height_mm, width_mm

    @property
    def num_voxels(self) -> int:
        """Voxels as they were stored."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Fingerprint:
    """Facts of all cases of a data set that have labels."""

    cases: tuple[CaseFacts, ...]

    @cached_property
    def spacing_mm(self) -> Triple:
        """Median spacing of each axis, (z, y, x)."""
        return _median_triple([case.spacing_mm for case in self.cases])

    @cached_property
    def extent_mm(self) -> Triple:
        """Median lengths of the scans, (z, y, x)."""
        return _median_triple([case.extent_mm for case in self.cases])

    @cached_property
    def largest(self) -> CaseFacts:
        """The scan with the largest field of view."""
        return max(self.cases, key=lambda case: math.prod(case.extent_mm))

    @cached_property
    def smallest_label(self) -> tuple[str, float]:
        """The label that is the smallest in its median case, and its distance across in mm."""
        sizes_mm: dict[str, list[float]] = {}
        for case in self.cases:
            for name, label in case.labels.items():
                sizes_mm.setdefault(name, []).append(label.size_mm)
        medians_mm = {name: median(values) for name, values in sizes_mm.items()}
        smallest = min(medians_mm, key=medians_mm.__getitem__)
        return smallest, medians_mm[smallest]

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
    """Read and audit every case.

    Args:
        cases: Cases that have labels, with the values in their label files.
        task: Labels and channels.

    Raises:
        UserError: If a case cannot be read, or its audit finds an error.
    """
    facts = []
    for case, label_values in track(cases, "read the cases", transient=True):
        facts.append(facts_of(case.name, read_source(case, task, label_values), task))
    return Fingerprint(tuple(facts))


def facts_of(name: str, source: SourceCase, task: Task) -> CaseFacts:
    """Measure a case that was read."""
    labels: dict[str, LabelFacts] = {}
    if source.labels is not None:
        # The entry of value v is at v - 1; None where the map lacks the value.
        boxes = ndimage.find_objects(source.labels)
        for label, value in task.labels.items():
            box = boxes[value - 1] if value <= len(boxes) else None
            if box is None:
                continue
            lengths = [part.stop - part.start for part in box]
            depth_mm, height_mm, width_mm = np.multiply(lengths, source.grid.spacing_mm).tolist()
            num_voxels = int(np.count_nonzero(source.labels[box] == value))
            volume_ml = num_voxels * math.prod(source.grid.spacing_mm) / ML
            labels[label] = LabelFacts(volume_ml, (depth_mm, height_mm, width_mm))
    values = source.audit.hu
    return CaseFacts(
        name, source.grid.shape, source.grid.spacing_mm, values["p01"], values["p99"], labels
    )


def _median_triple(triples: Sequence[Triple]) -> Triple:
    """Median of each axis."""
    z, y, x = (median(along_axis) for along_axis in zip(*triples, strict=True))
    return z, y, x
