"""The `predict` command: segments every scan of an input with a cascade."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress

from medseg.console import say
from medseg.errors import EXIT_FAILED
from medseg.io.inputs import with_case_name
from medseg.io.lean_nibabel import import_nibabel
from medseg.prediction.batch import BatchCase, Observer
from medseg.prediction.case_report import report_path
from medseg.prediction.options import PredictConfig
from medseg.prediction.predict import predict_scans
from medseg.wording import first_few, format_ml

# Largest number of files that the line of a case names if there is no label map.
MAX_FILES = 3
# Seconds after which the reading of headers is shown; a cohort on a network drive takes longer.
SLOW_S = 2.0


def predict(config: PredictConfig) -> int:
    """Segment every scan of the input.

    Args:
        config: Checked configuration.

    Returns:
        0, or 1 when cases failed; of a single case its own exit code.

    Raises:
        UserError: If the input, the output or a checkpoint is not usable at all.
    """
    # Before other threads start: it hides pydicom for a moment, and they may import pydicom.
    import_nibabel()
    console = Console(stderr=True)
    with sigterm_exits(), Progress(console=console, disable=not console.is_terminal) as progress:
        cases = predict_scans(config, Display(progress))
    num_skipped = sum(case.is_skipped for case in cases)
    if num_skipped:
        say(
            f"{num_skipped} of {len(cases)} cases were finished before and skipped; "
            "overwrite=true repeats them"
        )
    failed = [case for case in cases if case.exit_code]
    if not failed:
        return 0
    say(f"{len(failed)} of {len(cases)} cases failed")
    if len(cases) == 1:
        return failed[0].exit_code
    return EXIT_FAILED


class Display(Observer):
    """Bars of a prediction in a terminal, and the outcome of each case.

    There are three bars: headers that are read, cases of a batch, and steps of the present case.

    Args:
        progress: Bars; disabled where there is no terminal.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        # IDs of the bars in `progress`.
        self.case_bar = progress.add_task("", visible=False)
        # The field `case` of this bar holds the name of the case whose steps it shows.
        self.step_bar = progress.add_task("", visible=False, case="")
        self.header_bar = progress.add_task("", start=False, total=None, visible=False)

    def header_read(self) -> None:
        """Count a header; the bar is shown once the reading takes long."""
        bar = self.progress.tasks[self.header_bar]
        if not bar.started:
            self.progress.start_task(self.header_bar)
        self.progress.advance(self.header_bar)
        if (bar.elapsed or 0.0) >= SLOW_S:
            description = f"{bar.completed:g} headers of DICOM files read"
            self.progress.update(self.header_bar, description=description, visible=True)

    def forecast(self, sentence: str) -> None:
        """Say the forecast in a terminal only: for scripts, the error stream has errors alone."""
        if self.progress.console.is_terminal:
            say(sentence)

    def case_begins(self, name: str, num_cases: int) -> None:
        """Name the case in the bar of a batch; a single case has none."""
        self.progress.update(self.header_bar, visible=False)
        is_batch = num_cases > 1
        self.progress.update(self.case_bar, description=name, total=num_cases, visible=is_batch)

    def step_begins(self, name: str, step: str, number: int, num_steps: int) -> None:
        """Name the step in its bar."""
        description = f"{name}: {step.replace('_', ' ')}"
        self.progress.update(
            self.step_bar,
            description=description,
            completed=number,
            total=num_steps,
            visible=True,
            case=name,
        )

    def case_ends(self, case: BatchCase) -> None:
        """Print the outcome."""
        _print_outcome(case)
        self.progress.advance(self.case_bar)
        bar = self.progress.tasks[self.step_bar]
        # In a batch, the next case may have begun while the files of this one were written.
        if bar.fields["case"] == case.scan.name:
            self.progress.update(self.step_bar, completed=bar.total)


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Let SIGTERM end the command like Ctrl-C.

    The case whose files are being written is finished; the cases after it are left out.
    """

    def exit_by_signal(*_: Any) -> None:
        # The exit code that a shell reports for a program ended by a signal.
        sys.exit(128 + signal.SIGTERM)

    previous_handler = signal.signal(signal.SIGTERM, exit_by_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _print_outcome(case: BatchCase) -> None:
    """Print the outcome of a case: messages on the error stream, the result on the output."""
    for message in case.messages:
        say(with_case_name(case.scan.name, message, [case.scan.path]))
    if case.is_skipped:
        print(f"{_results_of(case)}: finished before, skipped", flush=True)
    elif case.report is not None:
        volumes_ml = case.report["volume_ml"]
        volumes = ", ".join(f"{name} {format_ml(ml)} ml" for name, ml in volumes_ml.items())
        total_s = case.report["durations_s"]["total"]
        print(f"{_results_of(case)}: {volumes}, {total_s:.1f} s", flush=True)


def _results_of(case: BatchCase) -> str:
    """Name the files of a case in its line.

    The label map stands for all files. Where `save` has no labels, the other files are named, or,
    without any, the report, which every case has.
    """
    if case.output in case.result_paths:
        return str(case.output)
    if case.result_paths:
        return first_few(case.result_paths, MAX_FILES)
    return str(report_path(case.output))
