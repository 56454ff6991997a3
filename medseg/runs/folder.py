"""Run folder: configuration, status, and the check of changed keys when a run is resumed."""

import json
import os
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from medseg.build.spacing import find_spacing
from medseg.config.check import to_config
from medseg.config.schema import TrainConfig
from medseg.config.targets import EXTENSION_KEYS, TARGET
from medseg.console import say
from medseg.errors import UserError, require
from medseg.io.atomic import is_locked, locked, replace_text
from medseg.io.text import read_yaml_text
from medseg.runs.signature import decisive, flat, plain, signature
from medseg.runs.status import Status

CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
# Held by the first rank.
LOCK_FILE = ".lock"
# How long the ranks of a killed run may take to end, in s.
LOCK_WAIT_S = 35.0
# Keys of run folders of earlier versions that no longer exist.
REMOVED_KEYS = ("start",)


def open_run(config: TrainConfig) -> Path:
    """Make a new run folder with the resolved configuration, or prepare that of `config.resume`.

    Args:
        config: Checked configuration; changed in place to the one of the run.

    Returns:
        The run folder, which is `config.run_dir` from now on.

    Raises:
        UserError: If a new run's folder holds a run already, or the run to resume does not exist, is running, or would become another.
    """
    settle(config)
    if config.resume is None:
        run_dir = Path(config.run_dir).absolute()
        if (run_dir / CONFIG_FILE).exists():
            raise UserError(f"{run_dir} already contains a run; give resume={run_dir} to continue it, or another hydra.run.dir")
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    else:
        run_dir = _existing_run(config.resume)
        saved = load_config(run_dir, config.trusted_targets)
        settle(saved)
        _check_change(config.resume, decisive(plain(saved)), decisive(plain(config)))
        if is_busy(run_dir):
            raise UserError(f"resume={config.resume}: another process is running it; wait for it, or stop it")
        config.resume = None
    _set_run_dir(config, run_dir)
    text = OmegaConf.to_yaml(OmegaConf.create(plain(config)))
    path = run_dir / CONFIG_FILE
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        replace_text(path, text)
    return run_dir


def changed_config(resume: str, composed: dict[str, Any], default: dict[str, Any], overrides: Iterable[str]) -> TrainConfig:
    """The configuration of a run to resume, changed by what the command line says beside `resume`.

    Args:
        resume: Run folder.
        composed: What the command line composes, in plain values.
        default: What an empty command line composes.
        overrides: The arguments. What they name, by key or by group, counts even where it is the default.

    Raises:
        UserError: If the folder holds no run, or the changed configuration is not right.
    """
    run_dir = _existing_run(resume)
    values = plain(load_config(run_dir, composed["trusted_targets"]))
    unchanged = flat(default)
    names = [override.lstrip("+~").partition("=")[0].partition("@")[0].replace("/", ".") for override in overrides]
    # Arguments of another class do not apply: `steps` changes those of the default schedule, which may not be the run's.
    foreign = [name for name in EXTENSION_KEYS if values[name].get(TARGET) != composed[name].get(TARGET)]
    for key, value in flat(composed).items():
        *groups, last = key.split(".")
        is_named = any(f"{key}.".startswith(f"{name}.") for name in names)
        is_changed = (key not in unchanged or unchanged[key] != value) and not (groups and groups[0] in foreign)
        if (is_named or is_changed) and key not in ("run_dir", "logger.save_dir"):
            node = values
            for group in groups:
                node = node.setdefault(group, {})
            node[last] = value
    if any(name.partition(".")[0] == "logger" for name in names):
        values["logger"], values["run_dir"] = composed["logger"], composed["run_dir"]
    return to_config(OmegaConf.create(values | {"resume": resume}), TrainConfig)


def find_run(config: TrainConfig) -> tuple[Path, Status] | None:
    """Find the run that `resume=auto` means: that of the configured folder, else the newest beside it that may go on.

    Args:
        config: Checked configuration.

    Returns:
        Folder and status of a run of the same signature. A finished run counts only in the configured folder. None = no such run.
    """
    settle(config)
    wanted, own = signature(plain(config)), Path(config.run_dir).absolute()
    paths = sorted(own.parent.glob(f"*/{CONFIG_FILE}"), key=lambda path: (path.parent == own, path.stat().st_mtime), reverse=True)
    for run_dir in (path.parent for path in paths):
        status = status_of_run(run_dir)
        has_ended = status in (Status.finished, Status.not_finite, Status.refused)
        if (not has_ended or (status is Status.finished and run_dir == own)) and _signature(run_dir) == wanted:
            return run_dir, status
    return None


def status_of_run(run_dir: Path) -> Status:
    """Status of a run. Without a summary it was interrupted: killed before it could write one."""
    if is_locked(run_dir / LOCK_FILE):
        return Status.running
    return Status(read_summary(run_dir).get("status", "interrupted"))


