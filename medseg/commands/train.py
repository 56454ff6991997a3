"""The `train` command: compose, check, hand over to one worker process per rank; a multirun is many runs."""

from __future__ import annotations

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from medseg.commands import entry
from medseg.config.check import resolved, to_config
from medseg.config.schema import TrainConfig
from medseg.console import say
from medseg.errors import require
from medseg.runs import sweeps as jobs
from medseg.runs.folder import changed_config, find_run, open_run, remove_if_empty
from medseg.runs.launch import check_start, join_torchrun, num_local_ranks, start_workers, tell_torchrun
from medseg.runs.ranks import is_under_torchrun
from medseg.runs.status import Status


def main() -> None:
    """Train what the command line composes."""
    join_torchrun()
    try:
        entry.run("train", TrainConfig, train, jobs.note_refusal, jobs.exit_codes, read)
    finally:
        for sweep_dir in filter(Path.is_dir, jobs.SweepFolder.started):
            print(f"comparison of the jobs: {jobs.compare(sweep_dir)}")


def read(composed: DictConfig) -> TrainConfig:
    """The configuration that a command line means: what it composes, or a run that goes on with some keys changed."""
    hydra_config = HydraConfig.get()
    if hydra_config.mode is RunMode.MULTIRUN or composed.resume in (None, "auto"):
        return to_config(composed, TrainConfig)
    default = resolved(hydra.compose("train"))
    return changed_config(composed.resume, resolved(composed), default, hydra_config.overrides.task)


def train(config: TrainConfig) -> int:
    """Open the run folder and run its workers; returns their exit code."""
    hydra_config = HydraConfig.get()
    if hydra_config.mode is RunMode.MULTIRUN:
        require(
            not is_under_torchrun(),
            "torchrun starts the ranks of one run; start a multirun with python, its jobs start their own",
        )
        return jobs.run_job(config)
    check_start(config)
    if config.resume == "auto":
        found = find_run(config)
        if found is not None and found[1] is Status.finished:
            say(f"finished already: {found[0]}")
            if is_under_torchrun():
                tell_torchrun(None)
            return 0
        config.resume = str(found[0]) if found is not None else None
    if config.resume is not None:
        say(f"going on with {config.resume}")
    run_dir = open_run(config)
    composed_dir = Path(hydra_config.runtime.output_dir)
    if run_dir != composed_dir:
        remove_if_empty(composed_dir)
    if is_under_torchrun():
        tell_torchrun(run_dir if config.start else None)
    if not config.start:
        print(f"to be started with torchrun … -m medseg.runs.worker {run_dir}")
        return 0
    return start_workers(run_dir, num_local_ranks(config))
