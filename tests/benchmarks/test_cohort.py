"""Scans of the cohort benchmark: slabs of the lungs that differ in their noise alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks import cohort
from medseg.io.read import read_image


def test_the_scans_are_slabs_of_the_lungs_with_noise_of_their_own(tmp_path: Path) -> None:
    folder = cohort.make_scans(tmp_path / "scans", 2)
    first, second = (read_image(path) for path in sorted(folder.iterdir()))
    assert first.grid == second.grid
    assert first.grid.shape[0] * first.grid.spacing_mm[0] == 40.0
    difference_hu = first.array.astype(float) - second.array
    # Independent noise with a standard deviation of 10 HU in both.
    assert abs(difference_hu.std() - 10 * 2**0.5) < 0.5
    assert (first.array < -700).any(axis=(1, 2)).all()
    middle = first.array[:, 40:90, 30:100]
    assert np.mean(middle < -700) > 0.1
