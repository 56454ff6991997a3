"""Pilot of `configure`: times a few training steps, a prediction and a scoring on a few cases."""

import json
import math
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from medseg.cascade.cascade import REFINE
from medseg.config.overrides import text_of
from medseg.console import say
from medseg.data.audit.table import READY
from medseg.data.cache import prepare_cases
from medseg.data.case_table import Case, write_case_table
from medseg.data.options import StageName
from medseg.errors import UserError
from medseg.io.atomic import replace_text
from medseg.io.tables import read_csv
from medseg.runs.folder import read_summary
from medseg.studies.command_steps import (
    Step,
    evaluate_step,
    failed_predictions,
    last_checkpoint,
    run_and_get_failure,
    search_paths,
)
from medseg.studies.configure.fingerprint import CaseFacts, Fingerprint
from medseg.studies.configure.setting import Setting, experiment_text
from medseg.studies.configure.stage_views import crops_mm
from medseg.studies.configure.times import Costs, StageCosts
from medseg.studies.train_arguments import key_of, merge_arguments
from medseg.task import LabelValues, Task

GIB = 2**30
# Resampling of the spacing `anisotropic`, which `experiment_text` chooses.
RESAMPLING = "antialiased"
# Largest number of training cases of the pilot.
NUM_TRAINED = 3
# A training on a free CPU uses 100 % of each of its cores. If all its threads together get less
# than this percentage of one core, other programs use the CPU.
BUSY_PERCENT = 70.0
# Number of lines that the timed steps write to the history; the median of the lines is taken.
NUM_LINES = 6

# A case, and the label values in its file.
LabelledCase = tuple[Case, LabelValues]


