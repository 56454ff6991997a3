"""Run folder: configuration, status, and the check of changed keys when a run is resumed."""

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf

from medseg import __version__
from medseg.config.check import to_config, to_typed
from medseg.console import say
from medseg.data.spacing import find_spacing
from medseg.errors import UserError, first_line, require
from medseg.io.atomic import check_writable, create_text, is_locked, locked, replace_text
from medseg.io.text import read_json, read_yaml_text
from medseg.runs.signature import decisive, flat, plain, signature
from medseg.runs.status import Status
from medseg.targets import EXTENSION_KEYS, TARGET
from medseg.training.options import TrainConfig

CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
# What each start of the run depends on beside the configuration.
VERSIONS_FILE = "versions.json"
# Held by the first rank.
LOCK_FILE = ".lock"
# How long the ranks of a killed run may take to end, in s.
LOCK_WAIT_S = 35.0
# Key with the length of a schedule that ends, by its class.
LENGTH_KEYS = {
    "OneCycleLR": "total_steps",
    "PolynomialLR": "total_iters",
    "CosineAnnealingLR": "T_max",
}

T = TypeVar("T")
Config = TypeVar("Config", bound=TrainConfig)


def open_run(config: TrainConfig, *, is_named: bool = True) -> Path:
    """Make a new run folder with the resolved configuration, or prepare that of `config.resume`.

    Args:
        config: Checked configuration; changed in place to the one of the run.
        is_named: Whether the user chose the folder. A folder that is named by the time gets a
            number where another run, started in the same second, has taken it.

    Returns:
        The run folder, which is `config.run_dir` from now on.

    Raises:
        UserError: If a new run's folder holds a run that has a checkpoint or may still run, or the
            run to resume does not exist, is running, or would get another result.
    """
    settle(config)
    if config.resume is None:
        run_dir = _make_folder(config, is_named)
    else:
        run_dir = _existing_run(config.resume)
        saved = load_config(run_dir, config.trusted_targets)
        settle(saved)
        _check_change(config.resume, decisive(plain(saved)), decisive(plain(config)))
        if is_busy(run_dir):
            raise UserError(
                f"resume={config.resume}: another process is running it; wait for it, or stop it"
            )
        config.resume = None
        _set_run_dir(config, run_dir)
        if saved.steps < config.steps:  # it has not finished these
            (run_dir / SUMMARY_FILE).unlink(missing_ok=True)
        if (text := _text(config)) != (run_dir / CONFIG_FILE).read_text(encoding="utf-8"):
            replace_text(run_dir / CONFIG_FILE, text)
    check_writable(run_dir / "checkpoints")
    return run_dir


def _make_folder(config: TrainConfig, is_named: bool) -> Path:
    """Claim a folder by its `config.yaml`, which exactly one of several processes can make."""
    for run_dir in numbered(Path(config.run_dir).absolute()):
        _set_run_dir(config, run_dir)
        if create_text(run_dir / CONFIG_FILE, _text(config)):
            break
        if is_named and _take_over(run_dir):
            say(
                f"{run_dir}: the run there ended before its first checkpoint; this one starts in its place"
            )
            replace_text(run_dir / CONFIG_FILE, _text(config))
            break
        require(
            not is_named,
            f"{run_dir} already contains a run; give resume={run_dir} to continue it, or another hydra.run.dir",
        )
    return run_dir


def _take_over(run_dir: Path) -> bool:
    """Claim the folder of a run that ended without a checkpoint, such as one that was refused by its data.

    Exactly one of several processes can remove its summary. A run that began and has not ended has
    none.
    """
    if not (run_dir / SUMMARY_FILE).is_file():
        return False
    with locked(run_dir / LOCK_FILE, 0.0) as is_free:
        has_checkpoint = any((run_dir / "checkpoints").glob("*.ckpt"))
        has_finished = Status(read_summary(run_dir).get("status")) is Status.finished
        if not is_free or has_checkpoint or has_finished:
            return False
        try:
            (run_dir / SUMMARY_FILE).unlink()
        except FileNotFoundError:
            return False
    # Of the start that ended.
    (run_dir / VERSIONS_FILE).unlink(missing_ok=True)
    return True


def note_abandoned(run_dir: Path) -> None:
    """Write the `summary.json` of a start that ended before its run began; a run writes its own."""
    if not (run_dir / SUMMARY_FILE).exists() and not is_locked(run_dir / LOCK_FILE):
        with suppress(UserError):  # the disk is full
            write_end(run_dir, Status.interrupted, "ended before its first step")


def numbered(folder: Path) -> Iterator[Path]:
    """Names for folders that are made in the same second: the given one, then with _2, _3 and so on."""
    yield folder
    yield from (folder.with_name(f"{folder.name}_{number}") for number in itertools.count(2))


def _text(config: TrainConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(plain(config)))


