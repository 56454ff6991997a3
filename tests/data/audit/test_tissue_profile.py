"""A cropped, shortened or resampled copy has the profile of its scan; other patients differ."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import ndimage

from medseg.data.audit.tissue_profile import (
    NEAR_PROFILE,
    Profile,
    areas_of,
    make_profile,
    profile_distance,
)

SPACING_MM = (2.5, 3.0, 3.0)


def distance(first: Profile, second: Profile) -> float:
    first_areas, second_areas = areas_of(first), areas_of(second)
    assert first_areas is not None
    assert second_areas is not None
    return profile_distance(first_areas, second_areas)


def patient(seed: int) -> np.ndarray:
    """A body of changing width with fat, muscle, a spine and lungs of its own."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[-1:1:90j, -1:1:100j]
    height, width = rng.uniform(0.45, 0.6), rng.uniform(0.65, 0.85)
    planes = []
    for z in np.linspace(0, 1, 120):
        grown = 1 + rng.uniform(0.02, 0.04) * np.sin(rng.uniform(4, 6) * z)
        radius = np.hypot(y / (height * grown), x / (width * grown))
        plane = np.where(radius < 1, np.where(radius < 0.85, 40, -100), -1000)
        plane[np.hypot((y - 0.2) / 0.1, x / 0.1) < 1] = 400
        for side in (-0.35, 0.35):
            lung = (
                np.hypot(y / (0.3 * np.sin(np.pi * z)), (x - side) / 0.2)
                if 0 < z < 1
                else radius + 9
            )
            plane[lung < 1] = -850
        planes.append(plane)
    return (np.stack(planes) + rng.normal(0, 10, (120, 90, 100))).astype(np.int16)


@pytest.mark.parametrize(
    "copy",
    [
        lambda image: image[2:-2, 2:-2, 2:-2],
        lambda image: image[12:],
        lambda image: image[:-12],
        lambda image: np.rint(ndimage.zoom(image.astype(np.float32), 0.95, order=1)).astype(
            np.int16
        ),
        lambda image: image + np.random.default_rng(9).normal(0, 5, image.shape).astype(np.int16),
    ],
)
def test_copies_are_near(copy: Callable[[np.ndarray], np.ndarray]) -> None:
    image = patient(1)
    other = copy(image)
    is_resampled = other.shape[0] == round(0.95 * image.shape[0])
    spacing_mm = tuple(step / 0.95 for step in SPACING_MM) if is_resampled else SPACING_MM
    assert distance(make_profile(image, SPACING_MM), make_profile(other, spacing_mm)) < NEAR_PROFILE


def test_patients_are_apart() -> None:
    profiles = [make_profile(patient(seed), SPACING_MM) for seed in range(4)]
    apart = [distance(profiles[0], other) for other in profiles[1:]]
    assert min(apart) > NEAR_PROFILE


def test_a_short_scan_has_none() -> None:
    assert make_profile(patient(1)[:30], SPACING_MM) == ()
    assert areas_of(()) is None
