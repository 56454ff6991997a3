"""The `predict` command: read, segment in two stages, write, one case after the other."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from medseg import __version__
from medseg.apps import entry
from medseg.apps.ending import EXIT_FAILED, EXIT_OUT_OF_MEMORY, EXIT_USER_ERROR, is_out_of_memory
from medseg.apps.finished import is_finished, results_of
from medseg.apps.meter import MemoryMeter, peak_resident_bytes, resident_bytes
from medseg.apps.ranks import is_under_torchrun, meet, rank
from medseg.config.schema import PredictConfig
from medseg.data.source_files import fingerprint
from medseg.errors import UserError
from medseg.io.inputs import WRITTEN_SUFFIXES, case_name, list_inputs, volume_suffix
from medseg.io.replacing import check_writable, replace_text
from medseg.preprocess.scale import AS_STORED, HuScale

# Folder beside the label maps: by how many percent the probabilities of several checkpoints or flips scatter.
UNCERTAINTY = "uncertainty"
# Helpers have nothing to do while the first process reads, writes, or runs what is not in tiles.
HELPERS_WAIT = timedelta(days=7)


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

    def reading(self) -> dict[str, Any]:
        """How the file is read, in plain types."""
        return {"series": self.series, "hu": {"slope": self.hu.slope, "offset": self.hu.offset}}


class Cascade(NamedTuple):
    """What all cases of a prediction share.

    Attributes:
        coarse: Trained coarse stage.
        fine: Trained fine stage.
        options: How the networks are run.
        settings: All that the result follows from beside the scan and how it is read, in plain types.
        name: Name of the range of `by_spacing`; empty where there is one cascade for all scans.
        range_mm: Coarsest spacing of the scans that it is for, from the first number to below the second.
    """

    coarse: Any
    fine: Any
    options: Any
    settings: dict[str, Any]
    name: str = ""
    range_mm: tuple[float, float] = (0.0, math.inf)


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
    # Imported here: `--cfg job` and a wrong key must not wait for them.
    from rich.console import Console
    from rich.progress import Progress

    if config.by_spacing and is_under_torchrun():
        raise UserError(
            "by_spacing: the processes of torchrun share one cascade; predict each range by itself, or without torchrun"
        )
    if is_helper():
        help_first(load_cascade(config))
        return 0
    source = Path(config.input)
    cases, known = find_cases(source, config.split, config.series, HuScale(config.hu_slope, config.hu_offset))
    is_one_scan = len(cases) == 1 and cases[0].path == source
    paths = output_paths(Path(config.output), [scan.name for scan in cases], is_one_scan=is_one_scan)
    check_outputs(paths, known)
    cascades = load_cascades(config)
    for folder in {path.parent for path in paths}:
        check_writable(folder)

    codes: list[int] = []
    num_finished = 0
    console = Console(stderr=True)
    with shared(cascades[0]), Progress(console=console, disable=len(cases) == 1 or not console.is_terminal) as progress:
        task = progress.add_task("", total=len(cases))
        for scan, output in zip(cases, paths, strict=True):
            progress.update(task, description=scan.name)
            cascade = pick_cascade(scan, cascades)
            if cascade is None:
                codes.append(EXIT_USER_ERROR)
            elif not config.overwrite and is_case_finished(scan, output, cascade):
                num_finished += 1
                print(f"{output}: finished before, skipped", flush=True)
            elif code := try_case(scan, output, cascade, is_alone=len(cases) == 1):
                codes.append(code)
            progress.advance(task)
    if num_finished:
        entry.say(f"{num_finished} of {len(cases)} cases were finished before and skipped; overwrite=true makes them anew")
    if codes:
        entry.say(f"{len(codes)} of {len(cases)} cases failed")
        # A single input that fails is the user's whole request.
        return codes[0] if len(cases) == 1 else EXIT_FAILED
    return 0


def load_cascades(config: PredictConfig) -> list[Cascade]:
    """Load both stages, those of each range where the scan's spacing decides.

    Raises:
        UserError: If the device, the precision or a checkpoint is not usable.
    """
    if not config.by_spacing:
        return [load_cascade(config)]
    return [
        load_cascade(replace(config, coarse=one.coarse, fine=one.fine))._replace(name=name, range_mm=one.range_mm)
        for name, one in config.by_spacing.items()
    ]


def pick_cascade(scan: Scan, cascades: list[Cascade]) -> Cascade | None:
    """Choose the cascade of a scan and say which and why; None, and said as well, where no range holds it."""
    from medseg.io.read import read_grid

    if not cascades[0].name:
        return cascades[0]
    try:
        # Headers store float32: 5 mm must not fall below a range that begins there.
        spacing_mm = round(max(read_grid(scan.path, scan.series).spacing_mm), 3)
    except UserError as error:
        entry.say(f"{scan.name}: {error}")
        return None
    for cascade in cascades:
        low_mm, high_mm = cascade.range_mm
        if low_mm <= spacing_mm < high_mm:
            entry.say(
                f"{scan.name}: {cascade.name}, since its coarsest spacing of {spacing_mm:g} mm lies in {_range_text(cascade)}"
            )
            return cascade
    known = ", ".join(f"{cascade.name} {_range_text(cascade)}" for cascade in cascades)
    entry.say(
        f"{scan.name}: its coarsest spacing of {spacing_mm:g} mm lies in no range of by_spacing ({known}); give checkpoints for it, "
        "or widen a range"
    )
    return None


def _range_text(cascade: Cascade) -> str:
    low_mm, high_mm = cascade.range_mm
    return f"{low_mm:g} … {high_mm:g} mm"


def load_cascade(config: PredictConfig) -> Cascade:
    """Load both stages.

    Raises:
        UserError: If the device, the precision or a checkpoint is not usable.
    """
    import torch

    from medseg.apps import segmenter
    from medseg.cascade.stage import CascadeOptions

    if config.threads:
        torch.set_num_threads(config.threads)
    if is_under_torchrun() and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    precision = config.precision.value if config.precision else None
    coarse, fine = segmenter.load_cascade(config.coarse, config.fine, config.accelerator, precision)
    inference = config.inference
    if inference.tile_size is not None:
        fine.patch_size = inference.tile_size
    options = CascadeOptions(tile_overlap=inference.overlap, budget_gib=inference.budget_gib, tta=inference.tta)
    settings = {
        **{stage.name: sorted(stage.checkpoints.values()) for stage in (coarse, fine)},
        "precision": precision,
        "inference": vars(inference),
    }
    return Cascade(coarse, fine, options, settings)


def is_helper() -> bool:
    """Whether this is a process of torchrun that runs networks for the first one, and neither reads nor writes."""
    return is_under_torchrun() and rank() > 0


def help_first(cascade: Cascade) -> None:
    """Run networks for the first process until it has done all cases."""
    from medseg.inference.team import serve

    meet("gloo", HELPERS_WAIT)
    stages = {stage.name: stage for stage in (cascade.coarse, cascade.fine)}
    serve(lambda job, images: stages[job[0]].answer(job[1], images, job[2]))


@contextmanager
def shared(cascade: Cascade) -> Iterator[None]:
    """Divide the tiles among torchrun's processes; alone nothing happens."""
    if not is_under_torchrun() or os.environ["WORLD_SIZE"] == "1":
        yield
        return
    from medseg.inference.team import Team

    meet("gloo", HELPERS_WAIT)
    team = cascade.coarse.team = cascade.fine.team = Team()
    try:
        yield
    finally:
        team.dismiss()


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


