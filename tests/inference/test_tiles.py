"""Tiles: same probabilities as the whole for a pointwise network; padding, batches, air."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from medseg.inference import tiles as tiles_module
from medseg.inference.tiles import most_probable, predict_probs

ROUNDING = 2.0**-12  # of a float16 below one, which has 11 significant bits
SHAPES = [(9, 20, 31), (16, 24, 8), (1, 5, 40)]
TILES = [(8, 8, 8), (12, 16, 20), (7, 9, 5), (32, 8, 64)]


def pointwise(image: Tensor) -> Tensor:
    """Pointwise network: logits of three classes, each from one voxel."""
    return torch.cat([image, -image, 0.3 * image.abs()], dim=1)


def noise(shape: tuple[int, int, int]) -> Tensor:
    return torch.rand((1, 1, *shape), generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tile_size", TILES)
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.6])
def test_tiles_equal_the_whole(
    shape: tuple[int, int, int], tile_size: tuple[int, int, int], overlap: float
) -> None:
    image = noise(shape)
    expected = torch.softmax(pointwise(image)[0], 0)
    probs = predict_probs(pointwise, image, tile_size=tile_size, overlap=overlap, divisor=(2, 4, 8))
    assert probs.shape == (3, *shape)
    torch.testing.assert_close(probs.float(), expected, rtol=0, atol=ROUNDING + 1e-5)
    whole = predict_probs(pointwise, image, tile_size=None, overlap=overlap, divisor=(2, 4, 8))
    torch.testing.assert_close(whole, expected.half(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("tile_size", [None, (6, 12, 16)])
@pytest.mark.parametrize("classes", [slice(1, 2), slice(1, None)])
def test_chosen_classes_have_the_probabilities_that_they_have_among_all(
    tile_size: tuple[int, int, int] | None, classes: slice
) -> None:
    options: dict[str, Any] = {"tile_size": tile_size, "overlap": 0.5, "divisor": (2, 4, 8)}
    every = predict_probs(pointwise, noise((9, 13, 15)), **options)
    chosen = predict_probs(pointwise, noise((9, 13, 15)), **options, classes=classes)
    assert torch.equal(chosen, every[classes])


@pytest.mark.parametrize("slab_voxels", [1, 300])
def test_slabs_of_a_whole_crop_change_nothing(
    slab_voxels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"tile_size": None, "overlap": 0.5, "divisor": (2, 4, 8)}
    at_once = predict_probs(pointwise, noise((9, 13, 15)), **options)
    monkeypatch.setattr(tiles_module, "SLAB_VOXELS", slab_voxels)
    assert torch.equal(predict_probs(pointwise, noise((9, 13, 15)), **options), at_once)


@pytest.mark.parametrize("tile_size", [None, (6, 12, 16), (40, 40, 40)])
def test_the_network_gets_multiples_and_what_training_pads_behind_the_image(
    tile_size: tuple[int, int, int] | None,
) -> None:
    divisor, shape = (4, 8, 8), (5, 17, 20)
    inputs: list[Tensor] = []

    def watched(image: Tensor) -> Tensor:
        inputs.append(image.clone())
        return pointwise(image)

    predict_probs(
        watched, torch.full((1, 1, *shape), 0.5), tile_size=tile_size, overlap=0.5, divisor=divisor
    )
    for image in inputs:
        assert all(size % step == 0 for size, step in zip(image.shape[2:], divisor, strict=True))
        assert set(image.unique().tolist()) <= {0.5, -1.0}
    if tile_size == (40, 40, 40):
        (image,) = inputs
        inside = (image[0, 0] == 0.5).nonzero()
        assert tuple(image.shape[2:]) == (40, 40, 40)
        # Along z the last slice is repeated; along y and x the padding is air.
        assert (inside.max(0).values - inside.min(0).values + 1).tolist() == [40, *shape[1:]]
        # Padding is at the end, as in training, so that cells of the network hold the same voxels.
        assert inside.min(0).values.tolist() == [0, 0, 0]


@pytest.mark.parametrize("tile_size", [None, (4, 4, 4)])
def test_sums_are_those_of_float32_whatever_the_logits(
    tile_size: tuple[int, int, int] | None,
) -> None:
    """Probabilities are rounded once, at the end; earlier rounding would exceed the tolerance."""
    image = noise((8, 8, 8))

    def half(batch: Tensor) -> Tensor:
        return pointwise(batch).bfloat16()

    probs = predict_probs(half, image, tile_size=tile_size, overlap=0.5, divisor=(1, 1, 1))
    assert probs.dtype == torch.float16
    expected = torch.softmax(half(image)[0].float(), 0)
    torch.testing.assert_close(probs.float(), expected, rtol=0, atol=ROUNDING + 1e-6)


def test_the_middle_of_a_tile_weighs_more_than_its_border() -> None:
    """The network predicts foreground in the middle of a tile, and background near its border."""

    def is_middle(image: Tensor) -> Tensor:
        logits = torch.zeros((1, 2, *image.shape[2:]))
        logits[0, 1] = -20.0
        logits[0, 1, 2:-2, 2:-2, 2:-2] = 20.0
        return logits

    probs = predict_probs(
        is_middle, noise((8, 8, 64)), tile_size=(8, 8, 16), overlap=0.5, divisor=(1, 1, 1)
    )
    assert probs[1, 4, 4, 4:-4].min() > 0.9


@pytest.mark.parametrize("num_classes", [2, 3, 5])
def test_the_most_probable_class_is_that_of_argmax(num_classes: int) -> None:
    # Four different values, so that many classes are equally probable.
    probs = torch.randint(0, 4, (num_classes, 5, 6, 7)) / 4
    before = probs.clone()
    labels = most_probable(probs)
    assert labels.dtype == torch.uint8
    assert torch.equal(labels.long(), probs.argmax(0))
    assert torch.equal(probs, before)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_batches_of_tiles_change_nothing(batch_size: int) -> None:
    image, sizes = noise((9, 20, 31)), []

    def watched(tiles: Tensor) -> Tensor:
        sizes.append(len(tiles))
        return pointwise(tiles)

    one_by_one = predict_probs(
        pointwise, image, tile_size=(8, 8, 8), overlap=0.5, divisor=(2, 4, 8)
    )
    probs = predict_probs(
        watched, image, tile_size=(8, 8, 8), overlap=0.5, divisor=(2, 4, 8), batch_size=batch_size
    )
    assert torch.equal(probs, one_by_one)
    assert max(sizes) == min(batch_size, sum(sizes))
    assert sizes[:-1] == [batch_size] * (len(sizes) - 1)


def test_a_tile_of_air_is_background_and_seen_by_no_network() -> None:
    image, num_seen = noise((8, 8, 32)), []
    image[..., 12:] = -1.0

    def always_foreground(tiles: Tensor) -> Tensor:
        num_seen.append(len(tiles))
        return torch.cat([torch.zeros_like(tiles), torch.full_like(tiles, 20.0)], dim=1)

    options = {"tile_size": (8, 8, 8), "overlap": 0.0, "divisor": (1, 1, 1)}
    probs = predict_probs(always_foreground, image, **options)
    assert sum(num_seen) == 2
    assert (probs[1, ..., :16] > 0.99).all()
    assert (probs[1, ..., 16:] == 0).all()
    torch.testing.assert_close(
        probs.float().sum(0), torch.ones(8, 8, 32), rtol=0, atol=2 * ROUNDING
    )
    # Air only: one tile goes through the network, for the number of classes.
    assert predict_probs(
        always_foreground, torch.full((1, 1, 8, 8, 32), -1.0), **options
    ).shape == (2, 8, 8, 32)


def test_every_tile_goes_through_the_network_where_air_is_a_value_of_the_body() -> None:
    """In an MR the lowest value may be tissue: `skips_air=False`."""
    image, num_seen = torch.full((1, 1, 8, 8, 32), -1.0), []

    def always_foreground(tiles: Tensor) -> Tensor:
        num_seen.append(len(tiles))
        return torch.cat([torch.zeros_like(tiles), torch.full_like(tiles, 20.0)], dim=1)

    options: dict[str, Any] = {"tile_size": (8, 8, 8), "overlap": 0.0, "divisor": (1, 1, 1)}
    probs = predict_probs(always_foreground, image, **options, skips_air=False)
    assert sum(num_seen) == 4
    assert (probs[1] > 0.99).all()


def test_the_number_of_tiles_does_not_change_how_often_values_are_read() -> None:
    """Each time a value of a tensor is read, the CPU waits for the GPU."""

    class Reads(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.number += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    class Methods(TorchFunctionMode):
        number = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.number += func in (Tensor.tolist, Tensor.numpy, Tensor.cpu)
            return func(*args, **(kwargs or {}))

    def num_reads(width: int) -> int:
        with Reads() as reads, Methods() as methods:
            predict_probs(
                pointwise, noise((8, 8, width)), tile_size=(8, 8, 8), overlap=0.0, divisor=(1, 1, 1)
            )
        return reads.number + methods.number

    assert num_reads(16) == num_reads(160) > 0


@pytest.mark.parametrize("num_parallel", [1, 2, 3, 50])
def test_who_runs_the_tiles_changes_no_bit(num_parallel: int) -> None:
    image = noise((12, 20, 28))
    options: dict[str, Any] = {
        "tile_size": (8, 8, 8),
        "overlap": 0.5,
        "divisor": (2, 4, 8),
        "batch_size": 2,
    }
    groups: list[int] = []

    def together(batches: list[Tensor]) -> list[Tensor]:
        groups.append(len(batches))
        return [pointwise(batch) for batch in batches]

    assert torch.equal(
        predict_probs(pointwise, image, **options),
        predict_probs(pointwise, image, **options, run_batches=together, num_parallel=num_parallel),
    )
    assert max(groups) <= num_parallel
    assert all(size == num_parallel for size in groups[:-1]), "nobody waits before the end"


@pytest.mark.parametrize(("filled", "num_runs"), [((2,), 1), ((0, 2), 2), ((), 1)])
def test_tiles_of_air_go_through_no_network_but_for_one_that_tells_the_classes(
    filled: tuple[int, ...], num_runs: int
) -> None:
    image = torch.full((1, 1, 8, 8, 24), -1.0)
    for number in filled:
        image[..., 8 * number + 3] = 0.5
    shapes: list[torch.Size] = []

    def network(tiles: Tensor) -> Tensor:
        shapes.append(tiles.shape)
        return torch.cat([torch.zeros_like(tiles), tiles], dim=1)

    predict_probs(network, image, tile_size=(8, 8, 8), overlap=0.0, divisor=(8, 8, 8))
    assert len(shapes) == num_runs
