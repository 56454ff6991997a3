"""The `predict` command: segments every scan of an input with a cascade."""

import signal
import sys
from pathlib import Path

from medseg.commands import entry
from medseg.config.schema import PredictConfig
from medseg.console import say
from medseg.errors import EXIT_FAILED
from medseg.prediction.batch import CaseOutcome, predict_scans
from medseg.prediction.cascades import EVERY_SPACING_MM
from medseg.preprocess.scale import HuScale


def main() -> None:
    """Compose, check, predict."""
    # SIGTERM ends the command like Ctrl-C: the case that is being written is finished, the rest is left out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    entry.run("predict", predict)


def predict(config: PredictConfig) -> int:
    """Segment every scan of the input.

    Args:
        config: Checked configuration.

    Returns:
        0, or 1 when cases failed; of a single case its own exit code.

    Raises:
        UserError: If the input, the output or a checkpoint is not usable at all.
    """
    from rich.console import Console
    from rich.progress import Progress

    checkpoints = {name: (one.coarse, one.fine, one.range_mm) for name, one in (config.by_spacing or {}).items()}
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", visible=False)

        def show_begin(name: str, num_cases: int) -> None:
            progress.update(bar, description=name, total=num_cases, visible=num_cases > 1)

        def show_end(outcome: CaseOutcome) -> None:
            _show(outcome)
            progress.advance(bar)

        outcomes = predict_scans(
            Path(config.input),
            Path(config.output),
            checkpoints or {"": (config.coarse, config.fine, EVERY_SPACING_MM)},
            inference=vars(config.inference),
            split=config.split,
            series=config.series,
            hu=HuScale(config.hu_slope, config.hu_offset),
            accelerator=config.accelerator.value,
            threads=config.threads,
            precision=config.precision.value if config.precision else None,
            overwrite=config.overwrite,
            trusted=config.trusted_targets,
            on_begin=show_begin,
            on_end=show_end,
        )
    if num_skipped := sum(outcome.is_skipped for outcome in outcomes):
        say(f"{num_skipped} of {len(outcomes)} cases were finished before and skipped; overwrite=true repeats them")
    codes = [outcome.exit_code for outcome in outcomes if outcome.exit_code]
    if codes:
        say(f"{len(codes)} of {len(outcomes)} cases failed")
        return codes[0] if len(outcomes) == 1 else EXIT_FAILED
    return 0


def _show(outcome: CaseOutcome) -> None:
    """Print the outcome of a case: messages on the error stream, the result on the output stream."""
    for message in outcome.messages:
        say(f"{outcome.name}: {message}")
    if outcome.is_skipped:
        print(f"{outcome.output}: finished before, skipped", flush=True)
    elif outcome.report is not None:
        volumes = ", ".join(f"{name} {volume_ml:.0f} ml" for name, volume_ml in outcome.report["volume_ml"].items())
        print(f"{outcome.output}: {volumes}, {outcome.report['durations_s']['total']:.1f} s", flush=True)
