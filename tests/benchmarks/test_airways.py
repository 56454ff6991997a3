"""Airway tracker: a drawn chest whose lumen is known, and phantoms."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.airways import Airway, track_airway
from medseg.geometry.grid import VoxelGrid
from medseg.phantom.anatomy import AIRWAYS, draw_patient, measure_tubes
from medseg.phantom.scan import make_phantom, place_scan
from medseg.phantom.shapes import Points
from medseg.phantom.spec import PhantomSpec
from medseg.preprocess.orient import orient

GRID = VoxelGrid((80, 70, 150), (1.0, 1.0, 1.0))
TISSUE_HU, LUNG_HU, AIR_HU = 40, -860, -1000
CARINA = 32


def chest() -> tuple[np.ndarray, np.ndarray]:
    """Draw lungs that widen downwards, with trachea and main bronchi; return HU and the lumen."""
    z, y, x = np.ogrid[: GRID.shape[0], : GRID.shape[1], : GRID.shape[2]]
    hu = np.full(GRID.shape, TISSUE_HU, dtype=np.float32)
    aside = np.abs(x - 75)
    is_lung = (aside > 22 + z / 8) & (aside < 70) & (np.abs(y - 35) < 32 - z / 8)
    trachea = (z >= CARINA) & ((x - 75) ** 2 + (y - 35) ** 2 <= 64)
    lumen = np.broadcast_to(trachea, GRID.shape).copy()
    # Each bronchus runs down by half of the way that it runs aside.
    middle_z = CARINA + 2 - aside / 2
    lumen |= (aside < 30) & ((z - middle_z) ** 2 + (y - 35) ** 2 <= 25)
    wall = np.broadcast_to((aside < 30) & ((z - middle_z) ** 2 + (y - 35) ** 2 <= 49), GRID.shape)
    hu[np.broadcast_to(is_lung, GRID.shape)] = LUNG_HU
    hu[wall] = TISSUE_HU
    hu[lumen] = AIR_HU
    return hu, lumen


def overlap(airway: Airway, lumen: np.ndarray) -> tuple[float, float]:
    """Share of the lumen that is found, and share of what is found that is lumen."""
    both = np.count_nonzero(airway.lumen & lumen)
    return both / np.count_nonzero(lumen), both / np.count_nonzero(airway.lumen)


def test_the_lumen_is_found_down_to_the_lungs() -> None:
    hu, lumen = chest()
    airway = track_airway(hu, GRID)
    assert airway.remark == ""
    recall, precision = overlap(airway, lumen)
    assert recall > 0.93
    assert precision > 0.97


def test_a_gap_of_the_wall_does_not_lead_into_the_lung() -> None:
    hu, lumen = chest()
    hu[55:58, 34:37, 75:110] = LUNG_HU
    recall, precision = overlap(track_airway(hu, GRID), lumen)
    assert recall > 0.93
    assert precision > 0.97


def test_a_smaller_tube_does_not_replace_a_trachea_that_opens_into_the_lung() -> None:
    hu, lumen = chest()
    hu[50:62, 29:41, 75:110] = LUNG_HU
    hu[lumen] = AIR_HU
    y, x = np.ogrid[: GRID.shape[1], : GRID.shape[2]]
    hu[36:, (x - 75) ** 2 + (y - 54) ** 2 <= 25] = AIR_HU
    airway = track_airway(hu, GRID)
    assert airway.threshold_hu is not None
    assert airway.threshold_hu < LUNG_HU
    recall, precision = overlap(airway, lumen)
    assert recall > 0.9
    assert precision > 0.97


def test_without_a_trachea_it_is_said() -> None:
    hu, lumen = chest()
    hu[lumen] = TISSUE_HU
    airway = track_airway(hu, GRID)
    assert not airway.lumen.any()
    assert airway.remark == "no trachea is visible"


def test_gas_below_the_lungs_is_no_trachea() -> None:
    hu, _ = chest()
    airway = track_airway(np.ascontiguousarray(hu[::-1]), GRID)
    assert not airway.lumen.any()


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1, 3])
def test_the_airway_of_a_phantom_is_found(index: int) -> None:
    spec = PhantomSpec(seed=100, index=index, noise_hu=12.0, tilt_deg=(0.0, 0.0, 0.0))
    patient = draw_patient(spec)
    scan, (z_mm, y_mm, x_mm) = place_scan(patient)
    z, y, x = (np.float32(axis) for axis in (z_mm, y_mm, x_mm))
    points = Points(x[None, None, :], y[None, :, None], z[:, None, None])
    lumen = measure_tubes(patient, points, AIRWAYS) < 0
    phantom = make_phantom(spec)
    hu, grid, _ = orient(phantom.image_hu, phantom.grid)
    assert grid.is_close(scan)
    recall, precision = overlap(track_airway(hu, grid), lumen)
    assert recall > 0.7
    assert precision > 0.8
