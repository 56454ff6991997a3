"""Size of the sample and of the case that a plan counts, and the largest batch within a budget."""

from __future__ import annotations

from typing import Any

import hydra
import pytest

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import PlanConfig
from medseg.errors import UserError
from medseg.planning import step
from medseg.planning.step import (
    evaluated_shape,
    input_shape,
    keep_numbers,
    largest_batch,
)
from medseg.training.options import micro_batches_per_step, samples_per_micro_batch

EXTENT = [
    "extent_mm.coarse=[100,201,299]",
    "extent_mm.fine=[100,201,299]",
    "extent_mm.single=[100,201,299]",
]


def compose(*overrides: str) -> PlanConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose("plan", [*EXTENT, "run_dir=plan", *overrides])
    return to_config(composed, PlanConfig)


@pytest.fixture(autouse=True)
def divisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that takes multiples of 4, 8 and 2 voxels."""
    monkeypatch.setattr(step, "find_divisor", lambda _: (4, 8, 2))


@pytest.mark.parametrize(
    ("budget", "num_samples"),
    [(99, 0), (100, 1), (129, 1), (130, 2), (159, 2), (160, 3), (1000, 31)],
)
def test_the_largest_batch_is_found_exactly(budget: int, num_samples: int) -> None:
    """Weights of 70 bytes and 30 bytes a sample."""
    assert largest_batch(lambda samples: 70 + 30 * samples, budget) == num_samples


@pytest.mark.parametrize("budget", [99, 100, 140, 250, 333, 1000, 5000])
def test_the_largest_batch_is_exact_where_the_bytes_are_no_line(budget: int) -> None:
    def peak(samples: int) -> int:
        return 90 + 10 * samples + samples**2 // 3 * 7

    num_samples = largest_batch(peak, budget)
    assert num_samples == 0 or peak(num_samples) <= budget
    assert peak(num_samples + 1) > budget


def test_the_samples_of_a_step_are_shared_by_ranks_machines_and_micro_batches() -> None:
    config = compose(
        "trainer=ddp",
        "trainer.devices=2",
        "trainer.num_nodes=3",
        "memory.accumulate=4",
        "stage.batch_size=48",
    )
    assert micro_batches_per_step(config) == 24
    assert samples_per_micro_batch(config) == 2


@pytest.mark.parametrize(
    ("overrides", "sample", "case"),
    [
        # 50, 101 and 150 voxels of 2 mm, raised to multiples.
        (["stage=single"], (52, 104, 150), (52, 104, 150)),
        (["stage=single", "stage.patch_size=[32,32,32]"], (32, 32, 32), (52, 104, 150)),
        (["stage=single", "shape=[40,48,56]"], (40, 48, 56), (40, 48, 56)),
        (
            ["stage=single", "shape=[40,48,56]", "stage.patch_size=[32,32,32]"],
            (40, 48, 56),
            (52, 104, 150),
        ),
        (
            ["stage=single", "shape=[40,48,56]", "validation_shape=[8,16,24]"],
            (40, 48, 56),
            (8, 16, 24),
        ),
    ],
)
def test_a_plan_counts_the_stated_sizes_and_else_those_of_the_extent(
    overrides: list[str], sample: tuple[int, ...], case: tuple[int, ...]
) -> None:
    spacing = ["spacing.strategy=anisotropic", "spacing.target_spacing_mm=[2,2,2]"]
    patch: list[str] = []
    if not any(override.startswith("stage.patch_size") for override in overrides):
        patch = ["stage.patch_size=null", "inference.tile_size=null"]
    config = compose(*spacing, *overrides, *patch)
    assert tuple(input_shape(config)) == sample
    assert tuple(evaluated_shape(config)) == case


def test_the_extent_is_counted_axis_by_axis_at_the_finest_spacing_and_as_a_cube() -> None:
    config = compose("stage=fine", "stage.patch_size=null", "inference.tile_size=null")
    config.spacing.strategy = step.SpacingStrategy.anisotropic
    config.spacing.target_spacing_mm = (5.0, 2.0, 1.0)
    assert evaluated_shape(config) == (20, 104, 300)
    config.spacing.strategy = step.SpacingStrategy.fixed_resolution
    config.spacing.target_spacing_mm = (2.0, 2.0, 2.0)
    assert evaluated_shape(config) == (152, 152, 150)
    config.spacing.strategy = step.SpacingStrategy.multi_scale
    config.spacing.range_mm = (1.0, 4.0)
    assert evaluated_shape(config) == (100, 208, 300)
    config.spacing.range_mm = None
    config.spacing.target_spacing_mm = None
    with pytest.raises(UserError, match=r"give shape=\[D,H,W\]"):
        evaluated_shape(config)


@pytest.mark.parametrize(
    ("max_voxels", "depth"), [(None, 52), (104 * 150 * 32, 32), (104 * 150 * 32 - 1, 28), (1, 4)]
)
def test_a_slab_of_whole_slices_has_at_most_the_voxels_of_the_stage(
    max_voxels: int | None, depth: int
) -> None:
    """A multiple of 4 slices, as in a run; at least one. A validation sees all slices."""
    config = compose("stage=coarse")
    config.spacing.target_spacing_mm = (2.0, 2.0, 2.0)
    config.stage.max_voxels = max_voxels
    assert input_shape(config) == (depth, 104, 150)
    assert evaluated_shape(config) == (52, 104, 150)


@pytest.mark.parametrize(
    ("shape", "patch_size", "is_kept"),
    [
        (None, None, True),
        (None, (32, 32, 32), True),
        ((40, 48, 56), None, True),
        ((32, 32, 32), (32, 32, 32), True),
        ((40, 48, 56), (32, 32, 32), False),
    ],
)
def test_numbers_of_another_size_than_that_of_the_run_are_not_kept_for_it(
    shape: Any, patch_size: Any, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(step, "write_plan", lambda config, numbers: kept.append(numbers))
    config = compose("stage=fine")
    config.shape = shape
    config.stage.patch_size = patch_size
    keep_numbers(config, {"seconds_per_step": 2.0})
    assert kept == [{"seconds_per_step": 2.0}] * is_kept