def changed_config(
    resume: str,
    composed: dict[str, Any],
    default: dict[str, Any],
    overrides: Iterable[str],
    schema: type[Config],
) -> Config:
    """The configuration of a run to resume, changed by what the command line says beside `resume`.

    Args:
        resume: Run folder.
        composed: What the command line composes, in plain values.
        default: What an empty command line composes.
        overrides: The arguments. Keys and groups that they name are changed even to a default
            value.
        schema: Keys of the command; those that `train` lacks are as they are composed.

    Raises:
        UserError: If the folder holds no run, or the changed configuration is invalid.
    """
    run_dir = _existing_run(resume)
    values = {**composed, **plain(load_config(run_dir, composed["trusted_targets"]))}
    unchanged, changed = flat(default), OmegaConf.create(values)
    names = [
        override.lstrip("+~").partition("=")[0].partition("@")[0].replace("/", ".")
        for override in overrides
    ]
    # Not changes of the user: the length of the schedule, which follows `steps`, and arguments of
    # another class than that of the run.
    foreign = [
        f"{name}."
        for name in EXTENSION_KEYS
        if values[name].get(TARGET) != composed[name].get(TARGET)
    ]
    foreign.append(f"{_length_key(values['schedule'][TARGET])}.")
    for key, value in flat(composed).items():
        is_named = any(f"{key}.".startswith(f"{name}.") for name in names)
        is_changed = (key not in unchanged or unchanged[key] != value) and not f"{key}.".startswith(
            tuple(foreign)
        )
        if (is_named or is_changed) and key not in ("run_dir", "logger.save_dir"):
            OmegaConf.update(changed, key, value, merge=False, force_add=True)
    if any(name.partition(".")[0] == "logger" for name in names):
        changed.logger, changed.run_dir = composed["logger"], composed["run_dir"]
    changed.resume = resume
    return to_config(changed, schema)


def find_run(config: TrainConfig) -> tuple[Path, Status] | None:
    """Find the run that `resume=auto` resumes: that of the configured folder, else the newest beside it that can continue.

    Args:
        config: Checked configuration.

    Returns:
        Folder and status of a run of the same signature. A finished run counts only in the
        configured folder. None = no such run.
    """
    settle(config)
    wanted, own = signature(plain(config)), Path(config.run_dir).absolute()
    times = {}
    for path in own.parent.glob(f"*/{CONFIG_FILE}"):
        with suppress(FileNotFoundError):  # its run has just been removed
            times[path] = (path.parent == own, path.stat().st_mtime)
    for path in sorted(filter(Path.is_file, times), key=times.__getitem__, reverse=True):
        status = status_of_run(path.parent)
        may_go_on = status not in (Status.finished, Status.not_finite) or (
            status is Status.finished and path.parent == own
        )
        if may_go_on and _signature(path.parent) == wanted:
            return path.parent, status
    return None


def status_of_run(run_dir: Path) -> Status:
    """Status of a run. Without a summary it was interrupted: killed before it could write one."""
    if is_locked(run_dir / LOCK_FILE):
        return Status.running
    return Status(read_summary(run_dir).get("status"))


def is_finished(config: TrainConfig) -> bool:
    """Whether the run that `config.resume` names has finished, and the configuration asks for no more steps than it did then."""
    run_dir = _existing_run(str(config.resume))
    return (
        status_of_run(run_dir) is Status.finished
        and load_config(run_dir, config.trusted_targets).steps >= config.steps
    )


def is_busy(run_dir: Path) -> bool:
    """Whether a process runs the run; waits for the ranks of a killed one to end."""
    if not is_locked(run_dir / LOCK_FILE):
        return False
    say(f"waiting for the process that runs {run_dir}")
    with locked(run_dir / LOCK_FILE, LOCK_WAIT_S) as is_free:
        return not is_free


def read_file(path: Path, read: Callable[[Path], T]) -> T | None:
    """Read a file of a run folder; None where there is none, or, with a message, where it is damaged.

    Args:
        path: The file.
        read: Makes the result; any exception means damage.
    """
    try:
        return read(path) if path.exists() else None
    except (
        Exception
    ) as error:  # OmegaConf and the reader of CSV raise any exception on random bytes
        say(f"{path} is damaged and left out: {first_line(error).removeprefix(f'{path}: ')}")
        return None


