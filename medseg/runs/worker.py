"""The worker process of a run: everything that trains begins here, from a run folder.

`python -m medseg.runs.worker <run folder>`, one process per rank: started by `launch.py`, or by torchrun.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medseg.config.rules import notes
from medseg.config.schema import Profiler, SpacingStrategy, StageName, TrainConfig
from medseg.config.signature import plain
from medseg.console import say
from medseg.errors import EXIT_FAILED, EXIT_USER_ERROR
from medseg.io.atomic import replace_text
from medseg.io.locks import locked
from medseg.runs.folder import END_S, LOCK_FILE, SUMMARY_FILE, load_config, write_end
from medseg.runs.ranks import fit_to_ranks, meet, rank, redirect_output, watch_parent
from medseg.runs.status import ending_of, status_of
from medseg.training.preemption import StopRequest

if TYPE_CHECKING:
    pass


def main() -> None:
    """Train the run of the folder that is named on the command line."""
    run_dir = Path(sys.argv[1]).absolute()
    stop = StopRequest()
    stop.install()
    watch_parent()
    redirect_output(run_dir)
    with locked(run_dir / LOCK_FILE, wait_s=END_S + 5) if rank() == 0 else nullcontext(True) as is_ours:
        if not is_ours:
            say(f"another process is running {run_dir}")
            sys.exit(EXIT_USER_ERROR)
        if rank() == 0:
            (run_dir / SUMMARY_FILE).unlink(missing_ok=True)  # an earlier end is none of this one
        try:
            train(run_dir, stop)
        except BaseException as error:
            code, message = ending_of(error)
            if code == EXIT_FAILED:
                traceback.print_exc()  # a defect
            else:
                say(message)
            write_end(run_dir, status_of(code), message)
            sys.exit(code)


def train(run_dir: Path, stop: StopRequest | None = None) -> dict[str, Any]:
    """Build, train, summarise; goes on from `checkpoints/last.ckpt` where there is one.

    Args:
        run_dir: Run folder with its `config.yaml`.
        stop: Says when the run is asked to stop.

    Returns:
        The summary that is written to `summary.json`.
    """
    config = load_config(run_dir)
    plain_config = plain(config)
    fit_to_ranks(config)
    # After the configuration is known to be right: these take seconds to import.
    import torch
    from lightning.pytorch.callbacks import LearningRateMonitor

    from medseg.build.data import make_data_module, make_views
    from medseg.build.device import pick_device
    from medseg.build.metadata import collect_versions, make_metadata
    from medseg.build.network import load_initial_weights, make_network
    from medseg.build.trainer import make_module, make_trainer
    from medseg.training.callbacks import Distortions, History, ValidationPictures, peak_bytes
    from medseg.training.checkpoints import Checkpoints
    from medseg.weights.checkpoint import load_checkpoint

    for key, is_on in debug_switches(config).items():
        if is_on:
            say(f"debug.{key} is on: this run is for finding faults, not for results")
    for note in notes(config):
        say(note)
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)  # greetings and tips
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch")  # samples need no state
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated")

    torch.manual_seed(config.seed)  # initial weights
    network = make_network(config)
    load_initial_weights(network, config)
    checkpoints = Checkpoints(
        run_dir / "checkpoints", config.stage.validate_every, config.checkpoint_every, config.stage.patience, stop
    )
    history = History(run_dir / "history.csv", every=max(1, min(50, config.steps // 20)), steps=config.steps)
    callbacks: list[Any] = [
        history,
        ValidationPictures(run_dir / "pictures", make_views(config)),
        checkpoints,
    ]
    if config.spacing.strategy is SpacingStrategy.fixed_size:
        is_coarse = config.stage.name is StageName.coarse
        callbacks.append(Distortions(["whole scan"] if is_coarse else list(config.task.regions)))
    if config.logger:
        callbacks.append(LearningRateMonitor("step"))
    best, last = checkpoints.folder / "best.ckpt", checkpoints.folder / "last.ckpt"
    start_step = load_checkpoint(last, f"resume={run_dir}")["global_step"] if last.is_file() else 0
    meet("nccl" if pick_device(config.trainer.accelerator).type == "cuda" else "gloo")
    trainer = make_trainer(config, callbacks, start_step)
    if trainer.is_global_zero:
        for abandoned in run_dir.rglob("*.tmp"):  # half-written when the run was killed
            abandoned.unlink()
        note_start(run_dir, {"seed": config.seed, **collect_versions()})
    module = make_module(config, network, make_metadata(config, plain_config))
    data = make_data_module(config)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=str(last) if last.is_file() else None, weights_only=True)
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning makes exit code 1 of it
            raise KeyboardInterrupt from None
        raise
    summary = {
        "status": "finished",
        "stage": config.stage.name.value,
        "steps": trainer.global_step,
        "val_dice_best": checkpoints.best_score,
        "train_s": round(history.train_s(), 1),
        "peak_gib": round(peak_bytes() / 2**30, 3),
        "num_parameters": sum(p.numel() for p in network.parameters()),
        "checkpoint": str(best if best.is_file() else last),
        "versions": collect_versions(),
    }
    if trainer.is_global_zero:
        replace_text(run_dir / SUMMARY_FILE, json.dumps(summary, indent=1))
        print(f"run folder: {run_dir}", flush=True)
    return summary


def note_start(run_dir: Path, start: dict[str, Any]) -> None:
    """Add a start of the run, with what its result depends on beside the configuration, to `versions.json`."""
    path = run_dir / "versions.json"
    starts = json.loads(path.read_text()) if path.is_file() else []
    replace_text(path, json.dumps([*starts, start], indent=1))


def debug_switches(config: TrainConfig) -> dict[str, bool]:
    """Name the debug switches and whether they are on."""
    debug = config.debug
    return {
        "anomaly": debug.anomaly,
        "overfit": debug.overfit,
        "fast": debug.fast,
        "profiler": debug.profiler is not Profiler.none,
    }


if __name__ == "__main__":
    main()
