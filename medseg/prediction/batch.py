"""Batch prediction: every scan of an input read, segmented and written in an overlapping pipeline, with an outcome for each case."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from medseg.cascade.bound import StatedBound
from medseg.cascade.cascade import Cascade, require_channels
from medseg.cascade.stage import CascadeOptions
from medseg.console import say
from medseg.data.task import Task
from medseg.errors import EXIT_FAILED, EXIT_OUT_OF_MEMORY, EXIT_USER_ERROR, UserError, first_line, is_out_of_memory, require
from medseg.evaluation.reports import read_bounds
from medseg.geometry.grid import VoxelGrid
from medseg.io.atomic import check_writable
from medseg.io.inputs import is_dicomdir
from medseg.io.scratch import scratch_above
from medseg.memory.profile import resident_bytes
from medseg.metrics.intensity import HU_FIGURES
from medseg.prediction.cascades import RangeCascade, load_cascade, pick_cascade, result_settings
from medseg.prediction.case import (
    CaseData,
    is_small,
    is_up_to_date,
    locked_folder,
    read_case,
    read_report,
    scan_grid,
    segment_case,
    write_case,
)
from medseg.prediction.contract import MemoryShares, share_memory
from medseg.prediction.forecast import Forecast, forecast, forecast_text, machine_key, seconds_per_voxel
from medseg.prediction.results import Wanted, check_kinds, result_paths
from medseg.prediction.scans import (
    Scan,
    check_outputs,
    describe_studies,
    divide_studies,
    find_scans,
    join_channels,
    may_hold_studies,
    output_paths,
)
from medseg.preprocess.scale import AS_STORED, HuScale
from medseg.report.tables import read_csv, refuse_table, write_csv

SUMMARY_FILE = "summary.csv"
# First columns of the table of the same name that `evaluate` writes.
SCORES = ("region", "trust", "metric")
# Columns of `summary.csv`. Status: `ok`, `warnings`, `not_hu` (see `Segmentation`) or `failed`; see `label_statistics` for the figures.
SUMMARY = ("case", "status", "label", "ml", *HU_FIGURES, "dice_at_least", "warnings")
# Stands for the data of a case whose results are up to date.
UP_TO_DATE = "up to date"
# With this budget our UNet runs in slabs on any scanner's field of view, so that headers need not be read twice.
SURE_BUDGET_GIB = 0.9
# Headers that are read for the forecast of a batch.
MAX_FORECASTS = 50

Checkpoints = tuple[Sequence[str] | None, Sequence[str] | None, tuple[float, float]]
"""Checkpoints of both stages (none = the included lung weights), and the coarsest spacing in mm of the scans that they are for."""


@dataclass
class BatchCase:
    """A scan of a batch and its outcome.

    Attributes:
        scan: The scan.
        output: Path of its label map, whether or not `save` has it.
        result_paths: Files that are written beside the report.
        chosen: Its cascade, set when it is read.
        known: Report that was there when it was read.
        messages: Sentences for the error stream.
        exit_code: Exit code of the case alone.
        report: Content of `<case>.json`; None where nothing was written.
        is_skipped: Whether its results were up to date.
    """

    scan: Scan
    output: Path
    result_paths: Sequence[Path] = ()
    chosen: RangeCascade = field(init=False)
    known: dict[str, Any] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    exit_code: int = 0
    report: dict[str, Any] | None = None
    is_skipped: bool = False


def predict_scans(
    source: Path | Sequence[Path],
    output: Path,
    checkpoints: Mapping[str, Checkpoints],
    *,
    inference: Mapping[str, Any],
    split: str | None = None,
    series: str | None = None,
    hu: HuScale = AS_STORED,
    accelerator: str = "auto",
    threads: int | None = None,
    precision: str | None = None,
    overwrite: bool = False,
    trusted: Sequence[str] = (),
    wanted: Wanted | None = None,
    on_header: Callable[[], None] = lambda: None,
    on_forecast: Callable[[str], None] = lambda _: None,
    on_begin: Callable[[str, int], None],
    on_step: Callable[[str, str, int, int], None] = lambda *_: None,
    on_end: Callable[[BatchCase], None],
    elsewhere: Callable[[Sequence[BatchCase], Cascade], None] | None = None,
) -> list[BatchCase]:
    """Segment every scan of an input; a failing case does not affect the others.

    Under torchrun rank 0 does this, and the other processes run networks for it and return an empty list.

    Args:
        source: Scan, DICOM folder, folder of scans, or case table; or the channels of one case, a scan each.
        output: File or folder of the label maps.
        checkpoints: Checkpoints of each spacing range, by its name in `by_spacing`; one with an empty name is used for all scans.
        inference: `tile_size`, `half_weights` and the fields `overlap`, `budget_gib` and `tta` of `CascadeOptions`; optionally
            `backend` and `max_ram_gib`.
        split: Only this split of a case table.
        series: Which DICOM series of each case is taken.
        hu: HU scale of the cases that have none of their own in a table.
        accelerator: `auto`, `cpu` or `gpu`.
        threads: CPU threads; None = torch's choice.
        precision: Precision of the networks; None = that of the training.
        overwrite: Whether results that are up to date are made again.
        trusted: Prefixes of `trusted_targets`: classes that a checkpoint may name.
        wanted: Which result files are written; None = the label maps.
        on_header: Called for each DICOM file of a folder whose header was read to find the studies.
        on_forecast: Called before the first case with a sentence about memory and seconds.
        on_begin: Called with the name of a case and the number of cases when its turn comes.
        on_step: Called with the name of a case, the name of the step that begins, its place and the number of steps.
        on_end: Called with each case when it is done, in the order of the cases.
        elsewhere: Segments the cases in other processes and fills in their outcomes; None = here.

    Returns:
        The cases with their outcomes.

    Raises:
        UserError: If the input, the output or a checkpoint is not usable at all.
    """
    wanted, is_shared = wanted or Wanted(), has_other_ranks()
    require(
        not is_shared or list(checkpoints) == [""],
        "by_spacing: the processes of torchrun share one cascade; predict each range with a command of its own, or start "
        "without torchrun",
    )
    if is_shared and int(os.environ["RANK"]) > 0:
        (chosen,) = load_cascades(checkpoints, inference, accelerator, threads, precision, trusted)
        chosen.cascade.serve_tiles()
        return []
    scans, protected = find_scans(source, split, series, hu, wanted.labels_column)
    is_folder = isinstance(source, Path) and source.suffix.lower() != ".csv"
    # Whether there is a summary does not depend on what the headers will say.
    is_batch = _is_batch(source)
    # An output with an unknown suffix is a mistyped file there, as for a folder that itself holds slices.
    is_one_scan = not is_batch or (len(scans) == 1 and scans[0].path == source)
    # Which DICOM files are one case depends on the task, which is in the checkpoints.
    if not (is_folder and any(map(may_hold_studies, scans))):
        check_outputs(_outputs(output, scans, is_one_scan), protected)
    cascades = load_cascades(checkpoints, inference, accelerator, threads, precision, trusted)
    task = cascades[0].cascade.coarse.task
    if not isinstance(source, Path):
        require_channels(task, len(source))
    elif is_folder:
        by_study = divide_studies(source, scans, task.channels[0].modality, on_header)
        if sentence := describe_studies(by_study, scans):
            say(f"{source}: {sentence}")
        scans = join_channels(by_study, len(task.channels))
    outputs = _outputs(output, scans, is_one_scan)
    check_outputs(outputs, protected)
    is_batch = is_batch and output not in outputs
    if is_batch:
        refuse_table(output / SUMMARY_FILE, SCORES, f"the scores of an evaluation; give another output than {output}")
    placed = [result_paths(path, cascades[0].cascade, wanted.save) for path in outputs]
    check_outputs([file for paths in placed for file in paths.values()], protected)
    for folder in {path.parent for path in outputs}:
        check_writable(folder)
    cases = []
    for scan, path, paths in zip(scans, outputs, placed, strict=True):
        cases.append(BatchCase(scan, path, list(paths.values())))
    if elsewhere is not None:
        require(not is_shared, "engine=ray distributes scans by itself; start the command without torchrun")
        elsewhere(cases, cascades[0].cascade)
        if is_batch:
            write_summary(output, cases, task)
        return cases
    shares = share_batch_memory(cascades, inference)
    cascades = [one._replace(cascade=one.cascade.within(shares.network_gib)) for one in cascades]
    batch = Batch(cascades, resident_bytes(), shares.array_bytes, overwrite, wanted, len(cases), on_begin, on_step, on_end)
    if said := batch.describe_cost(cases):
        on_forecast(said)
    with cascades[0].cascade.shared_tiles() if is_shared else nullcontext():
        run_overlapped(cases, batch.read, batch.compute, batch.finish)
    if is_batch:
        write_summary(output, cases, task)
    return cases


def _is_batch(source: Path | Sequence[Path]) -> bool:
    """Whether an input is a case table, or a folder or medium, which may hold any number of scans."""
    if not isinstance(source, Path):
        return False
    return source.suffix.lower() == ".csv" or source.is_dir() or is_dicomdir(source)


def _outputs(output: Path, scans: Sequence[Scan], is_one_scan: bool) -> list[Path]:
    """Choose the paths of the label maps; errors as for `output_paths`."""
    return output_paths(output, [scan.name for scan in scans], is_one_scan=is_one_scan)


def write_summary(folder: Path, cases: Sequence[BatchCase], task: Task) -> None:
    """Write `summary.csv`: a row for each case and label, and one for a case that failed.

    Rows of cases that earlier predictions wrote into the folder stay.

    Args:
        folder: Folder of the results.
        cases: Cases with their outcomes.
        task: Its regions tell which bound on Dice belongs to a label.

    Raises:
        UserError: If the file cannot be written, unless cases have failed already, such as on a full disk, which the command reports.
    """
    path, rows = folder / SUMMARY_FILE, []
    for case in cases:
        report = case.report or read_report(case.output)
        failed = {"status": "failed", "warnings": " | ".join(case.messages)}
        status = (
            failed
            if case.exit_code
            else {"status": report.get("status"), "warnings": " | ".join(map(str, report.get("warnings", [])))}
        )
        volumes = {"": None} if case.exit_code else report.get("volume_ml", {})
        figures = report.get("statistics", {})
        bounds = read_bounds({} if case.exit_code else report)
        for label, volume_ml in volumes.items():
            row = {"case": case.scan.name, "label": label, **figures.get(label, {}), "ml": volume_ml}
            rows.append({**row, **status, "dice_at_least": _bound_of(label, bounds, task)})
    with suppress(UserError) if any(case.exit_code for case in cases) else nullcontext(), locked_folder(folder):
        try:
            known = read_csv(path)
        except UserError:  # none yet, or a damaged one
            known = []
        own = {case.scan.name for case in cases}
        kept = [row for row in known if {"case", "status", "label"} <= row.keys() <= set(SUMMARY) and row["case"] not in own]
        write_csv(path, [*kept, *rows], SUMMARY)


def _bound_of(label: str, bounds: Mapping[str, StatedBound], task: Task) -> str:
    """Say the bounds on Dice of the regions of a label; a region of another name is named."""
    sentences = []
    for region in task.regions:
        if label in region.labels and region.name in bounds:
            name = "" if region.name == label else f"{region.name} "
            sentences.append(f"{name}{bounds[region.name]}")
    return " | ".join(sentences)


def has_other_ranks() -> bool:
    """Whether torchrun started this process together with others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1


