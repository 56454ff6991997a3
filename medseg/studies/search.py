"""The `search` command: searches values of keys by trials, each a training in its own run folder.

Optuna draws the values of each trial and decides which trials end early (pruning). The trials are
an Optuna study in a journal file, which several processes may share. Optuna's own recovery of the
trials of killed processes (heartbeats) needs a database and repeats a trial under another number.
So here the process that runs a trial locks a file: if a trial is marked as running while its lock
is free, its process was killed, and the trial is resumed in its folder.
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
from optuna.pruners import BasePruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
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
from medseg.errors import EXIT_FAILED, EXIT_RESUME, UserError
from medseg.io.atomic import create_text, locked, replace_text
from medseg.io.text import read_yaml_text
from medseg.report.compare import METRICS
from medseg.runs.folder import (
    CONFIG_FILE,
    open_run,
    read_summary,
    resolve_paths_and_spacing,
    status_of_run,
    write_end,
)
from medseg.runs.past_runs import HISTORY_FILE, STUDY_FILE, read_history, read_run, write_report
from medseg.runs.processes import check_start, exit_if_asked, run_in_process
from medseg.runs.signature import (
    changed_keys,
    decisive,
    describe_changes,
    flat,
    plain,
    signature,
)
from medseg.runs.status import FAILURES, Status, status_of
from medseg.runs.sweeps import Job
from medseg.studies.train_arguments import arguments_for_train, key_of
from medseg.targets import targets_first
from medseg.training.optimisation import make_scheduled_optimizer
from medseg.training.options import TrainConfig
from medseg.training.preemption import STOP

# Files in the folder of the search, and the lock file in the folder of each trial.
SEARCH_FILE = "search.yaml"
JOURNAL_FILE = "study.journal"
STUDY_LOCK_FILE = "study.lock"
TRIAL_LOCK_FILE = "trial.lock"
# Keys whose value may change when a search is resumed.
OPEN_KEYS = frozenset(
    {"sweep.num_trials", "sweep.pruner", "sweep.prune_after_trials", "sweep.prune_after_steps"}
)
# Statuses of a trial that has ended and is not resumed.
ENDED = FAILURES | {Status.finished, Status.pruned}
DIRECTIONS: dict[Objective, Literal["maximize", "minimize"]] = {
    Objective.val_dice: "maximize",
    Objective.peak_gib: "minimize",
    Objective.seconds_per_step: "minimize",
}
# Fewest trials with a result for importances of keys; with fewer, importances are noise.
MIN_FOR_IMPORTANCES = 8

# Function that composes the configuration of `train` from the values of a trial (key to text).
Compose = Callable[[Mapping[str, str]], DictConfig]


def search(config: SearchConfig) -> int:
    """Run trials until there are `sweep.num_trials`; a search in an existing folder is resumed.

    Returns:
        Exit code: 0; 1 if no trial has a result; `EXIT_RESUME` if the system stopped the search.

    Raises:
        UserError: If an argument does not suit a search.
    """
    hydra_config = HydraConfig.get()
    if hydra_config.mode is RunMode.MULTIRUN:
        raise UserError("search starts its trials by itself; leave out -m")
    if config.resume is not None or config.retry_failed:
        raise UserError("search resumes its trials by itself; leave out resume and retry_failed")
    STOP.install()
    resolve_paths_and_spacing(config)
    folder = Path(hydra_config.runtime.output_dir).absolute()
    compose = composer(hydra_config.overrides.task, config.sweep)
    check_space(config.sweep, compose)
    open_folder(folder, config)
    # Until here a stop signal has only set a flag, which is checked now. While a trial runs,
    # signals are forwarded to its process.
    exit_if_asked()
    journal = SearchJournal(folder, config.sweep)
    # The space may contain groups and keys, so the user's choices of both are joined.
    journal.begin_with({**hydra_config.runtime.choices, **flat(plain(config))})
    for trial, overrides in journal.trials():
        status = run_trial(journal, trial, overrides, compose)
        replace_text(folder / STUDY_FILE, json.dumps(journal.summary(), indent=1))
        if status is Status.interrupted:
            return EXIT_RESUME
    comparison = write_report(folder, folder, num_pictures=24)
    best = journal.summary()["best"]
    best_trials = ", ".join(f"trial {number}" for number in best)
    print(f"best: {best_trials or 'none has a result'}")
    if len(best) == 1 and comparison.verdict:
        print(comparison.verdict)
    return 0 if best else EXIT_FAILED


def composer(arguments: Sequence[str], sweep: SweepConfig) -> Compose:
    """Make a function that composes `train` with the values of a trial.

    Args:
        arguments: Arguments of the search; those of `sweep` and of searched keys are left out.
        sweep: Has the space, that is, the searched keys.
    """
    common = []
    for argument in arguments_for_train(arguments, SearchConfig):
        # The user's value of a searched key is used in the first trial only, see `begin_with`.
        if key_of(argument) not in sweep.space:
            common.append(argument)

    def compose(values: Mapping[str, str]) -> DictConfig:
        trial_arguments = [f"{key}={value}" for key, value in values.items()]
        return hydra.compose("train", targets_first([*common, *trial_arguments]))

    return compose


def check_space(sweep: SweepConfig, compose: Compose) -> None:
    """Refuse a space with a key or a value that `train` does not accept.

    Combinations of values are checked trial by trial.

    Raises:
        UserError: Names the key, the value and what to do.
    """
    values_of_key = {key: _checked_values(parameter) for key, parameter in sweep.space.items()}
    # Check number n takes the n-th value of each key. A key with fewer values starts again from its
    # first value, so that every value of every key is checked at least once.
    num_checks = max(map(len, values_of_key.values()))
    for number in range(num_checks):
        trial_values = {key: values[number % len(values)] for key, values in values_of_key.items()}
        try:
            config = to_typed(compose({**trial_values, "run_dir": "none"}), TrainConfig)
            # Built only to check the arguments of optimiser and schedule.
            make_scheduled_optimizer(config)
        except (HydraException, OmegaConfBaseException) as error:
            # `compose({})` has all valid keys, so that the message can suggest a similar key.
            raise UserError(f"sweep.space: {explain(error, compose({}))}") from error
        except UserError as error:
            raise UserError(f"sweep.space: {error}") from error


def _checked_values(parameter: ParameterConfig) -> list[str]:
    """List the values that stand for a parameter: all choices, or both ends of the range."""
    if parameter.choices:
        return [text_of(choice) for choice in parameter.choices]
    # Integer keys accept no decimal point, and `:.12g` writes whole numbers without one.
    return [f"{parameter.low:.12g}", f"{parameter.high:.12g}"]


def open_folder(folder: Path, config: SearchConfig) -> None:
    """Write the configuration of a search into a new folder, or compare it with the saved one.

    Raises:
        UserError: If the folder belongs to another search.
    """
    path = folder / SEARCH_FILE
    # If two processes start at the same moment, one creates the file and the other compares.
    if create_text(path, OmegaConf.to_yaml(OmegaConf.create(plain(config)))):
        return
    saved_config = OmegaConf.to_container(OmegaConf.create(read_yaml_text(path)))
    # `decisive` drops keys that cannot change a result, such as the names of folders.
    saved = decisive(cast(dict[str, Any], saved_config))
    current = decisive(plain(config))
    keys = [key for key in changed_keys(saved, current) if key not in OPEN_KEYS]
    if keys:
        changes = describe_changes(keys, saved, current)
        raise UserError(
            f"{folder} holds another search, which differs in {changes}; "
            "choose another hydra.run.dir or sweep.name"
        )


def run_trial(
    journal: "SearchJournal", trial: Trial, overrides: dict[str, str], compose: Compose
) -> Status:
    """Run or resume a trial, and record its status in its folder and in the journal.

    Args:
        journal: Journal of the search.
        trial: The trial, whose lock this process holds.
        overrides: Key to the value of this trial.
        compose: From `composer`.
    """
    job_dir = journal.folder / str(trial.number)
    job = Job(
        number=trial.number,
        status=Status.running,
        message="",
        overrides=overrides,
        signature="",
    )
    texts = [f"{key}={value}" for key, value in overrides.items()]
    say(f"trial {trial.number}: {' '.join(texts)}")
    # Written in `finally` if the trial ends by an exception other than `UserError`, such as
    # SystemExit after a stop signal.
    status, message = Status.interrupted, ""
    try:
        config = to_config(compose({**overrides, "run_dir": text_of(str(job_dir))}), TrainConfig)
        resolve_paths_and_spacing(config)
        job = replace(job, signature=signature(plain(config)))
        # Status `running`, until the end of the trial is written below.
        job.write(job_dir)
        status, message = run_job(trial, job_dir, config)
    except UserError as error:
        status, message = Status.refused, str(error)
    finally:
        replace(job, status=status, message=message).write(job_dir)
    result = message
    values: list[float] | None = None
    if status is Status.finished:
        values = objective_values(journal.sweep.objectives, job_dir)
        result = ", ".join(f"{value:.4g}" for value in values)
    # An interrupted trial stays `RUNNING` in the journal, so that it is resumed.
    if status is not Status.interrupted:
        journal.close(trial.number, values, is_defect=status is Status.failed)
    say(f"trial {trial.number} {status.value.replace('_', ' ')}: {result}")
    return status


def run_job(trial: Trial, job_dir: Path, config: TrainConfig) -> tuple[Status, str]:
    """Run or resume the training of a trial until it ends or is pruned.

    Returns:
        Status of the trial, and the reason of its end; the reason is empty if it finished.
    """
    if (job_dir / CONFIG_FILE).is_file():
        status = status_of_run(job_dir)
        # The training ended earlier, but the search was killed before it recorded the end.
        if status in ENDED:
            return status, read_summary(job_dir).get("message", "")
        config.resume = str(job_dir)
    check_start(config.trainer, config.resume)
    run_dir = open_run(config)
    prune_reason = ""

    def is_behind() -> bool:
        """Whether the trial should end now; `run_in_process` polls this until it is True."""
        nonlocal prune_reason
        prune_reason = report_validations(trial, run_dir / HISTORY_FILE)
        return prune_reason != ""

    exit_code = run_in_process(config, is_behind)
    # A training that has finished is not pruned, even if it was asked to stop at its last step.
    if exit_code == 0:
        # Report the validations after the last call of `is_behind`: the pruner compares later
        # trials with them too.
        report_validations(trial, run_dir / HISTORY_FILE)
    elif prune_reason:
        write_end(run_dir, Status.pruned, prune_reason)
        return Status.pruned, prune_reason
    return status_of(exit_code), read_summary(run_dir).get("message", "")


def report_validations(trial: Trial, history: Path) -> str:
    """Report the validations of a run that the journal lacks, and ask the pruner.

    With two objectives nothing is reported or pruned: Optuna prunes by a single objective.

    Returns:
        Reason why the trial should end now; "" if it should continue.
    """
    if len(trial.study.directions) > 1:
        return ""
    # Step of the last reported validation, also if an earlier process reported it.
    last_step = trial.study.get_trials(deepcopy=False)[trial.number].last_step
    dices: list[float] = []
    new_steps: list[int] = []
    for line in read_history(history):
        # Skip lines of losses alone, which are no validations.
        if not line.keys() >= {"step", "val_dice"}:
            continue
        step = int(line["step"])
        dices.append(line["val_dice"])
        if last_step is None or step > last_step:
            new_steps.append(step)
            trial.report(line["val_dice"], step)
    if not new_steps or not trial.should_prune():
        return ""
    return (
        f"its best Dice by step {new_steps[-1]}, {max(dices):.4f}, "
        "lies below the median of the earlier trials there"
    )


def objective_values(objectives: Sequence[Objective], job_dir: Path) -> list[float]:
    """Read the results of a finished run, one per objective.

    Raises:
        UserError: If a result is missing. This ends the search, as it would miss in every trial.
    """
    run = read_run(job_dir, job_dir.parent)
    results = {metric.key: metric.read(run) for metric in METRICS}
    values = []
    for objective in objectives:
        value = results[objective.value]
        if value is None:
            raise UserError(
                f"{job_dir} finished without {', '.join(objectives)}: are there validation cases?"
            )
        values.append(value)
    return values


class SearchJournal:
    """Trials of a search, in `study.journal`, which several processes may share.

    Args:
        folder: Folder of the search.
        sweep: Space, objectives, sampler and pruner of the search.
    """

    def __init__(self, folder: Path, sweep: SweepConfig) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder = folder
        self.sweep = sweep
        pruner: BasePruner = NopPruner()
        if sweep.pruner is not Pruner.none:
            pruner = MedianPruner(
                n_startup_trials=sweep.prune_after_trials, n_warmup_steps=sweep.prune_after_steps
            )
        self.study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL_FILE))),
            study_name="search",
            directions=[DIRECTIONS[objective] for objective in sweep.objectives],
            pruner=pruner,
            load_if_exists=True,
        )

    def begin_with(self, values: Mapping[str, Any]) -> None:
        """Queue a first trial with the user's own value of each searched key.

        If that value lies outside the range or choices of the key, the sampler draws a value.

        Args:
            values: Key or group to its value in the user's configuration.
        """
        with locked(self.folder / STUDY_LOCK_FILE):
            # Another process, or an earlier start of the search, has queued the first trial.
            if self.study.get_trials(deepcopy=False):
                return
            first_values = {}
            for key, parameter in self.sweep.space.items():
                value = _value_in_space(parameter, values.get(key))
                if value is not None:
                    first_values[key] = value
            self.study.enqueue_trial(first_values)

    def trials(self) -> Iterator[tuple[Trial, dict[str, str]]]:
        """Yield trials that this process has locked, each with its overrides.

        Unfinished trials of killed processes come first, then new trials.
        """
        while True:
            # The generator pauses at `yield` inside the block, so the lock is held until the caller
            # asks for the next trial.
            with ExitStack() as trial_lock:
                trial_and_overrides = self._next(trial_lock)
                if trial_and_overrides is None:
                    return
                yield trial_and_overrides

    def _next(self, trial_lock: ExitStack) -> tuple[Trial, dict[str, str]] | None:
        """Choose the next trial, take its lock, and draw its values.

        Args:
            trial_lock: Receives the lock of the trial.

        Returns:
            The trial and its overrides (key to value as text); None if all of `num_trials` have
            begun and the unfinished trials are run by other processes.
        """
        # The study stays locked while values are drawn: they depend on the trials that have begun.
        with locked(self.folder / STUDY_LOCK_FILE):
            trials = self.study.get_trials(deepcopy=False)
            # Trials are numbered from 0 in the order in which they begin, so the next number is the
            # number of trials that have begun. The queued trial of `begin_with` has not begun.
            next_number = sum(trial.state is not TrialState.WAITING for trial in trials)
            numbers = [trial.number for trial in trials if trial.state is TrialState.RUNNING]
            if next_number < self.sweep.num_trials:
                numbers.append(next_number)
            for number in numbers:
                folder = self.folder / str(number)
                folder.mkdir(exist_ok=True)
                # If the lock is taken, a living process runs this trial.
                if not trial_lock.enter_context(locked(folder / TRIAL_LOCK_FILE, wait_s=0)):
                    continue
                self.study.sampler = self._make_sampler(number)
                if number == next_number:
                    trial = self.study.ask()
                else:
                    # Optuna has no public function that resumes a running trial.
                    trial = Trial(self.study, trials[number]._trial_id)
                overrides = {}
                for key, parameter in self.sweep.space.items():
                    overrides[key] = _suggest(trial, key, parameter)
                return trial, overrides
        return None

    def _make_sampler(self, number: int) -> BaseSampler:
        """Make the sampler of one trial.

        Each trial has its own seed, so that its values depend on its number and the trials before
        it, but not on interruptions.
        """
        # The factor exceeds any number of trials, so that trials of searches with different seeds
        # never share a seed. NumPy's seeds are below 2**32.
        seed = (self.sweep.seed * 100_003 + number) % 2**32
        if self.sweep.sampler is Sampler.random:
            return RandomSampler(seed=seed)
        # `constant_liar` counts running trials as bad ones, so that new trials keep away from them.
        return TPESampler(seed=seed, n_startup_trials=self.sweep.num_random, constant_liar=True)

    def close(
        self, number: int, values: Sequence[float] | None, *, is_defect: bool = False
    ) -> None:
        """Record the end of a trial.

        Args:
            number: Number of the trial.
            values: Result of each objective; None = no result.
            is_defect: Whether the trial ended for a reason unrelated to its drawn values.
        """
        if values is not None:
            state = TrialState.COMPLETE
        elif is_defect:
            # The sampler ignores a failed trial.
            state = TrialState.FAIL
        else:
            # The trial was pruned or refused, ran out of memory, or diverged. The sampler ranks it
            # below all trials with a result, and so avoids similar values.
            state = TrialState.PRUNED
        self.study.tell(number, values=values, state=state)

    def summary(self) -> dict[str, Any]:
        """Summarise the search for its report: space, best trials, importance of each key."""
        trials = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        importances: dict[str, float] = {}
        if len(self.sweep.objectives) == 1 and len(trials) >= MIN_FOR_IMPORTANCES:
            # Importance of each key for being among the best trials (PED-ANOVA, Watanabe et al.,
            # IJCAI 2023); the importances sum to 1.
            importances = get_param_importances(self.study, evaluator=PedAnovaImportanceEvaluator())
        # Several trials may be best: with two objectives, all of the Pareto front.
        best = []
        if trials:
            best = [trial.number for trial in self.study.best_trials]
        objectives = {}
        for objective in self.sweep.objectives:
            objectives[objective.value] = DIRECTIONS[objective]
        return {
            "name": self.sweep.name,
            "objectives": objectives,
            "space": {key: range_text(parameter) for key, parameter in self.sweep.space.items()},
            "num_trials": self.sweep.num_trials,
            "best": best,
            "importances": {key: round(float(share), 4) for key, share in importances.items()},
        }


def range_text(parameter: ParameterConfig) -> str:
    """Describe the possible values of a searched key for reports.

    Example:
        >>> range_text(ParameterConfig(ParameterType.float, low=1e-4, high=0.01, log=True))
        '0.0001 … 0.01, logarithmic'
        >>> range_text(ParameterConfig(ParameterType.int, low=1048576, high=2097152))
        '1048576 … 2097152'
        >>> range_text(ParameterConfig(ParameterType.choice, choices=["plain", "amp"]))
        'plain, amp'
    """
    if parameter.choices is not None:
        return ", ".join(text_of(choice) for choice in parameter.choices)
    text = f"{parameter.low:.12g} … {parameter.high:.12g}"
    if parameter.log:
        return f"{text}, logarithmic"
    if parameter.step:
        return f"{text}, in steps of {parameter.step:.12g}"
    return text


def _suggest(trial: Trial, key: str, parameter: ParameterConfig) -> str:
    """Return the value of a key in a trial as text: drawn at the first call, then the same."""
    if parameter.choices is not None:
        return trial.suggest_categorical(key, [text_of(choice) for choice in parameter.choices])
    # A key without choices has a range with both ends.
    low, high = cast(float, parameter.low), cast(float, parameter.high)
    if parameter.type is ParameterType.int:
        step = int(parameter.step or 1)
        return str(trial.suggest_int(key, int(low), int(high), step=step, log=parameter.log))
    number = trial.suggest_float(key, low, high, step=parameter.step, log=parameter.log)
    # Twelve digits remove rounding errors: 0.6, not 0.6000000000000001.
    return f"{number:.12g}"


def _value_in_space(parameter: ParameterConfig, value: Any) -> str | float | None:
    """Convert the user's value of a key to Optuna's type; None if it is outside the space."""
    if parameter.choices is not None:
        text = text_of(value)
        choices = [text_of(choice) for choice in parameter.choices]
        return text if text in choices else None
    # Booleans are excluded first, because `bool` is a subclass of `int`.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not cast(float, parameter.low) <= value <= cast(float, parameter.high):
        return None
    return int(value) if parameter.type is ParameterType.int else float(value)
