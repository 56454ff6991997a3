"""The folder of a run: its resolved configuration, and what may change in it when the run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from medseg.build.spacing import find_spacing
from medseg.config.check import TARGET_WHITELIST, to_config
from medseg.config.schema import TrainConfig
from medseg.config.signature import decisive, flat, plain, signature
from medseg.console import say
from medseg.errors import UserError
from medseg.io.atomic import replace_text
from medseg.io.locks import is_locked, locked
from medseg.runs.status import Status

CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
# Held by the worker.
LOCK_FILE = ".lock"
# How long a worker may take to save when what started it, or another rank, has died.
END_S = 30.0


def open_run(config: TrainConfig) -> Path:
    """Make a new run folder with the resolved configuration, or make that of `config.resume` ready to go on.

    Args:
        config: Checked configuration.

    Raises:
        UserError: If the folder holds a run already, or is none to go on with, or would become another one.
    """
    settle(config)  # a run is resumed from anywhere
    if config.resume is None:
        run_dir = Path(config.run_dir).absolute()
        if (run_dir / CONFIG_FILE).exists():
            raise UserError(f"{run_dir} holds a run already; give resume={run_dir} to go on with it, or another hydra.run.dir")
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        _move(config, run_dir)
        _write_config(config, run_dir)
        return run_dir
    run_dir = _existing(config.resume)
    saved = load_config(run_dir)
    settle(saved)
    _move(config, run_dir)
    _check_change(config.resume, decisive(plain(saved)), decisive(plain(config)))
    if is_busy(run_dir):
        raise UserError(f"resume={config.resume}: another process is running it; wait for it, or stop it")
    config.resume = None
    if plain(config) != plain(saved):
        _write_config(config, run_dir)
    return run_dir


def changed_config(resume: str, composed: dict[str, Any], default: dict[str, Any], overrides: Iterable[str]) -> TrainConfig:
    """The configuration of a run that goes on, changed by what the command line says beside `resume`.

    Args:
        resume: Run folder.
        composed: What the command line composes, in plain values.
        default: What an empty command line composes.
        overrides: The arguments: what they name, by key or by group, is meant even where it is the default.

    Raises:
        UserError: If the folder holds no run, or the changed configuration is not right.
    """
    run_dir = _existing(resume)
    values = plain(load_config(run_dir))
    unsaid = flat(default)
    names = [override.lstrip("+~").partition("=")[0].partition("@")[0].replace("/", ".") for override in overrides]
    # The arguments of one class are none of another: `steps` changes those of the default schedule, which may not be the run's.
    foreign = [name for name in TARGET_WHITELIST if values[name].get("_target_") != composed[name].get("_target_")]
    for key, value in flat(composed).items():
        *groups, last = key.split(".")
        is_named = any(f"{key}.".startswith(f"{name}.") for name in names)
        is_changed = (key not in unsaid or unsaid[key] != value) and not (groups and groups[0] in foreign)
        if (is_named or is_changed) and key not in ("run_dir", "logger.save_dir"):
            node = values
            for group in groups:
                node = node.setdefault(group, {})
            node[last] = value
    if any(name.partition(".")[0] == "logger" for name in names):
        values["logger"], values["run_dir"] = composed["logger"], composed["run_dir"]
    return to_config(OmegaConf.create(values | {"resume": resume}), TrainConfig)


def find_run(config: TrainConfig) -> tuple[Path, Status] | None:
    """What `resume=auto` means: the run of the folder that is asked for, else the newest beside it that did not end by itself.

    Args:
        config: Checked configuration.

    Returns:
        Folder and status of a run of the same signature; one that has finished only in the folder that is asked for. None = no such run.
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
    """What became of a run; one without a summary is running, or was killed with all that could have noted it."""
    if is_locked(run_dir / LOCK_FILE):
        return Status.running
    summary = read_summary(run_dir)
    return Status(summary["status"]) if summary else Status.interrupted