def load_cascades(
    checkpoints: Mapping[str, Checkpoints],
    inference: Mapping[str, Any],
    accelerator: str,
    threads: int | None,
    precision: str | None,
    trusted: Sequence[str] = (),
) -> list[RangeCascade]:
    """Load the cascade of each range; see `predict_scans` for the arguments.

    Raises:
        UserError: If the device, the precision or a checkpoint is not usable.
    """
    if threads:
        torch.set_num_threads(threads)
    if has_other_ranks() and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    loading = {key: inference[key] for key in ("tile_size", "half_weights")}
    loading |= {key: inference.get(key) for key in ("backend", "max_ram_gib")}
    options = CascadeOptions(
        **{key: inference[key] for key in ("overlap", "budget_gib", "tta")}, add_parts=inference.get("add_parts", True)
    )
    loaded = []
    for name, (coarse, fine, range_mm) in checkpoints.items():
        cascade = load_cascade(
            coarse, fine, accelerator=accelerator, precision=precision, options=options, trusted=trusted, **loading
        )
        loaded.append(RangeCascade(cascade, result_settings(cascade, precision, inference), name, range_mm))
    return loaded


def share_batch_memory(cascades: Sequence[RangeCascade], inference: Mapping[str, Any]) -> MemoryShares:
    """Divide what the loaded weights leave of `max_ram_gib`, see `share_memory`."""
    backend_bytes = sum(chosen.cascade.backend_bytes for chosen in cascades)
    return share_memory(inference.get("max_ram_gib"), backend_bytes)


