"""Which sample numbers make which batch of which step on which rank."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler


class StepBatchSampler(Sampler[list[int]]):
    """Yield the sample numbers of each micro-batch, one optimiser step after the other.

    Step s consumes the numbers s·B … (s+1)·B−1, where B is the global batch. Accumulation cuts them into consecutive
    groups and ranks cut each group into consecutive parts, so that one rank with accumulation 2 and two ranks without
    see the same samples at every step. No state: continuing a run needs `start_step` alone.

    Args:
        num_steps: Steps of the whole run, those before `start_step` included.
        batch_size: Global batch B of one optimiser step.
        accumulate: Micro-batches per step and rank.
        rank: Number of this process, 0 ≤ rank < num_ranks.
        num_ranks: Number of processes.
        start_step: First step to yield.

    Raises:
        ValueError: If B is not divisible by accumulate × num_ranks, or a number is out of its range.
    """

    def __init__(
        self,
        num_steps: int,
        batch_size: int,
        accumulate: int = 1,
        rank: int = 0,
        num_ranks: int = 1,
        start_step: int = 0,
    ) -> None:
        if min(batch_size, accumulate, num_ranks) < 1 or not 0 <= rank < num_ranks or min(num_steps, start_step) < 0:
            raise ValueError(
                f"expected positive sizes and 0 <= rank < num_ranks, got batch_size={batch_size}, "
                f"accumulate={accumulate}, rank={rank}, num_ranks={num_ranks}, num_steps={num_steps}, "
                f"start_step={start_step}"
            )
        if batch_size % (accumulate * num_ranks):
            raise ValueError(f"batch_size={batch_size} is not divisible by accumulate={accumulate} times num_ranks={num_ranks}")
        self.num_steps = num_steps
        self.batch_size = batch_size
        self.accumulate = accumulate
        self.rank = rank
        self.num_ranks = num_ranks
        self.start_step = start_step

    @property
    def micro_batch_size(self) -> int:
        """Samples of one micro-batch on one rank."""
        return self.batch_size // (self.accumulate * self.num_ranks)

    def __len__(self) -> int:
        """Micro-batches of this rank in the whole run; Lightning adds those before `start_step` to what it fetches."""
        return self.num_steps * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        group = self.batch_size // self.accumulate
        for step in range(self.start_step, self.num_steps):
            for micro in range(self.accumulate):
                first = step * self.batch_size + micro * group + self.rank * self.micro_batch_size
                yield list(range(first, first + self.micro_batch_size))
