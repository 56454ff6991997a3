"""Case of a batch: reads, segments and writes one scan with its report, and checks whether its result is up to date."""

import fcntl
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from medseg import __version__
from medseg.cascade.cascade import Cascade, Segmentation
from medseg.data.audit.finding import Severity
from medseg.data.audit.image import audit_image, measure_image
from medseg.data.source_files import fingerprint, is_same_source
from medseg.errors import UserError, require
from medseg.io.atomic import replace_text
from medseg.io.inputs import case_name
from medseg.io.read import read_grid, read_image
from medseg.io.volume import Volume
from medseg.io.write import write_labels
from medseg.memory.profile import MemoryProfile, peak_resident_bytes
from medseg.prediction.cascades import RangeCascade
from medseg.prediction.scans import Scan
from medseg.preprocess.scale import HuScale

# Folder beside the label maps: standard deviation of the probabilities of several checkpoints or flips, in percent.
UNCERTAINTY = "uncertainty"
# Largest size of a voxel of a scan in memory.
BYTES_PER_VOXEL = 4


@dataclass
class CaseData:
    """Data of a case on its way from the scan to the result files.

    Attributes:
        volume: The scan, set by `read_case`; its grid and its labels once it is segmented.
        result: The segmentation, set by `segment_case`.
        source: Fingerprint of the scan's files when they were read; None where they could not be read.
        durations_s: Seconds by step; the time between the steps belongs to other cases.
        memory_gb_s: Area under the curve of the process' memory during the steps.
    """

    volume: Volume = field(init=False)
    result: Segmentation = field(init=False)
    source: dict[str, Any] | None = None
    durations_s: dict[str, float] = field(default_factory=dict)
    memory_gb_s: float = 0.0

    @contextmanager
    def measured(self, step: str) -> Iterator[None]:
        """Record time and memory of a step."""
        start_s = time.perf_counter()
        with MemoryProfile() as profile:
            yield
        self.durations_s[step] = time.perf_counter() - start_s
        self.memory_gb_s += profile.area_gb_s


def is_small(scan: Scan, budget_gib: float) -> bool:
    """Whether the voxels of a scan fit into the budget.

    Raises:
        UserError: If its header cannot be read.
    """
    return BYTES_PER_VOXEL * math.prod(read_grid(scan.path, scan.series).shape) <= budget_gib * 2**30


def read_case(scan: Scan) -> CaseData:
    """Read a scan and the fingerprint of its files.

    Raises:
        UserError: If it cannot be read.
    """
    case = CaseData()
    with case.measured("read"):
        with suppress(OSError):  # the reader reports it in a sentence
            case.source = fingerprint(scan.path)
        case.volume = read_image(scan.path, scan.series)
    return case


def segment_case(scan: Scan, cascade: Cascade, case: CaseData) -> None:
    """Segment a scan and drop its voxels.

    Raises:
        UserError: If all its voxels have one value.
    """
    with case.measured("segment"):
        case.result = segment_scan(case.volume, scan.path, scan.hu, cascade)
    case.volume = replace(case.volume, array=case.result.labels)


def segment_scan(volume: Volume, name: str | Path, hu: HuScale, cascade: Cascade) -> Segmentation:
    """Segment a scan that has just been read, after a check of its values.

    Args:
        volume: Scan with the values of its file.
        name: Its name in messages.
        hu: Scale that turns the values into HU.
        cascade: The trained stages.

    Returns:
        Labels in the scan's storage order; the warnings include those of the reader and of the audit of its values.

    Raises:
        UserError: If all voxels have one value.
    """
    is_constant = volume.array.min() == volume.array.max()
    require(not is_constant, f"{name}: expected a scan, but every voxel holds {volume.array.flat[0]:g}; export it again.")
    volume = replace(volume, array=hu.apply(volume.array))
    findings = [one for one in audit_image(measure_image(volume.array)) if one.severity is not Severity.note]
    result = cascade.segment(volume)
    result.warnings[:0] = [*volume.remarks, *map(str, findings)]
    is_doubtful = any(one.severity is Severity.error for one in findings)
    result.status = "not_hu" if is_doubtful else "warnings" if result.warnings else "ok"
    return result