@dataclass
class Batch:
    """The three steps of a case for `run_overlapped`; errors are values until the case is finished.

    Attributes:
        cascades: Cascades to choose from.
        loaded_bytes: Resident memory before the first scan.
        array_bytes: Size above which an array of a scan is a temporary file.
        overwrite: Whether results that are up to date are made again.
        wanted: Which result files are written.
        num_cases: Number of cases.
        on_begin: See `predict_scans`.
        on_step: See `predict_scans`.
        on_end: See `predict_scans`.
    """

    cascades: list[RangeCascade]
    loaded_bytes: int
    array_bytes: float
    overwrite: bool
    wanted: Wanted
    num_cases: int
    on_begin: Callable[[str, int], None]
    on_step: Callable[[str, str, int, int], None]
    on_end: Callable[[BatchCase], None]

    def describe_cost(self, cases: Sequence[BatchCase]) -> str | None:
        """Say what the cases are expected to cost, by the headers of some of those that have no report yet; None if no header can be read."""
        new = [case for case in cases if self.overwrite or not read_report(case.output)]
        found: dict[str, Forecast] = {}
        rates = []
        for case in new[:: max(1, len(new) // MAX_FORECASTS)]:
            with suppress(Exception):  # of any reader; the case tells it in its turn
                cascade = pick_cascade(case.scan, self.cascades)[0].cascade
                found[case.scan.name] = self._forecast(cascade, scan_grid(case.scan, cascade.coarse.task))
                rates.append(seconds_per_voxel(machine_key(cascade)))
        known = [rate for rate in rates if rate is not None]
        return forecast_text(found, median(known) if len(known) == len(rates) else None, len(new)) if found else None

    def _forecast(self, cascade: Cascade, grid: VoxelGrid) -> Forecast:
        return forecast(cascade, grid, self.loaded_bytes, self.array_bytes)

    def read(self, case: BatchCase, is_ahead: bool) -> CaseData | str | Exception | None:
        """Read a case unless its results are up to date; None if called ahead of its turn while other cases need the memory."""
        try:
            case.chosen, case.messages = pick_cascade(case.scan, self.cascades)
            case.known = read_report(case.output)
            check_kinds(case.scan, self.wanted.save)
            if self._is_up_to_date(case):
                return UP_TO_DATE
            cascade = case.chosen.cascade
            if is_ahead and not is_small(case.scan, cascade.coarse.task, cascade.options.budget_gib):
                return None
            if cascade.options.budget_gib < SURE_BUDGET_GIB:
                cascade.check_budget(scan_grid(case.scan, cascade.coarse.task))
            if not is_ahead:
                self._begin(case, "read")
            with scratch_above(self.array_bytes):
                return read_case(case.scan, cascade.coarse.task)
        except Exception as error:
            return None if is_ahead and is_out_of_memory(error) else self._as_value(error)

    def compute(self, case: BatchCase, data: CaseData | str | Exception) -> CaseData | str | Exception:
        """Segment a case."""
        self.on_begin(case.scan.name, self.num_cases)
        if not isinstance(data, CaseData):
            return data
        try:
            # Another prediction into this folder may have finished the case since it was read.
            if self._is_up_to_date(case):
                return UP_TO_DATE
            with scratch_above(self.array_bytes):
                segment_case(case.scan, case.chosen.cascade, data, self.wanted, partial(self._begin, case))
        except Exception as error:
            return self._as_value(error)
        return data

    def finish(self, case: BatchCase, data: CaseData | str | Exception) -> BatchCase:
        """Write a case and note its outcome."""
        case.is_skipped = data is UP_TO_DATE
        try:
            if isinstance(data, Exception):
                raise data
            if isinstance(data, CaseData):
                if self.num_cases == 1:  # else the next case is shown
                    self._begin(case, "write")
                with scratch_above(self.array_bytes):
                    case.report = write_case(case.scan, case.output, case.chosen, data, case.known, self.wanted, self._forecast)
                case.messages += case.report["warnings"]
        except Exception as error:
            case.exit_code, message = self._describe(error)
            case.messages.append(message)
        self.on_end(case)
        return case

    def _is_up_to_date(self, case: BatchCase) -> bool:
        return not self.overwrite and is_up_to_date(case.scan, case.output, case.chosen, self.wanted)

    def _begin(self, case: BatchCase, step: str) -> None:
        steps = ["read", *case.chosen.cascade.steps, "write"]
        self.on_step(case.scan.name, step, steps.index(step), len(steps))

    def _describe(self, error: Exception) -> tuple[int, str]:
        """Exit code and sentence of an error; of a single case, a defect keeps its traceback and ends the program."""
        if isinstance(error, UserError):
            return EXIT_USER_ERROR, str(error)
        if is_out_of_memory(error):
            cure = "free some, give a smaller inference.budget_gib, or crop or resample the scan"
            return EXIT_OUT_OF_MEMORY, f"out of memory ({first_line(error)}); {cure}"
        if self.num_cases == 1:
            raise error
        return EXIT_FAILED, f"{type(error).__name__}: {error}"

    def _as_value(self, error: Exception) -> Exception:
        """Remove the frames of an error in a batch: they would hold a scan and its crops while the next cases run."""
        link: BaseException | None = error
        while link is not None and self.num_cases > 1:
            link.__traceback__ = None
            link = link.__cause__ or link.__context__
        return error


Case = TypeVar("Case")
Computed = TypeVar("Computed")
Answer = TypeVar("Answer")


def run_overlapped(
    cases: Sequence[Case],
    read: Callable[[Case, bool], Any],
    compute: Callable[[Case, Any], Computed],
    finish: Callable[[Case, Computed], Answer],
) -> list[Answer]:
    """Run the three steps of all cases, each step in the order of the cases.

    Beside the computed case at most two others are in memory: one that is read ahead and one that is finished. An interrupt waits for
    the case that is being finished, and abandons the one that is being read.

    Args:
        cases: The cases.
        read: Reads a case; the flag says whether it is ahead of its turn, in a thread of its own. There it may return None, and is
            called again in its turn.
        compute: Takes what was read; runs in the caller's thread.
        finish: Runs in a thread of its own, one case after the other.

    Returns:
        Results of `finish`, by case.

    Raises:
        Exception: The first exception of a step ends the whole; steps must return the errors of single cases as values.
    """
    answers: list[Answer] = []
    ahead: Future[Any] | None = None
    finishing: Future[Answer] | None = None
    try:
        for index, case in enumerate(cases):
            loaded = None if ahead is None else ahead.result()
            ahead = None  # a future keeps its result
            if loaded is None:
                loaded = read(case, False)
            # A daemon thread: reading leaves nothing behind, so an interrupt need not wait for it.
            if index + 1 < len(cases):
                ahead = _start(read, cases[index + 1], True, daemon=True)
            computed = compute(case, loaded)
            del loaded
            if finishing is not None:
                last, finishing = finishing, None  # read once, also where an interrupt comes now
                answers.append(last.result())
                del last
            finishing = _start(finish, case, computed, daemon=False)
            del computed
    finally:
        if finishing is not None:
            answers.append(finishing.result())
    return answers


def _start(call: Callable[..., Answer], *arguments: Any, daemon: bool) -> Future[Answer]:
    """Run a call in a thread of its own; an executor's threads would all be waited for at exit."""
    future: Future[Answer] = Future()

    def run(*arguments: Any) -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, args=arguments, daemon=daemon).start()
    return future