def is_busy(run_dir: Path) -> bool:
    """Whether a process runs the run; waits for the ranks of a killed one to end."""
    if not is_locked(run_dir / LOCK_FILE):
        return False
    say(f"waiting for the process that runs {run_dir}")
    with locked(run_dir / LOCK_FILE, LOCK_WAIT_S) as is_free:
        return not is_free


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Read the `summary.json` of a run; empty where there is none."""
    path = run_dir / SUMMARY_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write_end(run_dir: Path, status: Status, message: str) -> None:
    """Write the `summary.json` of a run that did not finish."""
    replace_text(run_dir / SUMMARY_FILE, json.dumps({"status": status.value, "message": message}, indent=1))


def load_config(run_dir: Path, trusted: Sequence[str] = ()) -> TrainConfig:
    """Read and check the configuration of a run folder, which may have been moved.

    Args:
        run_dir: The run folder.
        trusted: `trusted_targets` of the present command; a run folder can trust nothing.

    Raises:
        UserError: If it is damaged or not right.
    """
    config = to_config(OmegaConf.create({**read_config(run_dir), "trusted_targets": list(trusted)}), TrainConfig)
    _set_run_dir(config, run_dir)
    return config


def settle(config: TrainConfig) -> None:
    """Resolve relative paths and values that depend on the data, in place, so that a run can be resumed from anywhere."""
    for group, key in (
        (config.data, "cache"), (config.data, "cases"), (config.data.phantoms, "folder"), (config.stage, "coarse"), (config, "init_from"),
    ):  # fmt: skip
        if getattr(group, key):
            setattr(group, key, os.path.abspath(getattr(group, key)))
    find_spacing(config.spacing, config.data)


def remove_if_empty(folder: Path) -> None:
    """Remove the folder that Hydra made for a run that did not begin there."""
    if folder.is_dir() and folder != Path.cwd() and not any(folder.iterdir()):
        folder.rmdir()


def read_config(run_dir: Path) -> dict[str, Any]:
    """Read the configuration of a run folder, unchecked, without the keys that no longer exist.

    Raises:
        UserError: If it is damaged.
    """
    loaded = OmegaConf.to_container(OmegaConf.create(read_yaml_text(run_dir / CONFIG_FILE)))
    if not isinstance(loaded, dict):
        raise UserError(f"{run_dir / CONFIG_FILE} is damaged: a mapping was expected")
    for key in REMOVED_KEYS:
        loaded.pop(key, None)
    return typing.cast(dict[str, Any], loaded)


def _existing_run(resume: str) -> Path:
    run_dir = Path(resume).absolute()
    require(
        (run_dir / CONFIG_FILE).is_file(), f"resume={resume}: there is no {CONFIG_FILE} in that folder, so it is no run of medseg"
    )
    return run_dir


def _set_run_dir(config: TrainConfig, run_dir: Path) -> None:
    """Let a run, and its loggers, write to a folder, in place."""
    for node in (config.logger, *(one for one in config.logger.values() if isinstance(one, dict))):
        place = str(node.get("save_dir", ""))
        if place == config.run_dir or place.startswith(f"{config.run_dir}/"):
            node["save_dir"] = f"{run_dir}{place.removeprefix(config.run_dir)}"
    config.run_dir = str(run_dir)


def _check_change(resume: str, saved: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse a change of the result. More steps are allowed where the schedule does not depend on their number."""
    differing = [key for key in sorted(saved.keys() | given.keys()) if saved.get(key) != given.get(key)]
    if not differing:
        return
    begin, steps = f"resume={resume}: ", saved["steps"]
    if "steps" in differing and all(key == "steps" or key.startswith("schedule.") for key in differing):
        if given["steps"] < steps:
            raise UserError(f"{begin}steps={given['steps']} is less than steps={steps} of the run; choose {steps} or more")
        is_bound = any(key.startswith("schedule.") and type(value) is int and value == steps for key, value in saved.items())
        if not is_bound and differing == ["steps"]:
            return
        raise UserError(
            f"{begin}steps={given['steps']}: the schedule {str(saved['schedule._target_']).rpartition('.')[2]} was built for {steps} steps "
            "and would change with another length; start a new run, with schedule=constant if you want to extend it later"
        )
    changes = "; ".join(f"{key}: {saved.get(key)} then, {given.get(key)} now" for key in differing[:5])
    raise UserError(
        f"{begin}the configuration has changed and would change the result ({changes}); restore these values, or start a new run"
    )


def _signature(run_dir: Path) -> str | None:
    try:
        return signature(read_config(run_dir))
    except (OSError, YAMLError, KeyError, TypeError, UserError):
        return None  # of another version, or no run
