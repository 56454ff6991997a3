"""Included weights on odd patients: each lung is in its crop, missing ones are absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracle import dice

from medseg.cascade.cascade import Cascade
from medseg.cascade.load import load_stage
from medseg.cascade.localise import Localisation, localise
from medseg.cascade.stage import TrainedStage
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.geometry.grid_rule import region_crop
from medseg.io.volume import Volume
from medseg.phantom.scan import make_phantom
from medseg.phantom.spec import PhantomSpec
from medseg.preprocess.orient import orient
from medseg.weights.files import shipped_weights

ODD: dict[str, dict[str, Any]] = {
    "left lung missing": {"missing_lung": "left"},
    "right lung missing": {"missing_lung": "right"},
    "lungs touching": {"is_touching": True},
    "arms beside the chest": {"arms": "down"},
    "huge stomach bubble under a high dome": {"stomach_gas": 1.0, "high_dome_mm": (45.0, 0.0)},
    "whole trunk": {"view": "trunk"},
    "apex only": {"view": "apex"},
    "bases only": {"view": "bases"},
    "prone": {"is_prone": True, "flips": (False, True, True)},
    "stored from head to feet": {"flips": (True, False, False)},
}
# Axes of the stored array that are turned round while the header stays as it was; pairs, since a
# patient is turned, not mirrored.
TURNED = {"face down": (1, 2), "upside down": (0, 2), "upside down and face down": (0, 1)}


@pytest.fixture(scope="module")
def stages() -> list[TrainedStage]:
    return [
        load_stage(shipped_weights("lungs", stage), stage, torch.device("cpu"))
        for stage in ("coarse", "fine")
    ]


def phantom(
    turn: Callable[[np.ndarray], np.ndarray] = np.asarray, **odd: Any
) -> tuple[np.ndarray, np.ndarray, VoxelGrid]:
    """Oriented image, labels and grid."""
    made = make_phantom(
        PhantomSpec(
            seed=99,
            index=0,
            spacing_mm=(4.0, 3.2, 3.2),
            matrix=(120, 120),
            model_spacing_mm=(3.0, 3.0, 3.0),
            **odd,
        )
    )
    image_hu, grid, _ = orient(turn(made.image_hu), made.grid)
    return image_hu, orient(turn(made.labels), made.grid)[0], grid


def shares_inside(
    found: Localisation, labels: np.ndarray, grid: VoxelGrid, fine: TrainedStage
) -> dict[str, float]:
    """Share of each lung that lies in the crop that the fine stage gets; 0 without one."""
    shares = {}
    for value, name in ((1, "left_lung"), (2, "right_lung")):
        voxels = np.argwhere(labels == value)
        if not len(voxels):
            continue
        shares[name] = 0.0
        if name in found.boxes:
            fine_grid = grid.resampled(fine.spacing_mm)
            box = region_crop(
                found.boxes[name],
                found.grid,
                fine_grid,
                fine.region_margin_mm,
                fine.tile_size,
                fine.divisor,
            ).box
            native = grid.box_from(fine_grid.crop(box), VoxelBox.full(box.shape))
            shares[name] = float(((voxels >= native.start) & (voxels < native.stop)).all(1).mean())
    return shares


@pytest.mark.slow
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_every_lung_lies_in_its_crop(odd: dict[str, Any], stages: list[TrainedStage]) -> None:
    image_hu, labels, grid = phantom(**odd)
    found = localise([image_hu], grid, stages[0])
    shares = shares_inside(found, labels, grid, stages[1])
    assert shares
    assert set(shares.values()) == {1.0}, found.warnings
    assert not any("exchanged" in warning for warning in found.warnings), found.warnings


@pytest.mark.slow
@pytest.mark.parametrize(("missing", "other"), [("left", "right"), ("right", "left")])
def test_fluid_in_the_place_of_a_lung_is_told(
    missing: str, other: str, stages: list[TrainedStage]
) -> None:
    """It looks much like a consolidated lung, for which these weights take it."""
    image_hu, labels, grid = phantom(missing_lung=missing)
    result = Cascade(*stages).segment(Volume(image_hu, grid))
    is_told = any(
        warning.startswith((f"no {missing}_lung found", f"{missing}_lung has no air"))
        for warning in result.warnings
    )
    assert is_told
    value = {"left": 1, "right": 2}[other]
    assert dice(result.labels == value, labels == value) > 0.97


@pytest.mark.slow
@pytest.mark.parametrize("axes", TURNED.values(), ids=TURNED)
def test_a_patient_who_lies_otherwise_than_the_header_says_is_reported(
    axes: tuple[int, int], stages: list[TrainedStage]
) -> None:
    image_hu, _, grid = phantom(lambda array: np.flip(array, axes))
    found = localise([image_hu], grid, stages[0])
    assert any("exchanged" in warning for warning in found.warnings), found.warnings


@pytest.mark.slow
def test_a_patient_on_the_side_is_reported(stages: list[TrainedStage]) -> None:
    image_hu, _, grid = phantom(lambda array: np.rot90(array, 1, (1, 2)))
    assert localise([image_hu], grid, stages[0]).warnings
