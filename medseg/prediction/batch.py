"""Batch: scans read, segmented and written in an overlapping pipeline.

Each case has an outcome of its own.
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
from medseg.prediction.case_report import is_up_to_date, read_report, write_case
from medseg.prediction.forecast import (
    Forecast,
    forecast,
    forecast_text,
    known_rate,
    machine_key,
)
from medseg.prediction.load_models import (
    RangeCascade,
    load_cascade,
    load_model_folders,
    pick_cascade,
    result_settings,
)
from medseg.prediction.memory_limit import share_memory
from medseg.prediction.options import PredictConfig, Save
from medseg.prediction.result_files import check_kinds
from medseg.prediction.scans import Scan, scan_grid

# Stands for the data of a case whose results are up to date.
UP_TO_DATE = "up to date"
# With this budget our UNet runs in slabs on any scanner's field of view, so that headers need not
# be read twice.
SURE_BUDGET_GIB = 0.9
# Headers that are read for the forecast of a batch.
MAX_FORECASTS = 50


@dataclass
class BatchCase:
    """A scan of a batch and its outcome.

    Attributes:
        scan: The scan.
        output: Path of its label map, whether or not `save` has it.
        result_paths: Files that are written beside the report.
        chosen: Its cascade, set when it is read.
        earlier_report: Report that was there when it was read.
        messages: Sentences for the error stream.
        exit_code: Exit code of the case alone.
        report: Content of `<case>.json`; None where nothing was written.
        is_skipped: Whether its results were up to date.
    """

    scan: Scan
    output: Path
    result_paths: Sequence[Path] = ()
    chosen: RangeCascade = field(init=False)
    earlier_report: dict[str, Any] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    exit_code: int = 0
    report: dict[str, Any] | None = None
    is_skipped: bool = False


class Observer:
    """What a prediction tells its caller while it runs.

    The methods do nothing until a subclass replaces them.
    """

    def header_read(self) -> None:
        """Called for each DICOM file of a folder whose header was read to find the studies."""

    def forecast(self, sentence: str) -> None:
        """Called before the first case with a sentence about memory and seconds."""

    def case_begins(self, name: str, num_cases: int) -> None:
        """Called with the name of a case and the number of cases when its turn comes."""

    def step_begins(self, name: str, step: str, number: int, num_steps: int) -> None:
        """Called with a case, the step that begins, its place and the number of steps."""

    def case_ends(self, case: BatchCase) -> None:
        """Called with each case when it is done: in the order of the cases, but with engine=ray."""


def has_other_ranks() -> bool:
    """Whether torchrun started this process together with others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1