def read_record(path: Path, kind: type[T]) -> T:
    """Read a JSON file of a run folder; empty where there is none, or, with a message, where it is damaged.

    Args:
        path: The file.
        kind: `dict` or `list`.
    """

    def read(path: Path) -> T:
        loaded = read_json(path)
        if not isinstance(loaded, kind):
            raise UserError(f"a JSON {kind.__name__} was expected")
        return loaded

    return read_file(path, read) or kind()


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Read the `summary.json` of a run; empty where there is none."""
    return read_record(run_dir / SUMMARY_FILE, dict)


def write_end(run_dir: Path, status: Status, message: str) -> None:
    """Write the `summary.json` of a run that did not finish."""
    replace_text(
        run_dir / SUMMARY_FILE, json.dumps({"status": status.value, "message": message}, indent=1)
    )


def load_config(run_dir: Path, trusted: Sequence[str] = ()) -> TrainConfig:
    """Read the configuration of a run folder, which may have been moved, and check its names, types and ranges.

    The rules between keys are not checked, because files that the configuration names may be gone;
    `train` checks them.

    Args:
        run_dir: The run folder.
        trusted: `trusted_targets` of the present command; a run folder can trust nothing.

    Raises:
        UserError: If it is damaged or invalid, or of version 0.1.
    """
    values = read_config(run_dir)
    _refuse_version_0_1(run_dir, values)
    config = to_typed(OmegaConf.create({**values, "trusted_targets": list(trusted)}), TrainConfig)
    _set_run_dir(config, run_dir)
    return config


def _refuse_version_0_1(run_dir: Path, values: Mapping[str, Any]) -> None:
    """Refuse a run of version 0.1 by name; its configuration has no class of a network, which all later ones have."""
    model = values.get("model")
    if isinstance(model, dict) and TARGET not in model:
        raise UserError(
            f"resume={run_dir}: this is a run of medseg 0.1, which medseg {__version__} does not resume; start a new run from "
            f"its weights with init_from={run_dir / 'checkpoints/last.ckpt'}, or use version 0.1"
        )


def settle(config: TrainConfig) -> None:
    """Resolve relative paths and values that depend on the data, in place, so that a run can be resumed from anywhere."""
    for group, key in (
        (config.data, "cache"), (config.data, "cases"), (config.data.phantoms, "folder"), (config.stage, "coarse"), (config, "init_from"),
    ):  # fmt: skip
        if getattr(group, key):
            setattr(group, key, os.path.abspath(getattr(group, key)))
    if config.stage.coarse_folds:
        config.stage.coarse_folds = list(map(os.path.abspath, config.stage.coarse_folds))
    find_spacing(config.spacing, config.data, config.task)


def remove_if_empty(folder: Path) -> None:
    """Remove the folder that Hydra made for a run that did not begin there."""
    if folder.is_dir() and folder != Path.cwd() and not any(folder.iterdir()):
        folder.rmdir()


def read_config(run_dir: Path) -> dict[str, Any]:
    """Read the configuration of a run folder, unchecked.

    Raises:
        UserError: If it is damaged.
    """
    path = run_dir / CONFIG_FILE
    text = read_yaml_text(path)
    try:
        loaded = OmegaConf.to_container(OmegaConf.create(text))
    except Exception as error:  # any exception of YAML's and OmegaConf's constructors
        raise UserError(
            f"{path}: expected a configuration, but the file is damaged ({first_line(error)}); copy it again"
        ) from error
    if not isinstance(loaded, dict) or not loaded:
        raise UserError(
            f"{path}: expected a configuration, but the file holds no YAML mapping; copy it again"
        )
    return {str(key): value for key, value in loaded.items()}


def _existing_run(resume: str) -> Path:
    run_dir = Path(resume).absolute()
    require(
        (run_dir / CONFIG_FILE).is_file(),
        f"resume={resume}: there is no {CONFIG_FILE} in that folder, so it is no run of medseg",
    )
    return run_dir


def _set_run_dir(config: TrainConfig, run_dir: Path) -> None:
    """Let a run, and its loggers, write to a folder, in place."""
    for node in (config.logger, *(one for one in config.logger.values() if isinstance(one, dict))):
        node.update(
            {
                key: value.replace(config.run_dir, str(run_dir))
                for key, value in node.items()
                if isinstance(value, str)
            }
        )
    config.run_dir = str(run_dir)


def _check_change(resume: str, saved: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse a change of the result. More steps are allowed where the schedule does not depend on their number."""
    # A moved table is the same data set; the cases themselves are compared with those of the
    # checkpoint.
    keys = sorted((saved.keys() | given.keys()) - {"data.cases"})
    differing = [key for key in keys if saved.get(key) != given.get(key)]
    if not differing:
        return
    begin, steps = f"resume={resume}: ", saved["steps"]
    length_key = _length_key(saved["schedule._target_"])
    if "steps" in differing and {*differing} <= {"steps", length_key}:
        if given["steps"] < steps:
            raise UserError(
                f"{begin}steps={given['steps']} is less than steps={steps} of the run; choose {steps} or more"
            )
        # A schedule whose end lies beyond the new steps, or lay before the old ones, is not changed
        # by them.
        length = saved.get(length_key)
        if differing == ["steps"] and (length is None or not steps <= length < given["steps"]):
            return
        raise UserError(
            f"{begin}steps={given['steps']}: {length_key}={length}, so the schedule was built for that many steps and would change with another length; "
            "start a new run, with schedule=constant if you want to extend it later"
        )
    changes = "; ".join(
        f"{key}: {saved.get(key)} then, {given.get(key)} now" for key in differing[:5]
    )
    raise UserError(
        f"{begin}the configuration has changed and would change the result ({changes}); restore these values, or start a new run"
    )


def _length_key(target: str) -> str:
    """Key with the length of a schedule, by its class; a key that does not exist for a schedule without an end."""
    return f"schedule.{LENGTH_KEYS.get(target.rpartition('.')[2])}"


def _signature(run_dir: Path) -> str | None:
    return read_file(run_dir / CONFIG_FILE, lambda path: signature(read_config(path.parent)))
