"""A stage runs its networks within the memory budget, averaged over checkpoints and flips."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import TASK, CoarseOracle, FineOracle, scan, stage
from torch import Tensor, nn

from medseg.cascade.bound import DiceBound
from medseg.cascade.cascade import Cascade
from medseg.cascade.stage import TrainedStage, flips
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.geometry.grid_rule import GridRule
from medseg.inference.options import InferenceOptions
from medseg.inference.tiles import ALL, TilingPlan
from medseg.models.stage_network import StageNetwork
from medseg.models.traits import Traits
from medseg.models.unet import UNet
from medseg.prediction.load_models import load_cascade
from medseg.preprocess.intensity import HU_LIMITS
from medseg.preprocess.orient import Orientation
from medseg.task import Channel, Region, Task
from medseg.weights.files import shipped_weights

SHAPE = (96, 128, 80)
NO_SIDES = Task("t", {"a": 1}, (Region("a", ("a",)),), (Channel(window_hu=(-1000.0, 0.0)),))


class Sloped(FineOracle):
    """Foreground logit is the image plus a slope along the axes; keeps what it was given."""

    def __init__(
        self, slopes: tuple[float, float, float] = (0.0, 0.0, 0.0), gain: float = 1.0
    ) -> None:
        super().__init__()
        self.slopes, self.gain = slopes, gain
        self.shapes: list[tuple[int, ...]] = []
        self.devices: list[str] = []

    def forward(self, image: Tensor) -> Tensor:
        self.shapes.append(tuple(image.shape))
        self.devices.append(image.device.type)
        ramp = [
            slope * torch.linspace(-1, 1, size)
            for slope, size in zip(self.slopes, image.shape[2:], strict=True)
        ]
        logit = self.gain * (image + ramp[0][:, None, None] + ramp[1][:, None] + ramp[2])
        return torch.cat([torch.zeros_like(logit), logit], 1)


def image() -> Tensor:
    return torch.rand((1, *SHAPE), generator=torch.Generator().manual_seed(0))


def test_a_wanted_tile_gives_the_same_where_the_network_sees_one_voxel_at_a_time() -> None:
    network = Sloped()
    whole = stage(network, "fine", bytes_per_voxel=100.0).predict_probs(
        image(), InferenceOptions(budget_gib=1.0)
    )
    trained = stage(network, "fine", bytes_per_voxel=100.0, tile_size=(72, 72, 80))
    tiled = trained.predict_probs(image(), InferenceOptions(budget_gib=0.04))
    assert str(whole.tiling_plan) == "whole"
    assert str(tiled.tiling_plan) == "tiles of 72×72×80"
    assert {shape[2:] for shape in network.shapes} == {SHAPE, (72, 72, 80)}
    torch.testing.assert_close(tiled.probs, whole.probs, rtol=0, atol=2.0**-11)
    assert whole.warnings == tiled.warnings == []


@pytest.mark.parametrize(
    ("tile_size", "needed"),
    [(None, "the crop of 96×128×80"), ((96, 96, 80), "one tile of 96×96×80")],
)
def test_a_budget_that_is_too_small_is_refused_and_cuts_no_tile(
    tile_size: tuple[int, int, int] | None, needed: str
) -> None:
    network = Sloped()
    trained = stage(network, "fine", bytes_per_voxel=4096.0, tile_size=tile_size)
    with pytest.raises(
        UserError,
        match=(
            rf"inference\.budget_gib=0\.5 is too small for the fine stage: {needed} voxels needs "
            r"\d\.\d\d GiB"
        ),
    ):
        trained.predict_probs(image(), InferenceOptions(budget_gib=0.5))
    assert network.shapes == []


@pytest.mark.parametrize(
    ("trained_on", "is_told"), [((128, 160, 160), True), (None, True), ((96, 96, 96), False)]
)
def test_tiles_of_another_size_than_in_training_are_warned_of(
    trained_on: tuple[int, int, int] | None, is_told: bool
) -> None:
    trained = stage(Sloped(), "fine", tile_size=trained_on)
    trained.use_tiles((96, 96, 96))
    assert trained.tile_size == (96, 96, 96)
    result = Cascade(stage(CoarseOracle(), "coarse"), trained).segment(scan()[0])
    told = [
        one
        for one in result.warnings
        if "the fine stage runs in tiles of 96×96×96 voxels instead of" in one
    ]
    assert len(told) == is_told
    assert not any("as in training" in one for one in told), "nothing is known of other weights"


@pytest.mark.parametrize(("tile_size", "has_bound"), [((32, 32, 32), False), ((96, 96, 96), True)])
def test_the_bound_on_dice_holds_for_the_tiles_of_its_calibration_only(
    tile_size: tuple[int, int, int], has_bound: bool
) -> None:
    bound = DiceBound(0.5, 0.9, 20)
    fine = stage(Sloped(), "fine", tile_size=(96, 96, 96), dice_bound=bound)
    fine.use_tiles(tile_size)
    cascade = Cascade(stage(CoarseOracle(), "coarse", dice_bound=bound), fine)
    assert (cascade.dice_bound == bound) == has_bound


def test_only_the_included_weights_are_told_what_tiles_were_measured_to_change() -> None:
    own = load_cascade(
        None, None, accelerator="cpu", options=InferenceOptions(tile_size=(96, 96, 96))
    )
    assert "Dice of 0.96 to 0.99" in own.stages[-1].warnings[0]
    paths = [[shipped_weights("lungs", name)] for name in ("coarse", "fine")]
    given = load_cascade(
        *paths, accelerator="cpu", options=InferenceOptions(tile_size=(96, 96, 96))
    )
    assert "Dice" not in given.stages[-1].warnings[0]


def test_tiles_that_a_network_of_one_input_size_cannot_take_are_refused() -> None:
    class Fixed(Sloped):
        traits = Traits((1, 1, 1), (), (96, 96, 96))

    trained = stage(Fixed(), "fine", tile_size=(96, 96, 96))
    trained.use_tiles((96, 96, 96))
    with pytest.raises(
        UserError,
        match=(
            r"inference\.tile_size=\[64, 64, 64\]: the network .* inputs of \[96, 96, 96\] voxels "
            "only"
        ),
    ):
        trained.use_tiles((64, 64, 64))


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


class OutOfMemory(Sloped):
    """On the stand-in for a GPU, more voxels than `limit` raise what torch raises there."""

    def __init__(self, limit: int, error: Exception = FULL) -> None:
        super().__init__()
        self.limit, self.error = limit, error

    def forward(self, image: Tensor) -> Tensor:
        if image.device.type == "meta" and image.numel() > self.limit:
            self.shapes.append(tuple(image.shape))
            raise self.error
        return super().forward(
            image.cpu() if image.device.type != "meta" else torch.zeros(image.shape)
        )


def on_meta(network: OutOfMemory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stage on a device that is no CPU; tensors come back from it as zeros."""
    real_cpu = Tensor.cpu
    monkeypatch.setattr(
        Tensor, "cpu", lambda t: torch.zeros(t.shape) if t.device.type == "meta" else real_cpu(t)
    )
    return stage(network, "fine", device=torch.device("meta"), bytes_per_voxel=100.0)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: out of memory")],
)
def test_a_full_gpu_is_left_with_tiles_of_the_same_size(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, large = OutOfMemory(0, error), torch.rand(1, 160, 128, 96)
    result = on_meta(network, monkeypatch).predict_probs(large, InferenceOptions())
    assert network.shapes == [(1, 1, 160, 128, 96)]
    assert result.warnings == [
        "the fine stage ran out of memory on the GPU and went on with the CPU"
    ]
    assert str(result.tiling_plan) == "whole"
    expected = stage(Sloped(), "fine").predict_probs(large, InferenceOptions()).probs
    torch.testing.assert_close(result.probs, expected)


def test_a_full_gpu_first_takes_one_tile_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[str] = []

    def run(trained: TrainedStage, image: Tensor, plan: TilingPlan, *_: object) -> Any:
        plans.append(f"{trained.device.type}: {plan}")
        if trained.device.type == "meta":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return torch.zeros(2, *image.shape[1:]), None

    monkeypatch.setattr(TrainedStage, "_run", run)
    trained = on_meta(OutOfMemory(0), monkeypatch)
    trained.tile_size = (64, 64, 64)
    result = trained.predict_probs(torch.rand(1, 160, 128, 96), InferenceOptions())
    assert plans == [
        "meta: tiles of 64×64×64, 8 at a time",
        "meta: tiles of 64×64×64",
        "cpu: tiles of 64×64×64",
    ]
    assert [remark.split("went on with ")[1] for remark in result.warnings] == [
        "one tile at a time",
        "the CPU",
    ]


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: an illegal memory access"), MemoryError()]
)
def test_no_other_error_is_taken_for_a_full_gpu(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(OutOfMemory):
        def forward(self, image: Tensor) -> Tensor:
            raise error

    with pytest.raises(type(error)):
        on_meta(Broken(0), monkeypatch).predict_probs(image(), InferenceOptions())


def test_on_a_cpu_there_is_nowhere_to_go() -> None:
    class Full(Sloped):
        def forward(self, image: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        stage(Full(), "fine").predict_probs(image(), InferenceOptions())


def unet_stage(precision: str = "fp32", **changes: Any) -> TrainedStage:
    torch.manual_seed(0)
    network = StageNetwork(lambda channels: UNet(channels, 2, width=4, depth=1, blocks_per_level=1))
    for parameter in network.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    name = changes.pop("name", "fine")
    return stage(network, name, precision=precision, bytes_per_voxel=100.0, **changes)


@pytest.mark.parametrize(("tile_size", "tta"), [(None, True), ((64, 64, 80), False)])
def test_a_small_budget_runs_slabs_with_the_same_result(
    tile_size: tuple[int, int, int] | None, tta: bool
) -> None:
    trained = unet_stage(tile_size=tile_size)
    whole, slabs = (
        trained.predict_probs(image(), InferenceOptions(budget_gib=gib, tta=tta))
        for gib in (4.0, 0.025)
    )
    assert str(slabs.tiling_plan) == f"{whole.tiling_plan}, in slabs"
    torch.testing.assert_close(slabs.probs, whole.probs, rtol=0, atol=2.0**-11)
    assert whole.probs.std() > 0.01
    with pytest.raises(
        UserError,
        match=r"inference\.budget_gib=0\.0002 is too small for the fine stage: .* needs 0\.0\d GiB",
    ):
        trained.predict_probs(image(), InferenceOptions(budget_gib=0.0002))


def test_the_slabs_of_a_tile_need_no_more_where_the_scan_is_larger() -> None:
    """A tile is what goes through the network; without tiles the planes of the scan do."""
    small, large = (64, 64, 80), (64, 1024, 1280)
    options = InferenceOptions(budget_gib=0.025)
    tiled, whole = unet_stage(tile_size=small), unet_stage()
    assert str(tiled.plan(small, options)) == str(tiled.plan(large, options))
    assert tiled.plan(large, options).slab_bytes is not None
    assert whole.plan(small, options).slab_bytes is not None
    with pytest.raises(UserError, match="is too small for the fine stage"):
        whole.plan(large, options)


def test_memory_that_runs_out_is_left_with_slabs_not_with_other_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = unet_stage()
    expected = trained.predict_probs(image(), InferenceOptions())

    def full(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(StageNetwork, "forward", full)
    result = trained.predict_probs(image(), InferenceOptions())
    assert result.warnings == [
        (
            "the fine stage ran out of memory on the CPU and went on with slabs, which give the "
            "same labels"
        )
    ]
    torch.testing.assert_close(result.probs, expected.probs, rtol=0, atol=2.0**-11)


@pytest.mark.parametrize(
    ("precision", "cure"), [("fp32", "take another checkpoint"), ("fp16", "give precision=fp32")]
)
def test_values_that_are_no_numbers_are_no_background(precision: str, cure: str) -> None:
    """A network that was trained in bf16 may exceed the range of fp16 on an older GPU."""
    trained = stage(CoarseOracle(), "fine", precision=precision)
    probs = torch.zeros(3, 4, 5, 6, dtype=torch.float16)
    trained.check_numbers(probs)
    probs[1, 2, 3, 4] = torch.nan
    with pytest.raises(UserError, match=f"the fine stage give values .*NaN.*{cure}"):
        trained.check_numbers(probs)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_network_that_gives_no_numbers_is_refused(value: float) -> None:
    class Diverged(CoarseOracle):
        def forward(self, image: Tensor) -> Tensor:
            return super().forward(image) * value

    with pytest.raises(UserError, match="the single stage give values that are no numbers"):
        stage(Diverged(), "single").predict_probs(image(), InferenceOptions())


def test_a_scan_is_refused_by_its_header_where_no_slab_fits() -> None:
    grid = VoxelGrid((10, 2000, 2000), (1.0, 1.0, 1.0))
    trained = unet_stage(name="single", task=replace(TASK, regions=()))
    with pytest.raises(
        UserError, match=r"inference\.budget_gib=0\.01 is too small for the single stage"
    ):
        Cascade(trained, options=InferenceOptions(budget_gib=0.01)).check_budget(grid)
    Cascade(trained, options=InferenceOptions(budget_gib=1.0)).check_budget(grid)


def test_a_wide_scan_is_refused_by_its_header_only_where_no_crop_of_a_region_fits() -> None:
    grid = VoxelGrid((10, 2000, 2000), (1.0, 1.0, 1.0))
    coarse, options = stage(CoarseOracle(), "coarse"), InferenceOptions(budget_gib=0.01)
    Cascade(coarse, unet_stage(least_size=(16, 64, 64)), options).check_budget(grid)
    large = unet_stage(least_size=(16, 2000, 2000))
    with pytest.raises(
        UserError, match=r"inference\.budget_gib=0\.01 is too small for the fine stage"
    ):
        Cascade(coarse, large, options).check_budget(grid)


def test_a_budget_that_the_bound_of_the_process_has_lowered_is_not_the_cure() -> None:
    grid = VoxelGrid((10, 2000, 2000), (1.0, 1.0, 1.0))
    trained = unet_stage(name="single", task=replace(TASK, regions=()))
    cascade = Cascade(trained, options=InferenceOptions(max_ram_gib=0.8))
    with pytest.raises(
        UserError,
        match=(
            r"^inference\.max_ram_gib=0\.8 and inference\.budget_gib leave 0\.01 GiB to a network "
            r"pass, which is too small for the single stage: .* GiB; raise them, since"
        ),
    ):
        cascade.within(0.01).check_budget(grid)


def test_the_header_counts_the_voxels_that_the_network_sees_not_those_of_the_scan() -> None:
    trained, options = unet_stage(name="single"), InferenceOptions(budget_gib=0.01)
    wide, narrow = (VoxelGrid((10, 2000, 2000), (1.0, mm, mm)) for mm in (1.0, 0.1))
    with pytest.raises(UserError, match="2000×2000 voxels"):
        trained.check_budget(wide, options)
    trained.check_budget(narrow, options)


def test_several_checkpoints_are_averaged_and_their_spread_is_the_standard_deviation() -> None:
    networks = [Sloped(gain=gain) for gain in (0.0, 1.0, 5.0)]
    singles = [
        stage(network, "fine").predict_probs(image(), InferenceOptions()) for network in networks
    ]
    assert [single.std for single in singles] == [None] * 3
    averaged = stage(networks[0], "fine", others=tuple(networks[1:]))
    result = averaged.predict_probs(image(), InferenceOptions())
    foreground = torch.stack([single.probs[1].float() for single in singles])
    torch.testing.assert_close(result.probs[1].float(), foreground.mean(0), rtol=0, atol=2.0**-11)
    torch.testing.assert_close(
        result.probs.float().sum(0), torch.ones(SHAPE), rtol=0, atol=2.0**-11
    )
    assert result.std is not None
    torch.testing.assert_close(result.std, foreground.std(0, correction=0), rtol=0, atol=1e-3)
    chosen = averaged.predict_probs(image(), InferenceOptions(), classes=slice(1, 2))
    assert torch.equal(chosen.probs, result.probs[1:])
    assert chosen.std is not None
    assert torch.equal(chosen.std, result.std)


def test_flips_leave_the_sides_where_they_count() -> None:
    assert flips(TASK, tta=False) == [()]
    assert flips(TASK, tta=True) == [(), (-3,), (-2,), (-3, -2)]
    assert len(flips(NO_SIDES, tta=True)) == 8
    # A slope along a flipped axis cancels in the logits; one along x stays.
    options = InferenceOptions(tta=True)
    for slopes, is_even in (
        ((3.0, 0.0, 0.0), True),
        ((0.0, 3.0, 0.0), True),
        ((0.0, 0.0, 3.0), False),
    ):
        probs = (
            stage(Sloped(slopes), "fine").predict_probs(torch.zeros(1, *SHAPE), options).probs[1]
        )
        assert bool(torch.allclose(probs.float(), torch.full(SHAPE, 0.5), atol=1e-5)) is is_even
    # The image is turned back: its own detail stays in place.
    bright = torch.zeros(SHAPE)
    bright[10:20, 30:50, 60:70] = 1.0
    probs = stage(Sloped(gain=5.0), "fine").predict_probs(bright[None], options).probs[1]
    assert torch.equal(probs > 0.9, bright > 0)


STORED = Orientation((2, 0, 1), (False, True, False))


@pytest.mark.parametrize("tta", [False, True])
def test_the_disagreement_lies_where_the_checkpoints_differ(tta: bool) -> None:
    class Eager(FineOracle):
        def forward(self, image: Tensor) -> Tensor:
            return super().forward(image).index_fill(1, torch.tensor([1]), 10.0)

    volume, target = scan(STORED)
    fine = stage(FineOracle(), "fine", others=(Eager(),))
    result = Cascade(stage(CoarseOracle(), "coarse"), fine, InferenceOptions(tta=tta)).segment(
        volume
    )
    assert result.disagreement is not None
    assert result.disagreement.shape == volume.array.shape
    assert result.disagreement.dtype == np.uint8
    assert result.disagreement.max() == 50, "one says 0, one says 1"
    assert (result.disagreement[target > 0] < 10).mean() > 0.9, "both see the blocks"
    alone = Cascade(stage(CoarseOracle(), "coarse"), stage(FineOracle(), "fine")).segment(volume)
    assert alone.disagreement is None


def test_threads_get_their_own_results() -> None:
    trained = stage(Sloped(gain=3.0), "fine", precision="bf16")
    images = [image() * scale for scale in (0.2, 0.5, 1.0, 2.0)]
    expected = [trained.predict_probs(one, InferenceOptions()).probs for one in images]
    results: dict[int, Tensor] = {}

    def work(number: int) -> None:
        for _ in range(3):
            results[number] = trained.predict_probs(images[number], InferenceOptions()).probs

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[number], probs) for number, probs in enumerate(expected))


def test_networks_of_two_stages_run_one_after_the_other() -> None:
    """The budget holds for all of them together."""
    running, most = [0], [0]

    class Slow(Sloped):
        def forward(self, image: Tensor) -> Tensor:
            running[0] += 1
            most[0] = max(most[0], running[0])
            time.sleep(0.05)
            running[0] -= 1
            return super().forward(image)

    small = torch.zeros(1, 8, 8, 16)
    threads = [
        threading.Thread(target=stage(Slow(), name).predict_probs, args=(small, InferenceOptions()))
        for name in ("coarse", "fine", "fine")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_only_a_ct_is_clipped_to_hu_while_it_is_resampled() -> None:
    channels = (Channel(window_hu=(-1000.0, 400.0)), Channel("mr", None, "zscore"))
    assert stage(FineOracle(), "fine", replace(TASK, channels=channels)).limits == [HU_LIMITS, None]


class Everything(nn.Module):
    """Foreground everywhere."""

    divisor = (8, 8, 8)

    def forward(self, image: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(image), torch.full_like(image, 20.0)], 1)


@pytest.mark.parametrize(
    ("channel", "is_seen"),
    [(Channel(window_hu=(-1000.0, 400.0)), False), (Channel("mr", None, "zscore"), True)],
)
def test_tiles_of_the_lowest_value_are_air_in_a_ct_alone(channel: Channel, is_seen: bool) -> None:
    tiled = stage(Everything(), "fine", replace(TASK, channels=(channel,)), tile_size=(16, 16, 16))
    image = torch.full((1, 16, 16, 48), -1.0)
    image[..., :16] = 0.5
    probs = tiled.predict_probs(image, InferenceOptions(overlap=0.0)).probs
    assert (probs[1, ..., :16] > 0.9).all()
    assert (probs[1, ..., 16:] > 0.9).all() == is_seen


@pytest.mark.parametrize(("overlap", "num_tiles"), [(0.0, 8), (0.5, 27)])
def test_tiles_go_through_the_network_in_the_batches_of_the_plan(
    overlap: float, num_tiles: int
) -> None:
    for batch_size in (1, 3, 4):
        network = Sloped()
        trained = stage(network, "fine")
        plan = TilingPlan((32, 32, 32), batch_size=batch_size)
        cube = image()[:, :64, :64, :64]
        probs, _ = trained._run(cube, plan, InferenceOptions(overlap=overlap), ALL)
        sizes = [shape[0] for shape in network.shapes]
        assert sum(sizes) == num_tiles
        assert max(sizes) == batch_size
        torch.testing.assert_close(probs[1].float(), torch.sigmoid(cube[0]), atol=2e-3, rtol=0)


def test_a_tile_worker_runs_a_tile_in_slabs_as_in_one_pass() -> None:
    trained = unet_stage()
    tile = torch.rand((1, 1, 24, 16, 16), generator=torch.Generator().manual_seed(1))
    in_slabs: list[int] = []
    run = trained._run_in_slabs

    def counted(images: Tensor, take: Any, *given: Any) -> None:
        run(images, lambda slab: in_slabs.append(slab.shape[2]) or take(slab), *given)

    with torch.inference_mode():
        expected = trained.serve(0, tile)
        trained._run_in_slabs = counted  # type: ignore[method-assign]
        logits = trained.serve(0, tile, trained._least_slab_bytes((24, 16, 16)))
    assert len(in_slabs) > 1
    assert sum(in_slabs) == 24
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_tile_workers_are_asked_for_the_network_of_the_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = stage(Sloped(), "fine")
    trained = replace(trained, others=(Sloped(),), tile_size=(64, 64, 64))
    jobs: list[Any] = []

    class Workers:
        size = 3

        def run(self, job: Any, run_here: Any, batches: Sequence[Tensor]) -> list[Tensor]:
            jobs.append((job, len(batches)))
            return [run_here(batch) for batch in batches]

    alone = trained.predict_probs(image(), InferenceOptions())
    trained.tile_workers = Workers()
    shared = trained.predict_probs(image(), InferenceOptions())
    assert torch.equal(alone.probs, shared.probs)
    assert {job for job, _ in jobs} == {("fine", 0, None), ("fine", 1, None)}
    assert max(count for _, count in jobs) <= 3
    on_cpu = trained._on_cpu()
    assert on_cpu.tile_workers is None
    assert (on_cpu.device.type, len(on_cpu.networks)) == ("cpu", 2)


def test_slabs_after_a_full_memory_get_half_of_what_did_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However large the budget is: a pass of 100 bytes a voxel, then slabs, halved to the least."""
    plans: list[Any] = []
    free_bytes = 30e6

    def run(trained: TrainedStage, given: Tensor, plan: TilingPlan, *_: object) -> Any:
        plans.append(plan.slab_bytes)
        if plan.slab_bytes is None or plan.slab_bytes > free_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return torch.zeros(2, *given.shape[1:]), None

    monkeypatch.setattr(TrainedStage, "_run", run)
    trained = unet_stage()
    pass_bytes = 100.0 * math.prod(SHAPE)
    result = trained.predict_probs(image(), InferenceOptions(budget_gib=2.0))
    assert plans == [None, pass_bytes / 2, pass_bytes / 4]
    begin = "the fine stage ran out of memory on the CPU and went on with"
    assert result.warnings == [
        f"{begin} slabs, which give the same labels",
        f"{begin} smaller slabs, which give the same labels",
    ]
    plans.clear()
    monkeypatch.setattr(TrainedStage, "_least_slab_bytes", lambda *_: 7e9)
    with pytest.raises(torch.OutOfMemoryError):
        trained.predict_probs(image(), InferenceOptions(budget_gib=8.0))
    assert plans == [None, 7e9]
    plans.clear()
    free_bytes = 7e9
    trained.predict_probs(image(), InferenceOptions(budget_gib=8.0))
    assert plans == [None, 7e9]


OURS = {"stem": "space_to_depth", "refine": 4, "norm": "affine", "width": 8, "depth": 2}


def our_stage(precision: str, tile_size: tuple[int, int, int] | None = None) -> TrainedStage:
    torch.manual_seed(0)
    network = StageNetwork(lambda channels: UNet(channels, 3, **OURS), in_channels=1).eval()
    return stage(network, "fine", precision=precision, tile_size=tile_size)


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        (our_stage("bf16"), torch.bfloat16),
        (our_stage("fp16"), torch.float16),
        (our_stage("fp32"), torch.float32),
        (our_stage("bf16", (32, 32, 32)), torch.float32),  # tiles are searched for air
        (replace(our_stage("bf16"), backend_bytes=1), torch.float32),  # OpenVINO
        (stage(Sloped(), "fine", precision="bf16"), torch.float32),  # may begin with anything
    ],
)
def test_only_an_image_that_a_convolution_would_round_is_in_half_precision(
    trained: TrainedStage, expected: torch.dtype
) -> None:
    assert trained.image_dtype == expected


@pytest.mark.parametrize("stem", ["conv", "strided", "space_to_depth"])
@pytest.mark.parametrize("budget_gib", [1.0, 0.004])
def test_a_rounded_image_gives_the_probabilities_of_the_image(
    stem: str, budget_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OURS, "stem", stem)
    monkeypatch.setitem(OURS, "refine", 0 if stem == "conv" else 4)
    trained = our_stage("bf16")
    trained.count_memory()
    options = InferenceOptions(budget_gib=budget_gib)
    shown = torch.rand((1, 112, 48, 32), generator=torch.Generator().manual_seed(1)) * 2 - 1
    rounded = trained.predict_probs(shown, options)
    assert (rounded.tiling_plan.slab_bytes is None) == (budget_gib == 1.0)
    monkeypatch.setattr(TrainedStage, "image_dtype", torch.float32)
    whole = trained.predict_probs(shown, options)
    assert torch.equal(rounded.probs, whole.probs)


@pytest.mark.parametrize(("device", "batch_size"), [("cpu", 1), ("cuda", 8)])
def test_a_gpu_takes_several_tiles_at_a_time_and_a_cpu_one(device: str, batch_size: int) -> None:
    trained = stage(
        FineOracle(),
        "fine",
        bytes_per_voxel=1.0,
        tile_size=(16, 16, 16),
        device=torch.device(device),
    )
    plan = trained.plan(SHAPE, InferenceOptions(budget_gib=1.0))
    assert plan == TilingPlan((16, 16, 16), batch_size)


def test_networks_that_agree_have_no_deviation() -> None:
    """Rounding may leave a sum of squares below that of the mean."""
    network = Sloped((0.3, -0.2, 0.1), 0.7)
    trained = stage(network, "fine", others=(network, network))
    found = trained.predict_probs(image(), InferenceOptions())
    assert found.std is not None
    assert bool(torch.isfinite(found.std).all())
    assert float(found.std.max()) < 1e-3


@pytest.mark.parametrize(
    ("kinds", "is_skipped"), [(("ct", "ct"), True), (("ct", "mr"), False), (("mr", "mr"), False)]
)
def test_tiles_of_air_are_skipped_only_where_every_channel_has_a_window(
    kinds: tuple[str, ...], is_skipped: bool
) -> None:
    """-1 is a value like any other of a z-score."""
    channels = {"ct": Channel(window_hu=(-1000.0, 0.0)), "mr": Channel("mr", None, "zscore")}
    task = replace(TASK, channels=tuple(channels[kind] for kind in kinds))
    shapes: list[torch.Size] = []

    class First(FineOracle):
        def forward(self, image: Tensor) -> Tensor:
            shapes.append(image.shape)
            return super().forward(image[:, :1])

    trained = stage(First(), "fine", task, tile_size=(16, 16, 16))
    air = torch.full((2, 16, 16, 48), -1.0)
    air[..., 8:12] = 0.5
    trained.predict_probs(air, InferenceOptions(overlap=0.0))
    assert len(shapes) == (1 if is_skipped else 3)


@pytest.mark.parametrize("size", [None, (24, 32, 40)])
def test_the_budget_is_checked_for_the_size_of_the_crops(
    size: tuple[int, int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Any] = []
    monkeypatch.setattr(TrainedStage, "allows_slabs", True)
    monkeypatch.setattr(TrainedStage, "plan", lambda _, shape, __: planned.append(shape))
    trained = stage(FineOracle(), "coarse", rule=GridRule(size=size))
    grid = VoxelGrid((30, 40, 50), (4.0, 1.0, 2.0))
    trained.check_budget(grid, InferenceOptions())
    assert planned == [size or (60, 20, 50)]
