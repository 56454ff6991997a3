"""Run folder: configuration, status, and the check of changed keys when a run is resumed."""

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from medseg import __version__
from medseg.config.check import to_config, to_typed
from medseg.config.yaml_file import read_yaml
from medseg.console import say
from medseg.data.options import CASCADE_KEYS, StageName
from medseg.data.spacing import find_spacing
from medseg.errors import UserError, first_line
from medseg.io.atomic import check_writable, create_text, is_locked, locked, replace_text
from medseg.io.text import read_json
from medseg.runs.signature import (
    changed_keys,
    decisive,
    describe_changes,
    flat,
    plain,
    signature,
)
from medseg.runs.status import Status
from medseg.targets import EXTENSION_KEYS, TARGET
from medseg.training.options import TrainConfig

CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
# JSON list with one entry for each start of the run: the seed and the versions of the software. The
# result depends on these besides the configuration.
VERSIONS_FILE = "versions.json"
# Locked by rank 0 as long as the run is trained.
LOCK_FILE = ".lock"
# Locked by the process that starts the ranks or the job of a run, as long as these run. It shows
# that the run has begun: the ranks import for seconds before rank 0 locks `LOCK_FILE`.
START_LOCK_FILE = ".start.lock"
# How long the ranks of a killed run may take to end, in s: torchrun kills them 30 s after it has
# asked them to end; the rest is to spare.
LOCK_WAIT_S = 35.0
# Learning rate schedules with an end: class to its argument with the number of steps.
LENGTH_KEYS = {
    "OneCycleLR": "total_steps",
    "PolynomialLR": "total_iters",
    "CosineAnnealingLR": "T_max",
}

T = TypeVar("T")
Config = TypeVar("Config", bound=TrainConfig)


def open_run(config: TrainConfig, *, is_chosen_by_user: bool = True) -> Path:
    """Make a new run folder with the resolved configuration, or prepare the one to resume.

    Args:
        config: Checked configuration; changed in place to the configuration of the run.
        is_chosen_by_user: Whether the user chose the folder. Otherwise its name is the time, and
            gets a number where another run, started in the same second, has claimed it.

    Returns:
        The run folder, which is `config.run_dir` from now on.

    Raises:
        UserError: If a new run's folder holds a run that has a checkpoint or may still run, or the
            run to resume does not exist, is running, or would get another result.
    """
    resolve_paths_and_spacing(config)
    if config.resume is None:
        run_dir = _make_folder(config, is_chosen_by_user)
    else:
        run_dir = _open_again(config, config.resume)
    # A folder that cannot be written to is refused now, not at the first checkpoint hours later.
    check_writable(run_dir / "checkpoints")
    return run_dir


def _open_again(config: TrainConfig, resume: str) -> Path:
    """Prepare the folder of the run to resume, and write its changed configuration."""
    run_dir = _existing_run(resume)
    saved = load_config(run_dir, config.trusted_targets)
    # `open_run` has done the same to `config`. Equal paths and spacings now compare as equal.
    resolve_paths_and_spacing(saved)
    _check_change(resume, decisive(plain(saved)), decisive(plain(config)))
    if not wait_until_free(run_dir):
        raise UserError(f"resume={resume}: another process is running it; wait for it, or stop it")
    config.resume = None
    _set_run_dir(config, run_dir)
    # With more steps the run is unfinished again, and the summary of its earlier end is wrong.
    if saved.steps < config.steps:
        (run_dir / SUMMARY_FILE).unlink(missing_ok=True)
    text = _yaml_text(config)
    if text != (run_dir / CONFIG_FILE).read_text(encoding="utf-8"):
        replace_text(run_dir / CONFIG_FILE, text)
    return run_dir


def _make_folder(config: TrainConfig, is_chosen_by_user: bool) -> Path:
    """Claim a folder by its `config.yaml`, which only one of several processes can create.

    Raises:
        UserError: If the user chose the folder, and it holds a run that cannot be replaced.
    """
    for run_dir in numbered(Path(config.run_dir).absolute()):
        # The configuration names its run folder, so it is set anew for each number.
        _set_run_dir(config, run_dir)
        if create_text(run_dir / CONFIG_FILE, _yaml_text(config)):
            break
        if is_chosen_by_user and _take_over(run_dir):
            say(
                f"{run_dir}: the run there ended before its first checkpoint; "
                "this one starts in its place"
            )
            replace_text(run_dir / CONFIG_FILE, _yaml_text(config))
            break
        if is_chosen_by_user:
            raise UserError(
                f"{run_dir} already contains a run; give resume={run_dir} to continue it, "
                "or another hydra.run.dir"
            )
        # A folder that is named by the time is taken by another run: the next number is tried.
    return run_dir


