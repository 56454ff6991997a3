"""Deterministic sampling: generator of each sample, order of the cases, samples of each batch.

Every choice is a function of (seed, number), not a state: any worker can compute any sample, and a
run resumes exactly.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

# Independent streams of numbers of one seed.
SAMPLES = 0
ORDER = 1


def sample_rng(seed: int, n: int, stream: int = SAMPLES) -> np.random.Generator:
    """Make the generator of sample n.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011): Philox, a
    counter-based generator.

    Args:
        seed: Seed of the run, 0 ≤ seed < 2**64.
        n: Number of the sample in the run, 0 ≤ n < 2**64.
        stream: Which independent stream of (seed, n).

    Example:
        >>> bool(sample_rng(1, 7).random() == sample_rng(1, 7).random())
        True
    """
    # The stream is the highest word of the counter. The generator counts in the lowest, so streams
    # are 2**192 draws apart.
    return np.random.Generator(
        np.random.Philox(
            key=np.array([seed, n], dtype=np.uint64),
            counter=np.array([0, 0, 0, stream], dtype=np.uint64),
        )
    )


def torch_seed(seed: int, step: int, part: int = 0) -> int:
    """Derive the seed for torch's own generators (dropout) at one sample of one step.

    Args:
        seed: Seed of the run.
        step: Optimiser step.
        part: Number of the sample, or of the first one of a stack.

    Returns:
        A seed, 0 ≤ seed < 2**63.
    """
    return int(np.random.SeedSequence([seed, step, part]).generate_state(1, np.uint64)[0]) >> 1


def draw_from_pass(seed: int, n: int, weights: np.ndarray | int) -> int:
    """Choose which of K items sample n takes.

    Sample n belongs to pass n // K. Without weights each pass is a permutation. With weights w (sum
    1) an item comes K·w times in a pass on average, and never more than one time off: the pass
    walks along the items, in random order, in equal steps from a random start (systematic
    sampling), and the drawn ones are shuffled.

    Args:
        seed: Seed of the run.
        n: Number of the sample.
        weights: K, or the weights (K,), > 0, sum 1.

    Returns:
        Index of the item, 0 ≤ index < K.
    """
    count = weights if isinstance(weights, int) else len(weights)
    turn, place = divmod(n, count)
    rng = sample_rng(seed, turn, ORDER)
    order = rng.permutation(count)
    if isinstance(weights, int):
        return int(order[place])
    steps = (rng.random() + np.arange(count)) / count
    drawn = np.searchsorted(np.cumsum(weights[order]), steps, side="right")
    # By rounding the sum of the weights may be less than the last step.
    drawn = np.minimum(drawn, count - 1)
    return int(rng.permutation(order[drawn])[place])


def normalised_weights(weights: Sequence[float] | None, count: int) -> np.ndarray | int:
    """Scale weights to the sum one.

    Without weights, the number of items stands for equal ones.

    Raises:
        ValueError: If there is no item, or a weight is not positive.
    """
    if count == 0:
        raise ValueError("expected at least one case to take samples from, found none")
    if weights is None:
        return count
    values = np.asarray(weights, dtype=np.float64)
    if values.shape != (count,) or not np.all(np.isfinite(values)) or np.any(values <= 0):
        raise ValueError(f"expected {count} positive weights, got {list(weights)}")
    return values / values.sum()


class StepBatchSampler(Sampler[list[int]]):
    """Sampler of the numbers of each micro-batch, one optimiser step after the other.

    Step s consumes the numbers s·B … (s+1)·B−1, where B is the global batch. Accumulation cuts them
    into consecutive groups and ranks cut each group into consecutive parts, so that one rank with
    accumulation 2 and two ranks without see the same samples at every step. There is no state: a
    continued run needs `start_step` alone.

    Ranks wait for each other at the end of a step. Where samples differ in size, each sample of a
    step, the largest first, goes to the rank that has the fewest voxels so far and is not full.
    Which rank computes a sample does not change the mean over the step.

    Args:
        num_steps: Steps of the whole run, those before `start_step` included.
        batch_size: Global batch B of one optimiser step.
        accumulate: Micro-batches per step and rank.
        rank: Number of this process, 0 ≤ rank < num_ranks.
        num_ranks: Number of processes.
        start_step: First step to yield.
        size: Size of the sample of a number, in any unit; None: all samples have the same size.

    Raises:
        ValueError: If B is not divisible by accumulate × num_ranks, or a number is out of its
            range.
    """

    def __init__(
        self,
        num_steps: int,
        batch_size: int,
        accumulate: int = 1,
        rank: int = 0,
        num_ranks: int = 1,
        start_step: int = 0,
        size: Callable[[int], float] | None = None,
    ) -> None:
        if (
            min(batch_size, accumulate, num_ranks) < 1
            or not 0 <= rank < num_ranks
            or min(num_steps, start_step) < 0
        ):
            raise ValueError(
                f"expected positive sizes and 0 <= rank < num_ranks, got batch_size={batch_size}, "
                f"accumulate={accumulate}, rank={rank}, num_ranks={num_ranks}, "
                f"num_steps={num_steps}, start_step={start_step}"
            )
        if batch_size % (accumulate * num_ranks):
            raise ValueError(
                f"batch_size={batch_size} is not divisible by accumulate={accumulate} times "
                f"num_ranks={num_ranks}"
            )
        self.num_steps = num_steps
        self.start_step = start_step
        self.batch_size = batch_size
        self.accumulate = accumulate
        self.rank = rank
        self.num_ranks = num_ranks
        self.size = size

    def __len__(self) -> int:
        """Micro-batches of this rank in the whole run.

        Lightning adds those before `start_step` to what it fetches.
        """
        return self.num_steps * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        group = self.batch_size // self.accumulate
        length = group // self.num_ranks
        for step in range(self.start_step, self.num_steps):
            numbers = list(range(step * self.batch_size, (step + 1) * self.batch_size))
            # This rank's part of each group.
            starts = range(self.rank * length, self.batch_size, group)
            if self.size is not None and self.num_ranks > 1:
                numbers = self._share_of_rank(numbers, self.size)
                starts = range(0, len(numbers), length)
            for first in starts:
                yield numbers[first : first + length]

    def _share_of_rank(self, numbers: Sequence[int], size: Callable[[int], float]) -> list[int]:
        """Divide the samples of a step among the ranks by their sizes, and take those of this one.

        Every rank computes the same division.
        """
        max_samples = len(numbers) // self.num_ranks
        sizes = {n: size(n) for n in numbers}
        shares: list[list[int]] = [[] for _ in range(self.num_ranks)]
        loads = [0.0] * self.num_ranks
        for n in sorted(numbers, key=sizes.__getitem__, reverse=True):
            not_full = [rank for rank in range(self.num_ranks) if len(shares[rank]) < max_samples]
            rank = min(not_full, key=loads.__getitem__)
            shares[rank].append(n)
            loads[rank] += sizes[n]
        return shares[self.rank]