@dataclass(frozen=True)
class Pilot:
    """A pilot on some cases of a data set.

    Attributes:
        folder: Folder for its files; emptied before each measurement.
        cases: All cases that have labels.
        fingerprint: Facts of the same cases.
        task: Labels and channels.
        plain_task: Content of the group `task`, as plain types.
        label_values: Content of `data.label_values`: label name to value.
        arguments: The user's arguments of `train`.
        timed_steps: Number of steps to time.
        is_on_processor: Whether the training runs on the CPU.
    """

    folder: Path
    cases: Sequence[LabelledCase]
    fingerprint: Fingerprint
    task: Task
    plain_task: Mapping[str, Any]
    label_values: Mapping[str, Any]
    arguments: Sequence[str]
    timed_steps: int
    is_on_processor: bool

    def measure(self, settings: Sequence[Setting]) -> Costs:
        """Train, predict and score as `cross_validate` would, and time each part.

        Args:
            settings: Setting of a single stage, or those of both stages of a cascade.

        Raises:
            UserError: If a command fails, or the prediction of the largest case, with its message.
        """
        is_cascade = len(settings) > 1
        largest, training_cases = pick_cases(self.cases, self.fingerprint, need_regions=is_cascade)
        shutil.rmtree(self.folder, ignore_errors=True)
        prepare_s = 0.0
        for setting in settings:
            prepare_s += self._prepare([largest, *training_cases], setting)
        # The largest case is held out: its validation and prediction show the peak memory.
        held_out, _ = largest
        table_cases = [replace(held_out, split="val")]
        table_cases += [replace(case, split="train") for case, _ in training_cases]
        write_case_table(self.folder / "cases.csv", table_cases)
        say(
            f"configure: timing {self.timed_steps} steps, a prediction and its scores, which mean "
            "nothing after so few steps"
        )
        trained = [case.name for case, _ in training_cases]
        stages = [self._time_training(setting, trained) for setting in settings]
        table = write_case_table(self.folder / "held_out.csv", [replace(held_out, split=None)])
        predict_s = self._time(self._predict_step(table, settings))
        # A command that fails on a case alone has not failed as a whole, see `has_failed`.
        messages = failed_predictions(self.folder / "predictions")
        if messages:
            reason = "; ".join(messages.values())
            raise UserError(f"{held_out.name}: the largest case cannot be predicted: {reason}")
        score_s = self._time(evaluate_step(self.folder, table, self.plain_task, self.label_values))
        report_file = self.folder / "predictions" / f"{held_out.name}.json"
        report = json.loads(report_file.read_text(encoding="utf-8"))
        # Start and end of a command, without the work on the case; assumed to be the same for
        # `predict` and `evaluate`.
        overhead_s = max(0.0, predict_s - report["durations_s"]["total"])
        # Times of the largest case are scaled to a mean case by the volume of the field of view:
        # the time is proportional to the number of tiles, which cover the field of view.
        mean_share = self._mean_share(scan_mm3, [held_out.name])
        case_s = mean_share * report["durations_s"]["total"]
        predict_peak_gib = report["peak_resident_bytes"] / GIB
        if is_cascade:
            # After so few steps the boxes of a coarse stage mean nothing, nor do the time and the
            # memory of the crops. The validation of the fine stage takes the boxes of the
            # reference.
            case_s = mean_share * without_crops_s(report["durations_s"])
            crops_s = validation_s(self._run_dir(StageName.fine))
            case_s += self._mean_share(all_crops_mm3, [held_out.name]) * crops_s
            predict_peak_gib = 0.0
        return Costs(
            stages=tuple(stages),
            prepare_s=prepare_s,
            predict_start_s=overhead_s,
            case_s=case_s,
            score_s=mean_share * max(0.0, score_s - overhead_s),
            predict_peak_gib=predict_peak_gib,
        )

    def _time_training(self, setting: Setting, trained: Collection[str]) -> StageCosts:
        """Train a stage for a few steps, and measure its costs.

        Args:
            setting: Setting of the stage.
            trained: Names of the training cases.
        """
        steps = self.timed_steps
        text = experiment_text(replace(setting, steps=steps), self.task, reasons={})
        replace_text(self._experiment(setting.stage), text)
        train_s = self._time(self._train_step(setting.stage))
        run_dir = self._run_dir(setting.stage)
        step_s = median_of(run_dir, "seconds_per_step")
        if self.is_on_processor:
            _warn_if_busy(median_of(run_dir, "cpu_percent"))
        mean_share = 1.0
        if setting.stage is StageName.coarse:
            # Its samples are whole scans, which may be larger or smaller in the mean.
            mean_share = self._mean_share(scan_mm3, trained)
        return StageCosts(
            step_s=mean_share * step_s,
            start_s=max(0.0, train_s - steps * step_s),
            peak_gib=read_summary(run_dir)["peak_resident_mib"] / 2**10,
        )

    def _prepare(self, cases: Sequence[LabelledCase], setting: Setting) -> float:
        """Prepare some cases into the cache of the pilot, and time the preparation.

        Returns:
            Seconds for all cases of the data set, extrapolated by their number of voxels.

        Raises:
            UserError: If a case cannot be used.
        """
        task = self.task
        if setting.stage is StageName.single:
            # The regions are a part of the cache's key.
            task = task.as_one_stage()
        start_s = time.perf_counter()
        targets = [(setting.spacing_mm, RESAMPLING)]
        for audited, _ in prepare_cases(cases, self.folder / "cache", task, targets):
            if audited.status != READY:
                raise UserError(
                    f"{audited.case.name}: the case cannot be used; medseg prepare says why"
                )
        prepare_s = time.perf_counter() - start_s
        prepared_names = {case.name for case, _ in cases}
        num_all_voxels = 0
        num_prepared_voxels = 0
        for facts in self.fingerprint.cases:
            num_all_voxels += facts.num_voxels
            if facts.name in prepared_names:
                num_prepared_voxels += facts.num_voxels
        return prepare_s * num_all_voxels / num_prepared_voxels

    def _mean_share(self, volume: Callable[[CaseFacts], float], names: Collection[str]) -> float:
        """Divide the mean volume of all cases by that of some cases.

        Args:
            volume: Computes the volume of a case, mm³.
            names: Names of some cases.
        """
        cases = self.fingerprint.cases
        some_cases = [case for case in cases if case.name in names]
        return fmean(map(volume, cases)) / fmean(map(volume, some_cases))

    def _experiment(self, stage: StageName) -> Path:
        """Name the experiment file of a stage."""
        return self.folder / f"{stage.value}.yaml"

    def _run_dir(self, stage: StageName) -> Path:
        """Name the run folder of a stage."""
        return self.folder / stage.value

    def _train_step(self, stage: StageName) -> Step:
        """Make the command of the timed training of a stage."""
        # The arguments of the pilot replace the user's arguments with the same keys.
        pilot_arguments = [
            f"experiment={text_of(str(self._experiment(stage)))}",
            f"data.cases={self.folder / 'cases.csv'}",
            f"data.cache={self.folder / 'cache'}",
            "data.fold=null",
            "data.val_patients=[]",
            "data.test_patients=[]",
            f"history_every={max(1, self.timed_steps // NUM_LINES)}",
            f"hydra.run.dir={self._run_dir(stage)}",
        ]
        return ["train", *search_paths(), *merge_arguments(self.arguments, pilot_arguments)]

    def _predict_step(self, table: Path, settings: Sequence[Setting]) -> Step:
        """Make the command that predicts the largest case with the timed networks."""
        checkpoints = []
        for setting in settings:
            checkpoint = last_checkpoint(self._run_dir(setting.stage))
            checkpoints.append(f"{setting.stage.value}={checkpoint}")
        # The only argument of `train` that `predict` takes too and no checkpoint states.
        trusted = [argument for argument in self.arguments if key_of(argument) == "trusted_targets"]
        return [
            "predict",
            f"input={table}",
            f"output={self.folder / 'predictions'}",
            *checkpoints,
            *trusted,
        ]

    def _time(self, step: Step) -> float:
        """Run a command and return the seconds that it took.

        Raises:
            UserError: If the command fails, with its message.
        """
        start_s = time.perf_counter()
        failure = run_and_get_failure(step)
        if failure:
            raise UserError(failure)
        return time.perf_counter() - start_s


