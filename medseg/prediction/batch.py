"""Batch: scans are read, segmented and written in an overlapping pipeline.

Each case has an outcome of its own: a failing case does not affect the others.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

import torch

from medseg.cascade.cascade import Cascade
from medseg.errors import (
    EXIT_FAILED,
    EXIT_OUT_OF_MEMORY,
    EXIT_USER_ERROR,
    SeveralSeriesError,
    UserError,
    first_line,
    is_out_of_memory,
)
from medseg.geometry.grid import VoxelGrid
from medseg.inference.scan_model import ScanModel
from medseg.io.scratch import scratch_above
from medseg.memory.device import pick_device, start_libraries
from medseg.memory.profile import resident_bytes
from medseg.prediction.case import CaseData, is_small, read_case, segment_case
from medseg.prediction.case_report import (
    is_up_to_date,
    outdated_files,
    read_report,
    write_case,
)
from medseg.prediction.forecast import (
    Forecast,
    forecast,
    forecast_text,
    known_rate,
    machine_key,
)
from medseg.prediction.load_models import (
    RangeModel,
    check_one_task,
    load_cascade,
    load_model_folders,
    pick_model,
    result_settings,
)
from medseg.prediction.memory_limit import share_memory
from medseg.prediction.options import PredictConfig, Save
from medseg.prediction.result_files import check_kinds, check_slices
from medseg.prediction.scans import Scan, may_hold_studies, scan_grid
from medseg.wording import first_few

# Takes the place of the data of a case whose results are up to date.
UP_TO_DATE = "up to date"
# A budget of this size is enough for our UNet, run in slabs, on the field of view of any scanner. A
# smaller budget is checked against the header of each scan before the voxels are read.
SURE_BUDGET_GIB = 0.9
# Least number of headers that are read for the forecast of a large batch: from twice this number of
# cases on, only every second, third, … header is read.
LEAST_FORECASTS = 50
# Largest number of outdated files that a message names; it counts the others.
MAX_OUTDATED = 3


@dataclass
class BatchCase:
    """A scan of a batch and its outcome.

    Attributes:
        scan: What is segmented, or the reason why it is refused.
        output: Path of its label map, which names the report too; written only if `save` has it.
        result_paths: Files that are written beside the report.
        chosen: The model that segments it, set by `Batch.read`.
        earlier_report: Report that was there at `Batch.read`, or with engine=ray before its first
            actor; empty without one.
        messages: Sentences for the error stream.
        exit_code: Exit code that the case would have alone; 0 if it has a result.
        report: Content of `<case>.json`; None where nothing was written.
        is_skipped: Whether its results were up to date.
    """

    scan: Scan
    output: Path
    result_paths: Sequence[Path] = ()
    chosen: RangeModel = field(init=False)
    earlier_report: dict[str, Any] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    exit_code: int = 0
    report: dict[str, Any] | None = None
    is_skipped: bool = False


class Observer:
    """Receives the events of a running prediction.

    The methods do nothing until a subclass replaces them.
    """

    def header_read(self) -> None:
        """Called for each DICOM file of a folder whose header was read to find the studies."""

    def forecast(self, sentence: str) -> None:
        """Called before the first case with a sentence about memory and seconds."""

    def case_begins(self, name: str, num_cases: int) -> None:
        """Called with the name of a case and the number of cases when its turn comes."""

    def step_begins(self, name: str, step: str, number: int, num_steps: int) -> None:
        """Called with a case, the step that begins, its place from 0, and the number of steps."""

    def case_ends(self, case: BatchCase) -> None:
        """Called with each case when it is done; with engine=ray they end in any order."""


def has_other_ranks() -> bool:
    """Tell whether torchrun started this process together with others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1


