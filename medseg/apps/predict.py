"""The `predict` command: read, segment in two stages, write, one case after the other."""

from __future__ import annotations

import json
import signal
import sys
import time
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from medseg.apps import entry
from medseg.apps.ending import EXIT_FAILED, EXIT_USER_ERROR
from medseg.config.schema import PredictConfig
from medseg.errors import UserError
from medseg.io.inputs import WRITTEN_SUFFIXES, case_name, list_inputs, volume_suffix
from medseg.io.replacing import check_writable, replace_text
from medseg.preprocess.scale import AS_STORED, HuScale

# Folder beside the label maps: by how many percent the probabilities of several checkpoints or flips scatter.
UNCERTAINTY = "uncertainty"


class Scan(NamedTuple):
    """A case to predict.

    Attributes:
        name: Name of the case.
        path: Where it lies.
        series: Which DICOM series, where the path holds several.
        hu: What makes HU of its values.
    """

    name: str
    path: Path
    series: str | None = None
    hu: HuScale = AS_STORED


def main() -> None:
    """Compose, check, predict."""
    # Asked to end by the system it ends as by Ctrl-C: what is half-written is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    entry.run("predict", PredictConfig, predict)


def predict(config: PredictConfig) -> int:
    """Segment every case of the input.

    Args:
        config: Checked configuration.

    Returns:
        0, or 1 when a case failed and the others went on.

    Raises:
        UserError: If the input, the output or a checkpoint is not usable at all.
    """
    # Imported here: `--cfg job` and a wrong key must not wait for torch.
    import torch
    from rich.progress import track

    from medseg.build import load_stages, pick_device
    from medseg.cascade.segment import check_stages
    from medseg.cascade.stage import CascadeOptions
    from medseg.memory.precision import check_precision

    source = Path(config.input)
    cases, known = find_cases(source, config.split, config.series, HuScale(config.hu_slope, config.hu_offset))
    is_one_scan = len(cases) == 1 and cases[0].path == source
    paths = output_paths(Path(config.output), [scan.name for scan in cases], is_one_scan=is_one_scan)
    check_outputs(paths, known)
    device = pick_device(config.accelerator)
    if config.threads:
        torch.set_num_threads(config.threads)
    precision = config.precision.value if config.precision else None
    if precision:
        try:
            check_precision(precision, device.type)
        except ValueError as error:
            raise UserError(f"precision={precision}: {error}") from error
    coarse = load_stages(weights_paths(config.coarse, "coarse"), "coarse", device, precision)
    fine = load_stages(weights_paths(config.fine, "fine"), "fine", device, precision)
    check_stages(coarse, fine)
    if config.inference.tile_size is not None:
        fine.patch_size = config.inference.tile_size
    for folder in {path.parent for path in paths}:
        check_writable(folder)
    inference = config.inference
    options = CascadeOptions(tile_overlap=inference.overlap, budget_gib=inference.budget_gib, tta=inference.tta)

    num_failed = 0
    for scan, output in track(list(zip(cases, paths, strict=True)), "predict", disable=len(cases) == 1):
        try:
            report = predict_case(scan, output, coarse, fine, options)
        except UserError as error:
            num_failed += 1
            entry.say(f"{scan.name}: {error}")
            continue
        except Exception as error:
            # Alone it is a defect of medseg and keeps its traceback; among others it must not cost them their results.
            if len(cases) == 1:
                raise
            num_failed += 1
            entry.say(f"{scan.name}: {type(error).__name__}: {error}")
            continue
        for warning in report["warnings"]:
            entry.say(f"{scan.name}: {warning}")
        volumes = ", ".join(f"{region} {volume:.0f} ml" for region, volume in report["volume_ml"].items())
        print(f"{output}: {volumes}, {report['durations_s']['total']:.1f} s", flush=True)
    if num_failed:
        entry.say(f"{num_failed} of {len(cases)} cases failed")
        # A single input that fails is the user's whole request.
        return EXIT_USER_ERROR if len(cases) == 1 else EXIT_FAILED
    return 0


def weights_paths(given: list[str], stage: str) -> list[Path]:
    """The weights that were given, or those that come with medseg."""
    from medseg.weights.files import shipped_weights

    return [Path(path) for path in given] or [shipped_weights("lungs", stage)]


