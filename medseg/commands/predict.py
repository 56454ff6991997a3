"""The `predict` command: segments every scan of an input with a cascade."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from medseg.console import say
from medseg.data.cases import file_values
from medseg.errors import EXIT_FAILED
from medseg.io.inputs import with_case_name
from medseg.prediction.batch import BatchCase, predict_scans
from medseg.prediction.cascades import EVERY_SPACING_MM
from medseg.prediction.case import report_path
from medseg.prediction.options import Engine, PredictConfig
from medseg.prediction.results import Wanted
from medseg.preprocess.scale import HuScale

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
    checkpoints = {name: (one.coarse, one.fine, one.range_mm) for name, one in (config.by_spacing or {}).items()}
    console = Console(stderr=True)
    with sigterm_exits(), Progress(console=console, disable=not console.is_terminal) as progress:
        bar, steps = (progress.add_task("", visible=False, case="") for _ in range(2))
        headers = progress.add_task("", start=False, total=None, visible=False)

        def show_header() -> None:
            task = progress.tasks[headers]
            if not task.started:
                progress.start_task(headers)
            progress.advance(headers)
            if (task.elapsed or 0.0) >= SLOW_S:
                description = f"{task.completed:g} headers of DICOM files read"
                progress.update(headers, description=description, visible=True)

        def show_begin(name: str, num_cases: int) -> None:
            progress.update(headers, visible=False)
            progress.update(bar, description=name, total=num_cases, visible=num_cases > 1)

        def show_step(name: str, step: str, number: int, num_steps: int) -> None:
            description = f"{name}: {step.replace('_', ' ')}"
            progress.update(steps, description=description, completed=number, total=num_steps, visible=True, case=name)

        def show_end(case: BatchCase) -> None:
            _show(case)
            progress.advance(bar)
            shown = progress.tasks[steps]
            if shown.fields["case"] == case.scan.name:  # of a batch, the next case may be shown already
                progress.update(steps, completed=shown.total)

        wanted = _wanted(config)
        loading: dict[str, Any] = {
            "checkpoints": checkpoints or {"": (config.coarse, config.fine, EVERY_SPACING_MM)},
            "inference": vars(config.inference),
            "accelerator": config.accelerator.value,
            "threads": config.threads,
            "precision": config.precision.value if config.precision else None,
            "trusted": config.trusted_targets,
        }
        elsewhere = None
        if config.engine is Engine.ray:
            from medseg.prediction.ray_engine import RayOptions, predict_on_ray

            elsewhere = partial(
                predict_on_ray,
                options=RayOptions(**vars(config.ray)),
                loading={**loading, "threads": config.threads or 1},
                overwrite=config.overwrite,
                wanted=wanted,
                on_begin=show_begin,
                on_end=show_end,
            )
            # This process only needs the task: it may lack the device of the actors.
            plain = {**vars(config.inference), "backend": "torch", "half_weights": False}
            loading |= {"inference": plain, "accelerator": "cpu", "precision": None}
        cases = predict_scans(
            [Path(path) for path in config.input] if isinstance(config.input, list) else Path(config.input),
            Path(config.output),
            **loading,
            split=config.split,
            series=config.series,
            hu=HuScale(config.hu_slope, config.hu_offset),
            overwrite=config.overwrite,
            wanted=wanted,
            on_header=show_header,
            on_forecast=say if console.is_terminal else lambda _: None,  # the error stream of a script has complaints alone
            on_begin=show_begin,
            on_step=show_step,
            on_end=show_end,
            elsewhere=elsewhere,
        )
    if num_skipped := sum(case.is_skipped for case in cases):
        say(f"{num_skipped} of {len(cases)} cases were finished before and skipped; overwrite=true repeats them")
    codes = [case.exit_code for case in cases if case.exit_code]
    if codes:
        say(f"{len(codes)} of {len(cases)} cases failed")
        return codes[0] if len(cases) == 1 else EXIT_FAILED
    return 0


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Let SIGTERM end the command like Ctrl-C: the case that is being written is finished, the others are left out."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wanted(config: PredictConfig) -> Wanted:
    """Take the result files from the configuration."""
    return Wanted(
        tuple(dict.fromkeys(kind.value for kind in config.save)),
        {**vars(config.dicom_seg), "kind": config.dicom_seg.kind.value},
        config.viewer.max_mb,
        config.data.labels_column,
        file_values(config.data.label_values),
    )


def _show(case: BatchCase) -> None:
    """Print the outcome of a case: messages on the error stream, the result on the output stream."""
    for message in case.messages:
        say(with_case_name(case.scan.name, message, [case.scan.path]))
    if case.is_skipped:
        print(f"{_results_of(case)}: finished before, skipped", flush=True)
    elif case.report is not None:
        volumes = ", ".join(f"{name} {volume_ml:.0f} ml" for name, volume_ml in case.report["volume_ml"].items())
        total_s = case.report["durations_s"]["total"]
        print(f"{_results_of(case)}: {volumes}, {total_s:.1f} s", flush=True)


def _results_of(case: BatchCase) -> str:
    """Name the label map of a case; without one in `save` the other files, or else the report."""
    if case.output in case.result_paths:
        return str(case.output)
    files = [str(path) for path in case.result_paths or [report_path(case.output)]]
    more = f" and {len(files) - MAX_FILES} more" if len(files) > MAX_FILES else ""
    return ", ".join(files[:MAX_FILES]) + more
