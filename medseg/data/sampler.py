"""Deterministic sampling: generator of each sample, order of the cases, samples of each batch.

Every choice is a function of (seed, number), not a state: any worker can compute any sample, and a
run resumes exactly.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

# Independent streams of random numbers with the same seed. SAMPLES is for the content of a sample,
# by the number of the sample; ORDER is for the order of the items, by the number of the pass.
SAMPLES = 0
ORDER = 1


def sample_rng(seed: int, n: int, stream: int = SAMPLES) -> np.random.Generator:
    """Make the generator of sample n, or of pass n with the stream `ORDER`.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011): Philox, a
    counter-based generator.

    Args:
        seed: Seed of the run, 0 ≤ seed < 2**64.
        n: Number of the sample in the run, 0 ≤ n < 2**64.
        stream: `SAMPLES` or `ORDER`.

    Example:
        >>> bool(sample_rng(1, 7).random() == sample_rng(1, 7).random())
        True
    """
    key = np.array([seed, n], dtype=np.uint64)
    # The stream is the highest word of the counter. The generator counts in the lowest, so streams
    # are 2**192 draws apart.
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def torch_seed(seed: int, step: int, part: int = 0) -> int:
    """Derive the seed for torch's own generators (dropout) at one sample of one step.

    Args:
        seed: Seed of the run.
        step: Number of the optimiser step.
        part: Number of the sample in the run; for samples that share a forward pass, the first.

    Returns:
        A seed, 0 ≤ seed < 2**63.
    """
    (state,) = np.random.SeedSequence([seed, step, part]).generate_state(1, np.uint64)
    # The last bit is dropped, so that the seed fits a signed integer of 64 bits.
    return int(state) >> 1


def draw_from_pass(seed: int, n: int, weights: np.ndarray | int) -> int:
    """Choose which of K items sample n takes.

    Sample n belongs to pass n // K. Without weights, each pass is a permutation. With weights w
    (sum 1), an item is drawn K·w times in a pass, rounded up or down at random so that the average
    is exact. This is systematic sampling: the items, in random order, divide a line of length 1
    into segments as long as their weights; K equidistant points with a random start choose the
    items in whose segments they lie; the chosen items are then shuffled.

    Args:
        seed: Seed of the run.
        n: Number of the sample.
        weights: K for equal weights, or the weights (K,), > 0, sum 1.

    Returns:
        Index of the item, 0 ≤ index < K.
    """
    num_items = weights if isinstance(weights, int) else len(weights)
    pass_number, place = divmod(n, num_items)
    rng = sample_rng(seed, pass_number, ORDER)
    order = rng.permutation(num_items)
    if isinstance(weights, int):
        return int(order[place])
    points = (rng.random() + np.arange(num_items)) / num_items
    # End of each item's segment on the line.
    ends = np.cumsum(weights[order])
    drawn = np.searchsorted(ends, points, side="right")
    # Because of rounding, the last end may be less than the last point.
    drawn = np.minimum(drawn, num_items - 1)
    return int(rng.permutation(order[drawn])[place])


def normalised_weights(weights: Sequence[float] | None, num_items: int) -> np.ndarray | int:
    """Scale weights to the sum 1, as `draw_from_pass` takes them.

    Args:
        weights: Weight of each item; None: all are equal.
        num_items: Number of items.

    Returns:
        The weights; the number of items if all weights are equal.

    Raises:
        ValueError: If there is no item, or a weight is not positive.
    """
    if num_items == 0:
        raise ValueError("expected at least one case to take samples from, found none")
    if weights is None:
        return num_items
    values = np.asarray(weights, dtype=np.float64)
    is_positive = np.isfinite(values) & (values > 0)
    if values.shape != (num_items,) or not is_positive.all():
        raise ValueError(f"expected {num_items} positive weights, got {list(weights)}")
    return values / values.sum()


class StepBatchSampler(Sampler[list[int]]):
    """Sampler of the sample numbers of each micro-batch, one optimiser step after the other.

    Step s consumes the numbers s·B … (s+1)·B−1, where B is the global batch size. Accumulation
    divides these numbers into consecutive groups; each rank takes a consecutive part of each group
    as its micro-batch. So one rank with accumulation 2 and two ranks without accumulation see the
    same samples at every step. There is no state: a resumed run needs `start_step` alone.

    Ranks wait for each other at the end of a step. So if samples differ in size, those of a step
    are divided by size: from the largest to the smallest, each sample goes to the rank with the
    smallest total size so far, among the ranks that lack samples. The mean over the step does not
    depend on the rank that computes a sample.

    Args:
        num_steps: Steps of the whole run, those before `start_step` included.
        batch_size: Global batch size B of one optimiser step.
        accumulate: Micro-batches per step and rank.
        rank: Number of this process, 0 ≤ rank < num_ranks.
        num_ranks: Number of processes.
        start_step: First step whose micro-batches are yielded.
        size: Computes the size of a sample from its number, in any unit; None: all samples have the
            same size.

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
        are_sizes_positive = min(batch_size, accumulate, num_ranks) >= 1
        are_steps_allowed = min(num_steps, start_step) >= 0
        is_rank_valid = 0 <= rank < num_ranks
        if not (are_sizes_positive and are_steps_allowed and is_rank_valid):
            raise ValueError(
                f"expected positive sizes and 0 <= rank < num_ranks, got batch_size={batch_size}, "
                f"accumulate={accumulate}, rank={rank}, num_ranks={num_ranks}, "
                f"num_steps={num_steps}, start_step={start_step}"
            )
        if batch_size % (accumulate * num_ranks) != 0:
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

        Those before `start_step` are included, since Lightning counts them as fetched.
        """
        return self.num_steps * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        group_size = self.batch_size // self.accumulate
        micro_size = group_size // self.num_ranks
        for step in range(self.start_step, self.num_steps):
            numbers = list(range(step * self.batch_size, (step + 1) * self.batch_size))
            # First index of this rank's part in each group.
            starts = range(self.rank * micro_size, self.batch_size, group_size)
            if self.size is not None and self.num_ranks > 1:
                # Now `numbers` has the samples of this rank alone.
                numbers = self._divide_by_size(numbers, self.size)
                starts = range(0, len(numbers), micro_size)
            for start in starts:
                yield numbers[start : start + micro_size]

    def _divide_by_size(self, numbers: Sequence[int], size: Callable[[int], float]) -> list[int]:
        """Divide the samples of a step among the ranks by their sizes.

        Every rank computes the same division.

        Returns:
            The samples of this rank, the largest first.
        """
        max_samples = len(numbers) // self.num_ranks
        sizes = {n: size(n) for n in numbers}
        samples_of_rank: list[list[int]] = [[] for _ in range(self.num_ranks)]
        total_sizes = [0.0] * self.num_ranks
        # The sort is stable, also in reverse: of samples with equal size, the lower number comes
        # first.
        for n in sorted(numbers, key=sizes.__getitem__, reverse=True):
            not_full = [
                rank for rank, samples in enumerate(samples_of_rank) if len(samples) < max_samples
            ]
            rank = min(not_full, key=total_sizes.__getitem__)
            samples_of_rank[rank].append(n)
            total_sizes[rank] += sizes[n]
        return samples_of_rank[self.rank]
