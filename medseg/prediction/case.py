"""The three steps of predicting a case: reading, segmenting, writing."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from medseg import __version__
from medseg.data.source_files import fingerprint
from medseg.io.atomic import replace_text
from medseg.io.inputs import case_name
from medseg.memory.profile import MemoryProfile, peak_resident_bytes
from medseg.prediction.cascades import Cascade
from medseg.prediction.completed import is_finished, results_of
from medseg.prediction.scans import Scan

# Folder beside the label maps: by how many percent the probabilities of several checkpoints or flips scatter.
UNCERTAINTY = "uncertainty"
# What a voxel of a scan takes at most once it is read.
BYTES_PER_VOXEL = 4


@dataclass
class Costs:
    """What the steps of a case have cost so far; the time between them belongs to other cases.

    Attributes:
        duration_s: Seconds.
        memory_gb_s: Area under the curve of the process' memory over that time.
    """

    duration_s: float = 0.0
    memory_gb_s: float = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Add a step."""
        start_s = time.perf_counter()
        with MemoryProfile() as profile:
            yield
        self.duration_s += time.perf_counter() - start_s
        self.memory_gb_s += profile.area_gb_s


class ReadCase(NamedTuple):
    """A case that has been read.

    Attributes:
        volume: The scan, a `Volume`.
        source: What the files were when they were read; None where nobody can tell.
        costs: So far.
    """

    volume: Any
    source: dict[str, Any] | None
    costs: Costs


class SegmentedCase(NamedTuple):
    """A case that has been segmented.

    Attributes:
        result: Its `Segmentation`.
        grid: Grid of the scan, and of the labels.
        header: Header to write.
        source: See `ReadCase`.
        read_s: Seconds that reading took.
        costs: So far.
    """

    result: Any
    grid: Any
    header: Any
    source: dict[str, Any] | None
    read_s: float
    costs: Costs


def is_small(scan: Scan, budget_gib: float) -> bool:
    """Whether a scan takes no more than the budget once it is read.

    Raises:
        UserError: If its header cannot be read.
    """
    from medseg.io.read import read_grid

    return BYTES_PER_VOXEL * math.prod(read_grid(scan.path, scan.series).shape) <= budget_gib * 2**30


def read_case(scan: Scan) -> ReadCase:
    """Read a scan, and note which files it came from.

    Raises:
        UserError: If it cannot be read.
    """
    from medseg.io.read import read_image

    costs, source = Costs(), None
    with costs.measured():
        with suppress(OSError):  # the reader says it in a sentence
            source = fingerprint(scan.path)
        volume = read_image(scan.path, scan.series)
    return ReadCase(volume, source, costs)


def segment_case(scan: Scan, cascade: Cascade, case: ReadCase) -> SegmentedCase:
    """Segment a scan.

    Raises:
        UserError: If it shows nothing.
    """
    from medseg.prediction.segmenter import segment_scan

    volume, source, costs = case
    read_s = costs.duration_s
    with costs.measured():
        result = segment_scan(volume, scan.path, scan.hu, cascade.coarse, cascade.fine, cascade.options)
    return SegmentedCase(result, volume.grid, volume.header, source, read_s, costs)


def write_case(scan: Scan, output: Path, cascade: Cascade, case: SegmentedCase) -> dict[str, Any]:
    """Write the label map and its report.

    Args:
        scan: Scan.
        output: Label map to write; the report goes beside it as `<case>.json`, last of all.
        cascade: Stages and options.
        case: What is written.

    Returns:
        The report: times in s, memory, boxes, volumes in ml, warnings, and what the result follows from.

    Raises:
        UserError: If it cannot be written.
    """
    from medseg.io.write import write_labels

    result, grid, costs = case.result, case.grid, case.costs
    outputs = result_paths(output, cascade)
    segmented_s = costs.duration_s
    with costs.measured():
        maps = [result.labels, *([] if result.disagreement is None else [result.disagreement])]
        for path, array in zip(outputs, maps, strict=True):
            write_labels(path, array, grid, case.header)
    report = {
        "input": str(scan.path),
        **scan.reading(),
        "grid": grid.to_dict(),
        "volume_ml": {name: round(volume_ml, 2) for name, volume_ml in result.volumes_ml.items()},
        "boxes": {name: box.to_dict() for name, box in result.boxes.items()},
        "passes": result.passes,
        "distortions": result.distortions,
        "agreements": {name: round(value, 4) for name, value in result.agreements.items()},
        "warnings": result.warnings,
        "durations_s": {
            "read": case.read_s,
            **result.durations_s,
            "write": costs.duration_s - segmented_s,
            "total": costs.duration_s,
        },
        "peak_resident_bytes": peak_resident_bytes(),
        "memory_gb_s": costs.memory_gb_s,
        "checkpoints": {stage.name: stage.checkpoints for stage in (cascade.coarse, cascade.fine)},
        "by_spacing": {"name": cascade.name, "range_mm": cascade.range_mm} if cascade.name else None,
        "version": __version__,
        "settings": {**cascade.settings, **scan.reading()},
        "source": case.source,
        "results": results_of(outputs),
    }
    replace_text(report_path(output), json.dumps(report, indent=1, ensure_ascii=False))
    return report


def is_case_finished(scan: Scan, output: Path, cascade: Cascade) -> bool:
    """Whether predicting a case again would give what is there already."""
    settings = {**cascade.settings, **scan.reading()}
    return is_finished(scan.path, result_paths(output, cascade), report_path(output), settings)


def result_paths(output: Path, cascade: Cascade) -> list[Path]:
    """What a prediction writes beside its report: the label map, and where several views are averaged their disagreement."""
    return [output, *([output.parent / UNCERTAINTY / output.name] if cascade.fine.has_views(cascade.options) else [])]


def report_path(output: Path) -> Path:
    """The report beside a label map."""
    return output.parent / f"{case_name(output)}.json"
