"""Blocks that a training maps: by the results of its network that have 2 to 4 MiB."""

from __future__ import annotations

import os
from collections.abc import Callable

import hydra
import pytest
import torch
from torch import Tensor, nn

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import PlanConfig
from medseg.planning import estimate
from medseg.planning.estimate import Machine
from medseg.training import mapped_blocks
from medseg.training.mapped_blocks import heap_result_bytes, map_blocks

MIB = 2**20
# 3 MiB in a float32 channel.
SHAPE = (64, 96, 128)


class Layers(nn.Module):
    """Calls a function on an image."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, image: Tensor) -> Tensor:
        """Return the function's result."""
        return self.compute(image)


def result_mib(compute: Callable[[Tensor], Tensor], value_bytes: int = 4) -> float:
    return heap_result_bytes(lambda: Layers(compute), (1, 1, *SHAPE), value_bytes) / MIB


def test_new_tensors_count_and_views_and_changes_in_place_do_not() -> None:
    assert result_mib(lambda image: image) == 0, "the image is given"
    assert result_mib(lambda image: (image + 1) * 2) == 6
    assert result_mib(lambda image: (image + 1).view(-1)[::2].add_(1)) == 3


def test_only_tensors_of_two_to_four_mebibytes_count() -> None:
    assert result_mib(lambda image: torch.cat([image, image])) == 0, "6 MiB are mapped anyway"
    assert result_mib(lambda image: image[:, :, 22:] + 1) == 0, "1.97 MiB"
    assert result_mib(lambda image: image[:, :, :43] + 1) == pytest.approx(43 / 64 * 3)
    whole = torch.empty(1, 1, 64, 128, 128, device="meta")
    assert result_mib(lambda image: whole + 1) == 0, "4 MiB are mapped"


def test_half_precision_halves_the_tensors() -> None:
    assert result_mib(lambda image: image + 1, value_bytes=2) == 0
    assert result_mib(lambda image: torch.cat([image, image]), value_bytes=2) == 3


def test_a_network_that_reads_values_leaves_the_usual_blocks() -> None:
    assert result_mib(lambda image: image * float(image.mean())) == 0


def test_a_network_that_raises_anything_without_values_still_trains() -> None:
    def refuse(image: Tensor) -> Tensor:
        assert image.device.type == "cpu"
        return image

    assert result_mib(refuse) == 0


def compose(*overrides: str) -> PlanConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose("plan", ["trainer.accelerator=cpu", *overrides, "run_dir=plan"])
    return to_config(composed, PlanConfig)


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes from which on blocks are mapped, in the order in which they are set."""
    sizes: list[int] = []
    monkeypatch.setattr(mapped_blocks, "maps_large_blocks", lambda: True)
    monkeypatch.setattr(mapped_blocks, "map_blocks_from", sizes.append)
    return sizes


@pytest.mark.parametrize(("total_mib", "size"), [(64, 4 * MIB), (65, 2 * MIB)])
def test_more_than_the_heap_may_keep_is_mapped(
    total_mib: int, size: int, mapped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[tuple[int, ...], int]] = []

    def count(make: object, image_shape: tuple[int, ...], value_bytes: int) -> int:
        asked.append((image_shape, value_bytes))
        return total_mib * MIB

    monkeypatch.setattr(mapped_blocks, "heap_result_bytes", count)
    batch = ["stage.batch_size=6", "memory.accumulate=3"]
    map_blocks(compose("stage.patch_size=[32,48,64]", *batch, "memory.precision=bf16"))
    map_blocks(compose("stage.patch_size=[32,48,64]", "memory.precision=fp32"))
    assert asked == [((2, 1, 32, 48, 64), 2), ((1, 1, 32, 48, 64), 4)]
    assert mapped == [size, size]


def test_samples_of_all_sizes_leave_the_usual_blocks(mapped: list[int]) -> None:
    map_blocks(compose("stage.patch_size=null", "spacing.size=null"))
    assert mapped == [4 * MIB]


def test_nothing_is_counted_where_blocks_are_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_blocks, "maps_large_blocks", lambda: False)
    monkeypatch.setattr(mapped_blocks, "heap_result_bytes", None)
    map_blocks(compose("stage.patch_size=[32,48,64]"))


def test_a_plan_uses_the_costs_of_the_blocks_that_the_training_maps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def map_from(size: int) -> None:
        monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(size))

    map_from(4 * MIB)
    monkeypatch.setattr(mapped_blocks, "map_blocks_from", map_from)
    config = compose("stage.patch_size=[80,80,80]", "memory.precision=fp32")
    machine = Machine(config)
    usual_path = machine.costs.path
    monkeypatch.setattr(mapped_blocks, "heap_result_bytes", lambda *_: 65 * MIB)
    machine.prepare_for(config)
    assert os.environ["MALLOC_MMAP_THRESHOLD_"] == str(2 * MIB)
    assert machine.costs.path != usual_path
    costs = machine.costs
    machine.prepare_for(config)
    assert machine.costs is costs, "what was measured or changed since stays"
    assert estimate.min_mapped_bytes() == 2 * MIB
    monkeypatch.setattr(mapped_blocks, "heap_result_bytes", lambda *_: 0)
    machine.prepare_for(config)
    assert machine.costs.path == usual_path
