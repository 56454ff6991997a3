"""Search: trials of a space, each a run of its own; Optuna chooses their values and ends bad ones early."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from medseg.config.check import explain, to_config, to_typed
from medseg.config.overrides import text_of
from medseg.config.schema import TrainConfig
from medseg.config.search import Objective, SearchConfig, SweepConfig
from medseg.config.targets import targets_first
from medseg.console import say
from medseg.errors import EXIT_FAILED, EXIT_RESUME, UserError, require
from medseg.io.atomic import replace_text
from medseg.report.compare import METRICS
from medseg.runs.folder import CONFIG_FILE, open_run, read_summary, settle, status_of_run, write_end
from medseg.runs.processes import check_start, run_in_process
from medseg.runs.results import HISTORY_FILE, STUDY_FILE, read_history, read_run, write_report
from medseg.runs.signature import decisive, flat, plain, signature
from medseg.runs.status import FAILURES, Status, status_of
from medseg.runs.sweeps import Job
from medseg.studies.recipes import key_of, train_arguments

if TYPE_CHECKING:
    from medseg.studies.search_journal import SearchJournal, Turn

SEARCH_FILE = "search.yaml"
# Keys that may change when a search is resumed.
OPEN_KEYS = frozenset({"sweep.num_trials", "sweep.pruner", "sweep.prune_after_trials", "sweep.prune_after_steps"})
ENDED = FAILURES | {Status.finished, Status.pruned}

Compose = Callable[[Mapping[str, str]], DictConfig]
"""Composes `train` with the values of a trial."""


def search(config: SearchConfig) -> int:
    """Run trials until there are `sweep.num_trials`; a search that is started again in its folder is resumed.

    Returns:
        0; 1 if no trial has a result; `EXIT_RESUME` if the system stopped the search.
    """
    hydra_config = HydraConfig.get()
    require(hydra_config.mode is not RunMode.MULTIRUN, "search starts its trials by itself; leave out -m")
    require(
        config.resume is None and not config.retry_failed,
        "search resumes its trials by itself; leave out resume and retry_failed",
    )
    try:
        from medseg.studies.search_journal import SearchJournal
    except ModuleNotFoundError as error:
        raise UserError(
            f"search needs {error.name}, which is not installed; install medseg with its extra: medseg[search]"
        ) from error
    settle(config)
    folder = Path(hydra_config.runtime.output_dir).absolute()
    compose = composer(hydra_config.overrides.task, config.sweep)
    check_space(config.sweep, compose)
    open_folder(folder, config)
    journal = SearchJournal(folder, config.sweep)
    journal.begin_with({**hydra_config.runtime.choices, **flat(plain(config))})
    for turn in journal.turns():
        status = run_trial(journal, turn, compose)
        replace_text(folder / STUDY_FILE, json.dumps(journal.summary(), indent=1))
        if status is Status.interrupted:
            return EXIT_RESUME
    write_report(folder, folder, num_pictures=24)
    best = journal.summary()["best"]
    print(f"best: {', '.join(f'trial {number}' for number in best) or 'none has a result'}")
    return 0 if best else EXIT_FAILED


def composer(given: Sequence[str], sweep: SweepConfig) -> Compose:
    """Make a function that composes `train` from the arguments of a search and the values of a trial.

    Args:
        given: Arguments of the search; those of `sweep` and of searched keys are left out.
        sweep: The search.
    """
    own = [argument for argument in train_arguments(given, SearchConfig) if key_of(argument) not in sweep.space]

    def compose(values: Mapping[str, str]) -> DictConfig:
        return hydra.compose("train", targets_first([*own, *(f"{key}={value}" for key, value in values.items())]))

    return compose


def check_space(sweep: SweepConfig, compose: Compose) -> None:
    """Refuse a space with a key or a value that `train` does not accept. Combinations of values are checked trial by trial.

    Raises:
        UserError: Naming the key, the value and the cure.
    """
    ends = {
        # `:.12g` writes whole numbers without a decimal point, which integer keys do not accept.
        key: list(map(text_of, parameter.choices or ())) or [f"{parameter.low:.12g}", f"{parameter.high:.12g}"]
        for key, parameter in sweep.space.items()
    }
    for number in range(max(map(len, ends.values()))):
        values = {key: texts[number % len(texts)] for key, texts in ends.items()}
        try:
            to_typed(compose({**values, "run_dir": "none"}), TrainConfig)
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
    if not path.is_file():
        replace_text(path, OmegaConf.to_yaml(OmegaConf.create(plain(config))))
        return
    earlier = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path)))
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


def run_trial(journal: SearchJournal, turn: Turn, compose: Compose) -> Status:
    """Run or resume a trial, and record its status in its folder and in the journal."""
    job_dir = journal.folder / str(turn.number)
    job = Job(turn.number, Status.running, "", turn.overrides, "")
    say(f"trial {turn.number}: " + " ".join(f"{key}={value}" for key, value in turn.overrides.items()))
    status, message = Status.interrupted, ""  # the record if this process is killed
    try:
        config = to_config(compose({**turn.overrides, "run_dir": text_of(str(job_dir))}), TrainConfig)
        settle(config)
        job = replace(job, signature=signature(plain(config)))
        job.write(job_dir)
        status, message = run_job(turn, job_dir, config)
    except UserError as error:
        status, message = Status.refused, str(error)
    finally:
        replace(job, status=status, message=message).write(job_dir)
    values = objective_values(journal.sweep.objectives, job_dir) if status is Status.finished else []
    if status is not Status.interrupted:
        journal.close(turn, values or None, is_defect=status is Status.failed)
    say(f"trial {turn.number} {status.value.replace('_', ' ')}: {message or ', '.join(f'{value:.4g}' for value in values)}")
    return status


def run_job(turn: Turn, job_dir: Path, config: TrainConfig) -> tuple[Status, str]:
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
        reason = turn.report(validations(run_dir / HISTORY_FILE))
        return bool(reason)

    code = run_in_process(config, is_behind)
    if code == 0:
        turn.report(validations(run_dir / HISTORY_FILE))  # later trials are compared with the last validations too
    elif reason:
        write_end(run_dir, Status.pruned, reason)
        return Status.pruned, reason
    return status_of(code), read_summary(run_dir).get("message", "")


def validations(history: Path) -> list[tuple[int, float]]:
    """Read the (step, Dice) of the validations of a run so far."""
    return [(int(line["step"]), line["val_dice"]) for line in read_history(history) if "step" in line and "val_dice" in line]


def objective_values(objectives: Sequence[Objective], job_dir: Path) -> list[float]:
    """Read the results of a finished run, one per objective.

    Raises:
        UserError: If a result is missing, as it then is in every trial.
    """
    run = read_run(job_dir, job_dir.parent)
    found = {metric.key: metric.of(run) for metric in METRICS}
    values = [value for objective in objectives if (value := found[objective.value]) is not None]
    require(len(values) == len(objectives), f"{job_dir} finished without {', '.join(objectives)}: are there validation cases?")
    return values
