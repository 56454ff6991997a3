"""Run folder: configuration, status, and the check of changed keys when a run is resumed."""

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf

from medseg import __version__
from medseg.config.check import to_config, to_typed
from medseg.config.yaml_file import read_yaml
from medseg.console import say
from medseg.data.options import CASCADE_KEYS, StageName
from medseg.data.spacing import find_spacing
from medseg.errors import UserError, first_line
from medseg.io.atomic import check_writable, create_text, is_locked, locked, replace_text
from medseg.io.text import read_json
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
        run_dir = _open_again(config, config.resume)
    check_writable(run_dir / "checkpoints")
    return run_dir


def _open_again(config: TrainConfig, resume: str) -> Path:
    """Prepare the folder of the run to resume, and write its changed configuration."""
    run_dir = _existing_run(resume)
    saved = load_config(run_dir, config.trusted_targets)
    settle(saved)
    _check_change(resume, decisive(plain(saved)), decisive(plain(config)))
    if is_busy(run_dir):
        raise UserError(f"resume={resume}: another process is running it; wait for it, or stop it")
    config.resume = None
    _set_run_dir(config, run_dir)
    # A run that finished has not made the steps that are asked for now.
    if saved.steps < config.steps:
        (run_dir / SUMMARY_FILE).unlink(missing_ok=True)
    text = _text(config)
    if text != (run_dir / CONFIG_FILE).read_text(encoding="utf-8"):
        replace_text(run_dir / CONFIG_FILE, text)
    return run_dir


def _make_folder(config: TrainConfig, is_named: bool) -> Path:
    """Claim a folder by its `config.yaml`, which exactly one of several processes can make."""
    for run_dir in numbered(Path(config.run_dir).absolute()):
        _set_run_dir(config, run_dir)
        if create_text(run_dir / CONFIG_FILE, _text(config)):
            break
        if is_named and _take_over(run_dir):
            say(
                f"{run_dir}: the run there ended before its first checkpoint; "
                "this one starts in its place"
            )
            replace_text(run_dir / CONFIG_FILE, _text(config))
            break
        if is_named:
            raise UserError(
                f"{run_dir} already contains a run; give resume={run_dir} to continue it, "
                "or another hydra.run.dir"
            )
    return run_dir


def _take_over(run_dir: Path) -> bool:
    """Claim the folder of a run that ended without a checkpoint, as when its data were refused.

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
    # It tells the versions of the start that ended.
    (run_dir / VERSIONS_FILE).unlink(missing_ok=True)
    return True


def note_abandoned(run_dir: Path) -> None:
    """Write the `summary.json` of a start that ended before its run began; a run writes its own."""
    if (run_dir / SUMMARY_FILE).exists() or is_locked(run_dir / LOCK_FILE):
        return
    with suppress(UserError):  # the disk is full
        write_end(run_dir, Status.interrupted, "ended before its first step")


def numbered(folder: Path) -> Iterator[Path]:
    """Yield names for folders that are made in the same second: then with _2, _3 and so on."""
    yield folder
    for number in itertools.count(2):
        yield folder.with_name(f"{folder.name}_{number}")


def _text(config: TrainConfig) -> str:
    """Write a configuration as YAML.

    Without the keys of a cascade where the run has one stage: they are unset.
    """
    values = plain(config)
    if config.stage.name is StageName.single:
        for key in CASCADE_KEYS:
            del values["stage"][key]
    return OmegaConf.to_yaml(OmegaConf.create(values))


def changed_config(
    resume: str,
    composed: dict[str, Any],
    default: dict[str, Any],
    overrides: Iterable[str],
    schema: type[Config],
) -> Config:
    """Return the configuration of a run to resume, with the changes of the command line.

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
    default_values = flat(default)
    changed = OmegaConf.create(values)
    names = list(map(_name_of, overrides))
    # Not changes of the user: the length of the schedule, which follows `steps`, and arguments of
    # another class than that of the run.
    foreign = [_length_key(values["schedule"][TARGET])]
    for name in EXTENSION_KEYS:
        if values[name].get(TARGET) != composed[name].get(TARGET):
            foreign.append(name)
    for key, value in flat(composed).items():
        # Hydra gives every command a folder of its own; a resumed run keeps its folder.
        if key in ("run_dir", "logger.save_dir"):
            continue
        is_default = key in default_values and default_values[key] == value
        is_changed = not is_default and not _is_below(key, foreign)
        if is_changed or _is_below(key, names):
            OmegaConf.update(changed, key, value, merge=False, force_add=True)
    if any(name.partition(".")[0] == "logger" for name in names):
        changed.logger = composed["logger"]
        changed.run_dir = composed["run_dir"]
    changed.resume = resume
    return to_config(changed, schema)


