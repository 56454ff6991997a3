"""Journal of a search: its Optuna study in a file, from which several processes take trials."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import optuna
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.pruners import MedianPruner, NopPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState

from medseg.config.overrides import text_of
from medseg.config.search import Objective, ParameterConfig, ParameterType, Pruner, Sampler, SweepConfig
from medseg.io.atomic import locked

JOURNAL_FILE = "study.journal"
STUDY_LOCK_FILE = "study.lock"
TRIAL_LOCK_FILE = "trial.lock"
DIRECTIONS: dict[Objective, Literal["maximize", "minimize"]] = {
    Objective.val_dice: "maximize",
    Objective.peak_gib: "minimize",
    Objective.seconds_per_step: "minimize",
}
# With fewer results an importance is noise.
MIN_FOR_IMPORTANCES = 8


class Turn(NamedTuple):
    """Trial that only this process may run.

    Attributes:
        number: Its number, which names its folder.
        overrides: Key to value, as arguments of `train`.
        trial: The trial in Optuna's study.
    """

    number: int
    overrides: dict[str, str]
    trial: Trial

    def report(self, validations: Sequence[tuple[int, float]]) -> str:
        """Add the validations so far to the journal.

        Args:
            validations: (step, Dice) in the order of the steps; those of earlier reports may be among them.

        Returns:
            Why the trial should end now; "" if it should continue, and always with two objectives.
        """
        study = self.trial.study
        if len(study.directions) > 1:
            return ""
        last_step = study.get_trials(deepcopy=False)[self.number].last_step
        new = [(step, dice) for step, dice in validations if last_step is None or step > last_step]
        for step, dice in new:
            self.trial.report(dice, step)
        if not new or not self.trial.should_prune():
            return ""
        best = max(dice for _, dice in validations)
        return f"its best Dice by step {new[-1][0]}, {best:.4f}, lies below the median of the earlier trials there"


class SearchJournal:
    """Trials of a search, in `study.journal`.

    Several processes may share a journal. The process that runs a trial holds its lock, so a running trial whose lock is free belongs
    to a process that was killed, and is run again.

    Args:
        folder: Folder of the search.
        sweep: What is searched.
    """

    def __init__(self, folder: Path, sweep: SweepConfig) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder = folder
        self.sweep = sweep
        pruner = MedianPruner(n_startup_trials=sweep.prune_after_trials, n_warmup_steps=sweep.prune_after_steps)
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
                known = {key: _known_value(parameter, values.get(key)) for key, parameter in self.sweep.space.items()}
                self.study.enqueue_trial({key: value for key, value in known.items() if value is not None})

    def turns(self) -> Iterator[Turn]:
        """Yield trials to run: first those of killed processes, then new ones until there are `num_trials`."""
        while True:
            with ExitStack() as lock:
                turn = self._next(lock)
                if turn is None:
                    return
                yield turn

    def _next(self, lock: ExitStack) -> Turn | None:
        """Choose the next trial and hold its lock."""
        with locked(self.folder / STUDY_LOCK_FILE):
            trials = self.study.get_trials(deepcopy=False)
            for frozen in trials:
                if frozen.state is TrialState.RUNNING and self._lock_trial(frozen.number, lock):
                    return self._turn(Trial(self.study, frozen._trial_id))
            number = sum(frozen.state is not TrialState.WAITING for frozen in trials)
            if number >= self.sweep.num_trials:
                return None
            self._lock_trial(number, lock)  # no other process takes a trial while the study is locked
            return self._turn(self.study.ask())

    def _lock_trial(self, number: int, lock: ExitStack) -> bool:
        """Lock a trial and prepare its sampler; False if another process runs the trial."""
        folder = self.folder / str(number)
        folder.mkdir(exist_ok=True)
        # The values of a trial depend on its number and on the trials before it, not on interruptions.
        seed = self.sweep.seed * 100_003 + number
        self.study.sampler = (
            RandomSampler(seed=seed)
            if self.sweep.sampler is Sampler.random
            # With `constant_liar` running trials repel new ones.
            else TPESampler(seed=seed, n_startup_trials=self.sweep.num_random, constant_liar=True)
        )
        return lock.enter_context(locked(folder / TRIAL_LOCK_FILE, wait_s=0))

    def _turn(self, trial: Trial) -> Turn:
        return Turn(trial.number, {key: _suggest(trial, key, parameter) for key, parameter in self.sweep.space.items()}, trial)

    def close(self, turn: Turn, values: Sequence[float] | None, *, is_defect: bool = False) -> None:
        """Record the end of a trial.

        Args:
            turn: The trial.
            values: One per objective. None = no result: the sampler ranks the trial below all that have one, and so avoids what does
                not fit into memory.
            is_defect: Whether the trial ended for a reason that has nothing to do with its values; the sampler then ignores it.
        """
        state = TrialState.COMPLETE if values is not None else TrialState.FAIL if is_defect else TrialState.PRUNED
        self.study.tell(turn.number, values=values, state=state)

    def summary(self) -> dict[str, Any]:
        """Summarise the search for its report: space, best trials, and the importance of each key."""
        trials = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        importances: dict[str, float] = {}
        if len(self.sweep.objectives) == 1 and len(trials) >= MIN_FOR_IMPORTANCES:
            # Share of each key in what distinguishes the best trials (PED-ANOVA, Watanabe et al., IJCAI 2023).
            importances = get_param_importances(self.study, evaluator=PedAnovaImportanceEvaluator())
        return {
            "name": self.sweep.name,
            "objectives": {objective.value: DIRECTIONS[objective] for objective in self.sweep.objectives},
            "space": {key: describe(parameter) for key, parameter in self.sweep.space.items()},
            "num_trials": self.sweep.num_trials,
            "best": [trial.number for trial in self.study.best_trials] if trials else [],
            "importances": {key: round(float(share), 4) for key, share in importances.items()},
        }


def describe(parameter: ParameterConfig) -> str:
    """Describe the values of a searched key for people.

    Example:
        >>> from medseg.config.search import ParameterType
        >>> describe(ParameterConfig(ParameterType.float, low=1e-4, high=0.01, log=True))
        '0.0001 … 0.01, logarithmic'
        >>> describe(ParameterConfig(ParameterType.choice, choices=["plain", "amp"]))
        'plain, amp'
    """
    if parameter.choices is not None:
        return ", ".join(text_of(choice) for choice in parameter.choices)
    more = ", logarithmic" if parameter.log else f", in steps of {parameter.step:g}" if parameter.step else ""
    return f"{parameter.low:g} … {parameter.high:g}{more}"


def _suggest(trial: Trial, key: str, parameter: ParameterConfig) -> str:
    """The value of a trial: drawn at the first call, then always the same."""
    if parameter.choices is not None:
        return trial.suggest_categorical(key, [text_of(choice) for choice in parameter.choices])
    low, high = cast(float, parameter.low), cast(float, parameter.high)
    if parameter.type is ParameterType.int:
        return str(trial.suggest_int(key, int(low), int(high), step=int(parameter.step or 1), log=parameter.log))
    return f"{trial.suggest_float(key, low, high, step=parameter.step, log=parameter.log):.12g}"  # 0.6, not 0.6000000000000001


def _known_value(parameter: ParameterConfig, value: Any) -> str | float | None:
    """The value of the experiment as the study stores it; None if it lies outside the space."""
    if parameter.choices is not None:
        return text_of(value) if text_of(value) in map(text_of, parameter.choices) else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not cast(float, parameter.low) <= value <= cast(float, parameter.high):
        return None
    return int(value) if parameter.type is ParameterType.int else float(value)
