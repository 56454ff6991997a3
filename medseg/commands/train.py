"""The `train` command: opens a run folder and trains there; a multirun runs many jobs."""

import os
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from medseg.commands import entry
from medseg.console import say
from medseg.errors import EXIT_OUT_OF_MEMORY, UserError
from medseg.runs import sweeps
from medseg.runs.advice import plan_command
from medseg.runs.folder import find_run, is_finished, note_abandoned, open_run, remove_if_empty
from medseg.runs.processes import check_start, start_ranks
from medseg.runs.ranks import choose_gpus, from_first_rank, is_under_torchrun, num_restarts, rank
from medseg.runs.status import Status
from medseg.training.notes import notes
from medseg.training.options import TrainConfig
from medseg.training.preemption import STOP


def main() -> None:
    """Train with the configuration that the command line composes."""
    # Processes that this one starts import nothing from the working folder.
    os.environ["PYTHONSAFEPATH"] = "1"
    STOP.install()
    try:
        entry.run(
            "train",
            job=train,
            refused=sweeps.note_refusal,
            sweep_codes=sweeps.exit_codes,
            read=read,
        )
    finally:
        # In `finally`, because `entry.run` always ends by an exception, such as SystemExit.
        for sweep_dir in sweeps.SweepFolder.started:
            if not sweep_dir.is_dir():
                continue
            try:
                print(f"comparison of the jobs: {sweeps.compare(sweep_dir)}")
            except UserError as error:  # the disk is full; the exit code stays
                say(str(error))


def read(composed: DictConfig) -> TrainConfig:
    """Check the composed configuration, or that of the run to resume with the changes.

    Also chooses the GPUs, and builds the objects of the configuration once.

    Returns:
        The checked configuration.
    """
    config = entry.read_resumed("train", TrainConfig, composed)
    choose_gpus(config.trainer.gpus)
    if rank() == 0:
        _check_objects_and_tell(config)
    return config


def _check_objects_and_tell(config: TrainConfig) -> None:
    """Build the objects of the configuration once, and tell the user of surprising settings."""
    # This import loads torch, which takes seconds; the earlier checks do without torch.
    from medseg.training.check import check_objects

    has_tiles = HydraConfig.get().runtime.choices.get("inference") == "tiles"
    if has_tiles and config.inference.tile_size is None:
        say(
            "inference=tiles: stage.patch_size is null, so the tiles have no size "
            "and whole cases are validated; give inference.tile_size=[D,H,W] for tiles"
        )
    has_batch_norm = check_objects(config)
    for note in notes(config, has_batch_norm=has_batch_norm):
        say(note)


def train(config: TrainConfig) -> int:
    """Open the run folder and train; returns the exit code.

    When memory ran out, it prints the command that finds memory switches for this machine.
    """
    overrides = HydraConfig.get().overrides
    code = _train(config)
    if code == EXIT_OUT_OF_MEMORY and rank() == 0:
        command = plan_command(config, [*overrides.hydra, *overrides.task])
        say(f"find switches that fit into this machine: {command}")
    return code


def _train(config: TrainConfig) -> int:
    """Train one run, or one job of a multirun; returns the exit code."""
    hydra_config = HydraConfig.get()
    if hydra_config.mode is RunMode.MULTIRUN:
        if is_under_torchrun():
            raise UserError(
                "a multirun cannot run under torchrun, which starts the ranks of one run; "
                "start it with python, and each job starts its own ranks"
            )
        return sweeps.run_job(config)
    check_start(config.trainer, config.resume)
    arguments = (*hydra_config.overrides.hydra, *hydra_config.overrides.task)
    is_chosen_by_user = any(
        argument.startswith(("hydra.run.dir=", "run_dir=")) for argument in arguments
    )
    # Under torchrun the first rank opens the folder for all.
    opened = None
    if rank() == 0:
        opened = open_or_leave(config, is_chosen_by_user)
    if is_under_torchrun():
        opened = from_first_rank(opened)
    # Hydra has made a new folder, which a resumed run does not use.
    remove_if_empty(Path(hydra_config.runtime.output_dir))
    if opened is None:  # the run has finished
        return 0
    try:
        return start_ranks(opened)
    except BaseException:
        if rank() == 0:
            note_abandoned(Path(opened.run_dir))
        raise


def open_or_leave(config: TrainConfig, is_chosen_by_user: bool) -> TrainConfig | None:
    """Open the run folder that `resume` or `run_dir` names; None if that run has finished.

    Args:
        config: Checked configuration; changed in place to the configuration of the run.
        is_chosen_by_user: Whether the user chose the folder of a new run.
    """
    # torchrun starts all ranks again when one of them has died: they resume the run.
    if config.resume is None and num_restarts():
        config.resume = "auto"
    if config.resume == "auto":
        # `resume` stays None where there is no earlier run, so that a new one begins.
        config.resume = None
        earlier_run = find_run(config)
        if earlier_run is not None:
            run_dir, status = earlier_run
            if status is Status.finished:
                say(f"already finished: {run_dir}")
                return None
            config.resume = str(run_dir)
    has_finished = config.resume is not None and is_finished(config)
    if config.resume is not None and not has_finished:
        say(f"resuming {config.resume}")
    # The folder of a finished run is opened too: this sets `run_dir`, and refuses keys that would
    # have given another result.
    open_run(config, is_chosen_by_user=is_chosen_by_user)
    if has_finished:
        say(
            f"already finished: {config.run_dir} has made the {config.steps} steps "
            "that were asked for"
        )
        return None
    return config
