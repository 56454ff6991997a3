"""Randomness as a function of (seed, number), not as a state: any worker can compute any sample."""

from __future__ import annotations

import numpy as np

# What a stream of numbers is used for. Streams of one seed never overlap.
SAMPLES = 0
ORDER = 1


def sample_rng(seed: int, n: int, stream: int = SAMPLES) -> np.random.Generator:
    """Make the generator of sample n.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011): Philox, a counter-based generator.

    Args:
        seed: Seed of the run, 0 ≤ seed < 2**64.
        n: Number of the sample in the run, 0 ≤ n < 2**64.
        stream: Which independent stream of (seed, n).

    Example:
        >>> bool(sample_rng(1, 7).random() == sample_rng(1, 7).random())
        True
    """
    key = np.array([seed, n], dtype=np.uint64)
    # The stream is the highest word of the counter, the generator counts in the lowest: 2**192 draws lie between.
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, stream], dtype=np.uint64)))


def torch_seed(seed: int, step: int, part: int = 0) -> int:
    """Derive the seed for torch's own generators (dropout) at one micro-batch of one step.

    Args:
        seed: Seed of the run.
        step: Optimiser step.
        part: Place of the micro-batch among those of all ranks, so that it does not depend on how many ranks share them.

    Returns:
        A seed, 0 ≤ seed < 2**63.
    """
    state = np.random.SeedSequence([seed, step, part]).generate_state(1, np.uint64)
    return int(state[0]) >> 1
