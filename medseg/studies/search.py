"""Search: trials of a space, each a run of its own; Optuna chooses their values and ends bad ones early.

The trials are an Optuna study in a journal file, from which several processes take trials. Optuna's
own recovery of the trials of killed processes (heartbeats) needs a database and repeats a trial
under another number. Here the process that runs a trial holds its lock: a running trial whose lock
is free belongs to a process that was killed, and is resumed in its own folder.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import hydra
import optuna
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.pruners import MedianPruner, NopPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState

from medseg.config.check import explain, to_config, to_typed
from medseg.config.overrides import text_of
from medseg.config.search import (
    Objective,
    ParameterConfig,
    ParameterType,
    Pruner,
    Sampler,
    SearchConfig,
    SweepConfig,
)
from medseg.console import say
from medseg.errors import EXIT_FAILED, EXIT_RESUME, UserError, require
from medseg.io.atomic import create_text, locked, replace_text
from medseg.io.text import read_yaml_text
from medseg.report.compare import METRICS
from medseg.runs.folder import CONFIG_FILE, open_run, read_summary, settle, status_of_run, write_end
from medseg.runs.past_runs import HISTORY_FILE, STUDY_FILE, read_history, read_run, write_report
from medseg.runs.processes import check_start, exit_if_asked, run_in_process
from medseg.runs.signature import decisive, flat, plain, signature
from medseg.runs.status import FAILURES, Status, status_of
from medseg.runs.sweeps import Job
from medseg.studies.recipes import key_of, train_arguments
from medseg.targets import targets_first
from medseg.training.optimisation import make_scheduled_optimizer
from medseg.training.options import TrainConfig
from medseg.training.preemption import STOP

SEARCH_FILE = "search.yaml"
JOURNAL_FILE = "study.journal"
STUDY_LOCK_FILE = "study.lock"
TRIAL_LOCK_FILE = "trial.lock"
# Keys that may change when a search is resumed.
OPEN_KEYS = frozenset(
    {"sweep.num_trials", "sweep.pruner", "sweep.prune_after_trials", "sweep.prune_after_steps"}
)
ENDED = FAILURES | {Status.finished, Status.pruned}
DIRECTIONS: dict[Objective, Literal["maximize", "minimize"]] = {
    Objective.val_dice: "maximize",
    Objective.peak_gib: "minimize",
    Objective.seconds_per_step: "minimize",
}
# With fewer results an importance is noise.
MIN_FOR_IMPORTANCES = 8

Compose = Callable[[Mapping[str, str]], DictConfig]
"""Composes `train` with the values of a trial."""


def search(config: SearchConfig) -> int:
    """Run trials until there are `sweep.num_trials`; a search that is started again in its folder is resumed.

    Returns:
        0; 1 if no trial has a result; `EXIT_RESUME` if the system stopped the search.
    """
    hydra_config = HydraConfig.get()
    require(
        hydra_config.mode is not RunMode.MULTIRUN,
        "search starts its trials by itself; leave out -m",
    )
    require(
        config.resume is None and not config.retry_failed,
        "search resumes its trials by itself; leave out resume and retry_failed",
    )
    STOP.install()
    settle(config)
    folder = Path(hydra_config.runtime.output_dir).absolute()
    compose = composer(hydra_config.overrides.task, config.sweep)
    check_space(config.sweep, compose)
    open_folder(folder, config)
    exit_if_asked()  # before a trial is drawn; later the job of a trial is asked to stop
    journal = SearchJournal(folder, config.sweep)
    journal.begin_with({**hydra_config.runtime.choices, **flat(plain(config))})
    for trial, overrides in journal.trials():
        status = run_trial(journal, trial, overrides, compose)
        replace_text(folder / STUDY_FILE, json.dumps(journal.summary(), indent=1))
        if status is Status.interrupted:
            return EXIT_RESUME
    comparison = write_report(folder, folder, num_pictures=24)
    best = journal.summary()["best"]
    print(f"best: {', '.join(f'trial {number}' for number in best) or 'none has a result'}")
    if len(best) == 1 and comparison.verdict:
        print(comparison.verdict)
    return 0 if best else EXIT_FAILED


def composer(given: Sequence[str], sweep: SweepConfig) -> Compose:
    """Make a function that composes `train` from the arguments of a search and the values of a trial.

    Args:
        given: Arguments of the search; those of `sweep` and of searched keys are left out.
        sweep: The search.
    """
    own = [
        argument
        for argument in train_arguments(given, SearchConfig)
        if key_of(argument) not in sweep.space
    ]

    def compose(values: Mapping[str, str]) -> DictConfig:
        return hydra.compose(
            "train", targets_first([*own, *(f"{key}={value}" for key, value in values.items())])
        )

    return compose


def check_space(sweep: SweepConfig, compose: Compose) -> None:
    """Refuse a space with a key or a value that `train` does not accept. Combinations of values are checked trial by trial.

    Raises:
        UserError: Naming the key, the value and the cure.
    """
    ends = {
        # `:.12g` writes whole numbers without a decimal point, which integer keys do not accept.
        key: list(map(text_of, parameter.choices or ()))
        or [f"{parameter.low:.12g}", f"{parameter.high:.12g}"]
        for key, parameter in sweep.space.items()
    }
    for number in range(max(map(len, ends.values()))):
        values = {key: texts[number % len(texts)] for key, texts in ends.items()}
        try:
            make_scheduled_optimizer(
                to_typed(compose({**values, "run_dir": "none"}), TrainConfig)
            )  # binds the arguments
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(f"sweep.space: {explain(error, compose({}))}") from error
        except UserError as error:
            raise UserError(f"sweep.space: {error}") from error


def open_folder(folder: Path, config: SearchConfig) -> None:
    """Write the configuration of a search into a new folder, or compare it with that of the folder's search.

    Raises:
        UserError: If the folder belongs to another search.
    """
    path = folder / SEARCH_FILE
    if create_text(path, OmegaConf.to_yaml(OmegaConf.create(plain(config)))):
        return
    earlier = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(read_yaml_text(path))))
    saved, given = decisive(earlier), decisive(plain(config))
    changes = [
        f"{key}: {saved.get(key)} then, {given.get(key)} now"
        for key in sorted((saved.keys() | given.keys()) - OPEN_KEYS)
        if saved.get(key) != given.get(key)
    ]
    require(
        not changes,
        f"{folder} holds another search, which differs in {'; '.join(changes[:5])}; choose another hydra.run.dir or sweep.name",
    )


def run_trial(
    journal: "SearchJournal", trial: Trial, overrides: dict[str, str], compose: Compose
) -> Status:
    """Run or resume a trial, and record its status in its folder and in the journal."""
    job_dir = journal.folder / str(trial.number)
    job = Job(trial.number, Status.running, "", overrides, "")
    say(f"trial {trial.number}: " + " ".join(f"{key}={value}" for key, value in overrides.items()))
    status, message = Status.interrupted, ""  # the record if this process is killed
    try:
        config = to_config(compose({**overrides, "run_dir": text_of(str(job_dir))}), TrainConfig)
        settle(config)
        job = replace(job, signature=signature(plain(config)))
        job.write(job_dir)
        status, message = run_job(trial, job_dir, config)
    except UserError as error:
        status, message = Status.refused, str(error)
    finally:
        replace(job, status=status, message=message).write(job_dir)
    values = (
        objective_values(journal.sweep.objectives, job_dir) if status is Status.finished else []
    )
    if status is not Status.interrupted:
        journal.close(trial.number, values or None, is_defect=status is Status.failed)
    say(
        f"trial {trial.number} {status.value.replace('_', ' ')}: {message or ', '.join(f'{value:.4g}' for value in values)}"
    )
    return status


def run_job(trial: Trial, job_dir: Path, config: TrainConfig) -> tuple[Status, str]:
    """Run a trial to its end, or until it is pruned; return its status and the reason."""
    if (job_dir / CONFIG_FILE).is_file():
        status = status_of_run(job_dir)
        if status in ENDED:  # the search was killed before it recorded the end
            return status, read_summary(job_dir).get("message", "")
        config.resume = str(job_dir)
    check_start(config.trainer, config.resume)
    run_dir, reason = open_run(config), ""

    def is_behind() -> bool:
        nonlocal reason
        reason = report_validations(trial, run_dir / HISTORY_FILE)
        return bool(reason)

    code = run_in_process(config, is_behind)
    if code == 0:
        report_validations(
            trial, run_dir / HISTORY_FILE
        )  # later trials are compared with the last validations too
    elif reason:
        write_end(run_dir, Status.pruned, reason)
        return Status.pruned, reason
    return status_of(code), read_summary(run_dir).get("message", "")


def report_validations(trial: Trial, history: Path) -> str:
    """Add the validations of a run so far to the journal; those of an earlier report may be among them.

    Returns:
        Why the trial should end now; "" if it should continue, and always with two objectives.
    """
    if len(trial.study.directions) > 1:
        return ""
    validations = [
        (int(line["step"]), line["val_dice"])
        for line in read_history(history)
        if line.keys() >= {"step", "val_dice"}
    ]
    last_step = trial.study.get_trials(deepcopy=False)[trial.number].last_step
    new = [(step, dice) for step, dice in validations if last_step is None or step > last_step]
    for step, dice in new:
        trial.report(dice, step)
    if not new or not trial.should_prune():
        return ""
    best = max(dice for _, dice in validations)
    return f"its best Dice by step {new[-1][0]}, {best:.4f}, lies below the median of the earlier trials there"


def objective_values(objectives: Sequence[Objective], job_dir: Path) -> list[float]:
    """Read the results of a finished run, one per objective.

    Raises:
        UserError: If a result is missing, as it then is in every trial.
    """
    run = read_run(job_dir, job_dir.parent)
    found = {metric.key: metric.of(run) for metric in METRICS}
    values = [value for objective in objectives if (value := found[objective.value]) is not None]
    require(
        len(values) == len(objectives),
        f"{job_dir} finished without {', '.join(objectives)}: are there validation cases?",
    )
    return values


class SearchJournal:
    """Trials of a search, in `study.journal`.

    Several processes may share a journal. The process that runs a trial holds its lock, so a
    running trial whose lock is free belongs to a process that was killed, and is run again.

    Args:
        folder: Folder of the search.
        sweep: What is searched.
    """

    def __init__(self, folder: Path, sweep: SweepConfig) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder = folder
        self.sweep = sweep
        pruner = MedianPruner(
            n_startup_trials=sweep.prune_after_trials, n_warmup_steps=sweep.prune_after_steps
        )
        self.study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL_FILE))),
            study_name="search",
            directions=[DIRECTIONS[objective] for objective in sweep.objectives],
            pruner=NopPruner() if sweep.pruner is Pruner.none else pruner,
            load_if_exists=True,
        )

    def begin_with(self, values: Mapping[str, Any]) -> None:
        """Make the experiment itself the first trial, as far as its values lie in the space.

        Args:
            values: Key or group to its value in the experiment.
        """
        with locked(self.folder / STUDY_LOCK_FILE):
            if not self.study.get_trials(deepcopy=False):
                known = {
                    key: _known_value(parameter, values.get(key))
                    for key, parameter in self.sweep.space.items()
                }
                self.study.enqueue_trial(
                    {key: value for key, value in known.items() if value is not None}
                )

    def trials(self) -> Iterator[tuple[Trial, dict[str, str]]]:
        """Yield trials that only this process may run, each with its overrides: first those of killed processes, then new ones."""
        while True:
            with ExitStack() as lock:
                found = self._next(lock)
                if found is None:
                    return
                yield found

    def _next(self, lock: ExitStack) -> tuple[Trial, dict[str, str]] | None:
        """Choose the next trial and hold its lock; None if the others run or there are `num_trials`."""
        with locked(self.folder / STUDY_LOCK_FILE):
            trials = self.study.get_trials(deepcopy=False)
            running = [frozen.number for frozen in trials if frozen.state is TrialState.RUNNING]
            begun = sum(frozen.state is not TrialState.WAITING for frozen in trials)
            for number in [*running, begun] if begun < self.sweep.num_trials else running:
                folder = self.folder / str(number)
                folder.mkdir(exist_ok=True)
                if lock.enter_context(locked(folder / TRIAL_LOCK_FILE, wait_s=0)):
                    # The values of a trial depend on its number and on the trials before it, not on
                    # interruptions.
                    seed = (
                        self.sweep.seed * 100_003 + number
                    ) % 2**32  # what NumPy's generators take
                    self.study.sampler = (
                        RandomSampler(seed=seed)
                        if self.sweep.sampler is Sampler.random
                        # With `constant_liar` running trials repel new ones.
                        else TPESampler(
                            seed=seed, n_startup_trials=self.sweep.num_random, constant_liar=True
                        )
                    )
                    trial = (
                        self.study.ask()
                        if number == begun
                        else Trial(self.study, trials[number]._trial_id)
                    )
                    return trial, {
                        key: _suggest(trial, key, parameter)
                        for key, parameter in self.sweep.space.items()
                    }
        return None

    def close(
        self, number: int, values: Sequence[float] | None, *, is_defect: bool = False
    ) -> None:
        """Record the end of a trial.

        Args:
            number: Number of the trial.
            values: One per objective. None = no result: the sampler ranks the trial below all that
                have one, and so avoids what does not fit into memory.
            is_defect: Whether the trial ended for a reason that has nothing to do with its values;
                the sampler then ignores it.
        """
        state = (
            TrialState.COMPLETE
            if values is not None
            else TrialState.FAIL
            if is_defect
            else TrialState.PRUNED
        )
        self.study.tell(number, values=values, state=state)

    def summary(self) -> dict[str, Any]:
        """Summarise the search for its report: space, best trials, and the importance of each key."""
        trials = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        importances: dict[str, float] = {}
        if len(self.sweep.objectives) == 1 and len(trials) >= MIN_FOR_IMPORTANCES:
            # Share of each key in what distinguishes the best trials (PED-ANOVA, Watanabe et al.,
            # IJCAI 2023).
            importances = get_param_importances(self.study, evaluator=PedAnovaImportanceEvaluator())
        return {
            "name": self.sweep.name,
            "objectives": {
                objective.value: DIRECTIONS[objective] for objective in self.sweep.objectives
            },
            "space": {key: range_text(parameter) for key, parameter in self.sweep.space.items()},
            "num_trials": self.sweep.num_trials,
            "best": [trial.number for trial in self.study.best_trials] if trials else [],
            "importances": {key: round(float(share), 4) for key, share in importances.items()},
        }


def range_text(parameter: ParameterConfig) -> str:
    """Describe the values of a searched key for people.

    Example:
        >>> range_text(ParameterConfig(ParameterType.float, low=1e-4, high=0.01, log=True))
        '0.0001 … 0.01, logarithmic'
        >>> range_text(ParameterConfig(ParameterType.choice, choices=["plain", "amp"]))
        'plain, amp'
    """
    if parameter.choices is not None:
        return ", ".join(text_of(choice) for choice in parameter.choices)
    more = (
        ", logarithmic"
        if parameter.log
        else f", in steps of {parameter.step:g}"
        if parameter.step
        else ""
    )
    return f"{parameter.low:g} … {parameter.high:g}{more}"


def _suggest(trial: Trial, key: str, parameter: ParameterConfig) -> str:
    """The value of a trial: drawn at the first call, then always the same."""
    if parameter.choices is not None:
        return trial.suggest_categorical(key, [text_of(choice) for choice in parameter.choices])
    low, high = cast(float, parameter.low), cast(float, parameter.high)
    if parameter.type is ParameterType.int:
        return str(
            trial.suggest_int(
                key, int(low), int(high), step=int(parameter.step or 1), log=parameter.log
            )
        )
    return f"{trial.suggest_float(key, low, high, step=parameter.step, log=parameter.log):.12g}"  # 0.6, not 0.6000000000000001


def _known_value(parameter: ParameterConfig, value: Any) -> str | float | None:
    """The value of the experiment as the study stores it; None if it lies outside the space."""
    if parameter.choices is not None:
        return text_of(value) if text_of(value) in map(text_of, parameter.choices) else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not cast(float, parameter.low) <= value <= cast(float, parameter.high):
        return None
    return int(value) if parameter.type is ParameterType.int else float(value)
