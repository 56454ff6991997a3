"""Report of a case, `<case>.json`: written last, after the results, and read to skip the case."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from medseg import __version__
from medseg.data.source_files import fingerprint, is_same_source
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.inference.scan_model import ScanModel
from medseg.io.atomic import replace_text
from medseg.io.inputs import case_name, volume_suffix
from medseg.io.text import read_json
from medseg.memory.profile import peak_resident_bytes
from medseg.prediction.case import CaseData
from medseg.prediction.forecast import Forecast, record_cost
from medseg.prediction.load_models import RangeModel
from medseg.prediction.options import PredictConfig
from medseg.prediction.result_files import result_paths, write_results
from medseg.prediction.scans import Scan
from medseg.weights.files import checksum


def write_case(
    scan: Scan,
    output: Path,
    chosen: RangeModel,
    case: CaseData,
    earlier_report: dict[str, Any],
    config: PredictConfig,
    expect: Callable[[ScanModel, VoxelGrid], Forecast],
) -> dict[str, Any]:
    """Write the results and their report.

    They always belong together: one process writes into a folder at a time.

    Args:
        scan: The scan.
        output: Path of the label map; the report is written beside it as `<case>.json`, last of
            all.
        chosen: The cascade that segmented it.
        case: What is written.
        earlier_report: Report that was there when the scan was read.
        config: Which files are written.
        expect: Makes the forecast of a case from its grid.

    Returns:
        The report: times in s, memory, boxes, volumes in ml, warnings, and what decides the result.

    Raises:
        UserError: If a file cannot be written, or a prediction of another scan has written it
            meanwhile.
    """
    paths = result_paths(output, chosen.model, config.save)
    with locked_folder(output.parent):
        # Asked again under the lock: another process may have written since the case was read.
        report = read_report(output)
        if report != earlier_report and report.get("input") != scan.place:
            raise UserError(
                f"{output}: another prediction, of {report.get('input')}, has written it while "
                "this one ran; give another output"
            )
        with case.measured("write"):
            write_results(
                paths,
                scan,
                case.volume,
                case.result,
                case.views,
                chosen.model.task,
                config,
            )
        return _write_report(scan, output, chosen, case, list(paths.values()), expect)


def _write_report(
    scan: Scan,
    output: Path,
    chosen: RangeModel,
    case: CaseData,
    outputs: list[Path],
    expect: Callable[[ScanModel, VoxelGrid], Forecast],
) -> dict[str, Any]:
    """Write the report of a case beside its results."""
    result = case.result
    volume = case.volume
    total_s = sum(case.durations_s.values())
    expected = None
    with suppress(UserError):  # crops of usual size exceed a budget that those of the case keep
        expected = record_cost(
            expect(chosen.model, volume.grid), chosen.model, total_s, result.pass_s
        )
    by_spacing = None
    if chosen.name:
        by_spacing = {"name": chosen.name, "range_mm": chosen.range_mm}
    # Scans of one channel have no such key, as before there were several.
    more_sources = {}
    if len(case.sources) > 1:
        more_sources = {"more_sources": case.sources[1:]}
    report = {
        "input": scan.place,
        **scan.reading(),
        "identity": scan.identity_with(volume)._asdict(),
        "grid": asdict(volume.grid),
        "volume_ml": {name: round(volume_ml, 2) for name, volume_ml in result.volumes_ml.items()},
        "statistics": result.statistics,
        "total_statistics": result.total_statistics,
        "boxes": {name: box.to_dict() for name, box in result.boxes.items()},
        "passes": result.tiling_plans,
        "distortions": result.distortions,
        "agreements": {name: round(value, 4) for name, value in result.agreements.items()},
        "dice_at_least": {name: asdict(bound) for name, bound in result.dice_at_least.items()},
        "most_disputed_xyz_mm": result.most_disputed_xyz_mm,
        "status": result.status,
        "warnings": result.warnings,
        "findings": [finding.to_dict() for finding in result.findings],
        "durations_s": {
            "read": case.durations_s["read"],
            **result.durations_s,
            "write": case.durations_s["write"],
            "total": total_s,
        },
        "peak_resident_bytes": peak_resident_bytes(),
        "expected": expected,
        "memory_gb_s": case.memory_gb_s,
        "checkpoints": chosen.model.checkpoints,
        "by_spacing": by_spacing,
        "version": __version__,
        "settings": {**chosen.settings, **scan.reading()},
        "source": case.sources[0],
        **more_sources,
        "results": checksums(outputs),
    }
    replace_text(report_path(output), json.dumps(report, indent=1, ensure_ascii=False))
    return report


def is_up_to_date(scan: Scan, output: Path, chosen: RangeModel, config: PredictConfig) -> bool:
    """Whether a new prediction of the case would give the results that are there.

    The report, which is written last, must be there. The files must be those that it was written
    with. The content of the scan and of the checkpoints and all settings that decide the result
    must be unchanged.
    """
    try:
        report = read_report(output)
        if report["version"] != __version__:
            return False
        if not isinstance(report["volume_ml"], dict) or not isinstance(report["warnings"], list):
            return False
        # Through JSON, which turns tuples into lists.
        settings = json.loads(json.dumps({**chosen.settings, **scan.reading()}))
        if report["settings"] != settings:
            return False
        paths = list(result_paths(output, chosen.model, config.save).values())
        if not checksums(paths).items() <= report["results"].items():
            return False
        return _has_same_sources(scan, report, len(chosen.model.task.channels))
    except (OSError, KeyError, TypeError, ValueError, AttributeError, UserError):
        # Missing, damaged, of another version or not readable, which the prediction will report.
        return False


def _has_same_sources(scan: Scan, report: dict[str, Any], num_channels: int) -> bool:
    """Whether the files of each channel are those of the report."""
    paths = scan.paths(num_channels)
    sources = [report["source"], *report.get("more_sources", [])]
    for path, source, files in zip(
        paths, sources, scan.files_by_channel(num_channels), strict=True
    ):
        if path is None or not is_same_source(path, source, files):
            return False
    return True


def read_report(output: Path) -> dict[str, Any]:
    """Read the report beside a label map; empty where there is none that can be read."""
    try:
        report = read_json(report_path(output))
    except UserError:
        report = None
    return report if isinstance(report, dict) else {}


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which leaves no file behind and ends with its holder.

    On a file system without locks it has no effect.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def report_path(output: Path) -> Path:
    """Path of the report beside a label map."""
    return output.parent / f"{case_name(output)}.json"


def checksums(paths: list[Path]) -> dict[str, str]:
    """SHA-256 of result files by name; a volume of two files has one."""
    sums = {}
    for path in paths:
        if volume_suffix(path) is None:
            sums[path.name] = checksum(path)
        else:
            # A volume may have its voxels in a second file.
            sums[path.name] = fingerprint(path)["sha256"]
    return sums
