"""The spacing that a set of scans asks for."""

from __future__ import annotations

import numpy as np

from medseg.data.typical_spacing import AVERAGES, typical_spacing_mm


def test_the_median_or_the_mean_of_each_axis() -> None:
    scans = [(1.0, 0.6, 0.9), (2.0, 0.8, 0.7), (1.2, 0.7, 0.8)]
    assert typical_spacing_mm(scans) == typical_spacing_mm(scans, "median") == (1.2, 0.7, 0.8)
    assert typical_spacing_mm(scans, "mean") == (1.4, 0.7, 0.8)
    assert typical_spacing_mm([(2.0004999, 1.0, 1.0)]) == (2.0, 1.0, 1.0)


def test_a_coarse_axis_gets_its_tenth_percentile_but_none_finer_than_the_others() -> None:
    spacings = [(z, 0.7, 0.8) for z in (1.0, 2.0, 5.0, 5.0, 5.0, 5.0, 8.0, 8.0, 8.0, 10.0, 10.0)]
    for average, of in AVERAGES.items():
        assert of([z for z, _, _ in spacings]) > 3 * 0.7
        assert typical_spacing_mm(spacings, average) == (2.0, 0.7, 0.8)
    assert typical_spacing_mm([(0.5, 1.0, 1.1), *[(5.0, 1.0, 1.1)] * 8])[0] == round(np.percentile([0.5, *[5.0] * 8], 10), 3)
    assert typical_spacing_mm([*[(0.5, 1.0, 1.1)] * 4, *[(5.0, 1.0, 1.1)] * 5]) == (1.1, 1.0, 1.1)


def test_three_times_is_not_above_three() -> None:
    assert typical_spacing_mm([(3.0, 1.0, 1.0), (2.75, 1.0, 1.0), (3.25, 1.0, 1.0)]) == (3.0, 1.0, 1.0)
    one_differs = [(3.0, 1.0, 1.0), (2.75, 1.0, 1.0), (3.5, 0.7, 1.0)]
    assert typical_spacing_mm(one_differs) == (3.0, 1.0, 1.0)
    assert typical_spacing_mm(one_differs, "mean") == (2.8, 0.9, 1.0)