def _take_over(run_dir: Path) -> bool:
    """Claim the folder of a run that ended without a checkpoint, e.g. because of refused data.

    Removing the summary makes the claim: only one of several processes can remove it.

    Returns:
        Whether the folder is claimed.
    """
    # A run that has begun and not ended has no summary.
    if not (run_dir / SUMMARY_FILE).is_file():
        return False
    with locked(run_dir / LOCK_FILE, wait_s=0.0) as is_free:
        has_checkpoint = any((run_dir / "checkpoints").glob("*.ckpt"))
        has_finished = Status(read_summary(run_dir).get("status")) is Status.finished
        if not is_free or has_checkpoint or has_finished:
            return False
        try:
            (run_dir / SUMMARY_FILE).unlink()
        except FileNotFoundError:
            return False  # another process was faster
    # The file lists starts of the run that ended.
    (run_dir / VERSIONS_FILE).unlink(missing_ok=True)
    return True


def note_abandoned(run_dir: Path) -> None:
    """Record a run that ended before its training process could write a `summary.json`."""
    # Where the folder is locked, another process trains the run and will write the file.
    if (run_dir / SUMMARY_FILE).exists() or is_locked(run_dir / LOCK_FILE):
        return
    with suppress(UserError):  # the disk is full
        write_end(run_dir, Status.interrupted, "ended before its first step")


def numbered(folder: Path) -> Iterator[Path]:
    """Yield a folder, and then without end the names `<folder>_2`, `<folder>_3` and so on.

    Folders are named by the second in which they are made, so two runs may get one name.
    """
    yield folder
    for number in itertools.count(2):
        yield folder.with_name(f"{folder.name}_{number}")