def try_case(scan: Scan, output: Path, cascade: Cascade, *, is_alone: bool) -> int:
    """Predict a case and say what came of it; a bad one must not cost the others their results.

    Returns:
        Exit code that it would have alone.
    """
    try:
        report = predict_case(scan, output, cascade)
    except UserError as error:
        entry.say(f"{scan.name}: {error}")
        return EXIT_USER_ERROR
    except Exception as error:
        if is_out_of_memory(error):
            entry.say(
                f"{scan.name}: out of memory ({_first_line(error)}); free some, give a smaller inference.budget_gib, "
                "or crop or resample the scan"
            )
            return EXIT_OUT_OF_MEMORY
        # Alone it is a defect of medseg and keeps its traceback.
        if is_alone:
            raise
        entry.say(f"{scan.name}: {type(error).__name__}: {error}")
        return EXIT_FAILED
    for warning in report["warnings"]:
        entry.say(f"{scan.name}: {warning}")
    volumes = ", ".join(f"{region} {volume:.0f} ml" for region, volume in report["volume_ml"].items())
    print(f"{output}: {volumes}, {report['durations_s']['total']:.1f} s", flush=True)
    return 0


def predict_case(scan: Scan, output: Path, cascade: Cascade) -> dict[str, Any]:
    """Segment one case and write the label map and its report.

    Args:
        scan: Scan.
        output: Label map to write; the report goes beside it as `<case>.json`, last of all.
        cascade: Stages and options.

    Returns:
        The report: times in s, memory, boxes, volumes in ml, warnings, and what the result follows from.

    Raises:
        UserError: If the scan cannot be read or shows nothing, or the result cannot be written.
    """
    from medseg.apps.segmenter import segment_scan
    from medseg.io.read import read_image
    from medseg.io.write import write_labels

    with MemoryMeter(resident_bytes) as meter:
        start_s = time.perf_counter()
        source = None
        with suppress(OSError):  # the reader says it in a sentence
            source = fingerprint(scan.path)
        volume = read_image(scan.path, scan.series)
        read_s = time.perf_counter() - start_s
        result = segment_scan(volume, scan.path, scan.hu, cascade.coarse, cascade.fine, cascade.options)
        write_start_s = time.perf_counter()
        outputs = result_paths(output, cascade)
        maps = [result.labels, *([] if result.disagreement is None else [result.disagreement])]
        for path, array in zip(outputs, maps, strict=True):
            write_labels(path, array, volume.grid, volume.header)
        end_s = time.perf_counter()
    report = {
        "input": str(scan.path),
        **scan.reading(),
        "grid": volume.grid.to_dict(),
        "volume_ml": {name: round(volume_ml, 2) for name, volume_ml in result.volumes_ml.items()},
        "boxes": {name: box.to_dict() for name, box in result.boxes.items()},
        "passes": result.passes,
        "distortions": result.distortions,
        "warnings": result.warnings,
        "durations_s": {
            "read": read_s,
            **result.durations_s,
            "write": end_s - write_start_s,
            "total": end_s - start_s,
        },
        "peak_resident_bytes": peak_resident_bytes(),
        "memory_gb_s": meter.curve.area_gb_s,
        "checkpoints": {stage.name: stage.checkpoints for stage in (cascade.coarse, cascade.fine)},
        "by_spacing": {"name": cascade.name, "range_mm": cascade.range_mm} if cascade.name else None,
        "version": __version__,
        "settings": {**cascade.settings, **scan.reading()},
        "source": source,
        "results": results_of(outputs),
    }
    replace_text(report_path(output), json.dumps(report, indent=1, ensure_ascii=False))
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


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
