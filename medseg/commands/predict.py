"""The `predict` command: segments every scan of an input with a cascade."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
from medseg.wording import first_few

# Files of a case that its line names.
MAX_FILES = 3
# Reading headers is shown where it takes longer, as of a cohort on a network drive.
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
    # Before there are threads that read.
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

    Args:
        progress: Bars; disabled where there is no terminal.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.cases = progress.add_task("", visible=False, case="")
        self.steps = progress.add_task("", visible=False, case="")
        self.headers = progress.add_task("", start=False, total=None, visible=False)

    def header_read(self) -> None:
        """Count the headers, where reading them takes long."""
        bar = self.progress.tasks[self.headers]
        if not bar.started:
            self.progress.start_task(self.headers)
        self.progress.advance(self.headers)
        if (bar.elapsed or 0.0) >= SLOW_S:
            description = f"{bar.completed:g} headers of DICOM files read"
            self.progress.update(self.headers, description=description, visible=True)

    def forecast(self, sentence: str) -> None:
        """Say the forecast in a terminal; the error stream of a script has complaints alone."""
        if self.progress.console.is_terminal:
            say(sentence)

    def case_begins(self, name: str, num_cases: int) -> None:
        """Name the case in the bar of a batch."""
        self.progress.update(self.headers, visible=False)
        self.progress.update(self.cases, description=name, total=num_cases, visible=num_cases > 1)

    def step_begins(self, name: str, step: str, number: int, num_steps: int) -> None:
        """Name the step in its bar."""
        description = f"{name}: {step.replace('_', ' ')}"
        self.progress.update(
            self.steps,
            description=description,
            completed=number,
            total=num_steps,
            visible=True,
            case=name,
        )

    def case_ends(self, case: BatchCase) -> None:
        """Print the outcome."""
        _print_outcome(case)
        self.progress.advance(self.cases)
        bar = self.progress.tasks[self.steps]
        # Of a batch, the next case may be in the bar already.
        if bar.fields["case"] == case.scan.name:
            self.progress.update(self.steps, completed=bar.total)


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Let SIGTERM end the command like Ctrl-C.

    The case that is being written is finished, the others are left out.
    """
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
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
        volumes = ", ".join(
            f"{name} {volume_ml:.0f} ml" for name, volume_ml in case.report["volume_ml"].items()
        )
        total_s = case.report["durations_s"]["total"]
        print(f"{_results_of(case)}: {volumes}, {total_s:.1f} s", flush=True)


def _results_of(case: BatchCase) -> str:
    """Name the label map of a case; without one in `save` the other files, or else the report."""
    if case.output in case.result_paths:
        return str(case.output)
    paths = case.result_paths or [report_path(case.output)]
    return first_few(paths, MAX_FILES)
