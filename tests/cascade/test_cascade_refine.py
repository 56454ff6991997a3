"""The crop that a network sees: its place, its mirror image, its classes."""

from __future__ import annotations

import numpy as np
import torch
from oracle import GRID, TASK, FineOracle, scan, stage
from torch import Tensor

from medseg.cascade.cascade import refine
from medseg.geometry.grid import VoxelBox
from medseg.geometry.grid_rule import Crop
from medseg.preprocess.intensity import normalise_hu
from medseg.preprocess.resample import resample_image
from medseg.task import Region, Task


class LowHalf(FineOracle):
    """Foreground is the half of the crop at low x, whatever it shows."""

    def forward(self, image: Tensor) -> Tensor:
        foreground = torch.full_like(image, -20.0)
        foreground[..., : image.shape[-1] // 2] = 20.0
        return torch.cat([torch.zeros_like(image), foreground], 1)


class Watching(FineOracle):
    """Keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, image: Tensor) -> Tensor:
        self.seen.append(image.clone())
        return super().forward(image)


BOX = VoxelBox((5, -3, 20), (29, 29, 60))
FINE = GRID.resampled((1.0, 1.0, 1.0))


def test_only_the_right_side_is_mirrored() -> None:
    volume, _ = scan()
    for region, low in zip(TASK.regions, (True, False), strict=True):
        probs = refine(
            [volume.array], volume.grid, Crop(FINE, BOX), region, stage(LowHalf(), "fine")
        ).probs
        assert probs.shape == (1, *BOX.shape)
        halves = probs[0, :, :, :20] > 0.5, probs[0, :, :, 20:] > 0.5
        assert [bool(half.all()) for half in halves] == [low, not low]


def test_the_disagreement_of_a_mirrored_side_lies_where_its_probabilities_do() -> None:
    class Nothing(FineOracle):
        def forward(self, image: Tensor) -> Tensor:
            return torch.cat([torch.full_like(image, 20.0), torch.zeros_like(image)], 1)

    volume, _ = scan()
    for region, is_low in zip(TASK.regions, (True, False), strict=True):
        found = refine(
            [volume.array],
            volume.grid,
            Crop(FINE, BOX),
            region,
            stage(LowHalf(), "fine", others=(Nothing(),)),
        )
        assert found.std is not None
        assert torch.equal(found.std > 0.25, found.probs[0] > 0.25)
        assert bool((found.std[..., :20] > 0.25).all()) is is_low


def test_the_network_sees_the_crop_of_the_resampled_volume() -> None:
    image_hu = np.random.default_rng(0).integers(-1200, 200, GRID.shape).astype(np.int16)
    clipped_hu = np.clip(image_hu, -1024, None)  # padding below air is none
    whole = normalise_hu(resample_image(clipped_hu, GRID, FINE, -1000.0), TASK.window_hu)
    inner = VoxelBox((8, 8, 16), (32, 40, 64))
    expected = whole[inner.slices()]
    for region in TASK.regions:
        network = Watching()
        refine([image_hu], GRID, Crop(FINE, inner), region, stage(network, "fine"))
        (image,) = network.seen
        seen = image[0, 0].flip(-1) if region.side == "right" else image[0, 0]
        torch.testing.assert_close(seen, expected, rtol=0, atol=1e-5)


def test_beyond_the_volume_the_network_sees_air() -> None:
    network = Watching()
    refine(
        [np.full(GRID.shape, 0, dtype=np.int16)],
        GRID,
        Crop(FINE, BOX),
        TASK.regions[0],
        stage(network, "fine"),
    )
    image = network.seen[0][0, 0]
    assert (image[:, :3] == -1).all()
    assert (image[:, 3:] == 1).all()


def test_only_the_classes_of_the_region_are_kept() -> None:
    class Five(FineOracle):
        """Five classes whose logits are 0, 1, … 4 everywhere."""

        def forward(self, image: Tensor) -> Tensor:
            return torch.arange(5.0)[None, :, None, None, None].expand(1, 5, *image.shape[2:])

    volume, _ = scan()
    two, four = Region("right", ("a", "b"), "right"), Region("left", ("a", "b", "c", "d"), "left")
    task = Task("t", {"a": 1, "b": 2, "c": 3, "d": 4}, (two, four), TASK.channels)
    expected = torch.softmax(torch.arange(5.0), 0)
    for region in (two, four):
        probs = refine(
            [volume.array], volume.grid, Crop(FINE, BOX), region, stage(Five(), "fine", task)
        ).probs
        assert probs.shape == (len(region.labels), *BOX.shape)
        assert probs.untyped_storage().nbytes() == probs.numel() * probs.itemsize, (
            "nothing else is kept alive"
        )
        for prob, value in zip(probs, expected[1:], strict=False):
            torch.testing.assert_close(prob.float(), value.expand(BOX.shape), rtol=0, atol=2.0**-12)


def test_a_network_runs_in_the_stages_precision_and_its_probabilities_are_kept_in_half() -> None:
    class Conv(FineOracle):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv3d(1, 2, 1)
            self.norm = torch.nn.BatchNorm3d(2)
            self.dtypes: list[torch.dtype] = []

        def forward(self, image: Tensor) -> Tensor:
            assert not self.norm.training
            logits = self.conv(image)
            self.dtypes.append(logits.dtype)
            return self.norm(logits)

    volume, _ = scan()
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        network = Conv().train()
        fine = stage(network, "fine", precision=precision)
        probs = refine([volume.array], volume.grid, Crop(FINE, BOX), TASK.regions[0], fine).probs
        assert network.dtypes == [dtype]
        assert probs.dtype == torch.float16
