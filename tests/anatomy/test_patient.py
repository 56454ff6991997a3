"""The outline of the patient: lungs lie within it, foam of the table and blankets beside it."""

from __future__ import annotations

import numpy as np
import pytest

from medseg.anatomy.patient import beyond_patient

# In the last two the voxels that are read are wider along one axis of the slice.
SPACINGS = [(4.0, 4.0, 4.0), (8.0, 2.0, 2.0), (2.0, 1.3, 1.7), (4.0, 1.0, 7.0), (4.0, 7.0, 1.0)]


def ellipse(
    y: np.ndarray, x: np.ndarray, centre: tuple[float, float], radii: tuple[float, float]
) -> np.ndarray:
    return ((y - centre[0]) / radii[0]) ** 2 + ((x - centre[1]) / radii[1]) ** 2 < 1


def chest(
    spacing_mm: tuple[float, float, float], size_mm: float = 480.0
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A trunk with two lungs on a table of foam between thin shells, and masks of its parts."""
    z, y, x = (
        mm * np.arange(round(extent / mm))
        for mm, extent in zip(spacing_mm, (64.0, size_mm, size_mm), strict=True)
    )
    y, x = y[:, None] - size_mm / 2 + 240, x[None] - size_mm / 2 + 240
    sides = [ellipse(y, x, (200, centre), (80, 55)) for centre in (170, 310)]
    parts = {
        "trunk": ellipse(y, x, (200, 240), (110, 160)),
        "lungs": sides[0] | sides[1],
        "foam": (np.abs(y - 350) < 30) & (np.abs(x - 240) < 200),
        "shell": (np.abs(np.abs(y - 350) - 30) < 2) & (np.abs(x - 240) < 200),
    }
    plane = np.full(parts["trunk"].shape, -1000.0)
    for name, hu in (("foam", -900.0), ("shell", 100.0), ("trunk", 30.0), ("lungs", -850.0)):
        plane[parts[name]] = hu
    return np.repeat(plane[None], len(z), axis=0), {
        name: np.repeat(part[None], len(z), axis=0) for name, part in parts.items()
    }


@pytest.mark.parametrize("spacing_mm", SPACINGS)
def test_lungs_lie_within_the_patient_and_foam_beyond(
    spacing_mm: tuple[float, float, float],
) -> None:
    image_hu, parts = chest(spacing_mm)
    is_beyond = beyond_patient(image_hu, spacing_mm)
    assert not is_beyond[parts["trunk"]].any()
    assert is_beyond[parts["foam"] & ~parts["trunk"]].mean() > 0.9


def test_the_outline_of_half_a_chest_contains_the_edge_that_cuts_it() -> None:
    image_hu, parts = chest((4.0, 4.0, 4.0))
    # Also through the middle of a lung, and on both sides.
    for columns in (
        slice(0, 80),
        slice(0, 60),
        slice(60, None),
        slice(90, None),
        slice(25, 95),
        slice(60, 95),
    ):
        is_beyond = beyond_patient(image_hu[:, :, columns], (4.0, 4.0, 4.0))
        assert not is_beyond[parts["trunk"][:, :, columns]].any()
        assert is_beyond[(parts["foam"] & ~parts["trunk"])[:, :, columns]].mean() > 0.9


@pytest.mark.parametrize("part", [np.s_[:, 30:, 25:], np.s_[:, 30:70, :], np.s_[:, 30:70, 25:95]])
def test_nothing_is_beyond_where_other_edges_cut_the_patient(part: tuple[slice, ...]) -> None:
    image_hu, _ = chest((4.0, 4.0, 4.0))
    assert not beyond_patient(image_hu[part], (4.0, 4.0, 4.0)).any()


@pytest.mark.parametrize(
    ("rows", "columns"), [(36, slice(33, 52)), (36, slice(36, 50)), (45, slice(33, 88))]
)
def test_a_part_of_the_chest_without_its_front_wall_keeps_its_lung(
    rows: int, columns: slice
) -> None:
    image_hu, parts = chest((4.0, 4.0, 4.0))
    is_beyond = beyond_patient(image_hu[:, rows:, columns], (4.0, 4.0, 4.0))
    assert not is_beyond[parts["lungs"][:, rows:, columns]].any()
    assert is_beyond[(parts["foam"] & ~parts["trunk"])[:, rows:, columns]].mean() > 0.9


def test_two_legs_are_both_the_patient() -> None:
    y, x = np.ogrid[0:100, 0:120]
    legs = [
        np.broadcast_to(ellipse(y, x, (50, centre), (20, 20)), (20, 100, 120))
        for centre in (30, 90)
    ]
    image_hu = np.where(legs[0] | legs[1], 40.0, -1000.0)
    image_hu[:, 5:7, :] = 200.0  # a plate
    is_beyond = beyond_patient(image_hu, (4.0, 4.0, 4.0))
    assert not is_beyond[legs[0] | legs[1]].any()
    assert is_beyond[:, 5:7].all()


@pytest.mark.parametrize("thickness", [0, 3])
def test_nothing_is_beyond_where_there_is_no_outline(thickness: int) -> None:
    image_hu = np.full((3, 20, 24), -1000.0)
    image_hu[1, 9 : 9 + thickness, 3:20] = 40.0  # eroded to a line of voxels, which has no outline
    assert not beyond_patient(image_hu, (4.0, 4.0, 4.0)).any()
