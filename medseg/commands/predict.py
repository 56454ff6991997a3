"""The `predict` command: read, segment in two stages, write, one case after the other, and say what came of each."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from medseg.commands import entry
from medseg.config.schema import PredictConfig
from medseg.console import say
from medseg.errors import EXIT_FAILED, EXIT_OUT_OF_MEMORY, EXIT_USER_ERROR, UserError, is_out_of_memory
from medseg.io.atomic import check_writable
from medseg.prediction.cascades import (
    Cascade,
    is_tile_worker,
    is_under_torchrun,
    load_cascade,
    load_cascades,
    pick_cascade,
    serve_rank_0,
    shared_tiles,
)
from medseg.prediction.case import ReadCase, SegmentedCase, is_case_finished, is_small, read_case, segment_case, write_case
from medseg.prediction.pipeline import overlapped
from medseg.prediction.scans import Scan, check_outputs, find_cases, output_paths
from medseg.preprocess.scale import HuScale


def main() -> None:
    """Compose, check, predict."""
    # Asked to end by the system it ends as by Ctrl-C: what is being written becomes whole, the rest is left out.
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
    if is_tile_worker():
        serve_rank_0(load_cascade(config))
        return 0
    source = Path(config.input)
    scans, known = find_cases(source, config.split, config.series, HuScale(config.hu_slope, config.hu_offset))
    is_one_scan = len(scans) == 1 and scans[0].path == source
    paths = output_paths(Path(config.output), [scan.name for scan in scans], is_one_scan=is_one_scan)
    check_outputs(paths, known)
    cascades = load_cascades(config)
    for folder in {path.parent for path in paths}:
        check_writable(folder)

    cases = [CaseToPredict(scan, output) for scan, output in zip(scans, paths, strict=True)]
    console = Console(stderr=True)
    with shared_tiles(cascades[0]), Progress(console=console, disable=len(cases) == 1 or not console.is_terminal) as progress:
        task = progress.add_task("", total=len(cases))
        steps = Steps(
            cascades,
            config,
            is_alone=len(cases) == 1,
            begins=lambda name: progress.update(task, description=name),
            ends=lambda: progress.advance(task),
        )
        codes = [code for code in overlapped(cases, steps.read, steps.compute, steps.finish) if code]
    if num_finished := sum(case.is_finished for case in cases):
        say(f"{num_finished} of {len(cases)} cases were finished before and skipped; overwrite=true makes them anew")
    if codes:
        say(f"{len(codes)} of {len(cases)} cases failed")
        # A single input that fails is the user's whole request.
        return codes[0] if len(cases) == 1 else EXIT_FAILED
    return 0


@dataclass
class CaseToPredict:
    """A case and what is known of it so far.

    Attributes:
        scan: The scan.
        output: Label map to write.
        cascade: Who segments it; None until it is chosen.
        choice: The sentence that says why, where there was a choice.
        is_finished: Whether it was finished before.
    """

    scan: Scan
    output: Path
    cascade: Cascade | None = None
    choice: str | None = None
    is_finished: bool = False


class FinishedBefore:
    """What is read and computed of a case that is there already."""


@dataclass
class Steps:
    """The steps of a case for `overlapped`: a bad one must not cost the others their results, so errors are values until its turn.

    Attributes:
        cascades: See `load_cascades`.
        config: Checked configuration.
        is_alone: Whether there is one case only.
        begins: Told the name of a case whose turn comes.
        ends: Called when a case is done.
    """

    cascades: list[Cascade]
    config: PredictConfig
    is_alone: bool
    begins: Callable[[str], None]
    ends: Callable[[], None]

    def read(self, case: CaseToPredict, is_ahead: bool) -> ReadCase | FinishedBefore | Exception | None:
        """Read a case that is not finished; None ahead of its turn where the memory is needed by others."""
        try:
            case.cascade, case.choice = pick_cascade(case.scan, self.cascades)
            if self._was_finished(case, case.cascade):
                return FinishedBefore()
            if is_ahead and not is_small(case.scan, self.config.inference.budget_gib):
                return None
            return read_case(case.scan)
        except Exception as error:
            if is_ahead and is_out_of_memory(error):
                return None
            return error if self.is_alone else _without_frames(error)

    def compute(
        self, case: CaseToPredict, read: ReadCase | FinishedBefore | Exception
    ) -> SegmentedCase | FinishedBefore | Exception:
        """Segment a case."""
        self.begins(case.scan.name)
        if not isinstance(read, ReadCase):
            return read
        assert case.cascade is not None, "it was chosen before the scan was read"
        try:
            # Another prediction into this folder may have done it since it was read.
            if self._was_finished(case, case.cascade):
                return FinishedBefore()
            return segment_case(case.scan, case.cascade, read)
        except Exception as error:
            return error if self.is_alone else _without_frames(error)

    def finish(self, case: CaseToPredict, computed: SegmentedCase | FinishedBefore | Exception) -> int:
        """Write a case and say what came of it.

        Returns:
            Exit code that it would have alone.
        """
        if case.choice is not None:
            say(f"{case.scan.name}: {case.choice}")
        try:
            return self._finish(case, computed)
        finally:
            self.ends()

    def _was_finished(self, case: CaseToPredict, cascade: Cascade) -> bool:
        return not self.config.overwrite and is_case_finished(case.scan, case.output, cascade)

    def _finish(self, case: CaseToPredict, computed: SegmentedCase | FinishedBefore | Exception) -> int:
        if isinstance(computed, FinishedBefore):
            case.is_finished = True
            print(f"{case.output}: finished before, skipped", flush=True)
            return 0
        try:
            if isinstance(computed, Exception):
                raise computed
            assert case.cascade is not None, "it has segmented the scan"
            report = write_case(case.scan, case.output, case.cascade, computed)
        except UserError as error:
            say(f"{case.scan.name}: {error}")
            return EXIT_USER_ERROR
        except Exception as error:
            if is_out_of_memory(error):
                say(
                    f"{case.scan.name}: out of memory ({_first_line(error)}); free some, give a smaller inference.budget_gib, "
                    "or crop or resample the scan"
                )
                return EXIT_OUT_OF_MEMORY
            # Alone it is a defect of medseg and keeps its traceback.
            if self.is_alone:
                raise
            say(f"{case.scan.name}: {type(error).__name__}: {error}")
            return EXIT_FAILED
        for warning in report["warnings"]:
            say(f"{case.scan.name}: {warning}")
        volumes = ", ".join(f"{region} {volume:.0f} ml" for region, volume in report["volume_ml"].items())
        print(f"{case.output}: {volumes}, {report['durations_s']['total']:.1f} s", flush=True)
        return 0


def _without_frames(error: Exception) -> Exception:
    """The error without the frames that it came through, which would hold a scan and its crops through the cases that follow."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
