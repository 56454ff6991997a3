"""The tiles of one volume divided among processes: the first cuts, asks and blends, the others only run the networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Which stage, which of its networks and which region of the task a tile is for.
Job = tuple[str, int, int]


class Team:
    """The processes of torch's process group, seen from the first of them.

    Each takes one batch of tiles at a time. Whatever goes wrong in another process is raised in the first, so that only the first
    decides what comes next.

    Attributes:
        size: Processes, the first included.
    """

    def __init__(self) -> None:
        self.size = dist.get_world_size()

    def run(self, job: Job, alone: Callable[[Tensor], Tensor], batches: Sequence[Tensor]) -> list[Tensor]:
        """Run a network on at most `size` batches at once.

        Args:
            job: What the others are to run.
            alone: Runs the same here.
            batches: Images (N, 1, d, h, w).

        Returns:
            Logits (N, K, d, h, w) of each batch, on the device of the first.
        """
        tasks: list[Any] = [(job, batch.detach().cpu().clone()) for batch in batches]  # a view would bring its whole volume
        dist.scatter_object_list([None], [*tasks, *[()] * (self.size - len(tasks))], src=0)
        answers: list[Any] = [None] * self.size
        try:
            own = alone(batches[0])
        finally:
            dist.gather_object(None, answers, dst=0)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return [own, *(answer.to(own.device) for answer in answers[1 : len(batches)])]

    def dismiss(self) -> None:
        """Let the others end."""
        dist.scatter_object_list([None], [None] * self.size, src=0)


def serve(run: Callable[[Job, Tensor], Tensor]) -> None:
    """Answer the first process until it dismisses this one.

    Args:
        run: From a job and images (N, 1, d, h, w) to logits.
    """
    while True:
        tasks: list[Any] = [None]
        dist.scatter_object_list(tasks, None, src=0)
        if tasks[0] is None:
            return
        answer: Tensor | Exception | None = None
        if tasks[0]:
            try:
                with torch.inference_mode():
                    answer = run(*tasks[0]).cpu()
            except Exception as error:
                answer = error  # the first raises it
        dist.gather_object(answer, dst=0)
