"""Runs of `learning_curves.py`: one training, its prediction and its costs, by medseg or nnU-Net.

Each part of a run is a program of its own. Its facts and costs are kept in a file, by which a
command that was stopped knows that the part is done; see `finished`.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from benchmarks.instruments import ROOT, resident_bytes
from benchmarks.learning_curves_data import CASES, DATASET, HELD_OUT, RAW
from medseg.data.options import StageName
from medseg.errors import UserError
from medseg.io.atomic import replace_text
from medseg.io.tables import read_csv
from medseg.studies.command_steps import MEDSEG, last_checkpoint
from medseg.studies.configure.choose import TRAINING_SHARE

JOBS = ROOT / "benchmarks" / "learning_curves_nnunet.py"
# `configure` plans the hours of a cross-validation, which has at least two folds.
CONFIGURED_FOLDS = 2
# In fewer hours `configure` finds no time for the starts of its folds.
LEAST_HOURS = 0.15
# Steps of medseg that are timed, and lines in the history of each training.
TIMED_STEPS = 24
NUM_LINES = 6
# Largest number of epochs of nnU-Net, which lowers its learning rate once an epoch.
MOST_EPOCHS = 20
# Training iterations for each iteration of the validation; nnU-Net's epochs have 250 and 50.
ITERATIONS_PER_VALIDATION = 5
# A training is divided into more epochs as long as it keeps this share of the largest possible
# number of iterations.
LEAST_SHARE = 0.95
# Seconds between two readings of the memory.
SAMPLED_S = 0.5
GIB = 2**30
Row = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """Settings that all points of a folder share.

    Attributes:
        output: Folder of the study.
        task: Name of the task.
        held_out: Files of the channels of each held-out scan.
        threads: Threads of torch.
        fit_gib: Memory for `configure`, and for nnU-Net's planner in its small plan.
        nnunet: Python of nnU-Net's environment; not used where only medseg runs.
        trainer: Trainer in nnU-Net's registry.
        configuration: Configuration of nnU-Net's plans.
    """

    output: Path
    task: str
    held_out: Sequence[Sequence[str]]
    threads: int
    fit_gib: float
    nnunet: str
    trainer: str
    configuration: str

    @property
    def data(self) -> Path:
        """Folder of the files that both programs read."""
        return self.output / "data"

    @property
    def environment(self) -> dict[str, str]:
        """Environment of all programs: threads that do not wait busily, and no GPU."""
        return os.environ | {
            "OMP_NUM_THREADS": str(self.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "CUDA_VISIBLE_DEVICES": "",
        }


def finished(path: Path, make: Callable[[], Row]) -> Row:
    """Return the facts of a part of a run from its file; without a file, run the part first.

    The file is written last: a part that was stopped has none, and runs again.
    """
    if path.is_file():
        facts: Row = json.loads(path.read_text(encoding="utf-8"))
        return facts
    facts = make()
    replace_text(path, json.dumps(facts, indent=1))
    return facts


def fresh(folder: Path) -> Path:
    """Remove a folder that a stopped command left, and return its path.

    If the part continued in this folder, its costs would lack the work before the stop.
    """
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def run_measured(command: Sequence[str], log_file: Path, environment: Mapping[str, str]) -> Row:
    """Run a program to its end.

    Args:
        command: Program and arguments.
        log_file: Receives its output.
        environment: Environment variables.

    Returns:
        `cpu_s`, user and system time of the program and of the processes that it waited for, and
        `peak_gib`, the largest resident memory of all of them, see `resident_bytes`.

    Raises:
        RuntimeError: If the program fails, with the end of its output.
    """
    peak_bytes = 0
    with log_file.open("wb") as log:
        # In a session of its own: the program and its children can be ended together.
        program = subprocess.Popen(
            command,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
        )
        process = psutil.Process(program.pid)
        try:
            # `wait4` alone gives the costs of the program. WNOHANG: pid 0 as long as it runs.
            pid, status, usage = os.wait4(program.pid, os.WNOHANG)
            while pid == 0:
                peak_bytes = max(peak_bytes, resident_bytes(process))
                time.sleep(SAMPLED_S)
                pid, status, usage = os.wait4(program.pid, os.WNOHANG)
        except BaseException:
            # Also where this process is stopped: SIGTERM and Ctrl-C are no `Exception`.
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
            raise
    # `Popen` does not know that the process has been waited for, and would wait again.
    program.returncode = os.waitstatus_to_exitcode(status)
    if program.returncode:
        log_end = log_file.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise RuntimeError(f"{log_file} ends with exit code {program.returncode}:\n{log_end}")
    return {"cpu_s": usage.ru_utime + usage.ru_stime, "peak_gib": peak_bytes / GIB}


@dataclass(frozen=True)
class MedsegRuns:
    """Commands of medseg for one point.

    Attributes:
        study: The study.
        folder: Folder of the point; receives `predictions`.
        minutes: CPU minutes of the training.
    """

    study: Study
    folder: Path
    minutes: float

    def point(self) -> Row:
        """Configure, prepare, time, train and predict; returns the settings and the costs.

        The values of a cascade's two stages are joined by " + ".
        """
        configured = finished(self.folder / "configured.json", self.configure)
        plan = json.loads((self.folder / "plan" / "configure.json").read_text(encoding="utf-8"))
        settings = plan["settings"]
        prepared = finished(self.folder / "prepared.json", lambda: self.prepare(settings))
        trainings = []
        for setting, share in zip(settings, time_shares(plan), strict=True):
            trainings.append(self.train_within(setting["stage"], share * self.minutes))
        stages = [setting["stage"] for setting in settings]
        predicted = finished(self.folder / "predicted.json", lambda: self.predict(stages))
        cells = {
            "iterations": [training["steps"] for training in trainings],
            "batch_size": [setting["batch_size"] for setting in settings],
            "patch_size": [size_text(setting["patch_size"]) for setting in settings],
            "spacing_mm": [size_text(setting["spacing_mm"]) for setting in settings],
        }
        trained = {
            "cpu_s": sum(training["cpu_s"] for training in trainings),
            "peak_gib": max(training["peak_gib"] for training in trainings),
        }
        return {
            **{key: " + ".join(map(str, values)) for key, values in cells.items()},
            **costs_row(trained, configured["cpu_s"] + prepared["cpu_s"], predicted),
        }

    def train_within(self, stage: str, minutes: float) -> Row:
        """Time some steps of a stage, then train it for CPU minutes; returns `steps` and costs."""
        folder = self.folder / stage
        folder.mkdir(exist_ok=True)
        timed = finished(folder / "timed.json", lambda: self.train(stage, "timed", TIMED_STEPS))
        fixed_s, step_s = self.costs(stage, timed["cpu_s"])
        steps = steps_within(minutes, fixed_s, step_s)
        trained = finished(folder / "trained.json", lambda: self.train(stage, "run", steps))
        return {"steps": steps, **trained}

    def configure(self) -> Row:
        """Write the experiment for hours in which each training has its minutes.

        `configure` counts hours of a cross-validation, of which it plans `TRAINING_SHARE` for the
        trainings of all folds. The steps that it chooses are replaced by timed ones.
        """
        training_hours = self.minutes / 60 * CONFIGURED_FOLDS
        hours = max(LEAST_HOURS, training_hours / TRAINING_SHARE)
        return self._run(
            "configure",
            f"fit_gib={self.study.fit_gib:g}",
            f"hours={hours:g}",
            f"num_folds={CONFIGURED_FOLDS}",
            f"output={fresh(self.folder / 'plan')}",
            f"data.cases={self.study.data / CASES}",
            f"trainer.threads={self.study.threads}",
        )

    def prepare(self, settings: Sequence[Mapping[str, Any]]) -> Row:
        """Audit the cases and resample them to the spacing of each stage.

        Args:
            settings: Setting of each stage, with its spacing (z, y, x) in mm.
        """
        # `prepare` fills the cache for both stages of a cascade. A single stage takes the place of
        # the second one.
        places = ("coarse", "fine")[-len(settings) :]
        arguments = [] if "coarse" in places else ["~spacing@spacings.coarse"]
        for place, setting in zip(places, settings, strict=True):
            spacing_mm = list(setting["spacing_mm"])
            arguments.append(f"spacing@spacings.{place}=anisotropic")
            arguments.append(f"spacings.{place}.target_spacing_mm={spacing_mm}")
        return self._run(
            "prepare",
            f"data.cases={self.study.data / CASES}",
            f"data.cache={fresh(self.folder / 'cache')}",
            *arguments,
        )

    def train(self, stage: str, name: str, steps: int) -> Row:
        """Train a stage for a number of steps, with one validation at the end.

        Args:
            stage: Its name.
            name: Folder of the run inside that of the stage.
            steps: Number of steps.
        """
        # `configure` names the file of a single stage differently from those of a cascade.
        file_name = "experiment" if stage == StageName.single.value else stage
        return self._run(
            "train",
            f"experiment={self.folder / 'plan' / file_name}.yaml",
            f"data.cases={self.study.data / CASES}",
            f"data.cache={self.folder / 'cache'}",
            f"trainer.threads={self.study.threads}",
            f"steps={steps}",
            f"stage.validate_every={steps}",
            f"history_every={max(1, steps // NUM_LINES)}",
            f"hydra.run.dir={fresh(self.folder / stage / name)}",
        )

    def costs(self, stage: str, timed_cpu_s: float) -> tuple[float, float]:
        """Return the CPU seconds of a training beside its steps, and of a step with its samples.

        Args:
            stage: Name of the stage.
            timed_cpu_s: CPU seconds of the training whose steps were timed.
        """
        step_cpu_s = []
        for line in read_csv(self.folder / stage / "timed" / "history.csv"):
            if line["seconds_per_step"]:
                # 100 % is one core that is busy all the time. The workers of the loader count too.
                cores = float(line["cpu_percent"]) / 100
                step_cpu_s.append(float(line["seconds_per_step"]) * cores)
        # The first line is left out: its steps load and compile.
        step_s = median(step_cpu_s[1:])
        # The rest of the run: start and validation. Noise may make the difference negative.
        return max(0.0, timed_cpu_s - TIMED_STEPS * step_s), step_s

    def predict(self, stages: Sequence[str]) -> Row:
        """Predict the held-out scans with the weights of the last step of each stage."""
        checkpoints = []
        for stage in stages:
            checkpoints.append(f"{stage}={last_checkpoint(self.folder / stage / 'run')}")
        return self._run(
            "predict",
            f"input={self.study.data / HELD_OUT}",
            f"output={fresh(self.folder / 'predictions')}",
            *checkpoints,
            f"threads={self.study.threads}",
        )

    def _run(self, command: str, *arguments: str) -> Row:
        log_file = self.folder / f"{command}.log"
        return run_measured([*MEDSEG, command, *arguments], log_file, self.study.environment)


@dataclass(frozen=True)
class NnunetRuns:
    """Jobs of nnU-Net for one point; all points of a program share plan, cache and timed steps.

    Attributes:
        study: The study.
        folder: Folder of the point; receives `predictions`.
        minutes: CPU minutes of the training.
        gpu_memory_target: GB for the planner; None = the planner's default.
    """

    study: Study
    folder: Path
    minutes: float
    gpu_memory_target: float | None

    def point(self) -> Row:
        """Plan and time once for all points, train and predict; see `MedsegRuns.point`."""
        shared = self.folder.parent  # folder of the program
        planned = finished(shared / "planned.json", self.plan)
        timed = finished(shared / "timed.json", lambda: self._run("time", shared / "timed"))
        length = epochs_within(self.minutes, timed)
        trained = finished(self.folder / "trained.json", lambda: self.train(length))
        predicted = finished(self.folder / "predicted.json", self.predict)
        return {
            "iterations": trained["iterations"],
            "batch_size": planned["batch_size"],
            "patch_size": size_text(planned["patch_size"]),
            "spacing_mm": size_text(planned["spacing"]),
            **costs_row(trained, planned["cpu_s"], predicted),
        }

    def plan(self) -> Row:
        """Extract the fingerprint, plan and preprocess."""
        shared = self.folder.parent
        fresh(shared / "preprocessed")
        return self._run("plan", shared / "plan", gpu_memory_target=self.gpu_memory_target)

    def train(self, length: "Epochs") -> Row:
        """Train for a number of epochs and iterations."""
        return self._run("train", fresh(self.folder / "results"), **length._asdict())

    def predict(self) -> Row:
        """Predict the held-out scans with the last checkpoint."""
        return self._run(
            "predict",
            self.folder / "results",
            scans=self.study.held_out,
            output=str(fresh(self.folder / "predictions")),
        )

    def _run(self, job: str, results: Path, **entries: Any) -> Row:
        """Run a job in nnU-Net's environment.

        Args:
            job: Its name: `plan`, `time`, `train` or `predict`.
            results: nnU-Net's folder of trainings. The files of the job lie beside this folder.
            entries: Further entries of the job's file.

        Returns:
            Results and costs of the job.
        """
        folder = results.parent
        job_file = folder / f"{job}_job.json"
        facts_file = folder / f"{job}_facts.json"
        content = {
            "dataset": DATASET,
            "configuration": self.study.configuration,
            "trainer": self.study.trainer,
            "threads": self.study.threads,
            "facts": str(facts_file),
            **entries,
        }
        job_file.write_text(json.dumps(content), encoding="utf-8")
        folders = {
            "nnUNet_raw": self.study.data / RAW,
            "nnUNet_preprocessed": self.folder.parent / "preprocessed",
            "nnUNet_results": results,
        }
        environment = self.study.environment
        environment |= {name: str(path) for name, path in folders.items()}
        # Only the script's own folder may be on its path, and no module of medseg.
        environment.pop("PYTHONPATH", None)
        command = [self.study.nnunet, str(JOBS), job, str(job_file)]
        costs = run_measured(command, folder / f"{job}.log", environment)
        return {**json.loads(facts_file.read_text(encoding="utf-8")), **costs}


class Epochs(NamedTuple):
    """Length of a training of nnU-Net.

    Attributes:
        epochs: Epochs.
        iterations: Training iterations of each epoch.
        validations: Validation iterations of each epoch.
    """

    epochs: int
    iterations: int
    validations: int


def time_shares(plan: Mapping[str, Any]) -> list[float]:
    """Read the share of each stage in the time that `configure` plans for training steps.

    Args:
        plan: Content of its `configure.json`.

    Example:
        >>> stages = [{"step_s": 0.5}, {"step_s": 0.6}]
        >>> settings = [{"steps": 300, "batch_size": 1}, {"steps": 375, "batch_size": 2}]
        >>> time_shares({"settings": settings, "costs": {"stages": stages}})
        [0.25, 0.75]
    """
    seconds = []
    for setting, costs in zip(plan["settings"], plan["costs"]["stages"], strict=True):
        # `step_s` is that of a step of one patch.
        seconds.append(setting["steps"] * setting["batch_size"] * costs["step_s"])
    return [stage_s / sum(seconds) for stage_s in seconds]


def steps_within(minutes: float, fixed_s: float, step_s: float) -> int:
    """Count the steps that fit into CPU minutes.

    Args:
        minutes: CPU minutes of the training.
        fixed_s: CPU seconds of its start and its validation.
        step_s: CPU seconds of a step.

    Raises:
        UserError: If none fits.

    Example:
        >>> steps_within(5, 20.0, 0.5)
        560
    """
    steps = math.floor((60 * minutes - fixed_s) / step_s)
    # The message gives a tenth of a minute to the steps.
    if steps < 1:
        raise UserError(f"minutes={minutes:g}: no step fits; the least is {fixed_s / 60 + 0.1:.1f}")
    return steps


def epochs_within(minutes: float, timed: Mapping[str, float]) -> Epochs:
    """Choose the length of a training of nnU-Net, so that its schedule ends with its minutes.

    Each epoch validates and saves, so more epochs leave time for fewer iterations. The largest
    number of epochs is chosen that keeps the share LEAST_SHARE of the iterations.

    Args:
        minutes: CPU minutes of the training.
        timed: CPU seconds of its parts, see `learning_curves_nnunet.time_training`.

    Raises:
        UserError: If no iteration fits.

    Example:
        >>> timed = {"start_s": 20, "iteration_s": 2.0, "validation_s": 0.5, "epoch_s": 1.0}
        >>> epochs_within(5, timed)
        Epochs(epochs=14, iterations=9, validations=2)
    """
    room_s = 60 * minutes - timed["start_s"]
    lengths = []
    for epochs in range(1, MOST_EPOCHS + 1):
        iterations = iterations_within(room_s / epochs, timed)
        if iterations:
            validations = math.ceil(iterations / ITERATIONS_PER_VALIDATION)
            lengths.append(Epochs(epochs, iterations, validations))
    if not lengths:
        raise UserError(f"minutes={minutes:g}: no iteration of nnU-Net fits; give more minutes")
    most = max(length.epochs * length.iterations for length in lengths)
    # In the order of epochs, so the last length that has enough iterations has the most epochs.
    chosen = lengths[0]
    for length in lengths:
        if length.epochs * length.iterations >= LEAST_SHARE * most:
            chosen = length
    return chosen


def iterations_within(epoch_s: float, timed: Mapping[str, float]) -> int:
    """Count the iterations that fit into an epoch of some CPU seconds; 0 if none fits.

    Each group of `ITERATIONS_PER_VALIDATION` iterations, the last one also if it is incomplete, has
    one iteration of the validation.
    """
    iterations = 0
    # The cost of an epoch with one iteration more than `iterations`.
    cost_s = timed["epoch_s"] + timed["validation_s"] + timed["iteration_s"]
    while cost_s <= epoch_s:
        iterations += 1
        cost_s += timed["iteration_s"]
        if iterations % ITERATIONS_PER_VALIDATION == 0:
            cost_s += timed["validation_s"]
    return iterations


def costs_row(trained: Row, prepare_cpu_s: float, predicted: Row) -> Row:
    """Columns of the costs of a point.

    Args:
        trained: Costs of the training, see `run_measured`.
        prepare_cpu_s: CPU seconds of the preparation.
        predicted: Costs of the prediction.
    """
    return {
        "cpu_minutes": trained["cpu_s"] / 60,
        "peak_gib": trained["peak_gib"],
        "prepare_cpu_minutes": prepare_cpu_s / 60,
        "predict_cpu_minutes": predicted["cpu_s"] / 60,
        "predict_peak_gib": predicted["peak_gib"],
    }


def size_text(sizes: Sequence[float]) -> str:
    """Write a patch or a spacing, (z, y, x).

    Example:
        >>> size_text([3.0, 0.9765625, 0.9765625])
        '3×0.977×0.977'
    """
    return "×".join(f"{size:.3g}" for size in sizes)