def pick_cases(
    cases: Sequence[LabelledCase], fingerprint: Fingerprint, *, need_regions: bool
) -> tuple[LabelledCase, list[LabelledCase]]:
    """Pick the largest case, and up to `NUM_TRAINED` cases of other patients to train on.

    Split and folds of the case table are removed from the cases: the pilot sets its own split.

    Args:
        cases: All cases that have labels.
        fingerprint: Facts of the same cases.
        need_regions: Whether cases with a region of the task are preferred: a fine stage has no
            sample of the others.

    Returns:
        The largest case, and the training cases.
    """
    unmarked_cases = []
    for case, label_values in cases:
        unmarked_case = replace(case, split=None, fold=None, fold_sides=())
        unmarked_cases.append((unmarked_case, label_values))
    if need_regions:
        with_regions = {facts.name for facts in fingerprint.cases if facts.regions}
        # Sorting is stable: False comes first.
        unmarked_cases.sort(key=lambda pair: pair[0].name not in with_regions)
        candidates = [facts for facts in fingerprint.cases if facts.regions]
        largest_name = max(candidates, key=scan_mm3).name
    else:
        largest_name = fingerprint.largest.name
    largest = next(pair for pair in unmarked_cases if pair[0].name == largest_name)
    others = [pair for pair in unmarked_cases if pair[0].patient != largest[0].patient]
    return largest, others[:NUM_TRAINED]


def scan_mm3(case: CaseFacts) -> float:
    """Compute the volume of the field of view of a case, mm³."""
    return math.prod(case.extent_mm)


def all_crops_mm3(case: CaseFacts) -> float:
    """Compute the volume of all crops of a case together, mm³."""
    return sum(map(math.prod, crops_mm(case)))


def without_crops_s(durations_s: Mapping[str, float]) -> float:
    """Compute the seconds of a prediction without the crops of the fine stage.

    Args:
        durations_s: Step of the prediction to its seconds; `total` is the whole.
    """
    seconds = durations_s["total"]
    for step, step_s in durations_s.items():
        if step.startswith(REFINE):
            seconds -= step_s
    return seconds


def median_of(run_dir: Path, column: str) -> float:
    """Compute the median of a column of the history of a run.

    The first line is left out unless it is the only one: its steps load data and compile.
    """
    values = []
    for row in read_csv(run_dir / "history.csv"):
        # Lines of validations have an empty cell.
        if row.get(column):
            values.append(float(row[column]))
    return median(values[1:] or values)


def validation_s(run_dir: Path) -> float:
    """Compute the seconds of the validations of a run: those of the run without its steps."""
    steps_s = 0.0
    last_step = 0
    for row in read_csv(run_dir / "history.csv"):
        if row.get("seconds_per_step"):
            step = int(row["step"])
            steps_s += (step - last_step) * float(row["seconds_per_step"])
            last_step = step
    return max(0.0, float(read_summary(run_dir)["train_s"]) - steps_s)


def _warn_if_busy(cpu_percent: float) -> None:
    """Warn if other programs took so much of the CPU that the measured times are too long.

    Args:
        cpu_percent: CPU time of the training over elapsed time; 100 = one core.
    """
    if cpu_percent < BUSY_PERCENT:
        say(
            f"configure: the timed steps got {cpu_percent:.0f} % of a processor core, so other "
            "programs keep this machine busy; on a free machine the same hours hold more steps: "
            "start configure again there"
        )