def load_range_models(config: PredictConfig) -> list[RangeModel]:
    """Load the model folder, or the cascade of each range of spacings.

    The number of threads and, under torchrun, the GPU of this process are set first.

    Returns:
        The model of each range; for a model folder one, which serves all scans.

    Raises:
        UserError: If the device, the precision or a checkpoint is not usable, or the ranges are of
            different tasks.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    if has_other_ranks():
        device = pick_device(config.accelerator, "accelerator")
        # Each process of torchrun takes a GPU of its own.
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    precision = None if config.precision is None else config.precision.value
    if config.weights is not None:
        model = load_model_folders(
            config.weights,
            config.folds,
            label_values=config.label_values,
            ensemble=config.ensemble,
            accelerator=config.accelerator.value,
            precision=precision,
            options=config.inference,
            trusted=config.trusted_targets,
        )
        if Save.probabilities in config.save and not isinstance(model, Cascade):
            raise UserError(
                "save=probabilities: only one model folder of medseg keeps probabilities, which "
                "would fill the memory otherwise; leave it out"
            )
        # `label_values` may give the labels other values, which makes another result.
        settings = {**result_settings(model, precision), "labels": model.task.labels}
        return [RangeModel(model, settings)]
    range_models = []
    for name, range_options in config.ranges.items():
        cascade = load_cascade(
            range_options.coarse,
            range_options.fine,
            range_options.single,
            accelerator=config.accelerator.value,
            precision=precision,
            options=config.inference,
            trusted=config.trusted_targets,
        )
        settings = result_settings(cascade, precision)
        range_models.append(RangeModel(cascade, settings, name, range_options.range_mm))
    check_one_task(range_models)
    return range_models


def make_batch(
    range_models: Sequence[RangeModel], config: PredictConfig, num_cases: int, observer: Observer
) -> "Batch":
    """Make a batch that stays within `max_ram_gib`, once the weights are loaded.

    The memory that is left beside the weights is divided between the networks and the arrays of a
    scan, see `share_memory`.

    Args:
        range_models: The loaded models.
        config: Configuration of the prediction.
        num_cases: Number of cases of the batch.
        observer: Receives the events of the prediction.

    Raises:
        UserError: If the process already holds too much.
    """
    device = pick_device(config.accelerator, "accelerator")
    if device.type == "cuda":
        # The libraries of a GPU take memory of the host. They start before `share_memory` measures
        # the memory of the process, so that the measurement includes them.
        start_libraries(device)
    backend_bytes = sum(range_model.model.backend_bytes for range_model in range_models)
    shares = share_memory(config.inference.max_ram_gib, backend_bytes)
    bounded = []
    for range_model in range_models:
        bounded_model = range_model.model.within(shares.network_gib)
        bounded.append(range_model._replace(model=bounded_model))
    return Batch(
        range_models=bounded,
        loaded_bytes=resident_bytes(),
        array_bytes=shares.array_bytes,
        config=config,
        num_cases=num_cases,
        observer=observer,
    )


@dataclass
class Batch:
    """The three steps of a case for `run_overlapped`: `read`, `compute` and `finish`.

    Each step hands to the next one the data of the case, or `UP_TO_DATE`, or the exception that was
    raised: `finish` turns this value into the outcome of the case.

    Attributes:
        range_models: Models to choose from.
        loaded_bytes: Resident memory before the first scan.
        array_bytes: Size above which an array of a scan is a temporary file.
        config: Which result files are written, and whether results that are up to date are made
            again.
        num_cases: Number of cases.
        observer: Receives the events of the prediction.
    """

    range_models: list[RangeModel]
    loaded_bytes: int
    array_bytes: float
    config: PredictConfig
    num_cases: int
    observer: Observer

    def describe_cost(self, cases: Sequence[BatchCase]) -> str | None:
        """Describe the expected memory and time of the cases; None if no header can be read.

        Cases that have a report are left out, unless they are made again. Of many cases the headers
        of only some are read.
        """
        new_cases = []
        for case in cases:
            if self.config.overwrite or not read_report(case.output):
                new_cases.append(case)
        forecasts: dict[str, Forecast] = {}
        # Expected seconds of each case in `forecasts`; None for a model that has no rate on this
        # machine yet.
        durations_s: list[float | None] = []
        step = max(1, len(new_cases) // LEAST_FORECASTS)
        for case in new_cases[::step]:
            # Any reader may fail. The case reports it in its turn.
            with suppress(Exception):
                chosen, _ = pick_model(case.scan, self.range_models)
                grid = scan_grid(case.scan, chosen.model.task)
                expected = self._forecast(chosen.model, grid)
                rate = known_rate(machine_key(chosen.model))
                forecasts[case.scan.name] = expected
                durations_s.append(None if rate is None else rate.seconds(expected))
        if not forecasts:
            return None
        known_s = [duration_s for duration_s in durations_s if duration_s is not None]
        # If the time of some cases is unknown, no time is stated.
        mean_s = None
        if len(known_s) == len(durations_s):
            mean_s = mean(known_s)
        return forecast_text(forecasts, mean_s, len(new_cases))

    def _forecast(self, model: ScanModel, grid: VoxelGrid) -> Forecast:
        """Forecast a case of this batch."""
        return forecast(model, grid, self.loaded_bytes, self.array_bytes)

    def read(self, case: BatchCase, is_ahead: bool) -> CaseData | str | Exception | None:
        """Read a case unless its results are up to date.

        Args:
            case: The case; its model, its messages and its earlier report are set here.
            is_ahead: Whether the case is read ahead of its turn, while another one is segmented.

        Returns:
            The data, `UP_TO_DATE` or an exception. None if the case is ahead of its turn and too
            large to be read beside another: `read` must then be called again in its turn.
        """
        try:
            if case.scan.refusal:
                raise UserError(case.scan.refusal)
            case.chosen, case.messages = pick_model(case.scan, self.range_models)
            case.earlier_report = read_report(case.output)
            check_kinds(case.scan, self.config.save)
            if self._is_up_to_date(case):
                return UP_TO_DATE
            model = case.chosen.model
            if is_ahead and not is_small(case.scan, model.task, model.options.budget_gib):
                return None
            if model.options.budget_gib < SURE_BUDGET_GIB:
                model.check_budget(scan_grid(case.scan, model.task))
            # The observer follows the case whose turn it is, not one that is read ahead.
            if not is_ahead:
                self._begin(case, "read")
            check_slices(case.scan, model.task, self.config.save)
            with scratch_above(self.array_bytes, model.waiting_bytes):
                return read_case(case.scan, model.task)
        except Exception as error:
            # Alone, in its turn, the case may find enough memory.
            if is_ahead and is_out_of_memory(error):
                return None
            return self._without_frames(error)

    def compute(
        self, case: BatchCase, data: CaseData | str | Exception
    ) -> CaseData | str | Exception:
        """Segment a case that was read; `UP_TO_DATE` and exceptions are passed on.

        Returns:
            The data with its result, `UP_TO_DATE` or an exception.
        """
        self.observer.case_begins(case.scan.name, self.num_cases)
        if not isinstance(data, CaseData):
            return data
        try:
            # Another prediction into this folder may have finished the case since it was read.
            if self._is_up_to_date(case):
                return UP_TO_DATE
            model = case.chosen.model
            on_step = partial(self._begin, case)
            with scratch_above(self.array_bytes, model.waiting_bytes):
                segment_case(case.scan, model, data, self.config, on_step)
        except Exception as error:
            return self._without_frames(error)
        return data

    def finish(self, case: BatchCase, data: CaseData | str | Exception) -> BatchCase:
        """Write a case and note its outcome.

        Raises:
            Exception: A defect of the program, in a batch of one case.
        """
        case.is_skipped = data is UP_TO_DATE
        try:
            # Raised here, so that it is described like an exception of the writers.
            if isinstance(data, Exception):
                raise data
            if isinstance(data, CaseData):
                # In a batch the observer follows the next case, which is segmented meanwhile.
                if self.num_cases == 1:
                    self._begin(case, "write")
                with scratch_above(self.array_bytes):
                    case.report = write_case(
                        case.scan,
                        case.output,
                        case.chosen,
                        data,
                        case.earlier_report,
                        self.config,
                        self._forecast,
                    )
                case.messages += case.report["warnings"]
                outdated = outdated_files(case.output, case.earlier_report, case.report)
                if outdated:
                    case.messages.append(
                        f"{first_few(outdated, MAX_OUTDATED)}: from an earlier prediction of this "
                        "case, not written again; delete what is outdated"
                    )
        except Exception as error:
            case.exit_code, message = self._describe(error, case.scan)
            message = case.scan.in_words_of_user(message)
            case.messages.append(case.scan.identity.added_to(message))
        self.observer.case_ends(case)
        return case

    def _is_up_to_date(self, case: BatchCase) -> bool:
        """Tell whether a case may be skipped; with `overwrite` none may."""
        if self.config.overwrite:
            return False
        return is_up_to_date(case.scan, case.output, case.chosen, self.config)

    def _begin(self, case: BatchCase, step: str) -> None:
        """Tell the observer that a step of a case begins."""
        steps = ["read", *case.chosen.model.steps, "write"]
        self.observer.step_begins(case.scan.name, step, steps.index(step), len(steps))

    def _describe(self, error: Exception, scan: Scan) -> tuple[int, str]:
        """Choose the exit code and the sentence of an error of a scan.

        An error of another kind than the program expects is a defect. In a batch of one case it is
        raised, so that the user sees its traceback.
        """
        if isinstance(error, SeveralSeriesError):
            sentence = str(error)
            # For other inputs `series_pick` is refused or has no effect.
            if self.config.has_scan_path and may_hold_studies(scan):
                sentence += " Or give series_pick=thinnest."
            return EXIT_USER_ERROR, sentence
        if isinstance(error, UserError):
            return EXIT_USER_ERROR, str(error)
        if is_out_of_memory(error):
            cure = "free some, give a smaller inference.budget_gib, or crop or resample the scan"
            return EXIT_OUT_OF_MEMORY, f"out of memory ({first_line(error)}); {cure}"
        if self.num_cases == 1:
            raise error
        return EXIT_FAILED, f"{type(error).__name__}: {error}"

    def _without_frames(self, error: Exception) -> Exception:
        """Remove the frames of an error and of its causes in a batch.

        The frames would hold a scan and its crops while the next cases run. A single case keeps
        them for the traceback of a defect.
        """
        if self.num_cases == 1:
            return error
        link: BaseException | None = error
        while link is not None:
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

    While a case is computed, the next one is read and the previous one is finished, in a thread
    each; more cases are never in memory. An interrupt waits for the case that is being finished,
    and abandons the one that is being read.

    Args:
        cases: What `read` takes, in the order of the answers; may be empty.
        read: Reads a case. Its flag `is_ahead` says that the case is ahead of its turn: then `read`
            runs in a thread of its own, and may return None to be called again in its turn.
        compute: Takes what was read; runs in the caller's thread.
        finish: Takes what was computed; runs in a thread of its own, one case after the other.

    Returns:
        Result of `finish` for each case.

    Raises:
        Exception: The first exception of a step ends the whole run; steps must return the errors
            of single cases as values.
    """
    answers: list[Answer] = []
    # Each variable that refers to a case keeps its scan in memory, so they are cleared early.
    ahead: Future[Any] | None = None
    finishing: Future[Answer] | None = None
    try:
        for index, case in enumerate(cases):
            loaded = None if ahead is None else ahead.result()
            ahead = None  # a future keeps its result
            # The case is the first one, or it could not be read ahead of its turn. Now it is its
            # turn, so the flag `is_ahead` is False.
            if loaded is None:
                loaded = read(case, False)
            # The next case is read ahead of its turn (True). Its thread is a daemon, so that Python
            # does not wait for it after an interrupt: reading leaves no file behind.
            if index + 1 < len(cases):
                ahead = _start(read, cases[index + 1], True, daemon=True)
            computed = compute(case, loaded)
            del loaded
            if finishing is not None:
                # The name is cleared before the answer is awaited: if an interrupt comes now, the
                # `finally` below must not take the same answer again.
                last, finishing = finishing, None
                answers.append(last.result())
                del last
            finishing = _start(finish, case, computed, daemon=False)
            del computed
    finally:
        if finishing is not None:
            answers.append(finishing.result())
    return answers


def _start(call: Callable[..., Answer], *arguments: Any, daemon: bool) -> Future[Answer]:
    """Run a call in a new thread. At exit Python waits for it, unless it is a daemon.

    A `ThreadPoolExecutor` has no daemons: Python would wait for all of its threads.
    """
    future: Future[Answer] = Future()

    def run(*arguments: Any) -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, args=arguments, daemon=daemon).start()
    return future
