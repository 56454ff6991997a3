"""A worker among its ranks: how many there are, where they talk, and who started them."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from medseg.config.schema import Strategy, TrainConfig
from medseg.errors import UserError, require
from medseg.runs.folder import END_S

if TYPE_CHECKING:
    from torch.distributed import TCPStore

# Descriptor of a pipe that the starting process holds open as long as it lives.
PARENT_PIPE = "MEDSEG_PARENT_PIPE"
# Torch's own limit: the first rank may wait for a lock or for a slow disk.
MEET_WITHIN = timedelta(minutes=30)


def rank() -> int:
    """Number of this process in the run: torchrun's, or that of `launch.py`, which speaks as torchrun does."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def agent_store() -> TCPStore:
    """What torchrun keeps for the processes that it starts, also when it starts them again.

    Raises:
        UserError: If it keeps nothing.
    """
    from torch.distributed import TCPStore

    require(
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True",
        "torchrun must share its store with what it starts: leave out --rdzv-backend=etcd and TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    )
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=MEET_WITHIN)


def meet(backend: str, patience: timedelta = MEET_WITHIN) -> None:
    """Bring torchrun's processes together, so that after a restart none of them calls a process that has died.

    torch looks for the others in torchrun's store, which still holds the addresses of those before the restart: who reads before
    they are overwritten calls the dead. Hence each start here gets a part of the store for itself, under a word that the first rank
    makes up. It says the word to who asks it under a word of his own, so that no answer is older than its question.

    Args:
        backend: `gloo` or `nccl`.
        patience: How long a process may wait for another one.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ["WORLD_SIZE"] == "1":
        return
    import torch.distributed as dist

    store, num_ranks, word = agent_store(), int(os.environ["WORLD_SIZE"]), uuid.uuid4().hex
    if rank() == 0:
        while store.add(f"medseg/here/{word}", 0) < num_ranks - 1:
            for other in range(1, num_ranks):
                if store.check([f"medseg/asks/{other}"]):
                    store.set(f"medseg/word/{store.get(f'medseg/asks/{other}').decode()}", word)
            time.sleep(0.05)
    else:
        store.set(f"medseg/asks/{rank()}", word)
        word = store.get(f"medseg/word/{word}").decode()
        store.add(f"medseg/here/{word}", 1)
    dist.init_process_group(backend, store=dist.PrefixStore(word, store), rank=rank(), world_size=num_ranks, timeout=patience)
    # A process that ends while its group's threads still run may be aborted (std::terminate), with an exit code of failure.
    atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def is_under_torchrun() -> bool:
    """Whether this process is one that torchrun started, and not a worker of `launch.py`."""
    return "TORCHELASTIC_USE_AGENT_STORE" in os.environ


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
