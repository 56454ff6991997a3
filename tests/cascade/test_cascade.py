"""The whole cascade with networks that know the answer: labels on the file's grid and side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import (
    AS_ORIENTED,
    GRID,
    LEFT,
    RIGHT,
    TASK,
    Alternating,
    CoarseOracle,
    FineOracle,
    dice,
    scan,
    stage,
)
from torch import Tensor

from medseg.cascade import cascade as cascade_module
from medseg.cascade.bound import DiceBound
from medseg.cascade.cascade import Cascade
from medseg.cascade.stage import TrainedStage
from medseg.errors import UserError
from medseg.geometry.grid import VoxelBox
from medseg.inference.options import InferenceOptions
from medseg.inference.segmentation import RegionBox, Segmentation
from medseg.io import scratch
from medseg.io.scratch import scratch_above
from medseg.io.volume import Volume
from medseg.preprocess.orient import Orientation
from medseg.task import Channel, Region, Task

STORED = [
    Orientation((0, 1, 2), (False, False, False)),
    Orientation((0, 1, 2), (True, True, False)),
    Orientation((0, 1, 2), (False, True, True)),
    Orientation((2, 0, 1), (False, True, False)),
    Orientation((1, 2, 0), (True, False, True)),
]


class Upper(Alternating):
    """Sees no more than the upper 60 % of the left block."""

    def forward(self, image):
        logits = super().forward(image)
        if self.is_left():
            bright = (image[:, 0] > 0.01).any(dim=(0, 2, 3)).nonzero()
            low, high = int(bright.min()), int(bright.max()) + 1
            logits[:, 1, : low + round(0.4 * (high - low))] = -30.0
        return logits


def run(volume: Volume, **changes: object) -> Segmentation:
    return Cascade(stage(CoarseOracle(), "coarse"), stage(FineOracle(), "fine", **changes)).segment(
        volume
    )


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("changes", [{}, {"tile_size": (24, 32, 24)}], ids=["whole", "tiles"])
def test_two_blocks_come_back_on_the_files_own_grid(
    stored: Orientation, changes: dict[str, object]
) -> None:
    volume, target = scan(stored)
    result = run(volume, **changes)
    assert result.labels.shape == volume.array.shape
    assert result.labels.dtype == np.uint8
    assert result.labels.flags.c_contiguous
    for value in (1, 2):
        assert dice(result.labels == value, target == value) >= 0.98
    assert result.warnings == []
    assert list(result.durations_s) == ["localise", "refine_left_lung", "refine_right_lung", "join"]
    # Larger world x is the patient's left, whatever the storage order.
    centres = [
        volume.grid.index_to_world_xyz_mm(np.argwhere(result.labels == v)).mean(0)[0]
        for v in (1, 2)
    ]
    assert centres[0] > centres[1]


@pytest.mark.parametrize("changes", [{}, {"tile_size": (24, 32, 24)}], ids=["whole", "tiles"])
def test_temporary_files_instead_of_memory_change_nothing(changes: dict[str, object]) -> None:
    volume, _ = scan(STORED[3])
    expected = run(volume, **changes)
    before = len(scratch._maps)
    with scratch_above(0):
        result = run(volume, **changes)
    assert len(scratch._maps) > before
    assert np.array_equal(result.labels, expected.labels)
    assert (result.volumes_ml, result.agreements, result.warnings) == (
        expected.volumes_ml,
        expected.agreements,
        expected.warnings,
    )


def test_boxes_say_where_the_crops_lie_in_the_world() -> None:
    volume, target = scan(STORED[4])
    result = run(volume)
    for name, value in TASK.labels.items():
        points = volume.grid.index_to_world_xyz_mm(np.argwhere(target == value))
        crop = result.boxes[name].grid
        index = crop.world_to_index_zyx(points)
        assert (index > 0).all()
        assert (index < np.array(crop.shape) - 1).all()
        assert (
            np.abs((index.min(0) + index.max(0)) / 2 - (np.array(crop.shape) - 1) / 2).max() <= 2.5
        )
        saved = result.boxes[name].to_dict()
        np.testing.assert_allclose(saved["corners_xyz_mm"], crop.corners_xyz_mm())


@pytest.mark.parametrize(("missing", "kept"), [("left_lung", 2), ("right_lung", 1)])
def test_one_side_goes_on_alone(missing: str, kept: int) -> None:
    volume, target = scan(blocks=((LEFT, 1),) if kept == 1 else ((RIGHT, 2),))
    result = run(volume)
    assert dice(result.labels == kept, target == kept) >= 0.98
    assert set(np.unique(result.labels)) == {0, kept}
    assert missing not in result.boxes
    assert any(f"no {missing} found" in warning for warning in result.warnings)


def test_no_region_gives_empty_labels_and_a_warning() -> None:
    volume, _ = scan(STORED[3], blocks=())
    result = run(volume)
    assert result.labels.shape == volume.array.shape
    assert not result.labels.any()
    assert result.boxes == {}
    assert any("no region found at all" in warning for warning in result.warnings)


@pytest.mark.parametrize(
    ("block", "face"),
    [
        ((slice(15, 26), slice(28, 68), slice(78, 118)), "upper"),
        ((slice(0, 10), slice(28, 68), slice(78, 118)), "lower"),
        ((slice(7, 19), slice(0, 40), slice(78, 118)), "front"),
        ((slice(7, 19), slice(28, 68), slice(90, 130)), "left"),
    ],
)
def test_a_region_at_the_edge_is_whole_and_said_aloud(
    block: tuple[slice, slice, slice], face: str
) -> None:
    volume, target = scan(blocks=((block, 1), (RIGHT, 2)))
    result = run(volume)
    for value in (1, 2):
        assert dice(result.labels == value, target == value) >= 0.98
    (warning,) = result.warnings
    assert f"left_lung touches the {face} border" in warning


def test_a_whole_crop_is_at_least_as_large_as_the_patches_of_the_training() -> None:
    """Each axis by itself; without a least size a crop holds its region and the margin alone."""
    least = (72, 40, 80)
    coarse = stage(CoarseOracle(), "coarse")
    usual = Cascade(coarse, stage(FineOracle(), "fine")).segment(scan()[0])
    wide = Cascade(coarse, stage(FineOracle(), "fine", least_size=least)).segment(scan()[0])
    assert wide.boxes.keys() == {"left_lung", "right_lung"}
    for name, box in wide.boxes.items():
        own = usual.boxes[name].voxels.shape
        assert own[0] < least[0]
        assert own[1] > least[1]
        assert own[2] < least[2]
        assert box.voxels.shape == (72, own[1], 80)


def test_stages_that_disagree_are_said_aloud() -> None:
    volume, target = scan()
    result = Cascade(stage(CoarseOracle(), "coarse"), stage(Upper(), "fine")).segment(volume)
    assert result.agreements["right_lung"] > 0.95
    assert result.agreements["left_lung"] == pytest.approx(
        dice(result.labels == 1, target == 1), abs=0.03
    )
    assert 0.6 < result.agreements["left_lung"] < 0.85
    (warning,) = result.warnings
    assert warning == (
        "left_lung: the two stages agree only to a Dice of "
        f"{result.agreements['left_lung']:.2f} (0.85 or more is usual): "
        "check the result"
    )


@pytest.mark.parametrize(("least_ml", "is_kept"), [(2000.0, False), (100.0, True)])
def test_a_region_far_below_the_plausible_volume_on_which_the_stages_agree_little_is_absent(
    least_ml: float, is_kept: bool
) -> None:
    """The left block has 43 ml, of which the fine stage sees 60 %."""
    task = replace(
        TASK, volume_ml={"left_lung": (least_ml, 5000.0), "right_lung": (least_ml, 5000.0)}
    )
    stages = (
        replace(stage(CoarseOracle(), "coarse"), task=task),
        replace(stage(Upper(), "fine"), task=task),
    )
    volume, target = scan()
    result = Cascade(*stages).segment(volume)
    assert (result.volumes_ml["left_lung"] > 0) == is_kept
    assert dice(result.labels == 2, target == 2) >= 0.98
    assert any("do not match the coarse labels" in warning for warning in result.warnings) == (
        not is_kept
    )


class SeesProbability(FineOracle):
    """Foreground is what the coarse stage finds, or with `uses_it=False` what is bright."""

    def __init__(self, *, uses_it: bool) -> None:
        super().__init__()
        self.uses_it = uses_it

    def forward(self, image: Tensor) -> Tensor:
        assert image.shape[1] == 2
        return super().forward(image[:, 1:] if self.uses_it else image[:, :1])


def test_a_fine_stage_that_ignores_its_coarse_channel_gives_the_same_labels() -> None:
    volume, _ = scan()
    coarse = stage(CoarseOracle(), "coarse")
    without = Cascade(coarse, stage(FineOracle(), "fine")).segment(volume)
    fine = stage(SeesProbability(uses_it=False), "fine", has_coarse_channel=True)
    result = Cascade(coarse, fine).segment(volume)
    assert np.array_equal(result.labels, without.labels)
    assert (result.volumes_ml, result.agreements) == (without.volumes_ml, without.agreements)


@pytest.mark.parametrize("stored", [AS_ORIENTED, Orientation((2, 0, 1), (True, False, True))])
def test_the_coarse_channel_shows_each_region_at_its_place(stored: Orientation) -> None:
    volume, target = scan(stored)
    fine = stage(SeesProbability(uses_it=True), "fine", has_coarse_channel=True)
    result = Cascade(stage(CoarseOracle(), "coarse"), fine).segment(volume)
    for value in (1, 2):
        assert dice(result.labels == value, target == value) > 0.93


class KnowsAirway(CoarseOracle):
    """Label 3 is the lower part of what is bright."""

    def forward(self, image: Tensor) -> Tensor:
        logits = super().forward(image)
        airway = torch.full_like(image, -30.0)
        middle = image.shape[2] // 2
        airway[:, :, :middle] = logits[:, 1:].amax(1, keepdim=True)[:, :, :middle] + 5.0
        return torch.cat([logits, airway], 1)


def test_a_label_of_no_region_is_the_business_of_the_coarse_stage_alone() -> None:
    volume, _ = scan()
    task = replace(TASK, labels={**TASK.labels, "airway": 3}, ignore_label=255)
    coarse = stage(KnowsAirway(), "coarse", task)
    fine = stage(SeesProbability(uses_it=True), "fine", has_coarse_channel=True)
    cascade = Cascade(coarse, fine)
    assert cascade.task == TASK
    result = cascade.segment(volume)
    whole = Cascade(stage(CoarseOracle(), "coarse"), fine).segment(volume)
    assert set(result.volumes_ml) == {"left_lung", "right_lung"}
    assert result.agreements.keys() == whole.agreements.keys()
    assert min(result.agreements.values()) > 0.85
    # Half of the height is airway to the coarse stage, so its channel shows half of the blocks.
    share = np.count_nonzero(result.labels) / np.count_nonzero(whole.labels)
    assert 0.2 < share < 0.8
    with pytest.raises(UserError, match="two checkpoints of the same task"):
        Cascade(stage(CoarseOracle(), "coarse"), stage(FineOracle(), "fine", task))


class LowerIsAirway(FineOracle):
    """The second class is what is bright in the lower half of a crop."""

    def forward(self, image: Tensor) -> Tensor:
        logits = super().forward(image)
        airway = torch.full_like(image, -30.0)
        middle = image.shape[2] // 2
        airway[:, :, :middle] = logits[:, 1:, :middle] + 5.0
        return torch.cat([logits, airway], 1)


def test_a_helper_label_of_the_fine_stage_is_background_in_the_result() -> None:
    volume, target = scan()
    labels = {**TASK.labels, "airway": 3}
    # Its volume is for the audit of the training cases.
    task = replace(TASK, labels=labels, volume_ml={"airway": (10.0, 200.0)})
    coarse = stage(KnowsAirway(), "coarse", task)
    cascade = Cascade(coarse, stage(LowerIsAirway(), "fine", task))
    assert cascade.task == TASK
    result = cascade.segment(volume)
    assert set(np.unique(result.labels)) == {0, 1, 2}
    assert set(result.volumes_ml) == {"left_lung", "right_lung"}
    # The boxes of the coarse stage hold the upper half of the blocks, and the crops their margin.
    kept = result.labels > 0
    assert not np.any(kept & (result.labels != target))
    below = np.argwhere(kept)[:, 0].min()
    assert below > LEFT[0].start + 3


def test_two_stages_of_one_calibration_give_a_lower_bound_on_dice() -> None:
    volume, target = scan()
    bound = DiceBound(0.5, 0.9, 20)

    def segment(coarse: DiceBound | None, fine: DiceBound | None) -> Segmentation:
        stages = (
            replace(stage(CoarseOracle(), "coarse"), dice_bound=coarse),
            replace(stage(FineOracle(), "fine"), dice_bound=fine),
        )
        return Cascade(*stages).segment(volume)

    result = segment(bound, DiceBound(0.5, 0.9, 20))
    assert result.dice_at_least == {
        name: bound.stated(agreed) for name, agreed in result.agreements.items()
    }
    assert result.dice_at_least["right_lung"].value <= dice(result.labels == 2, target == 2)
    for others in ((bound, None), (None, None), (bound, DiceBound(0.4, 0.9, 20))):
        assert segment(*others).dice_at_least == {}


@pytest.mark.parametrize("averaged", ["coarse", "fine"])
def test_an_average_in_either_stage_has_no_bound_on_dice(averaged: str) -> None:
    """The bound was calibrated on single networks."""
    bound = DiceBound(0.5, 0.9, 20)
    stages = {}
    for name, network in (("coarse", CoarseOracle()), ("fine", FineOracle())):
        others = (network,) if name == averaged else ()
        stages[name] = stage(network, name, dice_bound=bound, others=others)
    assert Cascade(stages["coarse"], stages["fine"]).dice_bound is None
    flipped = InferenceOptions(tta=True)
    single = {name: replace(one, others=()) for name, one in stages.items()}
    assert Cascade(single["coarse"], single["fine"]).dice_bound == bound
    assert Cascade(single["coarse"], single["fine"], flipped).dice_bound is None


def test_a_region_of_which_one_label_is_found_has_a_bound_and_one_without_a_crop_none() -> None:
    lobes = Task(
        "lobes",
        {"upper": 1, "lower": 2, "other": 3, "rest": 4, "gone": 5, "lost": 6},
        (
            Region("left", ("upper", "lower")),
            Region("right", ("other", "rest")),
            Region("third", ("gone", "lost")),
        ),
        TASK.channels,
    )
    bound = DiceBound(0.5, 0.9, 20)
    cascade = Cascade(
        stage(CoarseOracle(), "coarse", lobes, dice_bound=bound),
        stage(FineOracle(), "fine", lobes, dice_bound=bound),
    )
    result = Segmentation(np.empty(0), volumes_ml=dict.fromkeys(lobes.labels, 0.0))
    result.volumes_ml |= {"lower": 5.0, "other": 7.0, "rest": 1.0}
    crop = RegionBox(VoxelBox((0, 0, 0), (1, 1, 1)), GRID)
    result.boxes = {"left": crop, "third": crop}
    result.agreements = {"left": 0.9, "right": 0.8, "third": 0.7}
    assert cascade._stated_bounds(result) == {"left": bound.stated(0.9)}


def test_an_empty_region_has_no_bound_on_dice() -> None:
    class Nothing(Alternating):
        """Sees nothing on the left."""

        def forward(self, image):
            logits = super().forward(image)
            if self.is_left():
                logits[:, 1] = -30.0
            return logits

    volume, _ = scan()
    bound = DiceBound(0.5, 0.9, 20)
    coarse = stage(CoarseOracle(), "coarse", dice_bound=bound)
    result = Cascade(coarse, stage(Nothing(), "fine", dice_bound=bound)).segment(volume)
    assert result.volumes_ml["left_lung"] == 0
    assert list(result.dice_at_least) == ["right_lung"]


def test_what_the_coarse_stage_did_not_mean_counts_as_absent() -> None:
    class Beside(Alternating):
        """Marks what lies above and below the left block, and not the block."""

        def forward(self, image):
            logits = super().forward(image)
            if self.is_left():
                is_block = (image[:, 0] > 0.01).any(dim=(2, 3))[..., None, None]
                logits[:, 1] = torch.where(is_block, -30.0, 30.0)
            return logits

    volume, target = scan()
    result = Cascade(stage(CoarseOracle(), "coarse"), stage(Beside(), "fine")).segment(volume)
    assert result.agreements["left_lung"] < 0.1
    assert result.volumes_ml["left_lung"] == 0.0
    assert dice(result.labels == 2, target == 2) >= 0.98
    assert set(np.unique(result.labels)) == {0, 2}
    removed, absent = result.warnings
    assert removed.endswith(
        "ml that the fine stage called left_lung were removed: they are apart from what the "
        "coarse stage marks"
    )
    assert absent == (
        "left_lung is empty: the fine stage found nothing in the crop that the coarse stage marks"
    )


def test_an_empty_fine_result_is_said_aloud() -> None:
    class Nothing(FineOracle):
        def forward(self, image):
            logits = super().forward(image)
            return logits.index_fill(1, torch.tensor([1]), -30.0)

    volume, _ = scan()
    result = Cascade(stage(CoarseOracle(), "coarse"), stage(Nothing(), "fine")).segment(volume)
    assert not result.labels.any()
    assert [warning.split()[0] for warning in result.warnings] == ["left_lung", "right_lung"]


def test_the_backends_of_all_stages_are_in_memory_at_once() -> None:
    coarse, fine = (
        stage(CoarseOracle(), "coarse", backend_bytes=3),
        stage(FineOracle(), "fine", backend_bytes=5),
    )
    assert Cascade(coarse, fine).backend_bytes == 8


def test_stages_of_different_tasks_are_refused() -> None:
    other = Task(
        "kidneys",
        {"kidney": 1},
        (Region("kidney", ("kidney",)),),
        (Channel(window_hu=(-200.0, 300.0)),),
    )
    with pytest.raises(UserError, match="two checkpoints of the same task"):
        Cascade(stage(CoarseOracle(), "coarse"), stage(FineOracle(), "fine", other))


def test_the_scan_is_left_as_it_is() -> None:
    volume, _ = scan(STORED[2])
    before = volume.array.copy()
    run(volume)
    np.testing.assert_array_equal(volume.array, before)
    assert volume.array.shape == GRID.shape


def test_the_tiles_of_all_stages_are_shared_and_the_workers_dismissed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []

    class Workers:
        def dismiss(self) -> None:
            done.append("dismissed")

    @contextmanager
    def group() -> Iterator[None]:
        done.append("joined")
        yield
        done.append("left")

    monkeypatch.setattr(cascade_module, "process_group", group)
    monkeypatch.setattr(cascade_module, "TileWorkers", Workers)
    cascade = Cascade(stage(CoarseOracle(), "coarse"), stage(FineOracle(), "fine"))

    def use() -> None:
        with cascade.shared_tiles():
            workers = {id(one.tile_workers) for one in cascade.stages}
            assert len(workers) == 1
            assert all(isinstance(one.tile_workers, Workers) for one in cascade.stages)
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        use()
    assert done == ["joined", "dismissed"]
    served: list[Any] = []
    monkeypatch.setattr(
        TrainedStage, "serve", lambda trained, *job: served.append((trained.name, *job))
    )
    monkeypatch.setattr(cascade_module, "serve_jobs", lambda run: run(("fine", 1, 5.0), "images"))
    cascade.serve_tiles()
    assert served == [("fine", 1, "images", 5.0)]
