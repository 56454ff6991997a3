"""Smooth random fields that are fixed in the patient."""

from __future__ import annotations

import numpy as np

from medseg.phantom.lattice import Lattice
from medseg.phantom.shapes import Field


def noise_field(rng: np.random.Generator, lattice: Lattice, grain_mm: float) -> Field:
    """Draw smooth unit noise that is fixed in the patient, (D, H, W).

    The numbers sit on a coarse lattice over a fixed box of the canonical frame, so the field does not depend on what is drawn.
    """
    low, high = np.array([-480.0, -280.0, -330.0]), np.array([360.0, 280.0, 330.0])
    counts = np.ceil((high - low) / grain_mm).astype(int) + 1
    values = rng.standard_normal(tuple(int(n) for n in counts), dtype=np.float32)
    for axis in range(3):
        at = np.clip((lattice.axis_mm(axis) - low[axis]) / grain_mm, 0, counts[axis] - 1.001)
        base = at.astype(int)
        rest = (at - base).astype(np.float32)
        rest = rest * rest * (3 - 2 * rest)
        shape = [1, 1, 1]
        shape[axis] = len(rest)
        rest = rest.reshape(shape)
        values = np.take(values, base, axis=axis) * (1 - rest) + np.take(values, base + 1, axis=axis) * rest
    return np.asarray(values * np.float32(1.5), dtype=np.float32)