def _name_of(override: str) -> str:
    """Dotted name of the key or group that an argument sets.

    Example:
        >>> [_name_of(override) for override in ("+data.seed=1", "augment/noise@augment=none")]
        ['data.seed', 'augment.noise']
    """
    name = override.lstrip("+~").partition("=")[0]
    return name.partition("@")[0].replace("/", ".")


def _is_below(key: str, groups: Iterable[str]) -> bool:
    """Whether a dotted key is one of some keys, or lies in one of some groups."""
    return any(f"{key}.".startswith(f"{group}.") for group in groups)


def find_run(config: TrainConfig) -> tuple[Path, Status] | None:
    """Find the run that `resume=auto` resumes.

    That of the configured folder, else the newest beside it that can continue.

    Args:
        config: Checked configuration.

    Returns:
        Folder and status of a run of the same signature. A finished run counts only in the
        configured folder. None = no such run.
    """
    settle(config)
    expected_signature = signature(plain(config))
    configured_dir = Path(config.run_dir).absolute()
    # Folder to its sort key: the configured one first, then the newest.
    search_keys = {}
    for path in configured_dir.parent.glob(f"*/{CONFIG_FILE}"):
        with suppress(FileNotFoundError):  # its run has just been removed
            search_keys[path.parent] = (path.parent == configured_dir, path.stat().st_mtime)
    for run_dir in sorted(search_keys, key=search_keys.__getitem__, reverse=True):
        # Other processes may remove their folders meanwhile.
        if not (run_dir / CONFIG_FILE).is_file():
            continue
        status = status_of_run(run_dir)
        if status is Status.not_finite:
            continue
        if status is Status.finished and run_dir != configured_dir:
            continue
        if _signature(run_dir) == expected_signature:
            return run_dir, status
    return None


def status_of_run(run_dir: Path) -> Status:
    """Status of a run; without a summary it was killed before it could write one: interrupted."""
    if is_locked(run_dir / LOCK_FILE):
        return Status.running
    return Status(read_summary(run_dir).get("status"))


def is_finished(config: TrainConfig) -> bool:
    """Whether the run that `config.resume` names has finished, and made the configured steps."""
    run_dir = _existing_run(str(config.resume))
    if status_of_run(run_dir) is not Status.finished:
        return False
    return load_config(run_dir, config.trusted_targets).steps >= config.steps


def is_busy(run_dir: Path) -> bool:
    """Whether a process runs the run; waits for the ranks of a killed one to end."""
    if not is_locked(run_dir / LOCK_FILE):
        return False
    say(f"waiting for the process that runs {run_dir}")
    with locked(run_dir / LOCK_FILE, LOCK_WAIT_S) as is_free:
        return not is_free


def read_file(path: Path, read: Callable[[Path], T]) -> T | None:
    """Read a file of a run folder; None where there is none, or where it is damaged.

    A damaged file is told.

    Args:
        path: The file.
        read: Makes the result; any exception means damage.
    """
    try:
        return read(path) if path.exists() else None
    # OmegaConf and the reader of CSV raise any exception on random bytes.
    except Exception as error:
        say(f"{path} is damaged and left out: {first_line(error).removeprefix(f'{path}: ')}")
        return None


def read_record(path: Path, kind: type[T]) -> T:
    """Read a JSON file of a run folder; empty where there is none, or where it is damaged.

    A damaged file is told.

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
    summary = {"status": status.value, "message": message}
    replace_text(run_dir / SUMMARY_FILE, json.dumps(summary, indent=1))


def load_config(run_dir: Path, trusted: Sequence[str] = ()) -> TrainConfig:
    """Read the configuration of a run folder, and check its names, types and ranges.

    The folder may have been moved: `run_dir` and the loggers follow it. The rules between
    keys are not checked, because files that the configuration names may be gone; `train` checks
    them.

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
    """Refuse a run of version 0.1: its configuration names no class of a network."""
    model = values.get("model")
    if isinstance(model, dict) and TARGET not in model:
        raise UserError(
            f"resume={run_dir}: this is a run of medseg 0.1, which medseg {__version__} does not "
            "resume; start a new run from its weights with "
            f"init_from={run_dir / 'checkpoints/last.ckpt'}, or use version 0.1"
        )


