"""Tasks without regions: one stage segments all labels of the whole scan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracle import AS_ORIENTED, LEFT, RIGHT, TASK, CoarseOracle, FineOracle, dice, scan, stage
from torch import Tensor, nn

from medseg.cascade.cascade import Cascade
from medseg.cascade.join import paste_percent
from medseg.cascade.stage import flips
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.inference.clean_up import clean
from medseg.inference.options import InferenceOptions
from medseg.io.volume import Volume
from medseg.preprocess.orient import Orientation
from medseg.task import CleanUp, Region, Task

WHOLE = replace(TASK, regions=())
STORED = Orientation((2, 0, 1), (False, True, False))


@pytest.mark.parametrize("tile_size", [None, (24, 32, 40)])
def test_one_stage_segments_all_labels_on_the_grid_of_the_scan(
    tile_size: tuple[int, int, int] | None,
) -> None:
    class Sided(CoarseOracle):
        """Label by the sign of a ramp that the tile keeps, so that tiles agree."""

        def forward(self, image: Tensor) -> Tensor:
            return (
                super().forward(image)
                if tile_size is None
                else torch.cat([image * 0, 10 * (image - 0.01), image - 30], 1)
            )

    volume, target = scan(STORED)
    result = Cascade(
        stage(Sided(), "coarse", WHOLE, spacing_mm=(1.0, 1.0, 1.0), tile_size=tile_size)
    ).segment(volume)
    assert result.labels.shape == volume.array.shape
    if tile_size is None:
        assert all(dice(result.labels == value, target == value) > 0.95 for value in (1, 2))
        assert result.volumes_ml["left_lung"] == pytest.approx(
            np.sum(target == 1) * np.prod(volume.grid.spacing_mm) / 1000, rel=0.05
        )
    else:
        assert dice(result.labels == 1, target > 0) > 0.95
    assert (result.boxes, result.agreements) == ({}, {})
    assert set(result.durations_s) == {"segment", "join"}
    assert result.tiling_plans == {"segment": "whole" if tile_size is None else "tiles of 24×32×40"}
    assert result.warnings == []


@pytest.mark.parametrize("depth", [61, 62, 63, 64, 65])
@pytest.mark.parametrize("slice_mm", [0.4, 0.7])
def test_thin_slices_at_the_ends_of_a_cut_organ_keep_their_labels(
    slice_mm: float, depth: int
) -> None:
    """The lattice of the stage has whole voxels, and may end before the scan does."""
    grid = VoxelGrid((depth, 20, 20), (slice_mm, 4.0, 4.0))
    image_hu = np.full(grid.shape, -1000, np.int16)
    image_hu[:, 5:15, 5:15] = 0
    result = Cascade(
        stage(FineOracle(), "single", replace(WHOLE, labels={"organ": 1}), spacing_mm=(3.0,) * 3),
        options=InferenceOptions(tta=True),
    ).segment(Volume(image_hu, grid), keep_probabilities=True)
    assert result.labels[:, 10, 10].tolist() == [1] * depth
    percent = paste_percent(result.probabilities["organ"], grid)
    assert percent[:, 10, 10].min() > 99


def test_labels_have_their_values_in_whatever_order_a_file_of_weights_names_them() -> None:
    """Files of weights sort them by name; the classes of the network follow the values."""
    volume, target = scan()
    task = replace(WHOLE, labels={"right_lung": 2, "left_lung": 1})
    trained = stage(CoarseOracle(), "single", task, spacing_mm=(1.0, 1.0, 1.0))
    result = Cascade(trained).segment(volume)
    assert all(dice(result.labels == value, target == value) > 0.95 for value in (1, 2))
    assert list(result.volumes_ml) == ["left_lung", "right_lung"]


def test_small_parts_and_enclosed_ones_stay() -> None:
    """A lesion is no splinter of an organ: nothing is removed or filled."""

    class Lesions(nn.Module):
        divisor = (8, 8, 8)

        def forward(self, image: Tensor) -> Tensor:
            return torch.cat([torch.zeros_like(image), 10.0 * image], 1)

    grid = VoxelGrid((40, 48, 56), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0))
    target = np.zeros(grid.shape, dtype=bool)
    target[5:25, 5:25, 5:25] = True
    target[12:16, 12:16, 12:16] = False
    target[32:35, 40:43, 40:43] = True
    image_hu = np.where(target, 0, -1000).astype(np.int16)
    image_hu[:, [0, -1]] = -499  # the body
    task = Task("t", {"lesion": 1}, (), WHOLE.channels)
    trained = stage(Lesions(), "coarse", task, spacing_mm=(1.0, 1.0, 1.0))
    labels = Cascade(trained).segment(Volume(image_hu, grid)).labels
    np.testing.assert_array_equal(labels[:, 2:-2] == 1, target[:, 2:-2])


@pytest.mark.parametrize("stored", [AS_ORIENTED, STORED])
def test_the_clean_up_of_a_model_is_the_last_step(stored: Orientation) -> None:
    """It does to the labels of the scan what it would do to those without it."""
    speck = (slice(20, 23), slice(70, 75), slice(20, 26))
    volume, _ = scan(stored, ((LEFT, 1), (RIGHT, 2), (speck, 2)))
    trained = stage(CoarseOracle(), "single", WHOLE, spacing_mm=(1.0, 1.0, 1.0))
    plain = Cascade(trained).segment(volume)
    clean_up = CleanUp("right_lung", only_largest=True)
    cleaned = Cascade(replace(trained, clean_up=(clean_up,))).segment(volume)
    expected = plain.labels.copy()
    clean(expected, volume.grid, WHOLE, [clean_up])
    np.testing.assert_array_equal(cleaned.labels, expected)
    lost_ml = plain.volumes_ml["right_lung"] - cleaned.volumes_ml["right_lung"]
    assert lost_ml > 0
    (finding,) = [finding for finding in cleaned.findings if finding.code == "clean_up"]
    assert f"right_lung: the clean-up of the model changed it by -{lost_ml:.2f} ml" in str(finding)
    assert cleaned.warnings == plain.warnings


def test_several_checkpoints_and_flips_give_a_disagreement() -> None:
    volume, _ = scan()
    trained = stage(CoarseOracle(), "coarse", WHOLE, others=(CoarseOracle(),))
    result = Cascade(trained, options=InferenceOptions(tta=True)).segment(volume)
    assert result.disagreement is not None
    assert result.disagreement.shape == volume.array.shape
    assert flips(WHOLE, tta=True) == [(), (-3,), (-2,), (-3, -2)], "the labels have sides"
    assert len(flips(Task("t", {"liver": 1}, (), WHOLE.channels), tta=True)) == 8


def test_one_stage_of_a_task_with_regions_keeps_its_sides() -> None:
    labels = {"a": 1, "b": 2}
    regions = (Region("a", ("a",), "left"), Region("b", ("b",), "right"))
    task = Task("t", labels, regions, WHOLE.channels)
    one_stage = task.as_one_stage()
    assert (one_stage.regions, one_stage.labels) == ((), labels)
    assert len(flips(one_stage, tta=True)) == len(flips(task, tta=True)) == 4
    assert Task.from_dict(one_stage.to_dict()) == one_stage
    assert not TASK.as_one_stage().as_one_stage().regions


def test_a_missing_or_superfluous_stage_is_refused() -> None:
    with pytest.raises(
        UserError, match="has regions, which a fine stage refines; give fine=<checkpoint>"
    ):
        Cascade(stage(CoarseOracle(), "coarse"))
    with pytest.raises(UserError, match="has no regions; leave fine out"):
        Cascade(stage(CoarseOracle(), "coarse", WHOLE), stage(FineOracle(), "fine", WHOLE))


def test_an_empty_result_is_told() -> None:
    volume, _ = scan()
    trained = stage(CoarseOracle(), "coarse", WHOLE)
    result = Cascade(trained).segment(replace(volume, array=np.full_like(volume.array, -990)))
    assert [warning for warning in result.warnings if warning.startswith("no label found at all")]
