"""Pilot of `configure`: some real steps, a prediction and a scoring on a few cases, all timed."""

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from medseg.console import say
from medseg.data.audit.table import READY
from medseg.data.cache import prepare_cases
from medseg.data.case_table import Case, write_case_table
from medseg.errors import UserError
from medseg.io.atomic import replace_text
from medseg.io.tables import read_csv
from medseg.runs.folder import read_summary
from medseg.studies.command_steps import (
    Step,
    evaluate_step,
    last_checkpoint,
    run_and_get_failure,
    search_paths,
)
from medseg.studies.configure.fingerprint import Fingerprint
from medseg.studies.configure.setting import Setting, experiment_text
from medseg.studies.configure.times import Costs
from medseg.studies.train_arguments import merge_arguments
from medseg.task import LabelValues, Task

GIB = 2**30
RESAMPLING = "antialiased"
# Training cases of the pilot.
NUM_TRAINED = 3
# A training on a processor uses 100 for each core; less than this means that it waited for others.
BUSY_PERCENT = 70.0
# Lines of the history over which the median of the seconds is taken.
NUM_LINES = 6


@dataclass(frozen=True)
class Pilot:
    """What the pilot works on.

    Attributes:
        folder: Its folder, removed afterwards.
        cases: All cases that have labels, with the values of their label files.
        fingerprint: Facts of the same cases.
        task: Labels and channels.
        plain_task: The group `task`, as plain types.
        label_values: The group `data.label_values`.
        arguments: Arguments of `train` that the user gave.
        timed_steps: Steps to time.
        is_on_processor: Whether the processor computes, and no GPU.
    """

    folder: Path
    cases: Sequence[tuple[Case, LabelValues]]
    fingerprint: Fingerprint
    task: Task
    plain_task: Mapping[str, Any]
    label_values: Mapping[str, Any]
    arguments: Sequence[str]
    timed_steps: int
    is_on_processor: bool

    def measure(self, setting: Setting) -> Costs:
        """Train, predict and score as `cross_validate` would, and time each part.

        Raises:
            UserError: If a command fails, with its message.
        """
        largest, trained = pick_cases(self.cases, self.fingerprint)
        shutil.rmtree(self.folder, ignore_errors=True)
        prepare_s = self._prepare([largest, *trained], setting)
        steps = self.timed_steps
        text = experiment_text(replace(setting, steps=steps), self.task, {})
        replace_text(self.folder / "experiment.yaml", text)
        held_out, _ = largest
        write_case_table(
            self.folder / "cases.csv",
            [
                replace(held_out, split="val"),
                *(replace(case, split="train") for case, _ in trained),
            ],
        )
        say(
            f"configure: timing {steps} steps, a prediction and its scores, which mean nothing "
            "after so few steps"
        )
        run_dir = self.folder / "run"
        train_s = self._time(self._train_step(run_dir))
        table = write_case_table(self.folder / "held_out.csv", [replace(held_out, split=None)])
        predict_s = self._time(self._predict_step(table, last_checkpoint(run_dir)))
        score_s = self._time(evaluate_step(self.folder, table, self.plain_task, self.label_values))
        report_file = self.folder / "predictions" / f"{held_out.name}.json"
        report = json.loads(report_file.read_text(encoding="utf-8"))
        case_s = report["durations_s"]["total"]
        summary = read_summary(run_dir)
        step_s = median_of(run_dir, "seconds_per_step")
        if self.is_on_processor:
            _tell_load(median_of(run_dir, "cpu_percent"))
        start_s = max(0.0, predict_s - case_s)
        # Tiles cover the field of view, so their number follows its volume.
        share = self._mean_share()
        return Costs(
            step_s=step_s,
            prepare_s=prepare_s,
            train_start_s=max(0.0, train_s - steps * step_s),
            predict_start_s=start_s,
            case_s=share * case_s,
            score_s=share * max(0.0, score_s - start_s),
            peak_gib=max(summary["peak_resident_mib"] / 2**10, report["peak_resident_bytes"] / GIB),
        )

    def _prepare(self, cases: Sequence[tuple[Case, LabelValues]], setting: Setting) -> float:
        """Fill the cache of the pilot; returns the seconds that all cases would take."""
        start_s = time.perf_counter()
        targets = [(setting.spacing_mm, RESAMPLING)]
        for audited, _ in prepare_cases(cases, self.folder / "cache", self.task, targets):
            if audited.status != READY:
                raise UserError(
                    f"{audited.case.name}: the case cannot be used; medseg prepare says why"
                )
        seconds = time.perf_counter() - start_s
        names = {case.name for case, _ in cases}
        num_voxels = 0
        for facts in self.fingerprint.cases:
            if facts.name in names:
                num_voxels += facts.num_voxels
        return seconds * sum(facts.num_voxels for facts in self.fingerprint.cases) / num_voxels

    def _mean_share(self) -> float:
        """Mean field of view of the cases, as a share of the largest one."""
        volumes = [math.prod(case.extent_mm) for case in self.fingerprint.cases]
        return sum(volumes) / len(volumes) / max(volumes)

    def _train_step(self, run_dir: Path) -> Step:
        """Make the command of the timed training."""
        own_arguments = [
            f"experiment={self.folder / 'experiment.yaml'}",
            f"data.cases={self.folder / 'cases.csv'}",
            f"data.cache={self.folder / 'cache'}",
            "data.fold=null",
            "data.val_patients=[]",
            "data.test_patients=[]",
            f"history_every={max(1, self.timed_steps // NUM_LINES)}",
            f"hydra.run.dir={run_dir}",
        ]
        return ["train", *search_paths(), *merge_arguments(self.arguments, own_arguments)]

    def _predict_step(self, table: Path, checkpoint: Path) -> Step:
        """Make the command that predicts the largest case."""
        return [
            "predict",
            f"input={table}",
            f"output={self.folder / 'predictions'}",
            f"single={checkpoint}",
        ]

    def _time(self, step: Step) -> float:
        """Run a command; returns its seconds.

        Raises:
            UserError: If it fails.
        """
        start_s = time.perf_counter()
        failure = run_and_get_failure(step)
        if failure:
            raise UserError(failure)
        return time.perf_counter() - start_s


def pick_cases(
    cases: Sequence[tuple[Case, LabelValues]], fingerprint: Fingerprint
) -> tuple[tuple[Case, LabelValues], list[tuple[Case, LabelValues]]]:
    """Pick the largest case, and a few cases of other patients to train on.

    Folds and sides of the table are removed.
    """
    plain_cases = []
    for case, label_values in cases:
        plain_cases.append((replace(case, split=None, fold=None, fold_sides=()), label_values))
    largest = next(pair for pair in plain_cases if pair[0].name == fingerprint.largest.name)
    others = [pair for pair in plain_cases if pair[0].patient != largest[0].patient]
    return largest, others[:NUM_TRAINED]


def median_of(run_dir: Path, column: str) -> float:
    """Median of a column of the history, without the first line, whose steps load and compile."""
    values = []
    for row in read_csv(run_dir / "history.csv"):
        if row.get(column):
            values.append(float(row[column]))
    return median(values[1:] or values)


def _tell_load(cpu_percent: float) -> None:
    """Say it where other programs took so much of the processor that the times are theirs too."""
    if cpu_percent < BUSY_PERCENT:
        say(
            f"configure: the timed steps got {cpu_percent:.0f} % of a processor core, so other "
            "programs keep this machine busy; on a free machine the same hours hold more steps: "
            "start configure again there"
        )