def _yaml_text(config: TrainConfig) -> str:
    """Write a configuration as YAML."""
    values = plain(config)
    # A run of one stage has no use for the keys of a cascade, which are unset.
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
        composed: Configuration that the command line composes, in plain values.
        default: Configuration that an empty command line composes.
        overrides: The arguments. Keys and groups that they name are changed even to a default
            value, or deleted (`~key`).
        schema: Dataclass of the command's configuration. Keys that the run's configuration lacks,
            since `train` does not have them, get their composed values.

    Raises:
        UserError: If the folder holds no run, or the changed configuration is invalid.
    """
    run_dir = _existing_run(resume)
    trusted_targets = composed.get("trusted_targets", [])  # `~trusted_targets` deletes the key
    values = {**composed, **plain(load_config(run_dir, trusted_targets))}
    default_values = flat(default)
    changed = OmegaConf.create(values)
    overridden_keys = list(map(_name_of, overrides))
    chosen_nodes = [
        name for name in EXTENSION_KEYS if _is_chosen(name, composed, default, overridden_keys)
    ]
    derived_keys = _derived_keys(values, composed)
    for key, value in flat(composed).items():
        if _is_below(key, chosen_nodes):
            continue
        # Hydra gives every command a folder of its own; a resumed run keeps its folder.
        if key in ("run_dir", "logger.save_dir"):
            continue
        is_default = key in default_values and default_values[key] == value
        is_changed = not is_default and not _is_below(key, derived_keys)
        if is_changed or _is_below(key, overridden_keys):
            OmegaConf.update(changed, key, value, merge=False, force_add=True)
    _delete_keys(changed, composed, overrides)
    for name in chosen_nodes:
        changed[name] = composed[name]
    if "schedule" in chosen_nodes:
        _follow_run(changed, composed, overridden_keys)
    # The paths of a new logger name the folder that Hydra gave this command. `_set_run_dir` later
    # replaces `changed.run_dir` by the folder of the run in these paths.
    if "logger" in chosen_nodes:
        changed.run_dir = composed["run_dir"]
    changed.resume = resume
    return to_config(changed, schema)


def _derived_keys(values: Mapping[str, Any], composed: Mapping[str, Any]) -> list[str]:
    """List keys whose composed values may differ from the defaults though the user gave none.

    These are the length of the schedule, which follows `steps`, and each extension point where the
    command line composes another class than the run has. (The caller replaces those whose class the
    user chose, so here the run keeps its class and arguments.)

    Args:
        values: Configuration of the run, in plain values.
        composed: See `changed_config`.

    Returns:
        Dotted keys and groups.
    """
    derived_keys = []
    length_key = _length_key(values["schedule"][TARGET])
    if length_key is not None:
        derived_keys.append(length_key)
    for name in EXTENSION_KEYS:
        if values[name].get(TARGET) != composed[name].get(TARGET):
            derived_keys.append(name)
    return derived_keys


def _delete_keys(
    changed: DictConfig, composed: Mapping[str, Any], overrides: Iterable[str]
) -> None:
    """Delete the keys that arguments such as `~callbacks.name` delete, in place.

    Args:
        changed: Configuration of the run with the changes.
        composed: See `changed_config`.
        overrides: See `changed_config`.
    """
    for override in overrides:
        key = _name_of(override)
        # A key that is still composed has got another value by a later argument, or is a group
        # whose keys have defaults.
        is_composed = any(_is_below(name, [key]) for name in flat(composed))
        if not override.startswith("~") or is_composed:
            continue
        group, _, name = key.rpartition(".")
        node = OmegaConf.select(changed, group) if group else changed
        if OmegaConf.is_dict(node):
            node.pop(name, None)


def _is_chosen(
    name: str,
    composed: Mapping[str, Any],
    default: Mapping[str, Any],
    overridden_keys: Sequence[str],
) -> bool:
    """Whether the command line chooses the class of an extension point.

    The composed node then replaces the node of the run as a whole: the arguments of one class have
    no meaning for another.

    Args:
        name: Key of the extension point, such as `optimizer`.
        composed: See `changed_config`.
        default: See `changed_config`.
        overridden_keys: Dotted keys and groups that the arguments name.
    """
    # Loggers have no common arguments: any key replaces the node.
    if name == "logger" and any(_is_below(key, ["logger"]) for key in overridden_keys):
        return True
    if name in overridden_keys or f"{name}.{TARGET}" in overridden_keys:
        return True
    # An experiment may choose another class than the default.
    return bool(composed[name].get(TARGET) != default[name].get(TARGET))


def _follow_run(
    changed: DictConfig, composed: Mapping[str, Any], overridden_keys: Sequence[str]
) -> None:
    """Let a newly chosen schedule follow the steps and the learning rate of the run, in place.

    The file of a schedule gives these arguments as `${steps}` and `${optimizer.lr}`. The command
    line has resolved them with its own values, which are defaults unless the user gave others.

    Args:
        changed: Configuration of the run with the changes.
        composed: See `changed_config`.
        overridden_keys: Dotted keys and groups that the arguments name.
    """
    # Argument of a schedule to the dotted key that it follows.
    followers = dict.fromkeys(LENGTH_KEYS.values(), "steps") | {"max_lr": "optimizer.lr"}
    flat_composed = flat(composed)
    for argument, source in followers.items():
        key = f"schedule.{argument}"
        if key not in flat_composed or key in overridden_keys:
            continue
        # A value that differs was given in an experiment, and stays.
        if flat_composed[key] == flat_composed.get(source):
            OmegaConf.update(changed, key, OmegaConf.select(changed, source))


def _name_of(override: str) -> str:
    """Dotted name of the key or group that an argument sets, without `+`, `~` and `@<package>`.

    Example:
        >>> [_name_of(override) for override in ("+data.seed=1", "augment/noise@augment=none")]
        ['data.seed', 'augment.noise']
    """
    name = override.lstrip("+~").partition("=")[0]
    return name.partition("@")[0].replace("/", ".")


def _is_below(key: str, groups: Iterable[str]) -> bool:
    """Whether a dotted key is one of some keys, or lies in one of some groups."""
    # The dot at the end: `data.seed` is not in the group `data.s`.
    return any(f"{key}.".startswith(f"{group}.") for group in groups)


def find_run(config: TrainConfig) -> tuple[Path, Status] | None:
    """Find the run that `resume=auto` resumes.

    The run has the signature of the configuration. It is the run in the configured folder or, where
    that folder has no such run, the newest unfinished run in a folder beside it. A run whose loss
    was not finite is left out, since it would fail again.

    Args:
        config: Checked configuration; its paths are made absolute.

    Returns:
        Folder and status of the run; None = there is no such run.
    """
    resolve_paths_and_spacing(config)
    expected_signature = signature(plain(config))
    configured_dir = Path(config.run_dir).absolute()
    # Folder to its sort key: whether it is the configured one, then its time. In descending order
    # the configured folder comes first, then the newest.
    sort_keys = {}
    for path in configured_dir.parent.glob(f"*/{CONFIG_FILE}"):
        with suppress(FileNotFoundError):  # its run has just been removed
            sort_keys[path.parent] = (path.parent == configured_dir, path.stat().st_mtime)
    for run_dir in sorted(sort_keys, key=sort_keys.__getitem__, reverse=True):
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
    """Read the status of a run."""
    if is_locked(run_dir / LOCK_FILE):
        return Status.running
    summary = read_summary(run_dir)
    # The summary of an earlier start is removed before the ranks are started.
    if not summary and is_locked(run_dir / START_LOCK_FILE):
        return Status.running
    # Without a summary the run was killed before it could write one: `Status(None)` is interrupted.
    return Status(summary.get("status"))


def is_finished(config: TrainConfig) -> bool:
    """Whether the run that `config.resume` names has finished at least the configured steps."""
    run_dir = _existing_run(str(config.resume))
    if status_of_run(run_dir) is not Status.finished:
        return False
    return load_config(run_dir, config.trusted_targets).steps >= config.steps


def wait_until_free(run_dir: Path) -> bool:
    """Wait up to `LOCK_WAIT_S` for the process that trains a run to end.

    Returns:
        Whether no process trains the run any more.
    """
    if not is_locked(run_dir / LOCK_FILE):
        return True
    say(f"waiting for the process that runs {run_dir}")
    with locked(run_dir / LOCK_FILE, LOCK_WAIT_S) as is_free:
        return is_free


def read_file(path: Path, read: Callable[[Path], T]) -> T | None:
    """Read a file of a run folder; None where the file is missing or damaged.

    The user is told of a damaged file.

    Args:
        path: The file.
        read: Function of the path that returns the content; any exception means damage.
    """
    try:
        return read(path) if path.exists() else None
    # OmegaConf and the reader of CSV may raise any exception on random bytes.
    except Exception as error:
        reason = first_line(error).removeprefix(f"{path}: ")
        say(f"{path} is damaged and left out: {reason}")
        return None


def read_record(path: Path, kind: type[T]) -> T:
    """Read a JSON file of a run folder; empty where the file is missing or damaged.

    The user is told of a damaged file.

    Args:
        path: The file.
        kind: Expected type of the content, `dict` or `list`.
    """

    def read(path: Path) -> T:
        loaded = read_json(path)
        if not isinstance(loaded, kind):
            raise UserError(f"a JSON {kind.__name__} was expected")
        return loaded

    return read_file(path, read) or kind()


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Read the `summary.json` of a run; empty where the file is missing or damaged."""
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
        trusted: `trusted_targets` of the present command. They replace the `trusted_targets` of the
            file: a folder from someone else must not decide which code is trusted.

    Raises:
        UserError: If the configuration is damaged or invalid, or the run is of version 0.1.
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


