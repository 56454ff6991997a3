"""Training of one run: the steps from a checked configuration to `summary.json`."""

import json
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from medseg.console import say
from medseg.data.options import StageName
from medseg.errors import EXIT_USER_ERROR, UserError
from medseg.io.atomic import PART_PREFIX, locked, replace_text
from medseg.preprocess.options import SpacingStrategy
from medseg.runs.advice import next_command
from medseg.runs.folder import (
    LOCK_FILE,
    LOCK_WAIT_S,
    SUMMARY_FILE,
    VERSIONS_FILE,
    read_config,
    read_record,
    read_summary,
    write_end,
)
from medseg.runs.plans import compare_with_plan
from medseg.runs.ranks import join_ranks, rank, redirect_output, share_among_ranks
from medseg.runs.status import Status, end_of, explains, num_oom_kills, status_of
from medseg.targets import TARGET
from medseg.training.options import DebugOptions, Profiler, TrainConfig
from medseg.training.preemption import STOP

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from medseg.models.stage_network import StageNetwork
    from medseg.training.history import History


def run_rank(config: TrainConfig) -> int:
    """Train as one rank, and write `summary.json` however the training ends.

    Only rank 0 locks the run folder. Of several ranks that fail, the summary names the end that is
    the cause of the others.

    Args:
        config: Configuration of an opened run folder.

    Returns:
        Exit code.
    """
    run_dir = Path(config.run_dir)
    num_kills_before = num_oom_kills()
    STOP.install()
    redirect_output(run_dir)
    lock: AbstractContextManager[bool] = nullcontext(True)
    if rank() == 0:
        lock = locked(run_dir / LOCK_FILE, LOCK_WAIT_S)
    with lock as is_ours:
        if not is_ours:
            say(f"another process is running {run_dir}")
            return EXIT_USER_ERROR
        try:
            # Until the trainer runs there is nothing to save: a stop signal ends the process.
            STOP.end_at_once()
            if rank() == 0:
                (run_dir / SUMMARY_FILE).unlink(missing_ok=True)
            train_run(config)
        except BaseException as error:
            STOP.is_safe = False  # from here on, a signal must not interrupt the summary
            code, message, is_defect = end_of(
                error,
                is_asked=STOP.is_asked,
                is_saved=(run_dir / "checkpoints" / "last.ckpt").is_file(),
                is_memory_full=num_oom_kills() > num_kills_before,
            )
            if is_defect:
                traceback.print_exc()
            else:
                say(message)
            with suppress(UserError):  # the disk is full
                _write_end_of_rank(run_dir, status_of(code), message)
            return code
    return 0


def _write_end_of_rank(run_dir: Path, status: Status, message: str) -> None:
    """Write how this rank ended, unless another rank has written the cause of this end."""
    # The summary of an earlier start has been removed, so another rank of this start wrote this.
    written = read_summary(run_dir)
    if written:
        written_status = Status(written.get("status"))
        if explains(written_status, str(written.get("message", "")), status, message):
            return
    write_end(run_dir, status, message)


