"""Report of a case, `<case>.json`.

The report is written after all results of the case. Later predictions read it, and skip a case
whose results are up to date.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from medseg import __version__
from medseg.data.source_files import fingerprint, is_same_source
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid, rounded_ml
from medseg.inference.scan_model import ScanModel
from medseg.io.atomic import replace_text
from medseg.io.inputs import case_name, volume_suffix
from medseg.io.text import read_json
from medseg.memory.profile import peak_resident_bytes
from medseg.prediction.case import CaseData
from medseg.prediction.forecast import Forecast, record_cost
from medseg.prediction.load_models import RangeModel
from medseg.prediction.options import PredictConfig, Save
from medseg.prediction.result_files import ENDINGS, result_paths, write_results
from medseg.prediction.scans import Scan
from medseg.weights.files import checksum

# Key below `settings` with the options of each kind of result file.
WRITERS = "writers"


class ResultFiles(NamedTuple):
    """Result files that a report lists.

    Attributes:
        sha256_by_name: See `checksums`.
        writers: Kind of file to the options that decided its content, see `_writer_options`.
    """

    sha256_by_name: dict[str, str]
    writers: dict[str, Any]


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

    Results and report always belong together, since the folder is locked meanwhile: one process
    writes into it at a time.

    Args:
        scan: Its place, series and HU scale go into the report.
        output: Path of the label map; the report is written beside it as `<case>.json`, last of
            all.
        chosen: The model that segmented it.
        case: What is written.
        earlier_report: Report that was there when the scan was read; empty without one.
        config: Which files are written.
        expect: Makes the forecast of a case from its model and grid.

    Returns:
        The report: times in s, memory, boxes, volumes in ml, warnings, and the settings that decide
        the result.

    Raises:
        UserError: If a file cannot be written, or a prediction of another scan has written it
            meanwhile.
    """
    paths = result_paths(output, chosen.model, config.save)
    with locked_folder(output.parent):
        # Read again under the lock: another process may have written a report since the case was
        # read, or deleted it. A new report of the same scan may be replaced.
        present_report = read_report(output)
        is_new = bool(present_report) and present_report != earlier_report
        present_input = present_report.get("input")
        if is_new and present_input != scan.place:
            raise UserError(
                f"{output}: another prediction, of {present_input}, has written it while "
                "this one ran; give another output"
            )
        with case.measured("write"):
            write_results(
                paths,
                scan,
                case.volume,
                case.result,
                case.picture_voxels,
                chosen.model.task,
                config,
            )
        files = ResultFiles(
            checksums(list(paths.values()), output.parent), _writer_options(scan, config)
        )
        # With `overwrite` nothing of an earlier prediction is relied on.
        if not config.overwrite:
            files = _with_earlier_files(files, scan, output, chosen, case, present_report)
        return _write_report(scan, output, chosen, case, files, expect)


def _write_report(
    scan: Scan,
    output: Path,
    chosen: RangeModel,
    case: CaseData,
    files: ResultFiles,
    expect: Callable[[ScanModel, VoxelGrid], Forecast],
) -> dict[str, Any]:
    """Write the report of a case beside its results, and return it.

    Args:
        scan: Its place, series and HU scale go into the report.
        output: Path of the label map.
        chosen: The model that segmented it, and its settings.
        case: What `segment_case` has filled, with the seconds of "write".
        files: Files that belong to it.
        expect: Makes the forecast of a case from its model and grid.
    """
    result = case.result
    volume = case.volume
    total_s = sum(case.durations_s.values())
    expected_cost = None
    # A forecast may fail although the case did not: it assumes crops of usual size, which may be
    # too large for the budget while those of this case were not.
    with suppress(UserError):
        forecast = expect(chosen.model, volume.grid)
        expected_cost = record_cost(forecast, chosen.model, total_s, result.pass_s)
    by_spacing = None
    if chosen.name:
        by_spacing = {"name": chosen.name, "range_mm": chosen.range_mm}
    # Older versions knew only one channel, and their reports lack this key. A scan of one channel
    # still has none, so that these reports stay valid.
    more_sources = {}
    if len(case.sources) > 1:
        more_sources = {"more_sources": case.sources[1:]}
    report = {
        "input": scan.place,
        **scan.reading(),
        "identity": scan.identity_with(volume)._asdict(),
        "grid": asdict(volume.grid),
        "volume_ml": {name: rounded_ml(volume_ml) for name, volume_ml in result.volumes_ml.items()},
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
        "expected": expected_cost,
        "memory_gb_s": case.memory_gb_s,
        "checkpoints": chosen.model.checkpoints,
        "by_spacing": by_spacing,
        "version": __version__,
        "settings": {
            **chosen.settings,
            **scan.reading(),
            WRITERS: files.writers,
        },
        "source": case.sources[0],
        **more_sources,
        "results": files.sha256_by_name,
    }
    replace_text(report_path(output), json.dumps(report, indent=1, ensure_ascii=False))
    return report


