"""Tile workers: processes of torchrun that run a network on the tiles that rank 0 distributes.

Rank 0 reads, cuts, blends and writes. Every other rank is a tile worker. Each call of
`TileWorkers.run` is one scatter, which sends a task to each rank, followed by one gather, which
returns the logits of each rank, or the exception that the rank raised. A task is a job with a batch
of tiles. An empty task means "no batch this time": scatter and gather wait for all ranks, so each
rank needs a task. The task None means "all work is done", and no gather follows.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Tile workers wait idle while rank 0 reads, writes or resamples; gloo's own limit of 30 minutes
# would end them.
IDLE_LIMIT = timedelta(days=7)


class Job(NamedTuple):
    """Network that the tile workers run, and how.

    Attributes:
        stage: Name of the stage; each process has loaded its networks.
        network_index: Index of the network in `TrainedStage.networks`.
        slab_bytes: See `medseg.inference.tiles.TilingPlan`.
    """

    stage: str
    network_index: int
    slab_bytes: float | None


@contextmanager
def process_group() -> Iterator[None]:
    """Join the processes of torchrun inside the block.

    Torch finds them by the environment variables that torchrun sets.
    """
    # `rendezvous` is a generator, which yields once for each start of a process group.
    store, rank, size = next(dist.rendezvous("env://", timeout=IDLE_LIMIT))
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        # Torchrun on one machine restarts the processes with the same store, which still holds the
        # addresses of those that died (torch 2.13). A prefix for each start hides them.
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=IDLE_LIMIT)
    try:
        yield
    finally:
        # If a process exits while the threads of its group still run, it can abort with a non-zero
        # exit status.
        dist.destroy_process_group()


class TileWorkers:
    """Access of rank 0 to all processes of the group.

    Each process takes one batch of tiles at a time. An exception in another process is raised in
    rank 0, which alone decides how to go on.

    Attributes:
        size: Number of processes, rank 0 included.
    """

    def __init__(self) -> None:
        self.size = dist.get_world_size()

    def run(
        self, job: Job, run_here: Callable[[Tensor], Tensor], batches: Sequence[Tensor]
    ) -> list[Tensor]:
        """Run a network on at most `size` batches at once, one in each process.

        Args:
            job: Network that the tile workers run.
            run_here: Runs the same network in rank 0.
            batches: Images (N, C, d, h, w), the first for rank 0.

        Returns:
            Logits (N, K, d, h, w) of each batch, on the device of rank 0.
        """
        # Each batch is a copy: pickling a view would send the whole volume that it shares.
        tasks: list[Any] = [(job, batch.detach().cpu().clone()) for batch in batches]
        # The last batches of a volume may be fewer than the processes.
        num_idle = self.size - len(tasks)
        tasks += [()] * num_idle
        # The first argument receives the task of rank 0. It is not used: `run_here` does that task.
        dist.scatter_object_list([None], tasks, src=0)
        answers: list[Any] = [None] * self.size
        try:
            logits_here = run_here(batches[0])
        finally:
            # Also after an error of `run_here`: the workers wait in the gather.
            dist.gather_object(None, answers, dst=0)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        device = logits_here.device
        # Rank 0 and the ranks with an empty task answer None.
        logits_of_others = [answer.to(device) for answer in answers[1 : len(batches)]]
        return [logits_here, *logits_of_others]

    def dismiss(self) -> None:
        """End `serve_tiles` in every other process."""
        dist.scatter_object_list([None], [None] * self.size, src=0)


def serve_tiles(run: Callable[[Job, Tensor], Tensor]) -> None:
    """Run networks for rank 0 until it dismisses this process.

    Args:
        run: Maps a job and images (N, C, d, h, w) to logits.
    """
    while True:
        received: list[Any] = [None]  # `scatter_object_list` writes the task into it
        dist.scatter_object_list(received, None, src=0)
        if received[0] is None:
            return
        # No variable for the answer: it would keep the logits while this process waits.
        dist.gather_object(_answer(run, received[0]), dst=0)


def _answer(run: Callable[[Job, Tensor], Tensor], task: Any) -> Tensor | Exception | None:
    """Do one task.

    Returns:
        Logits on the CPU, or the exception that `run` raised; None for an empty task.
    """
    if not task:
        return None
    job, images = task
    try:
        with torch.inference_mode():
            return run(job, images).cpu()
    # Rank 0 raises the error, and decides how to go on.
    except Exception as error:
        return error
