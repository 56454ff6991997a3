"""Ranks of a run: their numbers, torch process group, broadcast of rank 0's decisions.

Also the choice of GPUs, the share of each rank in the batch, and the logs of ranks 1, 2, ….
"""

import atexit
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from medseg.errors import UserError
from medseg.memory.options import MemoryOptions
from medseg.training.options import Strategy, TrainerOptions

T = TypeVar("T")

# How long a rank waits for the others in a collective call: torch's default for all backends but
# NCCL, whose 10 minutes are too short here. Rank 0 may have to wait for a lock or for a slow disk.
RANK_TIMEOUT = timedelta(minutes=30)


def is_under_torchrun() -> bool:
    """Whether torchrun, or torchrun's elastic agent in `start_ranks`, started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    """Number of this process among all ranks; 0 outside torchrun."""
    return int(os.environ["RANK"]) if is_under_torchrun() else 0


def num_ranks() -> int:
    """Number of all ranks; 1 outside torchrun."""
    return int(os.environ["WORLD_SIZE"]) if is_under_torchrun() else 1


def num_restarts() -> int:
    """Number of times that torchrun has restarted the ranks of this machine after one had died."""
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"]) if is_under_torchrun() else 0


def join_ranks() -> None:
    """Join torch's process group, and choose the GPU of this rank.

    Nothing happens with one rank, or where the group exists already.
    """
    import torch
    import torch.distributed as dist

    if num_ranks() == 1 or dist.is_initialized():
        return
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank < torch.cuda.device_count():
        # Before NCCL is initialised, and before anything is loaded to `cuda`: else all ranks would
        # use the first GPU.
        torch.cuda.set_device(local_rank)
    # Otherwise there is no GPU of this number: the ranks run on the CPU.
    store, own_rank, world_size = next(dist.rendezvous("env://", timeout=RANK_TIMEOUT))
    # When torchrun starts the ranks again, its store still holds the addresses of the dead ranks
    # (torch 2.13). On one machine a prefix therefore gives each start keys of its own. Several
    # machines may differ in their numbers of restarts, and so in the prefix: there the user sets
    # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which gives each start a new store.
    is_one_machine = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    if is_one_machine:
        store = dist.PrefixStore(str(num_restarts()), store)
    # Without a backend, torch 2.13 chooses one for a single type of device: on a machine with GPUs,
    # ranks that compute on the CPU could not exchange tensors. Torch would also name that backend
    # `undefined`, which Lightning does not recognise as Gloo.
    backend = "gloo"
    # NCCL needs a GPU for each rank.
    if int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count():
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend=backend,
        store=store,
        rank=own_rank,
        world_size=world_size,
        timeout=RANK_TIMEOUT,
    )
    # A process that ends while threads of its group still run may be aborted (std::terminate), with
    # an exit code of failure.
    atexit.register(_leave_ranks)


def _leave_ranks() -> None:
    """Leave torch's process group, unless something else has ended it already."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def from_first_rank(value: T) -> T:
    """Return the first rank's value on every rank; all ranks have to call it."""
    if num_ranks() == 1:
        return value
    import torch.distributed as dist

    join_ranks()
    values = [value]
    # The broadcast replaces the list's element on the other ranks.
    dist.broadcast_object_list(values, src=0)
    return values[0]


def choose_gpus(gpus: Sequence[int] | None) -> None:
    """Restrict this process and its child processes to some GPUs.

    Call it before torch looks for GPUs.

    Args:
        gpus: Numbers among the GPUs that were visible first, from 0; a number beyond them is passed
            on as it is. None = no change.
    """
    if gpus is None:
        return
    # The first value of CUDA_VISIBLE_DEVICES is kept: jobs of a sweep and started processes choose
    # again, and their numbers count among the same GPUs.
    visible = os.environ.setdefault(
        "MEDSEG_VISIBLE_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "")
    )
    visible_ids: dict[int, str] = {}
    # Where the variable is unset or empty, the numbers count among all GPUs.
    if visible:
        visible_ids = dict(enumerate(visible.split(",")))
    chosen_ids = [visible_ids.get(gpu, str(gpu)) for gpu in gpus]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(chosen_ids)


def share_among_ranks(trainer: TrainerOptions, memory: MemoryOptions) -> None:
    """Divide the batch among the ranks that were started, in place.

    The number of ranks may differ from the configured one. The micro-batch and the result stay the
    same: half as many ranks accumulate twice as often.

    Raises:
        UserError: If the micro-batches of a step cannot be divided among the ranks.
    """
    num_micro_batches = trainer.devices * trainer.num_nodes * memory.accumulate
    if num_micro_batches % num_ranks() != 0:
        raise UserError(
            f"{num_ranks()} ranks cannot share the {num_micro_batches} micro-batches of a step "
            "(trainer.devices × trainer.num_nodes × memory.accumulate); "
            "start a number of ranks that divides them"
        )
    memory.accumulate = num_micro_batches // num_ranks()
    trainer.devices = int(os.environ["LOCAL_WORLD_SIZE"]) if is_under_torchrun() else 1
    trainer.num_nodes = num_ranks() // trainer.devices
    # A strategy such as DDP exchanges gradients: one rank needs none, several ranks need one.
    if num_ranks() == 1:
        trainer.strategy = Strategy.auto
    elif trainer.strategy is Strategy.auto:
        trainer.strategy = Strategy.ddp


def redirect_output(run_dir: Path) -> None:
    """Let every rank but the first write its output to `ranks/rank<N>.log`."""
    if rank() == 0:
        return
    log_file = run_dir / "ranks" / f"rank{rank()}.log"
    log_file.parent.mkdir(exist_ok=True)
    # Text that is still buffered belongs to the old output.
    sys.stdout.flush()
    sys.stderr.flush()
    # The descriptors 1 and 2 (standard output and error) instead of `sys.stdout` and `sys.stderr`:
    # libraries in C write to the descriptors.
    with log_file.open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
