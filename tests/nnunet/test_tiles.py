"""Tiles: finished planes have the bits of sums over the whole image."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from medseg.errors import UserError
from medseg.nnunet.labels import mean_planes
from medseg.nnunet.tiles import Run, finished_planes, tile_starts, tile_weights

TILE = (6, 8, 10)


def network(images: Tensor) -> Tensor:
    """Three heads that differ from tile to tile, as those of a norm do."""
    return torch.cat([images, images - images.mean(), images * images.std()], dim=1)


def run(image: Tensor, take: Callable[[Tensor], None]) -> None:
    take(network(image))


def run_in_slabs(image: Tensor, take: Callable[[Tensor], None]) -> None:
    for planes in network(image).split(4, dim=2):
        take(planes)


def mirrored(tile: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Logits (1, K, d, h, w) by passes over the whole tile."""
    logits = network(tile)
    dimensions = [axis + 2 for axis in axes]
    for number in range(1, len(axes) + 1):
        for chosen in itertools.combinations(dimensions, number):
            logits += torch.flip(network(torch.flip(tile, chosen)), chosen)
    return logits / 2 ** len(axes)


def whole_sums(image: Tensor, axes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Logits (K, D, H, W) by sums that are as large as the image."""
    shape = image.shape[1:]
    sums = torch.zeros((3, *shape), dtype=dtype)
    weight_sums = torch.zeros(shape, dtype=dtype)
    weights = tile_weights(TILE).to(dtype)
    starts = [tile_starts(size, tile) for size, tile in zip(shape, TILE, strict=True)]
    for start in itertools.product(*starts):
        box = tuple(slice(low, low + tile) for low, tile in zip(start, TILE, strict=True))
        logits = mirrored(image[(slice(None), *box)][None].contiguous(), axes)[0]
        logits *= weights
        sums[(slice(None), *box)] += logits
        weight_sums[box] += weights
    return sums.div_(weight_sums)


@pytest.mark.parametrize("dtype", [torch.half, torch.float32])
@pytest.mark.parametrize("axes", [(), (0, 2)])
@pytest.mark.parametrize("depth", [6, 7, 23])
@pytest.mark.parametrize("runner", [run, run_in_slabs])
def test_finished_planes_are_those_of_the_whole(
    runner: Run, depth: int, axes: tuple[int, ...], dtype: torch.dtype
) -> None:
    image = torch.randn((1, depth, 19, 10), generator=torch.Generator().manual_seed(depth))
    planes = finished_planes(runner, image, TILE, 3, axes, dtype)
    finished = torch.stack([plane.clone() for plane in planes], dim=1)
    assert torch.equal(finished, whole_sums(image, axes, dtype))


def test_starts_of_tiles_that_overlap_less_are_those_of_nnunets_step_size() -> None:
    # compute_steps_for_sliding_window((110, 200), (64, 64), 0.8)
    assert [tile_starts(size, 64, 0.2) for size in (110, 200)] == [[0, 46], [0, 45, 91, 136]]


def test_weights_are_ten_in_the_middle_and_never_zero() -> None:
    weights = tile_weights((16, 16, 64))
    assert weights.dtype == torch.half
    assert weights.max() == weights[8, 8, 32] == 10
    assert weights.min() > 0


def test_an_infinite_sum_is_refused() -> None:
    image = torch.full((1, *TILE), 60_000.0)
    with pytest.raises(UserError, match=r"inference\.sums=float"):
        list(finished_planes(run, image, TILE, 3, (), torch.half))


def test_logits_that_are_no_numbers_are_refused() -> None:
    image = torch.zeros((1, *TILE))
    image[0, 0, 0, 0] = torch.nan
    with pytest.raises(UserError, match=r"some logits are NaN, .* give precision=fp32") as caught:
        list(finished_planes(run, image, TILE, 3, (), torch.half))
    # The network of this test already runs in fp32.
    assert "in fp32 already, the default on a CPU, take another checkpoint" in str(caught.value)


def test_folds_are_added_in_half_precision_one_after_the_other() -> None:
    generator = torch.Generator().manual_seed(0)
    folds = [torch.randn((5, 2, 3, 4), generator=generator).half() for _ in range(3)]
    mean = mean_planes((iter(fold) for fold in folds), 3, (5, 2, 3, 4))
    expected = (folds[0] + folds[1] + folds[2]) / 3
    assert torch.equal(torch.stack([plane.clone() for plane in mean]), expected)


def test_float_sums_of_half_logits_are_neither_rounded_nor_infinite() -> None:
    """The logits of a GPU are half: neither their products nor the mirrored sums may be."""

    def run(tile: Tensor, take: Callable[[Tensor], None]) -> None:
        take(torch.full((1, 2, *tile.shape[2:]), 7001.0).half())

    image = torch.zeros(1, 6, 6, 8)
    for axes in ((), (0, 1, 2)):
        planes = finished_planes(run, image, (4, 4, 4), 2, axes, torch.float32)
        for plane in planes:
            assert plane.dtype == torch.float32
            assert float((plane - 7000.0).abs().max()) < 0.01, "7001 is 7000 in half precision"
    with pytest.raises(UserError, match=r"give inference\.sums=float"):
        list(finished_planes(run, image, (4, 4, 4), 2, (), torch.half))
