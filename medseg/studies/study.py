"""The study of a search: Optuna's memory in a file of its folder, and the trials that it hands out."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.pruners import BasePruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import Trial, TrialState

from medseg.config.search import Objective, ParameterConfig, ParameterType, Pruner, Sampler, SweepConfig
from medseg.io.locks import locked
from medseg.studies.space import describe, text_of

JOURNAL_FILE = "study.journal"
STUDY_LOCK_FILE = "study.lock"
TRIAL_LOCK_FILE = "trial.lock"
DIRECTIONS = {
    Objective.val_dice: StudyDirection.MAXIMIZE,
    Objective.peak_gib: StudyDirection.MINIMIZE,
    Objective.seconds_per_step: StudyDirection.MINIMIZE,
}
# With fewer results an importance is noise.
_MIN_FOR_IMPORTANCES = 8


@dataclass(frozen=True)
class Turn:
    """A trial that is this process' to run, until it is closed.

    Attributes:
        number: Its number, which names its folder.
        overrides: Key to value, as arguments of `train`.
    """

    number: int
    overrides: dict[str, str]
    _trial: Trial
    _lock: ExitStack

    def report(self, validations: Sequence[tuple[int, float]]) -> str:
        """Tell the study the validations so far.

        Args:
            validations: (step, Dice) in the order of the steps, those that were told before among them.

        Returns:
            Why the trial is not worth going on with; "" while it is, and always with two objectives.
        """
        if len(self._trial.study.directions) > 1:
            return ""
        told = self._trial.study.get_trials(deepcopy=False)[self.number].last_step
        new = [(step, dice) for step, dice in validations if told is None or step > told]
        for step, dice in new:
            self._trial.report(dice, step)
        if new and self._trial.should_prune():
            best = max(dice for _, dice in validations)
            return f"its best Dice by step {new[-1][0]}, {best:.4f}, lies below the median of the earlier trials there"
        return ""


class Study:
    """What a search has tried, in `study.journal`.

    Several processes may work on one study, each on trials of its own: a trial that runs is locked by whoever runs it, so that one whose
    process was killed is known by being free.

    Args:
        folder: Folder of the search.
        sweep: What is searched.
    """

    def __init__(self, folder: Path, sweep: SweepConfig) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder = folder
        self.sweep = sweep
        self.study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL_FILE))),
            study_name="search",
            directions=[DIRECTIONS[objective] for objective in sweep.objectives],
            pruner=_pruner(sweep),
            load_if_exists=True,
        )

    def begin_with(self, values: Mapping[str, Any]) -> None:
        """Let the first trial be the experiment as it stands, as far as its values lie in the space.

        Args:
            values: Key or group to its value in the experiment.
        """
        with locked(self.folder / STUDY_LOCK_FILE):
            if not self.study.get_trials(deepcopy=False):
                inside = {
                    key: place for key, parameter in self.sweep.space.items() if (place := _place(parameter, values.get(key)))
                }
                self.study.enqueue_trial({key: value for key, (value,) in inside.items()})

    def turns(self) -> Iterator[Turn]:
        """Trials to run: those that were left running, then new ones until there are `num_trials`."""
        while (turn := self._next()) is not None:
            with turn._lock:
                yield turn

    def _next(self) -> Turn | None:
        with locked(self.folder / STUDY_LOCK_FILE):
            trials = self.study.get_trials(deepcopy=False)
            for frozen in trials:
                if frozen.state is TrialState.RUNNING and (lock := self._take(frozen.number)):
                    self.study.sampler = _sampler(self.sweep, frozen.number)
                    return self._turn(Trial(self.study, frozen._trial_id), lock)
            number = sum(frozen.state is not TrialState.WAITING for frozen in trials)
            if number >= self.sweep.num_trials:
                return None
            # What is drawn for a trial depends on its number and on the trials before, not on when a search was interrupted.
            self.study.sampler = _sampler(self.sweep, number)
            lock = self._take(number)
            assert lock is not None, "nobody else takes a trial while the study is locked"
            return self._turn(self.study.ask(), lock)

    def _take(self, number: int) -> ExitStack | None:
        """Lock a trial; None where another process has it."""
        folder = self.folder / str(number)
        folder.mkdir(exist_ok=True)
        stack = ExitStack()
        if stack.enter_context(locked(folder / TRIAL_LOCK_FILE, wait_s=0)):
            return stack
        stack.close()
        return None

    def _turn(self, trial: Trial, lock: ExitStack) -> Turn:
        overrides = {key: _suggest(trial, key, parameter) for key, parameter in self.sweep.space.items()}
        return Turn(trial.number, overrides, trial, lock)

    def close(self, turn: Turn, values: Sequence[float] | None, *, is_defect: bool = False) -> None:
        """Record the end of a trial.

        Args:
            turn: The trial.
            values: One per objective; None where it reached no end. The sampler then takes it for worse than all that did, so that
                it keeps away from what does not fit into memory.
            is_defect: Whether it ended for a reason that says nothing about its values, which the sampler then forgets.
        """
        state = TrialState.COMPLETE if values is not None else TrialState.FAIL if is_defect else TrialState.PRUNED
        self.study.tell(turn.number, values=None if values is None else list(values), state=state)

    def summary(self) -> dict[str, Any]:
        """What the report says about the study: what was searched, the best trials, how much each key mattered."""
        trials = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return {
            "name": self.sweep.name,
            "objectives": {objective.value: DIRECTIONS[objective].name.lower() for objective in self.sweep.objectives},
            "space": {key: describe(parameter) for key, parameter in self.sweep.space.items()},
            "num_trials": self.sweep.num_trials,
            "best": [trial.number for trial in self.study.best_trials] if trials else [],
            "importances": self._importances() if len(self.sweep.objectives) == 1 and len(trials) >= _MIN_FOR_IMPORTANCES else {},
        }

    def _importances(self) -> dict[str, float]:
        """Share of each key in what sets the best trials apart (PED-ANOVA, Watanabe et al., IJCAI 2023)."""
        found = get_param_importances(self.study, evaluator=PedAnovaImportanceEvaluator())
        return {key: round(float(share), 4) for key, share in found.items()}


def _suggest(trial: Trial, key: str, parameter: ParameterConfig) -> str:
    """The value of a trial; drawn at the first call, the same ever after."""
    if parameter.choices is not None:
        return trial.suggest_categorical(key, [text_of(choice) for choice in parameter.choices])
    low, high = typing.cast(float, parameter.low), typing.cast(float, parameter.high)
    if parameter.type is ParameterType.int:
        return str(trial.suggest_int(key, int(low), int(high), step=int(parameter.step or 1), log=parameter.log))
    return f"{trial.suggest_float(key, low, high, step=parameter.step, log=parameter.log):.12g}"  # 0.6, not 0.6000000000000001


def _place(parameter: ParameterConfig, value: Any) -> tuple[Any] | None:
    """A value as the study holds it, if it lies in the space."""
    if parameter.choices is not None:
        text = text_of(value)
        return (text,) if text in map(text_of, parameter.choices) else None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not typing.cast(float, parameter.low) <= value <= typing.cast(float, parameter.high):
        return None
    return (int(value),) if parameter.type is ParameterType.int else (float(value),)


def _sampler(sweep: SweepConfig, number: int) -> BaseSampler:
    seed = sweep.seed * 100_003 + number
    if sweep.sampler is Sampler.random:
        return RandomSampler(seed=seed)
    return TPESampler(seed=seed, n_startup_trials=sweep.num_random, constant_liar=True)  # parallel trials keep apart


def _pruner(sweep: SweepConfig) -> BasePruner:
    if sweep.pruner is Pruner.none:
        return NopPruner()
    return MedianPruner(n_startup_trials=sweep.prune_after_trials, n_warmup_steps=sweep.prune_after_steps)