def _with_earlier_files(
    files: ResultFiles,
    scan: Scan,
    output: Path,
    chosen: RangeModel,
    case: CaseData,
    earlier_report: dict[str, Any],
) -> ResultFiles:
    """Add the files of an earlier prediction that show the labels of the new one.

    These are the unchanged files of a prediction of the same scan by the same weights and settings,
    which had another `save`.

    Args:
        files: Files of the new prediction.
        scan: What was segmented.
        output: Path of the label map, which becomes the first file if it is among them.
        chosen: The model that segmented it.
        case: Has the fingerprints of the scan.
        earlier_report: Report of the earlier prediction; empty without one.
    """
    sha256_by_name = dict(files.sha256_by_name)
    earlier_writers = {}
    try:
        if not _has_same_settings(scan, chosen, earlier_report):
            return files
        earlier_sources = [earlier_report["source"], *earlier_report.get("more_sources", [])]
        if _contents(earlier_sources) != _contents(case.sources):
            return files
        for name, sha256 in earlier_report["results"].items():
            path = output.parent / name
            if name in sha256_by_name or not path.is_file():
                continue
            if checksums([path], output.parent) == {name: sha256}:
                sha256_by_name[name] = sha256
        for kind, options in earlier_report["settings"].get(WRITERS, {}).items():
            if f"{case_name(output)}{ENDINGS[kind]}" in sha256_by_name:
                earlier_writers[kind] = options
    except (OSError, KeyError, TypeError, ValueError, AttributeError, UserError):
        # As in `is_up_to_date`.
        return files
    if output.name in sha256_by_name:
        sha256_by_name = {output.name: sha256_by_name[output.name], **sha256_by_name}
    return ResultFiles(sha256_by_name, {**earlier_writers, **files.writers})


def _contents(sources: Sequence[dict[str, Any] | None]) -> list[tuple[str, Any] | None]:
    """List what of the fingerprints of sources stays when these are moved or copied.

    That of a channel without a file is None.
    """
    contents: list[tuple[str, Any] | None] = []
    for source in sources:
        if source is None:
            contents.append(None)
        else:
            contents.append((source["sha256"], source.get("names")))
    return contents


def _has_same_settings(scan: Scan, chosen: RangeModel, report: dict[str, Any]) -> bool:
    """Tell whether version, checkpoints and all settings that decide the labels are unchanged.

    Raises:
        KeyError: If the report lacks them.
    """
    if report["version"] != __version__:
        return False
    settings = dict(report["settings"])
    settings.pop(WRITERS, None)
    return settings == _as_in_json({**chosen.settings, **scan.reading()})


def is_up_to_date(scan: Scan, output: Path, chosen: RangeModel, config: PredictConfig) -> bool:
    """Tell whether a new prediction of the case would give the results that are there.

    The report is written last of all files, so it must be there. The result files must have the
    checksums that it lists. The content of the scan and of the checkpoints, and all settings that
    decide the result, must be unchanged.
    """
    try:
        report = read_report(output)
        if not _has_same_settings(scan, chosen, report):
            return False
        # The summary takes these two from the report of a skipped case.
        if not isinstance(report["volume_ml"], dict) or not isinstance(report["warnings"], list):
            return False
        # Of the files that are written now, the report may list further ones.
        report_writers = report["settings"].get(WRITERS, {})
        writers = _as_in_json(_writer_options(scan, config))
        if not writers.items() <= report_writers.items():
            return False
        paths = list(result_paths(output, chosen.model, config.save).values())
        has_same_results = checksums(paths, output.parent).items() <= report["results"].items()
        if not has_same_results:
            return False
        return _has_same_sources(scan, report, len(chosen.model.task.channels))
    except (OSError, KeyError, TypeError, ValueError, AttributeError, UserError):
        # The report or a file is missing or damaged, or is of another version; or the scan cannot
        # be read, which the prediction will report.
        return False


