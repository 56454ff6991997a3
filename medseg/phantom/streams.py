"""Random numbers as a function of (seed, index, name), never of the order of calls."""

from __future__ import annotations

import zlib

import numpy as np


def stream(seed: int, index: int, name: str) -> np.random.Generator:
    """Open the generator that belongs to one purpose of one case.

    Args:
        seed: Seed of the data set, >= 0.
        index: Number of the case in the data set, >= 0.
        name: What the numbers are for (`anatomy`, `noise`, …); each name has numbers of its own.

    Returns:
        A counter-based generator in its first state.
    """
    purpose = zlib.crc32(name.encode())
    return np.random.Generator(np.random.Philox(key=[seed & (2**64 - 1), (index << 32) | purpose]))
