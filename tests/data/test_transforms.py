"""Ordered transforms: seeding of MONAI's, labels in step, no mirrored sides."""

from __future__ import annotations

import inspect
import re
from typing import Any

import monai.transforms as monai
import numpy as np
import pytest
import torch
from torch import Tensor

from medseg.data.augment import Affine, Circle, Flip, Narrow, Noise, Truncate, WindowShift
from medseg.data.sampler import sample_rng
from medseg.data.transforms import Transforms, check_transform, default_arguments
from medseg.preprocess.effect import Effect, Spacing

AFFINE = Affine(1.0, (15.0, 7.5, 7.5), (0.8, 1.25), 0.05, (10.0, 10.0, 10.0))
SPACING_MM = (2.0, 1.0, 1.0)


def made(target: type, **given: Any) -> Any:
    """A transform as a configuration makes it."""
    return target(**given, **default_arguments(target, inspect.signature(target).parameters, given))


def test_a_mixed_list_depends_on_the_number_of_the_sample_alone() -> None:
    mixed = Transforms([
        WindowShift(20.0), Noise(0.5, (0.01, 0.1)), made(monai.RandGaussianNoised, prob=0.5),
        Flip([1]),
        made(monai.RandAffined, prob=0.5, rotate_range=[0.1, 0.1, 0.1]),
        made(monai.RandAdjustContrastd, prob=0.5),
    ])  # fmt: skip
    labels = torch.zeros(12, 14, 16, dtype=torch.uint8)
    labels[3:7, 4:9, 5:12] = 1

    def sample(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = torch.rand(1, *labels.shape, generator=torch.Generator().manual_seed(0))
        return mixed.alter(image, labels.clone(), sample_rng(7, n), SPACING_MM)

    forward = {n: sample(n) for n in range(8)}
    torch.manual_seed(99)
    for n in reversed(range(8)):
        assert all(
            torch.equal(again, before) for again, before in zip(sample(n), forward[n], strict=True)
        )
        assert type(forward[n][0]) is torch.Tensor
        assert (forward[n][0].dtype, forward[n][1].dtype) == (torch.float32, torch.uint8)
    assert len({float(image.sum()) for image, _ in forward.values()}) > 4


def test_a_channel_that_no_scanner_made_follows_voxels_alone() -> None:
    labels = torch.zeros(12, 14, 16, dtype=torch.uint8)
    labels[3:7, 4:9, 5:12] = 1
    scanned = torch.rand(1, *labels.shape, generator=torch.Generator().manual_seed(0))
    # A second channel that shows the labels shows them after each transform that moves or cuts.
    image = torch.cat([scanned, 2.0 * labels[None] - 1.0])
    effects = [
        Noise(1.0, (0.1, 0.2)), made(monai.RandGaussianNoised, prob=1.0), Flip([1]),
        Truncate(1.0, 0.4),
        Narrow(1.0, 0.4), Circle(1.0, (0.5, 0.9)), made(monai.RandFlipd, prob=1.0, spatial_axis=0),
    ]  # fmt: skip
    for n in range(4):
        rngs = sample_rng(7, n), sample_rng(7, n)
        transforms = Transforms(effects)
        changed, moved = transforms.alter(image.clone(), labels.clone(), rngs[0], SPACING_MM, 1)
        assert torch.equal(changed[1], 2.0 * moved - 1.0)
        alone, _ = transforms.alter(scanned.clone(), labels.clone(), rngs[1], SPACING_MM)
        assert torch.equal(changed[0], alone[0])


@pytest.mark.parametrize(
    ("target", "given", "added"),
    [
        (monai.RandGaussianNoised, {}, {"keys": ["image"]}),
        (monai.RandAffined, {}, {"keys": ["image", "label"], "mode": ["bilinear", "nearest"]}),
        (monai.RandFlipd, {}, {"keys": ["image", "label"]}),
        (monai.RandSimulateLowResolutiond, {}, {"keys": ["image"]}),
        (monai.RandSmoothDeformd, {}, {"keys": ["image", "label"]}),
        (monai.RandGaussianNoised, {"keys": ["image"]}, {}),
        (Noise, {}, {}),
    ],
)
def test_keys_and_modes_of_monai_where_nothing_is_said(
    target: type, given: dict[str, Any], added: dict[str, Any]
) -> None:
    assert default_arguments(target, inspect.signature(target).parameters, given) == added


def test_keys_without_modes_would_interpolate_labels() -> None:
    with pytest.raises(ValueError, match="mode is missing beside keys"):
        made(monai.RandAffined, keys=["image", "label"])


@pytest.mark.parametrize("transform", [
    AFFINE, Noise(0.1, (0.1, 0.2)), Truncate(0.2, 0.4), Circle(0.2, (0.7, 1.0)),
    made(monai.RandGaussianNoised, prob=0.1),
    made(monai.RandAffined, prob=0.1, rotate_range=[0.2, 0.2, 0.2], scale_range=[0.1, 0.1, 0.1]),
    made(monai.RandBiasFieldd, prob=0.1),
    made(monai.RandZoomd, prob=0.1, mode=["trilinear", "nearest"]),
    made(monai.Rand3DElasticd, sigma_range=[5, 7], magnitude_range=[10, 20], prob=0.1),
    made(monai.RandRotated, prob=0.5, range_x=3.14),
    made(monai.RandSimulateLowResolutiond, prob=0.1),
])  # fmt: skip
@pytest.mark.parametrize("is_coarse", [True, False])
def test_what_keeps_labels_and_sides_is_accepted(transform: Any, is_coarse: bool) -> None:
    check_transform(transform, has_sides=True, is_coarse=is_coarse)


FLIP_X, FLIP_Z = (
    made(monai.RandFlipd, prob=0.1, spatial_axis=2),
    made(monai.RandFlipd, prob=0.1, spatial_axis=0),
)


@pytest.mark.parametrize(
    ("transform", "has_sides", "is_coarse", "said"),
    [
        (FLIP_X, True, False, "mirrors left and right"),
        (FLIP_X, True, True, "mirrors left and right"),
        (FLIP_X, False, True, None),
        (FLIP_Z, True, False, None),
        (FLIP_Z, True, True, "mirrors left and right"),
        (Flip([2]), True, False, "mirrors left and right"),
        (Flip([0, 1]), True, False, None),
        (made(monai.RandAxisFlipd, prob=0.1), True, False, "mirrors left and right"),
        # Inside of others, a transform may be rare, too.
        (
            monai.OneOf([made(monai.RandFlipd, prob=0.001, spatial_axis=2)]),
            True,
            False,
            "mirrors left and right",
        ),
        (
            monai.OneOf([monai.RandAffined(keys=["image"], prob=0.5)]),
            False,
            False,
            "moves voxels, so keys=",
        ),
        (
            made(monai.RandAffined, prob=0.1, scale_range=[(-2.0, -2.0)] * 3),
            True,
            False,
            "mirrors left and right",
        ),
        (monai.RandAffined(keys=["image"], prob=0.5), False, False, "moves voxels, so keys="),
        (
            monai.RandAffined(keys=["image", "label"], prob=0.5, rotate_range=[0.3, 0.3, 0.3]),
            False,
            False,
            "interpolates between labels",
        ),
        (
            made(monai.RandSpatialCropd, roi_size=[8, 8, 8], random_size=False),
            False,
            False,
            "changes the shape",
        ),
        (
            monai.RandSmoothDeformd(["image"], spatial_size=[20, 24, 28], rand_size=[3, 3, 3]),
            False,
            False,
            "moves voxels, so keys=",
        ),
        (
            made(monai.RandSmoothDeformd, spatial_size=[8, 8, 8], rand_size=[3, 3, 3]),
            False,
            False,
            "changes the shape of the image, here from (1, 20, 24, 28) to (1, 8, 8, 8)",
        ),
        (
            made(monai.NormalizeIntensityd, keys=["ct"]),
            False,
            False,
            "cannot be applied to a sample (KeyError",
        ),
    ],
)  # fmt: skip
def test_what_breaks_labels_or_sides_is_refused(
    transform: Any, has_sides: bool, is_coarse: bool, said: str | None
) -> None:
    if said is None:
        check_transform(transform, has_sides=has_sides, is_coarse=is_coarse)
        return
    with pytest.raises(ValueError, match=re.escape(said)):
        check_transform(transform, has_sides=has_sides, is_coarse=is_coarse)


def test_one_affine_resamples_once() -> None:
    with pytest.raises(ValueError, match="a sample is resampled only once"):
        Transforms([AFFINE, AFFINE])


class MovedByHand(Effect):
    """Flips the rows without stating that it is spatial."""

    def __call__(
        self, image: Tensor, labels: Tensor, rng: np.random.Generator, spacing_mm: Spacing
    ) -> tuple[Tensor, Tensor]:
        return image.flip(2), labels.flip(1)


class StatedMove(MovedByHand):
    """The same, stated."""

    is_spatial = True


@pytest.mark.parametrize(
    ("transform", "is_refused"),
    [
        (MovedByHand(), True),
        (StatedMove(), False),
        (Noise(1.0, (0.1, 0.2)), False),
        (made(monai.RandGaussianNoised, prob=1.0), False),
        (made(monai.RandFlipd, prob=1.0, spatial_axis=1), False),
        (monai.OneOf([made(monai.RandFlipd, prob=1.0, spatial_axis=1)]), True),
    ],
)
def test_a_move_that_leaves_the_coarse_channel_behind_is_refused(
    transform: Any, is_refused: bool
) -> None:
    check_transform(transform, has_sides=False, is_coarse=False)
    if not is_refused:
        check_transform(transform, has_sides=False, is_coarse=False, has_coarse_channel=True)
        return
    with pytest.raises(ValueError, match=r"stage\.coarse_channel would stay where it was"):
        check_transform(transform, has_sides=False, is_coarse=False, has_coarse_channel=True)