def load_cascades(config: PredictConfig) -> list[RangeCascade]:
    """Load the model folder, or the cascade of each range of spacings.

    Raises:
        UserError: If the device, the precision or a checkpoint is not usable.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    # Under torchrun, each process takes a GPU of its own.
    if has_other_ranks() and pick_device(config.accelerator, "accelerator").type == "cuda":
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
        settings = {**result_settings(model, precision), "labels": model.task.labels}
        return [RangeCascade(model, settings)]
    loaded = []
    for name, checkpoints in config.ranges.items():
        cascade = load_cascade(
            checkpoints.coarse,
            checkpoints.fine,
            checkpoints.single,
            accelerator=config.accelerator.value,
            precision=precision,
            options=config.inference,
            trusted=config.trusted_targets,
        )
        loaded.append(
            RangeCascade(cascade, result_settings(cascade, precision), name, checkpoints.range_mm)
        )
    return loaded


def make_batch(
    cascades: Sequence[RangeCascade], config: PredictConfig, num_cases: int, observer: Observer
) -> "Batch":
    """Divide what the loaded weights leave of `max_ram_gib`, and make a batch that keeps it.

    See `share_memory`.
    """
    device = pick_device(config.accelerator, "accelerator")
    if device.type == "cuda":
        # Their host memory counts as that of the loaded weights.
        start_libraries(device)
    backend_bytes = sum(chosen.cascade.backend_bytes for chosen in cascades)
    shares = share_memory(config.inference.max_ram_gib, backend_bytes)
    bounded = []
    for chosen in cascades:
        bounded.append(chosen._replace(cascade=chosen.cascade.within(shares.network_gib)))
    return Batch(bounded, resident_bytes(), shares.array_bytes, config, num_cases, observer)


@dataclass
class Batch:
    """The three steps of a case for `run_overlapped`; errors are values until the case is finished.

    Attributes:
        cascades: Cascades to choose from.
        loaded_bytes: Resident memory before the first scan.
        array_bytes: Size above which an array of a scan is a temporary file.
        config: Which result files are written, and whether results that are up to date are made
            again.
        num_cases: Number of cases.
        observer: Is told what happens.
    """

    cascades: list[RangeCascade]
    loaded_bytes: int
    array_bytes: float
    config: PredictConfig
    num_cases: int
    observer: Observer

    def describe_cost(self, cases: Sequence[BatchCase]) -> str | None:
        """Say what the cases are expected to cost; None if no header can be read.

        The headers of some of the cases that have no report yet are read.
        """
        new = [case for case in cases if self.config.overwrite or not read_report(case.output)]
        forecasts: dict[str, Forecast] = {}
        seconds: list[float | None] = []
        for case in new[:: max(1, len(new) // MAX_FORECASTS)]:
            # Any reader may fail; the case tells it in its turn.
            with suppress(Exception):
                cascade = pick_cascade(case.scan, self.cascades)[0].cascade
                grid = scan_grid(case.scan, cascade.task)
                expected = self._forecast(cascade, grid)
                rate = known_rate(machine_key(cascade))
                forecasts[case.scan.name] = expected
                seconds.append(None if rate is None else rate.seconds(expected))
        if not forecasts:
            return None
        known_s = [case_s for case_s in seconds if case_s is not None]
        mean_s = mean(known_s) if len(known_s) == len(seconds) else None
        return forecast_text(forecasts, mean_s, len(new))

    def _forecast(self, cascade: ScanModel, grid: VoxelGrid) -> Forecast:
        return forecast(cascade, grid, self.loaded_bytes, self.array_bytes)

    def read(self, case: BatchCase, is_ahead: bool) -> CaseData | str | Exception | None:
        """Read a case unless its results are up to date.

        Called ahead of its turn while other cases need the memory, it returns None.
        """
        try:
            if case.scan.refusal:
                raise UserError(case.scan.refusal)
            case.chosen, case.messages = pick_cascade(case.scan, self.cascades)
            case.earlier_report = read_report(case.output)
            check_kinds(case.scan, self.config.save)
            if self._is_up_to_date(case):
                return UP_TO_DATE
            cascade = case.chosen.cascade
            if is_ahead and not is_small(case.scan, cascade.task, cascade.options.budget_gib):
                return None
            if cascade.options.budget_gib < SURE_BUDGET_GIB:
                cascade.check_budget(scan_grid(case.scan, cascade.task))
            if not is_ahead:
                self._begin(case, "read")
            with scratch_above(self.array_bytes, cascade.waiting_bytes):
                return read_case(case.scan, cascade.task)
        except Exception as error:
            if is_ahead and is_out_of_memory(error):
                return None
            return self._as_value(error)

    def compute(
        self, case: BatchCase, data: CaseData | str | Exception
    ) -> CaseData | str | Exception:
        """Segment a case."""
        self.observer.case_begins(case.scan.name, self.num_cases)
        if not isinstance(data, CaseData):
            return data
        try:
            # Another prediction into this folder may have finished the case since it was read.
            if self._is_up_to_date(case):
                return UP_TO_DATE
            cascade = case.chosen.cascade
            with scratch_above(self.array_bytes, cascade.waiting_bytes):
                segment_case(case.scan, cascade, data, self.config, partial(self._begin, case))
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
        except Exception as error:
            case.exit_code, message = self._describe(error)
            message = case.scan.in_words_of_user(message)
            case.messages.append(case.scan.identity.added_to(message))
        self.observer.case_ends(case)
        return case

    def _is_up_to_date(self, case: BatchCase) -> bool:
        return not self.config.overwrite and is_up_to_date(
            case.scan, case.output, case.chosen, self.config
        )

    def _begin(self, case: BatchCase, step: str) -> None:
        steps = ["read", *case.chosen.cascade.steps, "write"]
        self.observer.step_begins(case.scan.name, step, steps.index(step), len(steps))

    def _describe(self, error: Exception) -> tuple[int, str]:
        """Exit code and sentence of an error.

        Of a single case, a defect keeps its traceback and ends the program.
        """
        if isinstance(error, SeveralSeriesError):
            return EXIT_USER_ERROR, f"{error} Or give series_pick=thinnest."
        if isinstance(error, UserError):
            return EXIT_USER_ERROR, str(error)
        if is_out_of_memory(error):
            cure = "free some, give a smaller inference.budget_gib, or crop or resample the scan"
            return EXIT_OUT_OF_MEMORY, f"out of memory ({first_line(error)}); {cure}"
        if self.num_cases == 1:
            raise error
        return EXIT_FAILED, f"{type(error).__name__}: {error}"

    def _as_value(self, error: Exception) -> Exception:
        """Remove the frames of an error in a batch.

        They would hold a scan and its crops while the next cases run.
        """
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

    Beside the computed case at most two others are in memory: one that is read ahead and one that
    is finished. An interrupt waits for the case that is being finished, and abandons the one that
    is being read.

    Args:
        cases: The cases.
        read: Reads a case; the flag says whether it is ahead of its turn, in a thread of its own.
            There it may return None, and is called again in its turn.
        compute: Takes what was read; runs in the caller's thread.
        finish: Runs in a thread of its own, one case after the other.

    Returns:
        Results of `finish`, by case.

    Raises:
        Exception: The first exception of a step ends the whole; steps must return the errors of
            single cases as values.
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
                # Read once, also where an interrupt comes now.
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
    """Run a call in a thread of its own; an executor's threads would all be waited for at exit."""
    future: Future[Answer] = Future()

    def run(*arguments: Any) -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, args=arguments, daemon=daemon).start()
    return future