def settle(config: TrainConfig) -> None:
    """Make paths absolute and compute values that depend on the data, in place.

    The run can then be resumed from anywhere.
    """
    path_keys = (
        (config.data, "cache"),
        (config.data, "cases"),
        (config.data.phantoms, "folder"),
        (config.stage, "coarse"),
        (config, "init_from"),
    )
    for options, key in path_keys:
        path = getattr(options, key)
        if path:
            setattr(options, key, os.path.abspath(path))
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
    loaded = read_yaml(path, "a configuration", "copy it again")
    if not isinstance(loaded, dict) or not loaded:
        raise UserError(
            f"{path}: expected a configuration, but the file holds no YAML mapping; copy it again"
        )
    return {str(key): value for key, value in loaded.items()}


def _existing_run(resume: str) -> Path:
    """Folder of the run to resume; refused where there is no run in it."""
    run_dir = Path(resume).absolute()
    if not (run_dir / CONFIG_FILE).is_file():
        raise UserError(
            f"resume={resume}: there is no {CONFIG_FILE} in that folder, so it is no run of medseg"
        )
    return run_dir


def _set_run_dir(config: TrainConfig, run_dir: Path) -> None:
    """Let a run, and its loggers, write to a folder, in place."""
    # As whole parts of a path or URI: `/runs/a` lies neither in `/runs/a_logs` nor in
    # `/data/runs/a`.
    old_dir = re.compile(rf"(?<![\w.-]){re.escape(config.run_dir)}(?=[/\\]|$)")
    # A logger is one node, or a mapping of several.
    nodes = [config.logger]
    nodes += [value for value in config.logger.values() if isinstance(value, dict)]
    for node in nodes:
        for key, value in node.items():
            if isinstance(value, str):
                # A function, because backslashes of a text would be read as groups.
                node[key] = old_dir.sub(lambda _: str(run_dir), value)
    config.run_dir = str(run_dir)


def _check_change(resume: str, saved: dict[str, Any], changed: dict[str, Any]) -> None:
    """Refuse a change of the result.

    Args:
        resume: The argument, for messages.
        saved: Decisive values of the run.
        changed: Those of the command.
    """
    # A moved table is the same data set; the cases themselves are compared with those of the
    # checkpoint.
    keys = sorted((saved.keys() | changed.keys()) - {"data.cases"})
    differing = [key for key in keys if saved.get(key) != changed.get(key)]
    if not differing:
        return
    length_key = _length_key(saved["schedule._target_"])
    if "steps" in differing and {*differing} <= {"steps", length_key}:
        is_length_changed = length_key in differing
        _check_steps(resume, saved, changed["steps"], is_length_changed)
        return
    changes = "; ".join(
        f"{key}: {saved.get(key)} then, {changed.get(key)} now" for key in differing[:5]
    )
    raise UserError(
        f"resume={resume}: the configuration has changed and would change the result ({changes}); "
        "restore these values, or start a new run"
    )


def _check_steps(resume: str, saved: dict[str, Any], steps: int, is_length_changed: bool) -> None:
    """Allow more steps, where the schedule does not depend on their number.

    Args:
        resume: The argument, for messages.
        saved: Decisive values of the run.
        steps: Steps of the command, another number than those of the run.
        is_length_changed: Whether the length of the schedule has changed with them.
    """
    saved_steps = saved["steps"]
    if steps < saved_steps:
        raise UserError(
            f"resume={resume}: steps={steps} is less than steps={saved_steps} of the run; "
            f"choose {saved_steps} or more"
        )
    length_key = _length_key(saved["schedule._target_"])
    length = saved.get(length_key)
    # The further steps would run past the end of the schedule, which the run has not passed yet.
    is_end_passed = length is not None and saved_steps <= length < steps
    if is_length_changed or is_end_passed:
        raise UserError(
            f"resume={resume}: steps={steps}: {length_key}={length}, so the schedule was built for "
            "that many steps and would change with another length; "
            "start a new run, with schedule=constant if you want to extend it later"
        )


def _length_key(target: str) -> str:
    """Key with the length of a schedule, by its class.

    For a schedule without an end it is a key that does not exist.
    """
    return f"schedule.{LENGTH_KEYS.get(target.rpartition('.')[2])}"


def _signature(run_dir: Path) -> str | None:
    """Signature of the run in a folder; None where its configuration is damaged."""
    return read_file(run_dir / CONFIG_FILE, lambda path: signature(read_config(path.parent)))