def is_busy(run_dir: Path) -> bool:
    """Whether a worker is on a run, and stays; one whose parent was killed is given the time to save."""
    if not is_locked(run_dir / LOCK_FILE):
        return False
    say(f"waiting for the process that is on {run_dir}")
    with locked(run_dir / LOCK_FILE, wait_s=END_S + 5) as is_free:
        return not is_free


def read_summary(run_dir: Path) -> dict[str, Any]:
    """The `summary.json` of a run; empty where there is none."""
    path = run_dir / SUMMARY_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def load_config(run_dir: Path) -> TrainConfig:
    """Read and check the configuration of a run folder; it writes to where the folder lies now."""
    loaded = OmegaConf.load(run_dir / CONFIG_FILE)
    if not OmegaConf.is_dict(loaded):
        raise UserError(f"{run_dir / CONFIG_FILE} is damaged: a mapping was expected")
    config = to_config(loaded, TrainConfig)  # type: ignore[arg-type]
    _move(config, run_dir)
    return config


def settle(config: TrainConfig) -> None:
    """Write down, in place, what would mean something else in another place or another day.

    Paths become absolute, and a spacing that is found in the cases becomes numbers.
    """
    data, stage = config.data, config.stage
    data.cache, data.phantoms.folder = os.path.abspath(data.cache), os.path.abspath(data.phantoms.folder)
    data.cases = os.path.abspath(data.cases) if data.cases else None
    stage.coarse = os.path.abspath(stage.coarse) if stage.coarse else None
    config.init_from = os.path.abspath(config.init_from) if config.init_from else None
    find_spacing(config.spacing, data)


def write_end(run_dir: Path, status: Status, message: str) -> None:
    """Write the `summary.json` of a run that did not finish."""
    replace_text(run_dir / SUMMARY_FILE, json.dumps({"status": status.value, "message": message}, indent=1))


def _existing(resume: str) -> Path:
    run_dir = Path(resume).absolute()
    if not (run_dir / CONFIG_FILE).is_file():
        raise UserError(f"resume={resume}: there is no {CONFIG_FILE} in that folder, so it is no run of medseg")
    return run_dir


def _write_config(config: TrainConfig, run_dir: Path) -> None:
    replace_text(run_dir / CONFIG_FILE, OmegaConf.to_yaml(OmegaConf.create(plain(config))))


def _move(config: TrainConfig, run_dir: Path) -> None:
    """Let a run write to a folder, in place."""
    if config.logger.get("save_dir") == config.run_dir:
        config.logger["save_dir"] = str(run_dir)
    config.run_dir = str(run_dir)


def _check_change(resume: str, saved: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse what would change the result; more steps are no other run where the schedule does not depend on them."""
    differing = [key for key in sorted(saved.keys() | given.keys()) if saved.get(key) != given.get(key)]
    if not differing:
        return
    begin, steps = f"resume={resume}: ", saved["steps"]
    if all(key == "steps" or key.startswith("schedule.") for key in differing) and "steps" in differing:
        if given["steps"] < steps:
            raise UserError(f"{begin}steps={given['steps']} is less than the {steps} of the run")
        bound = [key for key, value in saved.items() if key.startswith("schedule.") and type(value) is int and value == steps]
        if not bound and differing == ["steps"]:
            return
        raise UserError(
            f"{begin}steps={given['steps']}: the learning rates of {str(saved['schedule._target_']).rpartition('.')[2]} were laid out for "
            f"{steps} steps, so more of them make another run; start a new one, with schedule=constant if it is to be prolonged"
        )
    changes = "; ".join(f"{key}: {saved.get(key)} then, {given.get(key)} now" for key in differing[:5])
    raise UserError(f"{begin}the result would be that of another run, since its configuration differs in {changes}")


def _signature(run_dir: Path) -> str | None:
    try:
        return signature(OmegaConf.to_container(OmegaConf.load(run_dir / CONFIG_FILE)))  # type: ignore[arg-type]
    except (OSError, YAMLError, KeyError, TypeError):
        return None  # of another version, or no run


def remove_if_empty(folder: Path) -> None:
    """Take back the run folder that Hydra made for a run that never began there."""
    if folder.is_dir() and folder != Path.cwd() and not any(folder.iterdir()):
        folder.rmdir()
