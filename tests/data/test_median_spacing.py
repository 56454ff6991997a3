"""The spacing that a set of scans asks for."""

from __future__ import annotations

import numpy as np

from medseg.data.median_spacing import median_spacing_mm


def test_the_median_of_each_axis() -> None:
    assert median_spacing_mm([(1.0, 0.6, 0.9), (2.0, 0.8, 0.7), (1.5, 0.7, 0.8)]) == (1.5, 0.7, 0.8)
    assert median_spacing_mm([(2.0004999, 1.0, 1.0)]) == (2.0, 1.0, 1.0)


def test_a_coarse_axis_gets_its_tenth_percentile_but_none_finer_than_the_others() -> None:
    spacings = [(z, 0.7, 0.8) for z in (1.0, 2.0, 5.0, 5.0, 5.0, 5.0, 8.0, 8.0, 8.0, 10.0, 10.0)]
    assert median_spacing_mm(spacings) == (2.0, 0.7, 0.8)
    assert np.median([z for z, _, _ in spacings]) > 3 * 0.7
    assert median_spacing_mm([(0.5, 1.0, 1.1), *[(5.0, 1.0, 1.1)] * 8])[0] == round(np.percentile([0.5, *[5.0] * 8], 10), 3)
    assert median_spacing_mm([*[(0.5, 1.0, 1.1)] * 4, *[(5.0, 1.0, 1.1)] * 5]) == (1.1, 1.0, 1.1)
    assert median_spacing_mm([(3.0, 1.0, 1.0), (2.9, 1.0, 1.0), (3.1, 1.0, 1.0)]) == (3.0, 1.0, 1.0), "three times is not above three"