def predict_case(scan: Scan, output: Path, coarse: Any, fine: Any, options: Any) -> dict[str, Any]:
    """Segment one case and write the label map and its report.

    Args:
        scan: Scan.
        output: Label map to write; the report goes beside it as `<case>.json`.
        coarse: Trained coarse stage.
        fine: Trained fine stage.
        options: How the networks are run.

    Returns:
        The report: times in s, peak memory in bytes, boxes, volumes in ml, warnings.

    Raises:
        UserError: If the scan cannot be read or shows nothing, or the result cannot be written.
    """
    from medseg.cascade.segment import segment
    from medseg.data.audit.finding import Severity
    from medseg.data.audit.image import audit_image, measure_image
    from medseg.io.read import read_image
    from medseg.io.write import write_labels

    start_s = time.perf_counter()
    volume = read_image(scan.path, scan.series)
    if volume.array.min() == volume.array.max():
        raise UserError(f"{scan.path}: expected a scan, but every voxel holds {volume.array.flat[0]:g}; export it again.")
    volume = replace(volume, array=scan.hu.apply(volume.array))
    odd = [finding for finding in audit_image(measure_image(volume.array)) if finding.severity is not Severity.note]
    read_s = time.perf_counter() - start_s
    result = segment(volume, coarse, fine, options)
    write_start_s = time.perf_counter()
    write_labels(output, result.labels, volume.grid, volume.header)
    if result.disagreement is not None:
        write_labels(output.parent / UNCERTAINTY / output.name, result.disagreement, volume.grid, volume.header)
    end_s = time.perf_counter()
    report = {
        "input": str(scan.path),
        "series": scan.series,
        "hu": {"slope": scan.hu.slope, "offset": scan.hu.offset},
        "grid": volume.grid.to_dict(),
        "volume_ml": {name: round(volume_ml, 2) for name, volume_ml in result.volumes_ml.items()},
        "boxes": {name: box.to_dict() for name, box in result.boxes.items()},
        "passes": result.passes,
        "warnings": [*volume.remarks, *map(str, odd), *result.warnings],
        "durations_s": {
            "read": read_s,
            **result.durations_s,
            "write": end_s - write_start_s,
            "total": end_s - start_s,
        },
        "peak_resident_bytes": peak_resident_bytes(),
    }
    replace_text(output.parent / f"{case_name(output)}.json", json.dumps(report, indent=1, ensure_ascii=False))
    return report


def find_cases(
    source: Path, split: str | None, series: str | None = None, hu: HuScale = AS_STORED
) -> tuple[list[Scan], list[Scan]]:
    """Every case of an input.

    Args:
        source: Scan, DICOM folder, folder of scans, or case table.
        split: Only this part of a case table.
        series: Which DICOM series the input is: a folder is then searched to its bottom and is one scan.
        hu: HU scale of the cases that have none of their own in the table.

    Returns:
        The cases to predict, and all that the input knows: none of those may be overwritten.

    Raises:
        UserError: If there is nothing to predict.
    """
    if source.suffix.lower() != ".csv":
        if split is not None:
            raise UserError(f"split={split}: only a case table has parts, but input={source} is none")
        paths = list_inputs(source) if series is None else [(case_name(source), source)]
        scans = [Scan(name, path, series, hu) for name, path in paths]
        return scans, scans
    from medseg.data.case_table import read_case_table

    if series is not None:
        raise UserError(f"series={series}: a case table has a column series for that; fill it in input={source}")

    table = read_case_table(source, None, hu=hu)
    chosen = [Scan(case.name, case.image, case.series, case.hu) for case in table if split is None or case.split == split]
    if not chosen:
        raise UserError(f"input={source}: no case of the table is marked split={split}")
    return chosen, [Scan(case.name, case.image, case.series, case.hu) for case in table]


def output_paths(output: Path, names: list[str], *, is_one_scan: bool) -> list[Path]:
    """Where the label maps go: the file that was named, or `<case>.nii.gz` in a folder.

    Args:
        output: File, or a folder that may not exist yet.
        names: Names of the cases.
        is_one_scan: Whether the input is one scan; a new name with a suffix then means a file.

    Raises:
        UserError: If several cases would go into one file, the suffix is no format to write, or a file stands where a
            folder is needed.
    """
    if output.is_dir():
        return [output / f"{name}.nii.gz" for name in names]
    suffix = volume_suffix(output)
    if suffix in WRITTEN_SUFFIXES:
        if len(names) > 1:
            raise UserError(f"output={output}: the input has {len(names)} cases, so give a folder")
        return [output]
    if suffix is not None or output.exists() or (is_one_scan and output.suffix):
        raise UserError(f"output={output}: give a name that ends in {', '.join(WRITTEN_SUFFIXES)}, or a folder")
    return [output / f"{name}.nii.gz" for name in names]


def check_outputs(outputs: list[Path], inputs: list[Scan]) -> None:
    """Refuse outputs that would overwrite a scan or each other, also through links.

    Raises:
        UserError: If a path stands for two things.
    """
    names = {scan.path.resolve(): scan.name for scan in inputs}
    taken: dict[str, Path] = {}
    for output in outputs:
        place = output.resolve()
        if place in names:
            raise UserError(f"{output} is the scan of the case {names[place]}, not to be overwritten; give another output")
        # Some systems take two spellings of ü for one name.
        other = taken.setdefault(unicodedata.normalize("NFC", str(place)), output)
        if other is not output:
            raise UserError(f"{other} and {output} would be one file; rename one of the cases")


def peak_resident_bytes() -> int:
    """Most memory that this process has held resident so far."""
    import resource
    import sys

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