def resolve_paths_and_spacing(config: TrainConfig) -> None:
    """Make paths absolute and compute the spacing from the data, in place.

    The run can then be resumed from any working folder, with the same values.
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
    """Remove the folder that Hydra made for a run that did not begin there, unless it has files."""
    # The working folder is the user's, even if `hydra.run.dir=.` names it.
    if folder.is_dir() and folder != Path.cwd() and not any(folder.iterdir()):
        folder.rmdir()


def read_config(run_dir: Path) -> dict[str, Any]:
    """Read the configuration of a run folder, unchecked.

    Raises:
        UserError: If the file is damaged.
    """
    path = run_dir / CONFIG_FILE
    loaded = read_yaml(path, "a configuration", "copy it again")
    if not isinstance(loaded, dict) or not loaded:
        raise UserError(
            f"{path}: expected a configuration, but the file holds no YAML mapping; copy it again"
        )
    # YAML reads a key such as `1` as a number.
    return {str(key): value for key, value in loaded.items()}


def _existing_run(resume: str) -> Path:
    """Return the folder of the run to resume, as an absolute path.

    Raises:
        UserError: If there is no run in it.
    """
    run_dir = Path(resume).absolute()
    if not (run_dir / CONFIG_FILE).is_file():
        raise UserError(
            f"resume={resume}: there is no {CONFIG_FILE} in that folder, so it is no run of medseg"
        )
    return run_dir


def _set_run_dir(config: TrainConfig, run_dir: Path) -> None:
    """Let a run and its loggers write to a folder: replace the old folder in place."""
    # Only whole parts of a path or URI are replaced: `/runs/a` is not found in `/runs/a_logs`, nor
    # in `/data/runs/a`.
    old_dir = re.compile(rf"(?<![\w.-]){re.escape(config.run_dir)}(?=[/\\]|$)")
    # `logger` is the node of one logger, or a mapping of the nodes of several.
    nodes = [config.logger]
    nodes += [value for value in config.logger.values() if isinstance(value, dict)]
    for node in nodes:
        for key, value in node.items():
            if isinstance(value, str):
                # A function, because backslashes in a replacement text would refer to groups.
                node[key] = old_dir.sub(lambda _: str(run_dir), value)
    config.run_dir = str(run_dir)


def _check_change(resume: str, saved: dict[str, Any], changed: dict[str, Any]) -> None:
    """Refuse changes that would change the result, but allow more steps where they would not.

    Args:
        resume: The argument, for messages.
        saved: Values of the run from `decisive`.
        changed: Values of the command from `decisive`.

    Raises:
        UserError: If the result would change.
    """
    # A table that was moved is the same data set: the cases themselves are compared with those in
    # the checkpoint.
    keys = [key for key in changed_keys(saved, changed) if key != "data.cases"]
    if not keys:
        return
    length_key = _length_key(saved["schedule._target_"])
    if "steps" in keys and set(keys) <= {"steps", length_key}:
        _check_steps(resume, saved, changed)
        return
    changes = describe_changes(keys, saved, changed)
    raise UserError(
        f"resume={resume}: the configuration has changed and would change the result ({changes}); "
        "restore these values, or start a new run"
    )


def _check_steps(resume: str, saved: dict[str, Any], changed: dict[str, Any]) -> None:
    """Refuse fewer steps, and more steps where they would change the schedule.

    Args:
        resume: The argument, for messages.
        saved: Values of the run from `decisive`.
        changed: Values of the command, which has another number of steps.

    Raises:
        UserError: If the steps are refused.
    """
    saved_steps = saved["steps"]
    steps = changed["steps"]
    if steps < saved_steps:
        raise UserError(
            f"resume={resume}: steps={steps} is less than steps={saved_steps} of the run; "
            f"choose {saved_steps} or more"
        )
    if not allows_more_steps(saved, changed):
        length_key = _length_key(saved["schedule._target_"])
        assert length_key is not None, "a schedule without an end allows more steps"
        raise UserError(
            f"resume={resume}: steps={steps}: {length_key}={saved.get(length_key)}, so the "
            "schedule was built for that many steps and would change with another length; "
            "start a new run, with schedule=constant if you want to extend it later"
        )


def allows_more_steps(saved: Mapping[str, Any], changed: Mapping[str, Any]) -> bool:
    """Whether a run may go on to more steps, since its schedule does not depend on them.

    Args:
        saved: Values of the run from `decisive`.
        changed: Values with more steps.
    """
    length_key = _length_key(saved["schedule._target_"])
    if length_key is None:
        return True
    length = saved.get(length_key)
    is_length_changed = changed.get(length_key) != length
    # A run that has already passed the end of its schedule may go on: its schedule does not depend
    # on the further steps. A run that ends within its schedule may not.
    is_end_passed = length is not None and saved["steps"] <= length < changed["steps"]
    return not (is_length_changed or is_end_passed)


def _length_key(target: str) -> str | None:
    """Dotted key with the length of a schedule; None for a schedule without an end.

    Args:
        target: Dotted path of the class of the schedule.
    """
    class_name = target.rpartition(".")[2]
    if class_name not in LENGTH_KEYS:
        return None
    return f"schedule.{LENGTH_KEYS[class_name]}"


def _signature(run_dir: Path) -> str | None:
    """Compute the signature of the run in a folder; None, with a message, where that fails."""

    def read(path: Path) -> str | None:
        try:
            return signature(read_config(run_dir))
        except KeyError as error:
            say(
                f"{path} is left out: it lacks the key {error.args[0]}, "
                "so another version or program has written it"
            )
            return None

    return read_file(run_dir / CONFIG_FILE, read)