def train_run(config: TrainConfig) -> dict[str, Any]:
    """Build, train and summarise a run; a run with `checkpoints/last.ckpt` continues from there.

    Args:
        config: Configuration of an opened run folder. Changed in place: its batch is divided among
            the ranks that were started, and its precision becomes one that the GPU has.

    Returns:
        The summary that is written to `summary.json`.
    """
    run_dir = Path(config.run_dir)
    share_among_ranks(config.trainer, config.memory)
    # These imports take seconds, so they follow the check that the ranks can divide the batch.
    import torch

    from medseg.memory.device import use_supported_half
    from medseg.training.assemble import (
        make_data_module,
        make_metadata,
        make_module,
        make_trainer,
        make_views,
    )
    from medseg.training.callbacks import ValidationPictures, ValidationScores
    from medseg.training.checkpoints import Checkpoints
    from medseg.training.extensions import make_callbacks
    from medseg.training.history import History, HistoryBar
    from medseg.training.network import load_initial_weights, make_network
    from medseg.training.versions import collect_versions
    from medseg.weights.files import load_checkpoint

    _announce(config.debug)
    use_supported_half(config.memory, config.trainer.accelerator)
    torch.manual_seed(config.seed)  # decides the initial weights
    network = make_network(config)
    last_checkpoint = run_dir / "checkpoints" / "last.ckpt"
    # A resumed run takes all weights from its checkpoint.
    if not last_checkpoint.is_file():
        load_initial_weights(network, config)
    if rank() == 0:
        say(describe_run(config, network))

    # Steps between two lines of the history: by default a twentieth of the run, at most 50.
    history_every = config.history_every or max(1, min(50, config.steps // 20))
    history = History(run_dir / "history.csv", history_every, config.steps, config.metrics)
    checkpoints = Checkpoints(
        run_dir / "checkpoints",
        validate_every=config.stage.validate_every,
        checkpoint_every=config.checkpoint_every,
        patience=config.stage.patience,
        stop=STOP,
    )
    pictures = ValidationPictures(run_dir / "pictures", make_views(config))
    validation_scores = ValidationScores(run_dir / "validation.csv", pictures)
    callbacks: list[Any] = [history, pictures, validation_scores, checkpoints]
    callbacks += _optional_callbacks(config, run_dir)
    callbacks += make_callbacks(config)
    # In a log file each state of the bar would be a line.
    if sys.stderr.isatty():
        callbacks.append(HistoryBar(history))

    start_step = 0
    start_path = None
    if last_checkpoint.is_file():
        start_step = load_checkpoint(last_checkpoint, f"resume={run_dir}")["global_step"]
        start_path = str(last_checkpoint)
    # Before the trainer exists: Lightning takes a process group that it finds, and its own would
    # lack the backends and the restarts of `join_ranks`.
    join_ranks()
    trainer = make_trainer(config, callbacks, start_step)
    if trainer.is_global_zero:
        remove_parts(run_dir)
        _note_start(run_dir, {"seed": config.seed, **collect_versions()})
    module = make_module(config, network, make_metadata(config, read_config(run_dir)))
    data = make_data_module(config)
    validation_scores.patients = data.patients
    try:
        trainer.fit(module, datamodule=data, ckpt_path=start_path, weights_only=True)
    except SystemExit as end:
        # Lightning turns an interrupt into SystemExit with code 1.
        if isinstance(end.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise

    # Without validation cases there is no `best.ckpt`.
    checkpoint = run_dir / "checkpoints" / "best.ckpt"
    if not checkpoint.is_file():
        checkpoint = last_checkpoint
    summary = _summarise(config, trainer, history, network, checkpoints.best_score, checkpoint)
    if trainer.is_global_zero:
        replace_text(run_dir / SUMMARY_FILE, json.dumps(summary, indent=1))
        print(f"checkpoint: {checkpoint}")
        print(f"next: {next_command(config, checkpoint)}")
        print(f"run folder: {run_dir}", flush=True)
    return summary


def _optional_callbacks(config: TrainConfig, run_dir: Path) -> list[Any]:
    """Make the callbacks that only some configurations need."""
    from lightning.pytorch.callbacks import LearningRateMonitor

    from medseg.memory.device import pick_device
    from medseg.training.callbacks import Distortions, MemorySnapshot

    callbacks: list[Any] = []
    # Crops of a fixed size are stretched: the callback prints by how much.
    if config.spacing.strategy is SpacingStrategy.fixed_size:
        crop_names = ["whole scan"]
        if config.stage.name is StageName.fine:
            crop_names = list(config.task.regions or {})
        callbacks.append(Distortions(crop_names))
    if config.logger:
        callbacks.append(LearningRateMonitor("step"))
    is_profiled = config.debug.profiler is Profiler.torch
    if is_profiled and pick_device(config.trainer.accelerator).type == "cuda":
        callbacks.append(MemorySnapshot(run_dir / "memory_snapshot.pickle"))
    return callbacks


def _summarise(
    config: TrainConfig,
    trainer: "Trainer",
    history: "History",
    network: "StageNetwork",
    best_score: float | None,
    checkpoint: Path,
) -> dict[str, Any]:
    """Collect the content of `summary.json`.

    Args:
        config: Configuration of the run.
        trainer: The trainer, which has finished.
        history: Losses, seconds and memory of the run.
        network: Network of the run.
        best_score: Best validation Dice; None without a validation.
        checkpoint: The best checkpoint, or the last one without a validation.
    """
    from medseg.training.machine_load import peak_bytes
    from medseg.training.versions import collect_versions

    seconds_per_step = []
    for row in history.rows:
        # The cell is empty in lines of a validation.
        if row.get("seconds_per_step"):
            seconds_per_step.append(float(row["seconds_per_step"]))
    measured = {
        # On a CPU, resident memory with that of the workers; on GPUs, all memory that is taken,
        # including that of the driver and of other programs.
        "peak_resident_mib": round(history.load.peak_device_bytes() / 2**20, 2),
        # 0 where no step was timed.
        "seconds_per_step": median(seconds_per_step or [0.0]),
    }
    plan = {}
    # On one rank only: the comparison also adds the run to the history of this machine.
    if trainer.is_global_zero:
        plan = compare_with_plan(config, measured)
    return {
        "status": "finished",
        "stage": config.stage.name.value,
        "steps": trainer.global_step,
        "val_dice_best": best_score,
        "train_s": round(history.train_s(), 1),
        # Of this process alone: on GPUs what torch has allocated, else resident memory.
        "peak_gib": round(peak_bytes(history.load.uses_gpu) / 2**30, 3),
        **measured,
        "plan": plan,
        "num_parameters": sum(weight.numel() for weight in network.parameters()),
        "checkpoint": str(checkpoint),
        "versions": collect_versions(),
    }


def describe_run(config: TrainConfig, network: "StageNetwork") -> str:
    """Describe the network of a run and the switches that are on, in one line."""
    from medseg.memory.switches import select_blocks

    memory = config.memory
    num_weights = sum(weight.numel() for weight in network.parameters())
    patch = "whole volumes or crops"
    if config.stage.patch_size:
        patch = f"patch {'×'.join(map(str, config.stage.patch_size))}"
    # Ranks and micro-batches among which the batch of a step is divided.
    divisions = []
    num_ranks = config.trainer.devices * config.trainer.num_nodes
    if num_ranks > 1:
        divisions.append(f"{num_ranks} ranks")
    if memory.accumulate > 1:
        divisions.append(f"{memory.accumulate} micro-batches")
    batch = f"batch {config.stage.batch_size}"
    if divisions:
        batch += f" ({', '.join(divisions)})"
    blocks = network.blocks()
    policy = memory.checkpointing
    if not isinstance(policy, str):
        policy = tuple(policy)  # names of blocks
    recomputed_blocks = select_blocks(blocks, policy)
    # Name of each switch to whether it is on.
    switches = {
        "offload": memory.offload,
        "channels_last": memory.channels_last,
        "compile": memory.compile,
        "cudnn_benchmark": memory.cudnn_benchmark,
        f"ema_decay={config.ema_decay}": config.ema_decay is not None,
    }
    class_name = str(config.model[TARGET]).rpartition(".")[2]
    return ", ".join(
        [
            f"{class_name} with {num_weights / 1e6:.3g} million weights",
            patch,
            batch,
            memory.precision.value,
            f"{len(recomputed_blocks)} of {len(blocks)} blocks recomputed",
            *(name for name, is_on in switches.items() if is_on),
        ]
    )


def remove_parts(run_dir: Path) -> None:
    """Remove temporary files that were half-written when the run was killed.

    Other files stay, since the user may have chosen a folder with some. Other subfolders too: a
    cache in one may be filled by another process.
    """
    for folder in (run_dir, run_dir / "checkpoints", run_dir / "pictures"):
        for part in folder.glob(f"{PART_PREFIX}*.part*"):
            part.unlink(missing_ok=True)


def debug_switches(debug: DebugOptions) -> dict[str, bool]:
    """Map the name of each debug switch to whether it is on."""
    return {**vars(debug), "profiler": debug.profiler is not Profiler.none}


def _announce(debug: DebugOptions) -> None:
    """Tell the user which debug switches are on."""
    for key, is_on in debug_switches(debug).items():
        if is_on:
            say(f"debug.{key} is on: this run is for finding faults, not for results")


def _note_start(run_dir: Path, start: dict[str, Any]) -> None:
    """Add a start of the run to `versions.json`.

    Args:
        run_dir: The run folder.
        start: The seed and the versions of the software, on which the result depends too.
    """
    path = run_dir / VERSIONS_FILE
    starts = [*read_record(path, list), start]
    replace_text(path, json.dumps(starts, indent=1))