def write_case(scan: Scan, output: Path, chosen: RangeCascade, case: CaseData, known: dict[str, Any]) -> dict[str, Any]:
    """Write the label map and its report, which always belong together: one process writes into a folder at a time.

    Args:
        scan: The scan.
        output: Path of the label map; the report is written beside it as `<case>.json`, last of all.
        chosen: The cascade that segmented it.
        case: What is written.
        known: Report that was there when the scan was read.

    Returns:
        The report: times in s, memory, boxes, volumes in ml, warnings, and what decides the result.

    Raises:
        UserError: If a file cannot be written, or a prediction of another scan has written it meanwhile.
    """
    result, volume = case.result, case.volume
    outputs = result_paths(output, chosen.cascade)
    with locked_folder(output.parent):
        found = read_report(output)
        require(
            found == known or found.get("input") == str(scan.path),
            f"{output}: another prediction, of {found.get('input')}, has written it while this one ran; give another output",
        )
        with case.measured("write"):
            maps = [array for array in (result.labels, result.disagreement) if array is not None]
            for path, array in zip(outputs, maps, strict=True):
                write_labels(path, array, volume.grid, volume.header)
        return _write_report(scan, output, chosen, case, outputs)


def _write_report(scan: Scan, output: Path, chosen: RangeCascade, case: CaseData, outputs: list[Path]) -> dict[str, Any]:
    """Write the report of a case beside its label maps."""
    result, volume = case.result, case.volume
    report = {
        "input": str(scan.path),
        **scan.reading(),
        "grid": asdict(volume.grid),
        "volume_ml": {name: round(volume_ml, 2) for name, volume_ml in result.volumes_ml.items()},
        "boxes": {name: box.to_dict() for name, box in result.boxes.items()},
        "passes": result.tiling_plans,
        "distortions": result.distortions,
        "agreements": {name: round(value, 4) for name, value in result.agreements.items()},
        "status": result.status,
        "warnings": result.warnings,
        "durations_s": {
            "read": case.durations_s["read"],
            **result.durations_s,
            "write": case.durations_s["write"],
            "total": sum(case.durations_s.values()),
        },
        "peak_resident_bytes": peak_resident_bytes(),
        "memory_gb_s": case.memory_gb_s,
        "checkpoints": {stage.name: stage.checkpoints for stage in chosen.cascade.stages},
        "by_spacing": {"name": chosen.name, "range_mm": chosen.range_mm} if chosen.name else None,
        "version": __version__,
        "settings": {**chosen.settings, **scan.reading()},
        "source": case.source,
        "results": checksums(outputs),
    }
    replace_text(report_path(output), json.dumps(report, indent=1, ensure_ascii=False))
    return report


def is_up_to_date(scan: Scan, output: Path, chosen: RangeCascade) -> bool:
    """Whether a new prediction of the case would give the results that are there.

    The report, which is written last, must be there. The label map must be the one that it was written with. The content of the scan
    and of the checkpoints and all settings that decide the result must be unchanged.
    """
    try:
        known = read_report(output)
        return bool(
            known["version"] == __version__
            # Through JSON, which turns tuples into lists.
            and known["settings"] == json.loads(json.dumps({**chosen.settings, **scan.reading()}))
            and known["results"] == checksums(result_paths(output, chosen.cascade))
            and is_same_source(scan.path, known["source"])
        )
    except (OSError, KeyError, TypeError, AttributeError, UserError):
        return False  # missing, damaged, of another version or not readable, which the prediction will report


def read_report(output: Path) -> dict[str, Any]:
    """Read the report beside a label map; empty where there is none that can be read."""
    try:
        report = json.loads(report_path(output).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        report = None
    return report if isinstance(report, dict) else {}


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which leaves no file behind and ends with its holder; without effect on a file system without locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def result_paths(output: Path, cascade: Cascade) -> list[Path]:
    """List the files of a prediction beside its report: the label map, and for averaged views their disagreement."""
    return [output, *([output.parent / UNCERTAINTY / output.name] if cascade.last.has_views(cascade.options) else [])]


def report_path(output: Path) -> Path:
    """Path of the report beside a label map."""
    return output.parent / f"{case_name(output)}.json"


def checksums(paths: list[Path]) -> dict[str, str]:
    """SHA-256 of result files by name."""
    return {path.name: fingerprint(path)["sha256"] for path in paths}
