"""A worker among its ranks: how many there are, where they talk, and who started them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from medseg.apps.runs import END_S
from medseg.config.schema import Strategy, TrainConfig
from medseg.errors import UserError

# Descriptor of a pipe that the starting process holds open as long as it lives.
PARENT_PIPE = "MEDSEG_PARENT_PIPE"


def rank() -> int:
    """Number of this process in the run: torchrun's, or that of `launch.py`, which speaks as torchrun does."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def fit_to_ranks(config: TrainConfig) -> None:
    """Let the ranks that were started, rather than those that were planned, share the batch, in place.

    The micro-batch stays, and with it the result: half the ranks accumulate twice as often.

    Raises:
        UserError: If the micro-batches of a step cannot be divided among them.
    """
    num_ranks, num_local = 1, 1
    if "TORCHELASTIC_RUN_ID" in os.environ:
        num_ranks, num_local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    trainer, memory = config.trainer, config.memory
    num_micro_batches = trainer.devices * trainer.num_nodes * memory.accumulate
    if num_micro_batches % num_ranks:
        raise UserError(
            f"{num_ranks} ranks cannot share the {num_micro_batches} micro-batches of a step (trainer.devices × trainer.num_nodes × "
            "memory.accumulate); start a number of ranks that divides them"
        )
    memory.accumulate = num_micro_batches // num_ranks
    trainer.devices, trainer.num_nodes = num_local, num_ranks // num_local
    if num_ranks == 1:
        trainer.strategy = Strategy.auto
    elif trainer.strategy is Strategy.auto:
        trainer.strategy = Strategy.ddp


def redirect_output(run_dir: Path) -> None:
    """Let every rank but the first write to a log of its own, `ranks/rank<N>.log`, whoever started it."""
    if rank() == 0:
        return
    folder = run_dir / "ranks"
    folder.mkdir(exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with (folder / f"rank{rank()}.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def watch_parent() -> None:
    """Be asked to stop when the process that started this one dies, and end soon after in any case."""
    descriptor = os.environ.pop(PARENT_PIPE, None)  # what this process starts is none of the parent's
    if descriptor is None:
        return
    pipe = int(descriptor)
    os.set_inheritable(pipe, False)

    def watch() -> None:
        os.read(pipe, 1)  # nothing is ever written: it returns at the end of the pipe
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(END_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