def _has_same_sources(scan: Scan, report: dict[str, Any], num_channels: int) -> bool:
    """Tell whether the files of each channel are those of the report.

    Raises:
        ValueError: If the report has another number of channels.
    """
    paths = scan.paths(num_channels)
    files_by_channel = scan.files_by_channel(num_channels)
    sources = [report["source"], *report.get("more_sources", [])]
    for path, source, files in zip(paths, sources, files_by_channel, strict=True):
        if path is None or not is_same_source(path, source, files):
            return False
    return True


def outdated_files(
    output: Path, earlier_report: dict[str, Any], report: dict[str, Any]
) -> list[Path]:
    """List the files of an earlier prediction of the case that the report of a new one lacks.

    They may show other labels than the new ones.

    Args:
        output: Path of the label map.
        earlier_report: Report of the earlier prediction; empty without one.
        report: Report of the new one.
    """
    earlier_names = earlier_report.get("results")
    if not isinstance(earlier_names, dict):
        return []
    files = [output.parent / name for name in earlier_names if name not in report["results"]]
    return [path for path in files if path.is_file()]


def _writer_options(scan: Scan, config: PredictConfig) -> dict[str, Any]:
    """List by the kind of file what else than labels and scan decides its content."""
    options: dict[str, Any] = {}
    if Save.dicom_seg in config.save:
        options["dicom_seg"] = asdict(config.dicom_seg)
    if Save.viewer in config.save:
        options["viewer"] = asdict(config.viewer)
        if scan.labels is not None:
            reference = None
            with suppress(OSError, UserError):  # a warning of the case says so
                reference = fingerprint(scan.labels)["sha256"]
            options["viewer"]["reference"] = reference
            options["viewer"]["label_values"] = config.data.label_values
    return options


def _as_in_json(settings: dict[str, Any]) -> dict[str, Any]:
    """Convert settings as if they were read from a report: tuples become lists."""
    converted: dict[str, Any] = json.loads(json.dumps(settings))
    return converted


def refuse_other_json(output: Path) -> None:
    """Refuse a label map whose report would overwrite a JSON file of another program.

    Such files lie beside scans: dcm2niix writes `ct.json` with `ct.nii.gz`. Beside a label map a
    file that is no JSON mapping counts as its damaged report. A missing or empty file is not read;
    a report has some kB, and is read again later, to see whether the case is up to date.

    Raises:
        UserError: Names the file.
    """
    path = report_path(output)
    try:
        if path.stat().st_size == 0:
            return
        content = read_json(path)
    except FileNotFoundError:
        return
    except (OSError, UserError):
        content = None
    is_report = output.exists()
    if isinstance(content, dict):
        is_report = "volume_ml" in content
    if not is_report:
        raise UserError(
            f"{path}: expected a report of medseg, got another JSON file or a damaged one, which "
            "would be overwritten; delete it or give another output"
        )


def read_report(output: Path) -> dict[str, Any]:
    """Read the report beside a label map; empty where there is none that can be read."""
    try:
        report = read_json(report_path(output))
    except UserError:
        return {}
    return report if isinstance(report, dict) else {}


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder during the block.

    The lock is that of the folder itself: it leaves no file behind, and the system releases it when
    the process ends. On a file system without locks it has no effect.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def report_path(output: Path) -> Path:
    """Name the report beside a label map."""
    return output.parent / f"{case_name(output)}.json"


def checksums(paths: list[Path], folder: Path | None = None) -> dict[str, str]:
    """Compute the SHA-256 of result files by their names.

    A volume whose voxels are in a second file has one checksum of both.

    Args:
        paths: Files that exist.
        folder: Folder to which the names are relative, since a file in a folder below may be called
            like one in it; None = plain names.
    """
    sha256_by_name = {}
    for path in paths:
        name = path.name if folder is None else path.relative_to(folder).as_posix()
        if volume_suffix(path) is None:
            sha256_by_name[name] = checksum(path)
        else:
            sha256_by_name[name] = fingerprint(path)["sha256"]
    return sha256_by_name
